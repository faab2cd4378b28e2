"""Greedy tokens are transformers' greedy tokens: every family, plan, exit and batch, with every way to steer them.

Float64 on both sides, so that no rounding tie hides or fakes a fault. Prompts are longer than the sliding windows, and
generation crosses from the first page of the cache into the second.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, NoRepeatNGramLogitsProcessor, PreTrainedModel

from selfspec import Engine, GenerateOutput
from tests.scripted import DRAFTING_PLANS, PLANS, endless, left_padded, plan_id, random_prompt, silence
from tests.tiny import FAMILIES, tiny_model

NEW_TOKENS = 18
PROMPTS = [random_prompt(57), random_prompt(62), random_prompt(51)]  # all outgrow a page of 64 while generating
BATCHES = {"alone": PROMPTS[:1], "padded3": PROMPTS}
SHAPES = [("none", 1)] + [(plan, layer) for plan in DRAFTING_PLANS for layer in (1, 3)]

shapes = pytest.mark.parametrize(
    ("plan", "exit_layer"), SHAPES, ids=[f"{plan_id(plan)}-exit{layer}" for plan, layer in SHAPES]
)
plans = pytest.mark.parametrize("plan", PLANS, ids=plan_id)
batches = pytest.mark.parametrize("batch", BATCHES)


@cache
def model_of(family: str) -> PreTrainedModel:
    return endless(tiny_model(family))


@cache
def engine_of(family: str) -> Engine:
    return Engine.from_model(model_of(family))


@cache
def reference(family: str, batch: str, eos: tuple[int, ...] = ()) -> torch.Tensor:
    return transformers_tokens(family, BATCHES[batch], eos_token_id=list(eos) or None)


def transformers_tokens(family: str, prompts: list[list[int]], **settings: Any) -> torch.Tensor:
    ids, mask = left_padded(prompts)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **settings}
    return model_of(family).generate(ids, attention_mask=mask, **settings)


def generated(family: str, prompts: list[list[int]], plan: str, exit_layer: int = 2, **settings: Any) -> GenerateOutput:
    ids, mask = left_padded(prompts)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **settings}
    output = engine_of(family).generate(
        ids,
        attention_mask=mask,
        plan=plan,
        exit_layer=exit_layer,
        speculative_decoding="force",
        return_dict_in_generate=True,
        **settings,
    )
    assert isinstance(output, GenerateOutput)
    return output


@pytest.mark.parametrize("family", FAMILIES)
@batches
@shapes
def test_greedy_tokens_equal_transformers(family: str, batch: str, plan: str, exit_layer: int) -> None:
    output = generated(family, BATCHES[batch], plan, exit_layer)
    assert torch.equal(output.sequences, reference(family, batch))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", ["chain:4", "tree:4,2,2,1"])
def test_drafts_of_these_models_are_sometimes_right_and_sometimes_wrong(family: str, plan: str) -> None:
    stats = generated(family, PROMPTS, plan, exit_layer=2).stats
    assert any(0 < row.accept_rate < 1 for row in stats)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_tree_deeper_than_the_sliding_window_equals_transformers(family: str) -> None:
    """Layers from 2 on are silent, so that whole paths are accepted and the deepest nodes count."""
    model = silence(endless(tiny_model(family)), 2)
    ids = torch.tensor(PROMPTS[:1])
    plan = "tree:2,2,1,1,1,1,1,1"
    settings: dict[str, Any] = {"max_new_tokens": 18, "do_sample": False}
    output = Engine.from_model(model).generate(
        ids, exit_layer=2, plan=plan, speculative_decoding="force", return_dict_in_generate=True, **settings
    )
    assert isinstance(output, GenerateOutput)
    assert torch.equal(output.sequences, model.generate(ids, **settings))
    assert output.stats[0].cycles == 2


# Ends of text


def eos_that_ends_rows_apart(new_tokens: list[list[int]]) -> tuple[int, ...]:
    """Two ids that end every row, each at another step, none at its first or last."""
    for eos in combinations(sorted({token for row in new_tokens for token in row}), 2):
        ends = [next((step for step, token in enumerate(row) if token in eos), 0) for row in new_tokens]
        if len(set(ends)) == len(ends) and all(0 < end < NEW_TOKENS - 1 for end in ends):
            return eos
    raise AssertionError("no pair of tokens ends these rows at different steps")


@pytest.mark.parametrize("family", FAMILIES)
@plans
def test_rows_that_end_at_different_times_equal_transformers(family: str, plan: str) -> None:
    ends = eos_that_ends_rows_apart(reference(family, "padded3")[:, -NEW_TOKENS:].tolist())
    output = generated(family, PROMPTS, plan, eos_token_id=list(ends))
    assert torch.equal(output.sequences, reference(family, "padded3", ends))
    assert output.sequences.shape[1] < reference(family, "padded3").shape[1]


@plans
def test_one_eos_in_the_middle_ends_only_its_rows(plan: str) -> None:
    first_row = reference("llama", "padded3")[0, -NEW_TOKENS:].tolist()
    eos = first_row[NEW_TOKENS // 2]
    expected = transformers_tokens("llama", PROMPTS, eos_token_id=eos)
    output = generated("llama", PROMPTS, plan, eos_token_id=eos)
    assert torch.equal(output.sequences, expected)
    assert output.stats[0].new_tokens == first_row.index(eos) + 1 < NEW_TOKENS


# Logits that depend on the text so far. transformers counts padding as text, so its rows are generated one by one.


class ForbidByPrefix(LogitsProcessor):
    """Forbids a third of the vocabulary, another third after every prefix."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        tokens = torch.arange(scores.shape[-1])
        forbidden = (tokens[None] + input_ids.sum(-1, keepdim=True) + input_ids.shape[-1]) % 3 == 0
        return scores.masked_fill(forbidden, -float("inf"))


class RaiseByPrefix(LogitsProcessor):
    """Raises half of the vocabulary, far above zero, where a repetition penalty weighs most: their order shows."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        chosen = (torch.arange(scores.shape[-1])[None] + input_ids[:, -2:].sum(-1, keepdim=True)) % 2 == 0
        return torch.where(chosen, scores + 50, scores)  # type: ignore[return-value]


class LeastLikely(LogitsProcessor):
    """Turns the order of tokens round, so that a penalty on scores below zero shows."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return -scores  # type: ignore[return-value]


EARLY = 6  # the step at which each row meets an end token, where min_new_tokens does not put it off


def steering(name: str) -> dict[str, Any]:
    """Keyword arguments of a way to steer; transformers and selfspec take the same."""
    ends = [row[EARLY] for row in reference("llama", "padded3")[:, -NEW_TOKENS:].tolist()]
    ngram, forbid, lift = NoRepeatNGramLogitsProcessor(2), ForbidByPrefix(), RaiseByPrefix()
    late: dict[str, Any] = {"min_new_tokens": EARLY + 5, "eos_token_id": ends}
    settings: dict[str, dict[str, Any]] = {
        "eos": {"eos_token_id": ends},
        "repetition_penalty": {"repetition_penalty": 1.3},
        "penalty_below_zero": {"repetition_penalty": 1.3, "logits_processor": LogitsProcessorList([LeastLikely()])},
        "min_new_tokens": late,
        "min_new_tokens_just_reached": {"min_new_tokens": EARLY, "eos_token_id": ends},
        "no_repeat_ngram": {"logits_processor": LogitsProcessorList([ngram])},
        "by_prefix": {"logits_processor": LogitsProcessorList([forbid])},
        "all": {**late, "repetition_penalty": 1.3, "logits_processor": LogitsProcessorList([lift, ngram, forbid])},
    }
    return settings[name]


@cache
def steered_reference(name: str) -> list[list[int]]:
    settings = steering(name)
    return [transformers_tokens("llama", [prompt], **settings)[0, len(prompt) :].tolist() for prompt in PROMPTS]


STEERINGS = [
    "repetition_penalty",
    "penalty_below_zero",
    "min_new_tokens",
    "min_new_tokens_just_reached",
    "no_repeat_ngram",
    "by_prefix",
    "all",
]


@pytest.mark.parametrize("name", STEERINGS)
@plans
def test_steered_rows_equal_transformers(name: str, plan: str) -> None:
    output = generated("llama", PROMPTS, plan, **steering(name))
    new_tokens = output.sequences[:, len(PROMPTS[1]) :].tolist()  # the longest prompt is as wide as the batch
    rows = [row[: stats.new_tokens] for row, stats in zip(new_tokens, output.stats, strict=True)]
    assert rows == steered_reference(name)


@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat_ngram", "by_prefix", "all"])
def test_this_steering_changes_the_text(name: str) -> None:
    assert steered_reference(name) != reference("llama", "padded3")[:, -NEW_TOKENS:].tolist()


def test_min_new_tokens_changes_every_row() -> None:
    pairs = zip(steered_reference("eos"), steered_reference("min_new_tokens"), strict=True)
    assert all(len(early) <= EARLY + 1 < len(late) for early, late in pairs)
    assert EARLY + 1 in map(len, steered_reference("min_new_tokens_just_reached"))


@pytest.mark.parametrize("plan", ["none", "chain:4", "tree:3,2,1"])
def test_processors_act_before_a_sampling_cut_as_in_transformers(plan: str) -> None:
    """Top-k 1 leaves sampling no choice, so the two can be compared."""
    settings: dict[str, Any] = {
        "do_sample": True,
        "top_k": 1,
        "logits_processor": LogitsProcessorList([ForbidByPrefix()]),
    }
    output = generated("llama", PROMPTS[:1], plan, **settings)
    assert torch.equal(output.sequences, transformers_tokens("llama", PROMPTS[:1], **settings))
