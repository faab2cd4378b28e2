"""Logits processors of transformers: merges a caller's with those that the settings imply, and folds those of known
types into SamplingParams, which run on the device; the others run as Python on the host.

The engine applies `process_logits`, then the processors that were not folded, then `warp_logits`. A processor is folded
only if that order gives the same logits as transformers' order. This module reads no prompts and draws no tokens.
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

# Types that set some logits to -inf and keep the others: any order of them gives the same logits.
_BANS = (
    NoBadWordsLogitsProcessor,
    SuppressTokensLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
# Types that map each logit by itself and -inf to -inf: a ban may come before or after them.
_ELEMENTWISE = (*_BANS, SequenceBiasLogitsProcessor, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper)
_ORDER: list[type] = [  # the order in which transformers' generate applies the processors that it makes itself
    SequenceBiasLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    NoBadWordsLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensLogitsProcessor,
]
_WARPERS = ("temperature", "top_k", "top_p", "min_p")  # in the order in which `warp_logits` applies them


def run_processors(processors: Sequence[Processor], tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Applies the processors in order to logits [1, V], given the tokens [1, t]; keeps the dtype of the logits."""
    for processor in processors:
        processed = processor(tokens, logits)
        if not isinstance(processed, torch.Tensor) or processed.shape != logits.shape:
            given = list(processed.shape) if isinstance(processed, torch.Tensor) else type(processed).__name__
            name = getattr(processor, "__name__", type(processor).__name__)
            raise ValueError(
                f"the logits processor {name} returned {given} instead of logits {list(logits.shape)}: return a tensor "
                "of the shape that it is called with"
            )
        logits = processed.to(logits.dtype)
    return logits


def merge(built_in: Sequence[Any], own: Sequence[Any]) -> list[Any]:
    """Merges as transformers does: a caller's processor replaces the built-in one of exactly the same type; the
    caller's others follow, each object once."""
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
    """Merges a caller's processors with those that the parameters imply, as transformers does, and folds as many as
    possible into the parameters. Returns the parameters, and the other processors in the order to run them in.

    `prompt_length` includes padding, as in transformers; minimum lengths are returned as `min_new_tokens`, which
    padding does not change. `built_in` are the processors of `bad_words_ids`, `suppress_tokens` and `sequence_bias`.
    `stop_token_ids` end the sequence (None: the parameters' own); minimum lengths ban the parameters' own.
    """
    merged = merge(_built_in(params, prompt_length, built_in, device), processors)
    stops = params.stop_token_ids if stop_token_ids is None else stop_token_ids
    if not merged:  # spares most requests the checks of further SamplingParams
        is_same = not (params.min_new_tokens or params.min_length) and tuple(stops) == params.stop_token_ids
        return params if is_same else replace(params, min_new_tokens=0, min_length=0, stop_token_ids=tuple(stops)), []
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
    """Returns the processors that transformers makes of the parameters, in its order; `min_new_tokens` makes two."""
    made: list[Any] = list(others)
    if params.repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    shortest = max(params.min_length, prompt_length + params.min_new_tokens if params.min_new_tokens else 0)
    if params.stop_token_ids and shortest:
        ends: Any = torch.tensor(params.stop_token_ids, device=device)
        made.append(MinLengthLogitsProcessor(shortest, ends))
        if params.min_new_tokens:
            made.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_new_tokens, ends))
    return sorted(made, key=lambda processor: _ORDER.index(type(processor)))


def _fold(
    params: SamplingParams, processor: Any, left: Sequence[Processor]
) -> tuple[SamplingParams, Sequence[Processor]]:
    """Folds one processor; returns the parameters and the part of the processor that must run as Python. `left` are the
    processors before it that must run as Python, which is after `process_logits`."""
    kind = type(processor)
    if kind is RepetitionPenaltyLogitsProcessor:
        ignored = processor.prompt_ignore_length  # None, a number of tokens, or a tensor with one for each prompt
        whole_text = not isinstance(ignored, torch.Tensor) and not ignored
        foldable = whole_text and params.repetition_penalty == 1 and math.isfinite(processor.penalty)
        if foldable and _all_of(left, _BANS):
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
    """Folds the biases of single tokens into `logit_bias`; those of several tokens stay a processor."""
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
    """Folds bans of single tokens, and a minimum length whose end tokens are the stop tokens."""
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
    """Folds as many of the last processors as possible into temperature, top-k, top-p and min-p. Greedy decoding drops
    them: they do not change the best token."""
    for start in range(len(left) + 1):
        steps = [_warper_step(processor) for processor in left[start:]]
        settings = _in_order([*steps, *_own_steps(params)]) if params.do_sample else {}
        if None not in steps and settings is not None:
            return replace(params, **settings), left[:start]
    return params, left


def _warper_step(processor: Any) -> tuple[str, float] | None:
    """Returns (parameter, value) of a warper that `warp_logits` can apply; None for any other processor."""
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
    """Returns (parameter, value) of the warpers that the parameters switch on, in order."""
    switched_off = SamplingParams()
    own = [(name, getattr(params, name)) for name in _WARPERS]
    return [(name, value) for name, value in own if value != getattr(switched_off, name)]


def _in_order(steps: Sequence[tuple[str, float] | None]) -> dict[str, Any] | None:
    """Returns the settings with which `warp_logits` gives the same logits as these steps in order; None if no settings
    do.

    Top-k keeps the same tokens before and after a temperature. Several top-k equal the smallest, several min-p the
    largest. One temperature rounds differently than two, and two top-p cut more than either of them.
    """
    settings: dict[str, Any] = {}
    for step in steps:
        if step is None:
            return None
        name, value = step
        if name == "top_k" and settings.get("top_k", math.inf) <= value:
            continue  # a smaller top-k comes before
        later = {other for other in settings if _WARPERS.index(other) > _WARPERS.index(name)}
        if later and not (name == "temperature" and later == {"top_k"}):
            return None
        if name in settings:
            if name in ("temperature", "top_p"):
                return None
            value = value if name == "top_k" else max(value, settings[name])
        settings[name] = value
    return settings
