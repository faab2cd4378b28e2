"""Logits processors and stopping criteria in transformers' terms: merging a caller's with those that settings ask for,
and folding those of a known type into sampling parameters, which need no Python between the logits and the choice.

The engine applies `process_logits`, then the processors left over, then `warp_logits`. A processor is folded only where
that order gives what transformers' own order gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec.sampling import SamplingParams, read_token_ids

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (tokens [1, t], logits [1, V]) -> logits [1, V]

# Types that set some logits to -inf and leave the others: their order among themselves does not matter.
_BANS = (
    NoBadWordsLogitsProcessor,
    SuppressTokensLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
# Types that change every logit by itself and keep -inf as it is: a ban may come before or after them.
_ELEMENTWISE = (*_BANS, SequenceBiasLogitsProcessor, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper)
_ORDER: list[type] = [  # of those that transformers makes itself
    SequenceBiasLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    NoBadWordsLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensLogitsProcessor,
]
_WARPERS = ("temperature", "top_k", "top_p", "min_p")  # in the order in which `warp_logits` applies them


def run_processors(processors: Sequence[Processor], tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Logits [1, V] after all processors, in the dtype they came in, whatever dtype a processor returns."""
    for processor in processors:
        processed = processor(tokens, logits)
        if not isinstance(processed, torch.Tensor) or processed.shape != logits.shape:
            given = list(processed.shape) if isinstance(processed, torch.Tensor) else type(processed).__name__
            name = getattr(processor, "__name__", type(processor).__name__)
            raise ValueError(f"the logits processor {name} returned {given} instead of logits {list(logits.shape)}")
        logits = processed.to(logits.dtype)
    return logits


def merge(built_in: Sequence[Any], own: Sequence[Any]) -> list[Any]:
    """transformers' rule for processors and criteria: a caller's takes the place of the built-in one of exactly its
    type; the caller's others follow, each object once."""
    merged = [next((mine for mine in own if type(mine) is type(default)), default) for default in built_in]
    for mine in own:
        if mine not in merged:
            merged.append(mine)
    return merged


def absorb_processors(
    params: SamplingParams,
    processors: Sequence[Processor],
    prompt_length: int,
    built_in: Sequence[Processor] = (),
    stop_token_ids: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[SamplingParams, list[Processor]]:
    """Merges a caller's processors with those that the parameters stand for, as transformers does, and folds what can
    be folded into the parameters; the rest comes back in order, to be run between `process_logits` and `warp_logits`.

    `prompt_length` counts padding, as transformers does; minimum lengths come back as `min_new_tokens`, which padding
    does not change. `built_in` are further processors made from settings (`bad_words_ids`, `suppress_tokens`,
    `sequence_bias`). `stop_token_ids` end the text where they are not the parameters' own, which minimum lengths ban.
    """
    merged = merge(_built_in(params, prompt_length, built_in, device), processors)
    stops = params.stop_token_ids if stop_token_ids is None else stop_token_ids
    folded = replace(params, repetition_penalty=1.0, min_new_tokens=0, min_length=0, stop_token_ids=tuple(stops))
    left: list[Processor] = []
    for processor in merged:
        changed, rest = _fold(folded, processor, left)
        folded, left = changed, [*left, *rest]
    folded = replace(folded, min_new_tokens=max(0, folded.min_length - prompt_length), min_length=0)
    return _fold_warpers(folded, left)


def _built_in(
    params: SamplingParams, prompt_length: int, others: Sequence[Processor], device: torch.device | str
) -> list[Processor]:
    """What transformers would make of the parameters, in its order. A minimum of new tokens makes two processors."""
    made: list[Any] = list(others)
    if params.repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    ends: Any = torch.tensor(params.stop_token_ids, device=device)
    shortest = max(params.min_length, prompt_length + params.min_new_tokens if params.min_new_tokens else 0)
    if len(ends) and shortest:
        made.append(MinLengthLogitsProcessor(shortest, ends))
    if len(ends) and params.min_new_tokens:
        made.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_new_tokens, ends))
    return sorted(made, key=lambda processor: _ORDER.index(type(processor)))


def _fold(
    params: SamplingParams, processor: Any, left: Sequence[Processor]
) -> tuple[SamplingParams, Sequence[Processor]]:
    """The parameters with the processor in them, and what of it could not be folded; `left` are those before it that
    run after `process_logits`."""
    kind = type(processor)
    if kind is RepetitionPenaltyLogitsProcessor:
        ignored = processor.prompt_ignore_length  # None, a number of tokens, or one for each row
        whole_text = not isinstance(ignored, torch.Tensor) and not ignored
        fits = whole_text and params.repetition_penalty == 1 and math.isfinite(processor.penalty)
        if fits and _all_of(left, _BANS):
            return replace(params, repetition_penalty=processor.penalty), ()
    elif kind is SequenceBiasLogitsProcessor:
        if params.repetition_penalty == 1 and _all_of(left, (*_BANS, kind)):
            return _fold_bias(params, processor)
    elif kind in _BANS and _all_of(left, _ELEMENTWISE):
        return _fold_ban(params, processor)
    return params, (processor,)


def _all_of(processors: Sequence[Processor], kinds: tuple[type, ...]) -> bool:
    return all(type(processor) in kinds for processor in processors)


def _fold_bias(params: SamplingParams, processor: Any) -> tuple[SamplingParams, Sequence[Processor]]:
    """Biases of single tokens are folded; those of longer sequences stay a processor."""
    single = {ids[0]: bias for ids, bias in processor.sequence_bias.items() if len(ids) == 1}
    if not single or any(bias == math.inf or math.isnan(bias) for bias in single.values()):
        return params, (processor,)
    bias = dict(params.logit_bias)
    for token, value in single.items():
        bias[int(token)] = bias.get(int(token), 0.0) + value
    longer: Any = {ids: value for ids, value in processor.sequence_bias.items() if len(ids) > 1}
    rest = (SequenceBiasLogitsProcessor(longer),) if longer else ()
    return replace(params, logit_bias=tuple(bias.items())), rest


def _fold_ban(params: SamplingParams, processor: Any) -> tuple[SamplingParams, Sequence[Processor]]:
    kind = type(processor)
    if kind is NoBadWordsLogitsProcessor:
        single = [int(ids[0]) for ids in processor.sequence_bias if len(ids) == 1]
        longer = [list(ids) for ids in processor.sequence_bias if len(ids) > 1]
        rest = (processor if not single else NoBadWordsLogitsProcessor(longer),) if longer else ()
        return replace(params, banned_token_ids=(*params.banned_token_ids, *single)), rest
    if kind is SuppressTokensLogitsProcessor:
        banned = [token for token in processor.suppress_tokens.tolist() if token >= 0]
        return replace(params, banned_token_ids=(*params.banned_token_ids, *banned)), ()
    length = processor.min_length if kind is MinLengthLogitsProcessor else (
        processor.prompt_length_to_skip + processor.min_new_tokens
    )  # fmt: skip
    if set(read_token_ids("eos_token_id", processor.eos_token_id)) != set(params.stop_token_ids):
        return params, (processor,)
    return replace(params, min_length=max(params.min_length, length)), ()


def _fold_warpers(params: SamplingParams, left: list[Processor]) -> tuple[SamplingParams, list[Processor]]:
    """Folds as many of the last processors as possible into temperature, top-k, top-p and min-p. When greedy they have
    no effect on the best token."""
    for start in range(len(left) + 1):
        steps = [_warper_step(processor) for processor in left[start:]]
        settings = _in_order([*steps, *_own_steps(params)]) if params.do_sample else {}
        if None not in steps and settings is not None:
            return replace(params, **settings), left[:start]
    return params, left


def _warper_step(processor: Any) -> tuple[str, float] | None:
    """The setting that a warper stands for; None for anything else."""
    kind = type(processor)
    if kind is TemperatureLogitsWarper and math.isfinite(processor.temperature):
        return "temperature", processor.temperature
    removes = getattr(processor, "filter_value", None) == -math.inf
    if kind is TopKLogitsWarper and removes:
        return "top_k", processor.top_k
    if kind is TopPLogitsWarper and removes and processor.min_tokens_to_keep == 1 and processor.top_p > 0:
        return "top_p", processor.top_p
    if kind is MinPLogitsWarper and removes and processor.min_tokens_to_keep == 1:
        return "min_p", processor.min_p
    return None


def _own_steps(params: SamplingParams) -> list[tuple[str, float]]:
    switched_off = SamplingParams()
    own = [(name, getattr(params, name)) for name in _WARPERS]
    return [(name, value) for name, value in own if value != getattr(switched_off, name)]


def _in_order(steps: Sequence[tuple[str, float] | None]) -> dict[str, Any] | None:
    """The settings with which `warp_logits` does the same as these steps one after the other; None if there are none.

    Top-k keeps the same tokens before and after a temperature. Of several top-k the smallest counts, of several min-p
    the largest; two temperatures would round differently as one, and two top-p cut more than either.
    """
    settings: dict[str, Any] = {}
    for step in steps:
        if step is None:
            return None
        name, value = step
        if name == "top_k" and settings.get("top_k", math.inf) <= value:
            continue  # fewer are left already
        later = {other for other in settings if _WARPERS.index(other) > _WARPERS.index(name)}
        if later and not (name == "temperature" and later == {"top_k"}):
            return None
        if name in settings:
            if name in ("temperature", "top_p"):
                return None
            value = value if name == "top_k" else max(value, settings[name])
        settings[name] = value
    return settings
