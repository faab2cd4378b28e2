"""Tokens depend on model, prompt, seed and sampling parameters only: not on plan, exit, batch or slot.

Every test compares with the same sequence decoded plainly and alone, in float64, so that no rounding tie hides or
causes a failure.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec import Engine, GenerateOutput, Plan
from selfspec.governor.rules import Policy
from tests.profiles import choice_of, profile_of, random_exit, random_rows, watch_vocabularies
from tests.scripted import IRREGULAR, ScriptedPolicy, endless, forced_text_model, left_padded, random_prompt
from tests.strategies import plans
from tests.tiny import FAMILIES, VOCABULARY, tiny_model

NEW_TOKENS = 16
PROMPTS = [random_prompt(56), random_prompt(9), random_prompt(31), random_prompt(1)]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k-min_p-penalty": {"temperature": 0.8, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.2},
    "greedy": {"do_sample": False},
}
SWITCHING = ["tree:4,2,2,1", "chain:4", "none", "none", "chain:1", "none", "tree:3,2,1"]


@cache
def engine_of(family: str) -> Engine:
    return Engine.from_model(endless(tiny_model(family)))


def generate(engine: Engine, prompts: list[list[int]], seed: Any, sampling: str = "top_p", **options: Any) -> Any:
    """New tokens of every sequence, and its statistics."""
    ids, mask = left_padded(prompts)
    settings = {"do_sample": True, "max_new_tokens": NEW_TOKENS, "speculative_decoding": "force"}
    settings |= {**SAMPLINGS[sampling], **options}
    output = engine.generate(ids, attention_mask=mask, seed=seed, return_dict_in_generate=True, **settings)
    assert isinstance(output, GenerateOutput)
    new_tokens = output.sequences[:, ids.shape[1] :].tolist()
    return [tokens[: stats.new_tokens] for tokens, stats in zip(new_tokens, output.stats, strict=True)], output.stats


@cache
def alone(prompt: int, seed: int, sampling: str = "top_p", family: str = "llama") -> list[int]:
    """The sequence decoded plainly in a batch of one."""
    (tokens,), _ = generate(engine_of(family), [PROMPTS[prompt]], seed, sampling, plan="none")
    return tokens


@contextmanager
def plan_of_each_step(plans: list[str]) -> Iterator[None]:
    """Requests made within take the plans of their steps from the list, over and over."""
    policy = ScriptedPolicy(plans)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "choose", lambda self, batch: policy.choose(batch))
        yield


# The draft


@pytest.mark.parametrize(
    ("plan", "exit_layer", "sampling"),
    [
        ("chain:1", 1, "top_p"),
        ("chain:4", 3, "top_k-min_p-penalty"),
        ("tree:4,2,2,1", 1, "top_k-min_p-penalty"),
        (IRREGULAR, 3, "top_p"),
        ("tree:3,2+copy:4", 2, "top_k-min_p-penalty"),
        ("copy:5", None, "greedy"),
        ("beam:3,4,2+copy:2", 1, "top_k-min_p-penalty"),
    ],
)
def test_tokens_are_the_same_for_every_plan_and_exit(plan: str, exit_layer: int | None, sampling: str) -> None:
    drawn, _ = generate(engine_of("llama"), PROMPTS[:1], 5, sampling, plan=plan, exit_layer=exit_layer)
    assert drawn == [alone(0, 5, sampling)]


@settings(max_examples=6)
@given(plans(max_nodes=4, max_copied=6), st.lists(st.integers(3, 5), min_size=1, max_size=9), st.integers(0, 9))
def test_tokens_are_the_same_with_any_copied_nodes(plan: Plan, prompt: list[int], seed: int) -> None:
    """The bias favours the prompt's few tokens, so that copied and ranked nodes often carry the same token."""
    bias = {"logit_bias": dict.fromkeys(range(3, 6), 6.0)}
    plain, drafted = (
        generate(engine_of("llama"), [prompt], seed, plan=each, **bias)[0] for each in ("none", str(plan))
    )
    assert drafted == plain


@pytest.mark.filterwarnings("ignore:drafting only")
@pytest.mark.parametrize("sequences", [1, 6])
def test_without_a_profile_text_that_repeats_is_copied_and_stays_the_same(sequences: int) -> None:
    engine, prompts = Engine.from_model(forced_text_model([5, 9, 7, 3, 11])), [[5, 9, 7, 3, 11, 5, 9]] * sequences
    settings = {"speculative_decoding": None, "max_new_tokens": 60}
    plain, of_plain = generate(engine, prompts, 0, "greedy", **settings | {"speculative_decoding": False})
    copied, of_copied = generate(engine, prompts, 0, "greedy", **settings)
    assert copied == plain and of_plain[0].disabled_reason == "request"
    for stats in of_copied:
        assert stats.accepted > 10 and (stats.exit_layer, stats.disabled_reason) == (None, "no_profile")


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_same_in_every_family(family: str) -> None:
    drawn, stats = generate(engine_of(family), PROMPTS[:3], 6, plan="tree:4,2,2,1", exit_layer=3)
    assert drawn == [alone(prompt, 6, family=family) for prompt in range(3)]
    assert sum(of_sequence.accepted for of_sequence in stats) > 0


def test_tokens_are_the_same_when_speculation_is_switched_off_and_on() -> None:
    with plan_of_each_step(random.Random(1).choices(["none", *SWITCHING], k=20)):
        drawn, _ = generate(engine_of("llama"), PROMPTS[:3], 7, exit_layer=2)
    assert drawn == [alone(prompt, 7) for prompt in range(3)]


# The batch


@pytest.mark.parametrize(("size", "rules"), [(5, None), (17, "force")], ids=["5-by-rules", "17-forced"])
def test_a_sequence_is_the_same_in_a_batch_of_any_size(size: int, rules: Any) -> None:
    prompts, seeds = [index % 4 for index in range(size)], [index // 4 for index in range(size)]
    drawn, _ = generate(
        engine_of("llama"), [PROMPTS[prompt] for prompt in prompts], seeds, exit_layer=2, speculative_decoding=rules
    )
    assert drawn == [alone(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]


@pytest.mark.parametrize("slot", [0, 3])
def test_a_sequence_is_the_same_in_any_slot_among_sequences_of_other_lengths(slot: int) -> None:
    others = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    batch = [*others[:slot], PROMPTS[2], *others[slot:]]
    drawn, _ = generate(engine_of("llama"), batch, 8, plan="tree:3,2,1", exit_layer=2)
    assert drawn[slot] == alone(2, 8)


def test_a_sequence_is_the_same_while_others_end_and_the_rules_change_the_plan() -> None:
    """18 sequences decode plainly; as sequences end, the rules choose chains, then trees."""
    prompts, seeds = [index % 4 for index in range(18)], [index // 4 for index in range(18)]
    whole = [alone(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    ends = sorted({tokens[index] for tokens, index in zip(whole, [2, 3, 4, 5, 6] * 4, strict=False)})
    expected = [_until(tokens, ends) for tokens in whole]
    drawn, stats = generate(
        engine_of("llama"),
        [PROMPTS[prompt] for prompt in prompts],
        seeds,
        exit_layer=2,
        speculative_decoding=True,
        eos_token_id=ends,
    )
    assert drawn == expected
    kinds = {change.plan.partition(":")[0] for each in stats for change in each.changes}
    assert kinds == {"none", "chain", "tree"}


def _until(tokens: list[int], ends: list[int]) -> list[int]:
    last = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]


# Seeds and sample indices


def test_different_seeds_give_different_tokens() -> None:
    assert len({tuple(alone(0, seed)) for seed in range(10)}) == 10


def test_each_sequence_draws_with_its_own_seed() -> None:
    drawn, _ = generate(engine_of("llama"), [PROMPTS[0]] * 3, [3, 4, 3], plan="chain:4", exit_layer=2)
    assert drawn == [alone(0, 3), alone(0, 4), alone(0, 3)]


def test_sequences_of_one_prompt_differ_and_do_not_depend_on_their_number() -> None:
    settings: dict[str, Any] = {"exit_layer": 2, "seed": [9, 10]}
    few, _ = generate(engine_of("llama"), PROMPTS[:2], plan="tree:4,2,2,1", num_return_sequences=2, **settings)
    many, _ = generate(engine_of("llama"), PROMPTS[:2], plan="none", num_return_sequences=4, **settings)
    assert few == [many[0], many[1], many[4], many[5]]
    assert few[::2] == [alone(0, 9), alone(1, 10)]
    assert len({tuple(tokens) for tokens in many}) == 8


def test_without_a_seed_torch_manual_seed_fixes_the_tokens() -> None:
    draws = []
    for plan in ("none", "tree:3,2,1"):
        torch.manual_seed(11)
        draws.append(generate(engine_of("llama"), [PROMPTS[0]] * 2, None, plan=plan, exit_layer=2)[0])
    assert draws[0] == draws[1]
    assert draws[0][0] != draws[0][1], "sequences without a seed must not share one"


def test_without_a_seed_two_calls_draw_different_tokens() -> None:
    torch.manual_seed(11)
    first, second = (generate(engine_of("llama"), PROMPTS[:1], None, plan="chain:4")[0] for _ in range(2))
    assert first != second


# Exits that were trained, and exits with a trimmed head


def engine_with_exit(block: bool, trimmed: bool) -> Engine:
    """An exit at layer 2, with a random block and 60 rows of the head, or one of these."""
    engine = Engine.from_model(endless(tiny_model("llama")))
    exit = random_exit(engine.model, 2)
    rows = random_rows(60) if trimmed else None
    engine.drafters.exits[2] = replace(exit, block=exit.block if block else None, head_rows=rows)
    return engine


EXITS = {"block": (True, False), "trimmed": (False, True), "block-trimmed": (True, True)}


@pytest.mark.parametrize(
    ("kind", "plan", "sampling"),
    [
        ("block", "chain:4", "top_p"),
        ("trimmed", "tree:4,2,2,1", "top_k-min_p-penalty"),
        ("block-trimmed", "chain:4", "greedy"),
        ("block-trimmed", "tree:4,2,2,1", "top_p"),
    ],
)
def test_tokens_are_the_same_with_any_exit(kind: str, plan: str, sampling: str) -> None:
    drawn, stats = generate(engine_with_exit(*EXITS[kind]), PROMPTS[:3], 12, sampling, plan=plan, exit_layer=2)
    assert drawn == [alone(prompt, 12, sampling) for prompt in range(3)]
    assert sum(of_sequence.accepted for of_sequence in stats) > 0


def test_tokens_are_the_same_with_a_trained_exit_when_speculation_is_switched_off_and_on() -> None:
    engine = engine_with_exit(block=True, trimmed=True)
    with plan_of_each_step(SWITCHING):
        drawn, _ = generate(engine, PROMPTS[:3], 13, exit_layer=2)
    assert drawn == [alone(prompt, 13) for prompt in range(3)]


# Profiles: exits with random blocks, a trimmed head for each domain, and a plan for each batch size

BY_BATCH = {"1": "tree:4,2,2,1", "2-4": IRREGULAR, "5-16": "tree:3,2,1"}


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def profiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Engine]:
    """A family, and an engine of it with a profile of two domains."""
    hf, folder = endless(tiny_model(request.param)), tmp_path_factory.mktemp(request.param)
    model = engine_of(request.param).model
    marks = random_prompt(32, 1), random_prompt(32, 2)  # any two directions will do
    centroids = [[float(value) for value in mark] for mark in marks]
    domains = {
        "text": choice_of(2, BY_BATCH, centroid=centroids[0], direction=centroids[0]),
        "code": choice_of(3, BY_BATCH, centroid=centroids[1], direction=centroids[1]),
    }
    profile = profile_of(model, domains)
    exits, rows = [random_exit(model, 2), random_exit(model, 3)], {"text": random_rows(40), "code": random_rows(20, 1)}
    return request.param, Engine.from_model(hf, profile=profile.save(folder, exits, rows))


@pytest.mark.parametrize(
    ("size", "domain", "mode", "plan", "sampling"),
    [
        (1, "text", None, BY_BATCH["1"], "greedy"),
        (3, "auto", None, BY_BATCH["2-4"], "top_p"),
        (6, "code", None, "chain:3", "top_p"),
        (6, "text", "force", BY_BATCH["5-16"], "greedy"),
    ],
    ids=["batch1-tree", "batch3-irregular", "batch6-chain", "batch6-forced_tree"],
)
def test_tokens_with_a_profile_are_those_without(
    profiled: tuple[str, Engine],
    size: int,
    domain: str,
    mode: Any,
    plan: str,
    sampling: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family, engine = profiled
    vocabularies, prompts = watch_vocabularies(monkeypatch), [index % 3 for index in range(size)]
    drawn, stats = generate(
        engine, [PROMPTS[prompt] for prompt in prompts], 14, sampling, domain=domain, speculative_decoding=mode
    )
    assert drawn == [alone(prompt, 14, sampling, family) for prompt in prompts]
    assert {of_sequence.plan for of_sequence in stats} == {plan}
    assert sum(of_sequence.accepted for of_sequence in stats) > 0
    assert len(vocabularies) == 1 and max(vocabularies) < VOCABULARY, "the whole request drafts with one trimmed head"
