"""Reads the arguments of `generate`: prompts, generation settings, seeds and speculation options, checked before any
work.

Merges transformers' defaults, the model's generation config, the caller's generation config and the keyword arguments;
later sources win. Raises ValueError for an unsupported argument that would change the output. Runs no model and submits
nothing to the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache, lru_cache, wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
)

from selfspec.governor.rules import Mode, Rules
from selfspec.logprobs import MAX_TOP
from selfspec.processors import Processor, absorb_processors
from selfspec.sampling import SamplingParams, as_scalar, is_int, read_token_ids
from selfspec.speculation.plan import Plan

P = ParamSpec("P")
R = TypeVar("R")

PlanLike = str | Plan | Sequence[tuple[int, int]]

SUPPORTED = tuple(
    "max_new_tokens max_length min_new_tokens min_length do_sample temperature top_k top_p min_p repetition_penalty "
    "presence_penalty frequency_penalty logit_bias sequence_bias bad_words_ids suppress_tokens allowed_token_ids "
    "eos_token_id stop_token_ids pad_token_id stop_strings num_return_sequences logprobs prompt_logprobs".split()
)
# Arguments of `Engine.generate` that are neither settings of a text nor of its speculation.
_OF_CALLS = tuple(
    "input_ids attention_mask generation_config logits_processor stopping_criteria streamer return_dict_in_generate "
    "seed response_format inputs tokenizer".split()
)

# Fields of a GenerationConfig that do not change the tokens of a decoder-only model, greedy or sampling.
_WITHOUT_EFFECT = set(
    "transformers_version _from_model_config bos_token_id decoder_start_token_id return_dict_in_generate "
    "early_stopping length_penalty cache_implementation cache_config disable_compile compile_config "
    "continuous_batching_config is_assistant num_assistant_tokens num_assistant_tokens_schedule "
    "assistant_confidence_threshold assistant_lookbehind target_lookbehind".split()
)

# Values at which an unsupported field is accepted, because they switch it off. None, False and empty always do.
_SWITCHED_OFF = {
    "use_cache": True,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
}

_TRANSFORMERS_DEFAULTS = {"top_k": 50, "temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
_DEFAULT_NEW_TOKENS = 20
# Fields that make transformers return more tensors, and only with return_dict_in_generate=True.
_EXTRA_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_ONLY_WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Resolved:
    """The settings of one call's sequences, with the caller's processors and criteria merged in."""

    params: SamplingParams
    processors: list[Processor]  # run as Python between `process_logits` and `warp_logits`
    criteria: list[Callable]  # the caller's, without those that became stop tokens or a length
    stop_strings: tuple[str, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Settings:
    """The checked generation settings of a request; `resolve` merges a caller's processors and criteria in."""

    sampling: SamplingParams  # without the settings of `built_in`
    built_in: tuple[Processor, ...]  # transformers' processors for sequence_bias, bad_words_ids and suppress_tokens
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]  # further tokens that end a sequence
    max_new_tokens: int | None  # either this or max_length is set
    max_length: int | None  # prompt with padding and new tokens together
    pad_token_id: int | None
    num_return_sequences: int
    stop_strings: tuple[str, ...]
    return_dict: bool
    logprobs: int | None  # likely tokens beside the log probability of each new token; None: none are computed
    prompt_logprobs: int | None  # the same for the prompt's tokens

    def resolve(
        self,
        prompt_width: int,
        processors: Sequence[Processor] | None = None,
        criteria: Sequence[Callable] | None = None,
        device: torch.device | str = "cpu",
    ) -> Resolved:
        """Merges a caller's processors and criteria in, as transformers does: one of a built-in's type replaces it.
        `prompt_width` is the width of input_ids, padding included; `device` that of the logits."""
        for name, given in (("logits_processor", processors), ("stopping_criteria", criteria)):
            if given is not None and not isinstance(given, list | tuple):
                raise ValueError(f"{name} must be a list, not a {type(given).__name__}: pass [{name}]")
        own = list(criteria or ())
        ends = [criterion for criterion in own if type(criterion) is EosTokenCriteria]
        limits = [criterion for criterion in own if type(criterion) is MaxLengthCriteria]
        stops = self.sampling.stop_token_ids
        if ends:
            stops = sum((read_token_ids("eos_token_id", each.eos_token_id) for each in ends), self.stop_token_ids)
        allowed = self.new_tokens_allowed(prompt_width)
        if limits:
            allowed = max(1, min(int(each.max_length) for each in limits) - prompt_width)
        params, left = absorb_processors(self.sampling, processors or (), prompt_width, self.built_in, stops, device)
        replaced = any(type(criterion) is StopStringCriteria for criterion in own)
        rest = [criterion for criterion in own if criterion not in ends and criterion not in limits]
        return Resolved(params, left, rest, () if replaced else self.stop_strings, allowed)

    def new_tokens_allowed(self, prompt_width: int) -> int:
        """Returns the largest number of new tokens for prompts of this width, padding included."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        assert self.max_length is not None
        if prompt_width >= self.max_length:
            raise ValueError(
                f"the prompt is {prompt_width} tokens long and max_length={self.max_length} counts prompt and new "
                "tokens together, so there is nothing left to generate: raise max_length or pass max_new_tokens"
            )
        return self.max_length - prompt_width


def read_settings(model_config: GenerationConfig, config: GenerationConfig | None, kwargs: dict[str, Any]) -> Settings:
    """Merges the sources and checks every value; of `model_config`, `config` and `kwargs` the later ones win."""
    if config is not None and not isinstance(config, GenerationConfig):
        raise ValueError(f"generation_config must be a transformers GenerationConfig, not a {type(config).__name__}")
    fields_of_config = _generation_config_fields()
    for name in kwargs:
        if name not in SUPPORTED and name not in fields_of_config:
            raise unknown_argument(name, _arguments())
    merged: dict[str, Any] = dict(_TRANSFORMERS_DEFAULTS)
    for name, value in vars(model_config).items():
        # transformers ignores entries of generation_config.json that are not fields of its GenerationConfig.
        if value is not None and name in fields_of_config:
            merged[name] = value
    if config is not None:
        merged.update({name: value for name, value in config.to_dict().items() if value is not None})
    merged.update(kwargs)  # a keyword argument of None switches an entry of a config off
    merged = {name: as_scalar(value) for name, value in merged.items() if value is not None}
    if all(isinstance(value, str | int | float) for value in merged.values()):
        return _cached_settings(**merged)
    return _settings_from(merged)


@lru_cache(maxsize=64, typed=True)  # most calls have the settings of one before; typed, because True equals 1
def _cached_settings(**merged: str | int | float) -> Settings:
    return _settings_from(merged)


def _arguments() -> list[str]:
    """The names of all arguments of a call."""
    return [*SUPPORTED, *_OF_CALLS, *SpeculationRequest.__dataclass_fields__]


def unknown_argument(name: str, every: Sequence[str]) -> ValueError:
    """An error that names the accepted arguments that are spelt like an unknown one, or else all of them."""
    close = [other for other in every if other.startswith(f"{name}_")] or get_close_matches(name, every)
    instead = f": did you mean {' or '.join(close)}?" if close else f"; supported are {', '.join(every)}"
    return ValueError(f"there is no argument {name!r}{instead}")


def refuse_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a call with an unknown keyword argument raise ValueError with suggestions instead of TypeError."""
    names = [name for name in signature(function).parameters if name not in ("cls", "self")]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                raise unknown_argument(name, names)
        return function(*args, **kwargs)

    return checked


def _settings_from(merged: dict[str, Any]) -> Settings:
    for name, value in merged.items():
        _check_supported(name, value, merged)
    max_new_tokens, max_length = _positive("max_new_tokens", merged), _positive("max_length", merged)
    if max_new_tokens is None and max_length is None:
        max_new_tokens = _DEFAULT_NEW_TOKENS
    samples = _positive("num_return_sequences", merged) or 1
    ends = read_token_ids("eos_token_id", merged.get("eos_token_id"))
    pads = read_token_ids("pad_token_id", merged.get("pad_token_id"))
    more_ends = read_token_ids("stop_token_ids", merged.get("stop_token_ids"))
    sampling = _params_from(merged, (*ends, *more_ends))
    if samples > 1 and not sampling.do_sample:
        raise ValueError(
            f"num_return_sequences={samples} without do_sample=True would return the same greedy tokens {samples} "
            "times: pass do_sample=True, or num_return_sequences=1"
        )
    return Settings(
        sampling=sampling,
        built_in=tuple(_built_in(merged, ends)),
        eos_token_ids=ends,
        stop_token_ids=more_ends,
        max_new_tokens=max_new_tokens,
        max_length=None if max_new_tokens is not None else max_length,
        pad_token_id=next(iter(pads + ends), None),
        num_return_sequences=samples,
        stop_strings=_stop_strings(merged.get("stop_strings", ())),
        return_dict=bool(merged.get("return_dict_in_generate", False)),
        logprobs=_top("logprobs", merged),
        prompt_logprobs=_top("prompt_logprobs", merged),
    )


def _params_from(merged: dict[str, Any], stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Reads the entries that are sampling parameters; `min_new_tokens` overrides `min_length`, as in transformers."""
    ignored = {"stop_token_ids"} if merged.get("do_sample") else {"stop_token_ids", *_ONLY_WHEN_SAMPLING}
    if "min_new_tokens" in merged:
        ignored.add("min_length")
    names = {field.name for field in fields(SamplingParams)} & set(SUPPORTED) - ignored
    return SamplingParams(**{name: merged[name] for name in names & merged.keys()}, stop_token_ids=stop_token_ids)


def _built_in(merged: dict[str, Any], ends: tuple[int, ...]) -> list[Processor]:
    """Makes transformers' processors for sequence_bias, bad_words_ids and suppress_tokens; they check their values."""
    made: list[Processor] = []
    if merged.get("sequence_bias"):
        made.append(SequenceBiasLogitsProcessor(merged["sequence_bias"]))
    words = merged.get("bad_words_ids")
    if words and not (isinstance(words, list) and all(word in [[end] for end in ends] for word in words)):
        made.append(NoBadWordsLogitsProcessor(words, list(ends)))  # never bans an end token
    suppressed = read_token_ids("suppress_tokens", merged.get("suppress_tokens"))
    if suppressed:
        made.append(SuppressTokensLogitsProcessor(suppressed))
    return made


def _positive(name: str, merged: dict[str, Any]) -> int | None:
    value = merged.get(name)
    if value is not None and (not is_int(value) or value < 1):
        raise ValueError(f"{name}={value!r} is not possible: it must be an integer of at least 1")
    return value


def _top(name: str, merged: dict[str, Any]) -> int | None:
    value = merged.get(name)
    if value is not None and (not is_int(value) or not 0 <= value <= MAX_TOP):
        raise ValueError(f"{name}={value!r} is not possible: it must be an integer from 0 to {MAX_TOP}, or None")
    return value


def _stop_strings(given: Any) -> tuple[str, ...]:
    strings = (given,) if isinstance(given, str) else given
    if not isinstance(strings, list | tuple) or not all(isinstance(text, str) and text for text in strings):
        raise ValueError(f"stop_strings={given!r} is not possible: pass a string or a list of strings")
    return tuple(strings)


def _check_supported(name: str, value: Any, merged: dict[str, Any]) -> None:
    if name in SUPPORTED or name in _WITHOUT_EFFECT:
        return
    if name in _EXTRA_OUTPUTS and not merged.get("return_dict_in_generate"):
        return  # transformers ignores it as well
    off = value is False or value == _SWITCHED_OFF.get(name) or (isinstance(value, dict | list | tuple) and not value)
    if not off:
        raise ValueError(f"{name}={value!r} is not supported; supported are {', '.join(_arguments())}")


@cache
def _generation_config_fields() -> frozenset[str]:
    """The field names of transformers' GenerationConfig."""
    return frozenset(GenerationConfig().to_dict())


def read_input_ids(input_ids: torch.Tensor | None, inputs: torch.Tensor | None) -> torch.Tensor:
    """Returns `input_ids` or `inputs`, which is transformers' other name for it; raises ValueError for both."""
    if input_ids is not None and inputs is not None:
        raise ValueError("inputs and input_ids are two names for the same tensor: pass one of them")
    return input_ids if inputs is None else inputs  # type: ignore[return-value]  # None is refused in `read_prompts`


def read_prompts(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, settings: Settings) -> list[list[int]]:
    """Returns the tokens of each prompt of a left-padded batch [B, T], without padding."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype != torch.long or input_ids.ndim != 2:
        given = f"{input_ids.dtype} {list(input_ids.shape)}" if isinstance(input_ids, torch.Tensor) else type(input_ids)
        raise ValueError(f"input_ids must be a LongTensor of shape [batch, length], not {given}")
    if input_ids.shape[0] == 0:
        raise ValueError("input_ids has no rows (shape [0, length]): pass at least one prompt")
    if attention_mask is not None and not isinstance(attention_mask, torch.Tensor):
        raise ValueError(f"attention_mask must be a tensor of input_ids' shape, not a {type(attention_mask).__name__}")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {list(attention_mask.shape)} and input_ids {list(input_ids.shape)} differ in shape: pass "
            "the attention_mask that the tokenizer returned with these input_ids"
        )
    rows = input_ids.tolist()
    masks = _infer_masks(rows, settings) if attention_mask is None else attention_mask.tolist()
    prompts = []
    for row, (ids, mask) in enumerate(zip(rows, masks, strict=True)):
        length = len(mask) - mask.count(0)
        if not all(mask[len(mask) - length :]):
            raise ValueError(
                f"row {row} of input_ids is not left-padded: its attention_mask (or, without one, its pad tokens) must "
                "mask tokens at its beginning only. Tokenize with padding_side='left' and pass the attention_mask."
            )
        prompts.append(ids[len(ids) - length :])
    return prompts


def _infer_masks(rows: list[list[int]], settings: Settings) -> list[list[int]]:
    """Returns masks of the tokens that are not the pad token; all ones if there is no pad token or if it also is an end
    token, as in transformers. On the host: a comparison on a GPU would queue behind the steps that run there."""
    pad = settings.pad_token_id
    is_padded = pad is not None and pad not in settings.eos_token_ids
    return [[int(token != pad) for token in row] if is_padded and pad in row else [1] * len(row) for row in rows]


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError for a biased or allowed token id outside the vocabulary."""
    named = {
        "logit_bias or sequence_bias": tuple(token for token, _ in params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for name, ids in named.items():
        largest = max(ids, default=0)
        if largest >= vocab_size:
            raise ValueError(f"{name} contains token id {largest}, outside the vocabulary (0 to {vocab_size - 1})")


def check_prompts(prompts: list[list[int]], vocab_size: int, context: int) -> None:
    """Raises ValueError for a prompt that is empty, has a token id outside the vocabulary, or fills the context."""
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty: pass at least one token, for example the model's bos token")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise ValueError(
                f"prompt {index} contains token id {bad}, outside the vocabulary (0 to {vocab_size - 1}): "
                "tokenize it with this model's own tokenizer"
            )
        if len(prompt) >= context:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and the context holds {context}, new tokens included: "
                "shorten the prompt"
            )


def read_seeds(seed: int | Sequence[int] | torch.Tensor | None, batch: int, do_sample: bool) -> list[int]:
    """Returns one seed per prompt. None draws them from torch's default generator: torch.manual_seed fixes them."""
    if seed is None:
        return torch.randint(0, 2**63 - 1, (batch,)).tolist() if do_sample else [0] * batch
    seed = as_scalar(seed)
    listed = seed.flatten().tolist() if hasattr(seed, "flatten") else seed
    seeds = [as_scalar(value) for value in listed] if isinstance(listed, Sequence) else [listed] * batch
    if len(seeds) != batch:
        raise ValueError(f"seed has {len(seeds)} entries for {batch} prompts: pass one int, or one per prompt")
    for value in seeds:
        if not is_int(value) or not -(2**63) <= value < 2**63:
            raise ValueError(f"seed {value!r} is not possible: seeds are integers of 64 bits (-2**63 to 2**63 - 1)")
    return seeds


def check_rules(rules: Any) -> Rules | None:
    """Returns `rules`; raises ValueError unless it is a Rules or None."""
    if rules is not None and not isinstance(rules, Rules):
        raise ValueError(f"rules={rules!r} is not possible: pass a selfspec.Rules")
    return rules


@dataclass(frozen=True)
class SpeculationRequest:
    """The speculation options of a request; checked when built."""

    speculative_decoding: Mode = None
    domain: str = "auto"
    exit_layer: int | None = None
    plan: PlanLike | None = None
    acceptance: str = "coupled"
    stateful_processors: bool = False
    rules: Rules | None = None

    def __post_init__(self) -> None:
        mode = self.speculative_decoding
        if not (mode is None or isinstance(mode, bool) or mode == "force"):
            raise ValueError(
                f"speculative_decoding={self.speculative_decoding!r} is not possible: pass None or True (the rules "
                "decide), False (off) or 'force' (on in spite of the rules)"
            )
        if self.acceptance not in ("coupled", "rejection"):
            raise ValueError(f"acceptance={self.acceptance!r} is not possible: pass 'coupled' or 'rejection'")
        check_rules(self.rules)


def split_options(options: dict[str, Any]) -> tuple[SpeculationRequest, dict[str, Any]]:
    """Splits keyword arguments into the speculation options and the generation arguments."""
    own = SpeculationRequest.__dataclass_fields__
    request = SpeculationRequest(**{name: value for name, value in options.items() if name in own})
    return request, {name: value for name, value in options.items() if name not in own}
