"""Greedy tokens equal transformers' greedy tokens for every family, plan, exit, batch and logits processing.

Both sides compute in float64, so that no rounding tie hides or causes a failure. Prompts are longer than the sliding
windows, and generation crosses from the first page of the cache to the second.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, NoRepeatNGramLogitsProcessor, PreTrainedModel

from selfspec import Engine, GenerateOutput
from tests.scripted import IRREGULAR, endless, left_padded, plan_id, random_prompt, silence
from tests.tiny import FAMILIES, tiny_model

NEW_TOKENS = 18
PROMPTS = [random_prompt(57), random_prompt(62), random_prompt(51)]  # all outgrow a page of 64 while generating
BATCHES = {"alone": PROMPTS[:1], "padded3": PROMPTS}
SHAPES = [("none", 1, "padded3"), ("chain:4", 0, "alone"), ("tree:4,2,2,1", 3, "padded3"), (IRREGULAR, 3, "padded3")]

shapes = pytest.mark.parametrize(
    ("plan", "exit_layer", "batch"), SHAPES, ids=[f"{plan_id(plan)}-exit{layer}" for plan, layer, _ in SHAPES]
)
plans = pytest.mark.parametrize("plan", ["none", "chain:4", IRREGULAR], ids=plan_id)


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
@shapes
def test_greedy_tokens_equal_transformers(family: str, plan: str, exit_layer: int, batch: str) -> None:
    output = generated(family, BATCHES[batch], plan, exit_layer)
    assert torch.equal(output.sequences, reference(family, batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_some_drafts_of_these_models_are_accepted_and_some_rejected(family: str) -> None:
    stats = generated(family, PROMPTS, "tree:4,2,2,1", exit_layer=2).stats
    assert any(0 < of_sequence.accept_rate < 1 for of_sequence in stats)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_tree_deeper_than_the_sliding_window_equals_transformers(family: str) -> None:
    """Layers from 2 on add zero, so that whole paths are accepted, down to the deepest nodes."""
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


# End tokens


def eos_that_ends_sequences_apart(new_tokens: list[list[int]]) -> tuple[int, ...]:
    """Two ids that end every sequence, each at another new token, none at its first or last."""
    for eos in combinations(sorted({token for tokens in new_tokens for token in tokens}), 2):
        ends = [next((index for index, token in enumerate(tokens) if token in eos), 0) for tokens in new_tokens]
        if len(set(ends)) == len(ends) and all(0 < end < NEW_TOKENS - 1 for end in ends):
            return eos
    raise AssertionError("no pair of tokens ends these sequences at different tokens")


@plans
def test_sequences_of_a_batch_that_end_at_different_tokens_equal_transformers(plan: str) -> None:
    ends = eos_that_ends_sequences_apart(reference("llama", "padded3")[:, -NEW_TOKENS:].tolist())
    output = generated("llama", PROMPTS, plan, eos_token_id=list(ends))
    assert torch.equal(output.sequences, reference("llama", "padded3", ends))
    assert output.sequences.shape[1] < reference("llama", "padded3").shape[1]


def test_an_eos_of_one_sequence_does_not_end_the_others() -> None:
    first = reference("llama", "padded3")[0, -NEW_TOKENS:].tolist()
    eos = first[NEW_TOKENS // 2]
    expected = transformers_tokens("llama", PROMPTS, eos_token_id=eos)
    output = generated("llama", PROMPTS, "tree:4,2,2,1", eos_token_id=eos)
    assert torch.equal(output.sequences, expected)
    assert output.stats[0].new_tokens == first.index(eos) + 1 < NEW_TOKENS


# Logits that depend on the tokens so far. transformers processes padding as tokens, so it gets one prompt at a time.


class ForbidByPrefix(LogitsProcessor):
    """Bans a third of the vocabulary, another third after every prefix."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        tokens = torch.arange(scores.shape[-1])
        forbidden = (tokens[None] + input_ids.sum(-1, keepdim=True) + input_ids.shape[-1]) % 3 == 0
        return scores.masked_fill(forbidden, -float("inf"))


class RaiseByPrefix(LogitsProcessor):
    """Adds 50 to half of the logits: a repetition penalty before or after it gives different tokens."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        chosen = (torch.arange(scores.shape[-1])[None] + input_ids[:, -2:].sum(-1, keepdim=True)) % 2 == 0
        return torch.where(chosen, scores + 50, scores)  # type: ignore[return-value]


class LeastLikely(LogitsProcessor):
    """Negates the logits, so that a penalty on logits below zero changes the choice."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return -scores  # type: ignore[return-value]


EARLY = 6  # index of the new token that is an end token in each sequence, unless min_new_tokens bans it


def processing(name: str) -> dict[str, Any]:
    """Keyword arguments of `generate`, of transformers as of selfspec."""
    ends = [tokens[EARLY] for tokens in reference("llama", "padded3")[:, -NEW_TOKENS:].tolist()]
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
def processed_reference(name: str) -> list[list[int]]:
    settings = processing(name)
    return [transformers_tokens("llama", [prompt], **settings)[0, len(prompt) :].tolist() for prompt in PROMPTS]


PROCESSINGS = [
    "repetition_penalty",
    "penalty_below_zero",
    "min_new_tokens",
    "min_new_tokens_just_reached",
    "no_repeat_ngram",
    "by_prefix",
    "all",
]


@pytest.mark.parametrize(
    ("name", "plan"),
    [("all", "none"), ("all", "chain:4"), *((name, "tree:4,2,2,1") for name in PROCESSINGS)],
)
def test_tokens_after_logits_processing_equal_transformers(name: str, plan: str) -> None:
    output = generated("llama", PROMPTS, plan, **processing(name))
    new_tokens = output.sequences[:, len(PROMPTS[1]) :].tolist()  # the longest prompt is as wide as the batch
    kept = [tokens[: stats.new_tokens] for tokens, stats in zip(new_tokens, output.stats, strict=True)]
    assert kept == processed_reference(name)


@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat_ngram", "by_prefix", "all"])
def test_this_processing_changes_the_tokens(name: str) -> None:
    assert processed_reference(name) != reference("llama", "padded3")[:, -NEW_TOKENS:].tolist()


def test_min_new_tokens_changes_every_sequence() -> None:
    pairs = zip(processed_reference("eos"), processed_reference("min_new_tokens"), strict=True)
    assert all(len(early) <= EARLY + 1 < len(late) for early, late in pairs)
    assert EARLY + 1 in map(len, processed_reference("min_new_tokens_just_reached"))


@pytest.mark.parametrize("plan", ["none", "tree:3,2,1"])
def test_processors_run_before_top_k_as_in_transformers(plan: str) -> None:
    """With top-k 1 a sampled token can be compared."""
    settings: dict[str, Any] = {
        "do_sample": True,
        "top_k": 1,
        "logits_processor": LogitsProcessorList([ForbidByPrefix()]),
    }
    output = generated("llama", PROMPTS[:1], plan, **settings)
    assert torch.equal(output.sequences, transformers_tokens("llama", PROMPTS[:1], **settings))
