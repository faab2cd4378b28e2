"""Tokens are a function of model, prompt, seed and sampling settings alone: never of how they were drafted.

Every test compares with the same row decoded plainly and alone, in float64, so that no rounding tie hides or fakes a
fault.
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

from selfspec import Engine, GenerateOutput
from selfspec.governor.rules import Policy
from tests.profiles import choice_of, profile_of, random_exit, random_rows, watch_vocabularies
from tests.scripted import DRAFTING_PLANS, IRREGULAR, ScriptedPolicy, endless, left_padded, plan_id, random_prompt
from tests.tiny import FAMILIES, VOCABULARY, tiny_model

NEW_TOKENS = 16
PROMPTS = [random_prompt(56), random_prompt(9), random_prompt(31), random_prompt(1)]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k-min_p-penalty": {"temperature": 0.8, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.2},
    "greedy": {"do_sample": False},
}
SWITCHING = ["tree:4,2,2,1", "chain:4", "none", "none", "chain:1", "none", "tree:3,2,1"]

samplings = pytest.mark.parametrize("sampling", SAMPLINGS)


@cache
def engine_of(family: str) -> Engine:
    return Engine.from_model(endless(tiny_model(family)))


def generate(engine: Engine, prompts: list[list[int]], seed: Any, sampling: str = "top_p", **options: Any) -> Any:
    """New tokens of every row, and their statistics."""
    ids, mask = left_padded(prompts)
    settings = {"do_sample": True, "max_new_tokens": NEW_TOKENS, "speculative_decoding": "force"}
    settings |= {**SAMPLINGS[sampling], **options}
    output = engine.generate(ids, attention_mask=mask, seed=seed, return_dict_in_generate=True, **settings)
    assert isinstance(output, GenerateOutput)
    new_tokens = output.sequences[:, ids.shape[1] :].tolist()
    return [row[: stats.new_tokens] for row, stats in zip(new_tokens, output.stats, strict=True)], output.stats


@cache
def alone(prompt: int, seed: int, sampling: str = "top_p", family: str = "llama") -> list[int]:
    """The row decoded plainly in a batch of one."""
    (row,), _ = generate(engine_of(family), [PROMPTS[prompt]], seed, sampling, plan="none")
    return row


@contextmanager
def plan_of_each_cycle(plans: list[str]) -> Iterator[None]:
    """Requests made inside take their cycles' plans from the list, over and over."""
    policy = ScriptedPolicy(plans)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "choose", lambda self, batch: policy.choose(batch))
        yield


# The draft


@pytest.mark.parametrize(
    ("sampling", "exit_layer"),
    [("top_p", 1), ("top_p", 3), ("top_k-min_p-penalty", 2)],
    ids=["top_p-exit1", "top_p-exit3", "top_k-min_p-penalty-exit2"],
)
@pytest.mark.parametrize("plan", DRAFTING_PLANS, ids=plan_id)
def test_tokens_are_the_same_for_every_plan_and_exit(plan: str, exit_layer: int, sampling: str) -> None:
    rows, _ = generate(engine_of("llama"), PROMPTS[:1], 5, sampling, plan=plan, exit_layer=exit_layer)
    assert rows == [alone(0, 5, sampling)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", ["chain:4", "tree:4,2,2,1"])
def test_tokens_are_the_same_in_every_family(family: str, plan: str) -> None:
    rows, stats = generate(engine_of(family), PROMPTS[:3], 6, plan=plan, exit_layer=3)
    assert rows == [alone(prompt, 6, family=family) for prompt in range(3)]
    assert sum(row.accepted for row in stats) > 0


@pytest.mark.parametrize("script", range(4))
def test_tokens_are_the_same_when_speculation_is_switched_off_and_on(script: int) -> None:
    plans = SWITCHING if script == 0 else random.Random(script).choices(["none", *SWITCHING], k=20)
    with plan_of_each_cycle(plans):
        rows, _ = generate(engine_of("llama"), PROMPTS[:3], 7, exit_layer=2)
    assert rows == [alone(prompt, 7) for prompt in range(3)]


# The batch


@pytest.mark.parametrize("rules", ["force", None], ids=["forced", "by_rules"])
@pytest.mark.parametrize("size", [2, 5, 17])
def test_a_row_is_the_same_in_a_batch_of_any_size(size: int, rules: Any) -> None:
    prompts, seeds = [index % 4 for index in range(size)], [index // 4 for index in range(size)]
    rows, _ = generate(
        engine_of("llama"), [PROMPTS[prompt] for prompt in prompts], seeds, exit_layer=2, speculative_decoding=rules
    )
    assert rows == [alone(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_row_is_the_same_at_every_place_among_neighbours_of_other_lengths(place: int) -> None:
    neighbours = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    batch = [*neighbours[:place], PROMPTS[2], *neighbours[place:]]
    rows, _ = generate(engine_of("llama"), batch, 8, plan="tree:3,2,1", exit_layer=2)
    assert rows[place] == alone(2, 8)


def test_a_sequence_is_the_same_while_its_neighbours_end_and_the_rules_change_the_plan() -> None:
    """Eighteen sequences decode plainly; as they end, chains and then trees set in."""
    prompts, seeds = [index % 4 for index in range(18)], [index // 4 for index in range(18)]
    whole = [alone(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    ends = sorted({row[step] for row, step in zip(whole, [2, 3, 4, 5, 6] * 4, strict=False)})
    expected = [_until(row, ends) for row in whole]
    rows, stats = generate(
        engine_of("llama"),
        [PROMPTS[prompt] for prompt in prompts],
        seeds,
        exit_layer=2,
        speculative_decoding=True,
        eos_token_id=ends,
    )
    assert rows == expected
    kinds = {change.plan.partition(":")[0] for of in stats for change in of.changes}
    assert kinds == {"none", "chain", "tree"}


def _until(row: list[int], ends: list[int]) -> list[int]:
    last = next((step for step, token in enumerate(row) if token in ends), len(row))
    return row[: last + 1]


# Seeds and copies


def test_different_seeds_give_different_tokens() -> None:
    assert len({tuple(alone(0, seed)) for seed in range(10)}) == 10


def test_one_seed_per_row_draws_each_row_with_its_own() -> None:
    rows, _ = generate(engine_of("llama"), [PROMPTS[0]] * 3, [3, 4, 3], plan="chain:4", exit_layer=2)
    assert rows == [alone(0, 3), alone(0, 4), alone(0, 3)]


@pytest.mark.parametrize("plan", ["none", "tree:3,2,1"])
def test_copies_of_a_prompt_differ_from_each_other(plan: str) -> None:
    rows, _ = generate(engine_of("llama"), PROMPTS[:1], 9, plan=plan, exit_layer=2, num_return_sequences=5)
    assert len({tuple(row) for row in rows}) == 5


@pytest.mark.parametrize("plan", ["chain:4", "tree:4,2,2,1"])
def test_a_copy_is_the_same_however_many_are_asked_for(plan: str) -> None:
    settings: dict[str, Any] = {"exit_layer": 2, "seed": [9, 10]}
    few, _ = generate(engine_of("llama"), PROMPTS[:2], plan=plan, num_return_sequences=2, **settings)
    many, _ = generate(engine_of("llama"), PROMPTS[:2], plan="none", num_return_sequences=4, **settings)
    assert few == [many[0], many[1], many[4], many[5]]
    assert few[::2] == [alone(0, 9), alone(1, 10)]


def test_without_a_seed_torch_manual_seed_decides() -> None:
    draws = []
    for plan in ("none", "chain:4", "tree:3,2,1"):
        torch.manual_seed(11)
        draws.append(generate(engine_of("llama"), [PROMPTS[0]] * 2, None, plan=plan, exit_layer=2)[0])
    assert draws[0] == draws[1] == draws[2]
    assert draws[0][0] != draws[0][1], "rows without a seed must not share one"


def test_without_a_seed_every_call_draws_anew() -> None:
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


@samplings
@pytest.mark.parametrize("plan", ["chain:4", "tree:4,2,2,1"])
@pytest.mark.parametrize("kind", EXITS)
def test_tokens_are_the_same_with_any_kind_of_exit(kind: str, plan: str, sampling: str) -> None:
    rows, stats = generate(engine_with_exit(*EXITS[kind]), PROMPTS[:3], 12, sampling, plan=plan, exit_layer=2)
    assert rows == [alone(prompt, 12, sampling) for prompt in range(3)]
    assert sum(row.accepted for row in stats) > 0


@pytest.mark.parametrize("kind", EXITS)
def test_tokens_are_the_same_with_any_kind_of_exit_when_switching(kind: str) -> None:
    engine = engine_with_exit(*EXITS[kind])
    with plan_of_each_cycle(SWITCHING):
        rows, _ = generate(engine, PROMPTS[:3], 13, exit_layer=2)
    assert rows == [alone(prompt, 13) for prompt in range(3)]


# Profiles: trained-like exits, a trimmed head for each domain, and a plan for each batch

BY_BATCH = {"1": "tree:4,2,2,1", "2-4": IRREGULAR, "5-16": "tree:3,2,1"}


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3", "gemma3_text"])
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


@pytest.mark.parametrize("sampling", ["greedy", "top_p"])
@pytest.mark.parametrize(
    ("size", "domain", "mode", "plan"),
    [
        (1, "text", None, BY_BATCH["1"]),
        (3, "auto", None, BY_BATCH["2-4"]),
        (6, "code", None, "chain:3"),
        (6, "text", "force", BY_BATCH["5-16"]),
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
    rows, stats = generate(
        engine, [PROMPTS[prompt] for prompt in prompts], 14, sampling, domain=domain, speculative_decoding=mode
    )
    assert rows == [alone(prompt, 14, sampling, family) for prompt in prompts]
    assert {row.plan for row in stats} == {plan}
    assert sum(row.accepted for row in stats) > 0
    assert len(vocabularies) == 1 and max(vocabularies) < VOCABULARY, "the head is trimmed, for the request as a whole"
