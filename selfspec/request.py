"""Reading what a caller of `generate` asked for: prompts and settings, in transformers' terms, checked before any work.

Merges transformers' defaults, the model's generation config, the caller's and the keyword arguments, in that order.
Whatever would change the output and is not supported is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from transformers import GenerationConfig

from selfspec.governor.rules import Mode, Rules
from selfspec.sampling import Sampling
from selfspec.speculation.plan import Plan

PlanLike = str | Plan | Sequence[tuple[int, int]]

SUPPORTED = (
    "max_new_tokens",
    "max_length",
    "min_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "eos_token_id",
    "pad_token_id",
    "stop_strings",
    "num_return_sequences",
)

# Fields of a GenerationConfig that cannot change the tokens of a decoder-only model's sampling or greedy search.
_WITHOUT_EFFECT = {
    "transformers_version",
    "_from_model_config",
    "bos_token_id",
    "decoder_start_token_id",
    "return_dict_in_generate",
    "early_stopping",
    "length_penalty",
    "cache_implementation",
    "cache_config",
    "disable_compile",
    "compile_config",
    "continuous_batching_config",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
}

# Unsupported fields are fine at the values that switch them off; None, False and empty always do.
_SWITCHED_OFF = {
    "use_cache": True,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "min_length": 0,
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
_ONLY_WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Settings:
    """A checked request, less its prompts."""

    sampling: Sampling
    max_new_tokens: int | None  # one of these two is set
    max_length: int | None  # padded prompt and new tokens together
    pad_token_id: int | None
    num_return_sequences: int
    stop_strings: tuple[str, ...]
    return_dict: bool

    def new_tokens_allowed(self, prompt_width: int) -> int:
        """How many tokens may follow prompts that are `prompt_width` wide, padding included."""
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
    """Merges the sources, later ones winning, and checks every value."""
    if config is not None and not isinstance(config, GenerationConfig):
        raise ValueError(f"generation_config must be a transformers GenerationConfig, not a {type(config).__name__}")
    known = _known_to_transformers()
    for name in kwargs:
        if name not in SUPPORTED and name not in known:
            raise ValueError(f"generate() does not know the argument {name!r}; it supports {', '.join(SUPPORTED)}")
    merged: dict[str, Any] = dict(_TRANSFORMERS_DEFAULTS)
    # Entries of a model's file that transformers does not know, its maker's own, mean nothing to it either.
    of_model = {name: value for name, value in vars(model_config).items() if name in known}
    for source in (of_model, {} if config is None else config.to_dict()):
        merged.update({name: value for name, value in source.items() if value is not None})
    merged.update(kwargs)  # here None is said on purpose: it takes back what a config says
    merged = {name: value for name, value in merged.items() if value is not None}
    for name, value in merged.items():
        _check_supported(name, value)
    return _settings_from(merged)


def _settings_from(merged: dict[str, Any]) -> Settings:
    max_new_tokens, max_length = merged.get("max_new_tokens"), merged.get("max_length")
    for name, value in (("max_new_tokens", max_new_tokens), ("max_length", max_length)):
        if value is not None and (not _is_int(value) or value < 1):
            raise ValueError(f"{name}={value!r} is not possible: it must be an integer of at least 1")
    if max_new_tokens is None and max_length is None:
        max_new_tokens = _DEFAULT_NEW_TOKENS
    copies = merged.get("num_return_sequences", 1)
    if not _is_int(copies) or copies < 1:
        raise ValueError(f"num_return_sequences={copies!r} is not possible: it must be an integer of at least 1")
    ends = _ids("eos_token_id", merged.get("eos_token_id"))
    pads = _ids("pad_token_id", merged.get("pad_token_id"))
    stop_strings = merged.get("stop_strings", ())
    stop_strings = (stop_strings,) if isinstance(stop_strings, str) else stop_strings
    if not isinstance(stop_strings, list | tuple) or not all(isinstance(text, str) and text for text in stop_strings):
        raise ValueError(f"stop_strings={stop_strings!r} is not possible: pass a string or a list of strings")
    ignored = () if merged.get("do_sample") else _ONLY_WHEN_SAMPLING
    chosen = {f.name: merged[f.name] for f in fields(Sampling) if f.name in merged and f.name not in ignored}
    sampling = Sampling(**{**chosen, "eos_token_ids": ends})
    if copies > 1 and not sampling.do_sample:
        raise ValueError(
            f"num_return_sequences={copies} without do_sample=True would return copies of one greedy text: pass "
            "do_sample=True, or num_return_sequences=1"
        )
    return Settings(
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        max_length=None if max_new_tokens is not None else max_length,
        pad_token_id=next(iter(pads + ends), None),
        num_return_sequences=copies,
        stop_strings=tuple(stop_strings),
        return_dict=bool(merged.get("return_dict_in_generate", False)),
    )


def _check_supported(name: str, value: Any) -> None:
    if name in SUPPORTED or name in _WITHOUT_EFFECT:
        return
    off = value is False or value == _SWITCHED_OFF.get(name) or (isinstance(value, dict | list | tuple) and not value)
    if not off:
        raise ValueError(f"{name}={value!r} is not supported; generate() supports {', '.join(SUPPORTED)}")


@cache
def _known_to_transformers() -> frozenset[str]:
    """The names of a generation config's entries."""
    return frozenset(GenerationConfig().to_dict())


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value.flatten().tolist() if isinstance(value, torch.Tensor) else value
    ids = tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    if not all(_is_int(entry) for entry in ids):
        raise ValueError(f"{name}={value!r} is not possible: pass a token id or a list of them")
    return ids


def read_prompts(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, settings: Settings) -> list[list[int]]:
    """Rows of a left-padded batch [B, T] as lists of their real tokens."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype != torch.long or input_ids.ndim != 2:
        given = f"{input_ids.dtype} {list(input_ids.shape)}" if isinstance(input_ids, torch.Tensor) else type(input_ids)
        raise ValueError(f"input_ids must be a LongTensor of shape [batch, length], not {given}")
    if input_ids.shape[0] == 0:
        raise ValueError("input_ids has no rows: pass at least one prompt")
    if attention_mask is None:
        attention_mask = _infer_mask(input_ids, settings)
    if not isinstance(attention_mask, torch.Tensor):
        raise ValueError(f"attention_mask must be a tensor of input_ids' shape, not a {type(attention_mask).__name__}")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {list(attention_mask.shape)} and input_ids {list(input_ids.shape)} differ in shape"
        )
    prompts = []
    for row, (ids, mask) in enumerate(zip(input_ids.tolist(), attention_mask.bool().tolist(), strict=True)):
        real = sum(mask)
        if not all(mask[len(mask) - real :]):
            raise ValueError(
                f"row {row} is not left-padded: its attention_mask (or, without one, its pad tokens) must leave out a "
                "beginning and nothing else. Tokenize with padding_side='left' and pass the attention_mask."
            )
        prompts.append(ids[len(ids) - real :])
    return prompts


def _infer_mask(input_ids: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Without a mask, padding is recognised only where the pad token cannot be an end of text, as in transformers."""
    pad = settings.pad_token_id
    if pad is None or pad in settings.sampling.eos_token_ids:
        return torch.ones_like(input_ids)
    return input_ids.ne(pad)


def check_prompts(prompts: list[list[int]], vocab_size: int, context: int) -> None:
    """Refuses prompts that cannot be continued."""
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {row} is empty: pass at least one token, for example the model's bos token")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise ValueError(
                f"prompt {row} contains token id {bad}, outside the vocabulary (0 to {vocab_size - 1}): "
                "tokenize it with this model's own tokenizer"
            )
        if len(prompt) >= context:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens and the context holds {context}, new tokens included: "
                "shorten the prompt"
            )


def read_seeds(seed: int | Sequence[int] | torch.Tensor | None, batch: int, do_sample: bool) -> list[int]:
    """One seed per prompt. None draws them from torch's default generator, so torch.manual_seed reproduces a call."""
    if seed is None:
        return torch.randint(0, 2**63 - 1, (batch,)).tolist() if do_sample else [0] * batch
    if isinstance(seed, torch.Tensor):
        seed = seed.flatten().tolist()
    seeds = list(seed) if isinstance(seed, Sequence) else [seed] * batch
    if len(seeds) != batch:
        raise ValueError(f"seed has {len(seeds)} entries for {batch} prompts: pass one int, or one per prompt")
    for value in seeds:
        if not _is_int(value) or not -(2**63) <= value < 2**63:
            raise ValueError(f"seed {value!r} is not possible: seeds are integers of 64 bits")
    return seeds


def check_rules(rules: Any) -> Rules | None:
    if rules is not None and not isinstance(rules, Rules):
        raise ValueError(f"rules={rules!r} is not possible: pass a selfspec.Rules")
    return rules


@dataclass(frozen=True)
class SpeculationRequest:
    """What a request says about speculation; checked when built."""

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
                f"speculative_decoding={self.speculative_decoding!r} : pass None or True (the rules decide), "
                "False (off) or 'force' (on, whatever the rules say)"
            )
        if self.acceptance not in ("coupled", "rejection"):
            raise ValueError(f"acceptance={self.acceptance!r} is not possible: pass 'coupled' or 'rejection'")
        check_rules(self.rules)


def split_options(options: dict[str, Any]) -> tuple[SpeculationRequest, dict[str, Any]]:
    """What is said about speculation, and the generation arguments."""
    own = SpeculationRequest.__dataclass_fields__
    request = SpeculationRequest(**{name: value for name, value in options.items() if name in own})
    return request, {name: value for name, value in options.items() if name not in own}
