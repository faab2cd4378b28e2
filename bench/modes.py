"""Decoding modes that the benchmarks compare: ours and transformers', on one copy of the weights.

A `Way` decodes a batch of prompts and returns the new tokens. Order, timing and tables belong to the benchmarks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from selfspec import Engine

TRANSFORMERS = ("eager", "compile", "lookup", "early-exit")
LOOKUP_TOKENS = 10  # drafted tokens of prompt lookup, as in transformers' documentation


@dataclass(frozen=True)
class Task:
    """New tokens of each sequence at most, and the temperature; 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0

    @property
    def sampling(self) -> dict[str, Any]:
        return {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together, and a seed for each."""

    prompts: Sequence[Sequence[int]]
    seeds: Sequence[int]
    device: torch.device
    pad: int = 0

    @property
    def width(self) -> int:
        return max(map(len, self.prompts))

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask [B, T], padded on the left."""
        gaps = [self.width - len(prompt) for prompt in self.prompts]
        ids = [[self.pad] * gap + list(prompt) for gap, prompt in zip(gaps, self.prompts, strict=True)]
        mask = [[0] * gap + [1] * len(prompt) for gap, prompt in zip(gaps, self.prompts, strict=True)]
        return torch.tensor(ids, device=self.device), torch.tensor(mask, device=self.device)


@dataclass(frozen=True)
class Written:
    """The result of one call."""

    tokens: list[list[int]]  # new tokens of each sequence
    steps: int | None = None  # summed over sequences; None: transformers does not report them


Way = Callable[[Batch, Task], Written]


def ours(engine: Engine, **settings: Any) -> Way:
    """`engine.generate` with these arguments."""

    def write(batch: Batch, task: Task) -> Written:
        ids, mask = batch.tensors()
        out: Any = engine.generate(
            ids, mask, max_new_tokens=task.max_new_tokens, seed=list(batch.seeds), return_dict_in_generate=True,
            **task.sampling, **settings,
        )  # fmt: skip
        pairs = zip(out.sequences.tolist(), out.stats, strict=True)
        tokens = [ids[batch.width : batch.width + stats.new_tokens] for ids, stats in pairs]
        return Written(tokens, sum(stats.cycles for stats in out.stats))

    return write


def route(engine: Engine, prompts: Sequence[Sequence[int]]) -> str:
    """The domain that the engine finds for prompts of one request."""
    assert engine.profile is not None
    return engine.profile.route(engine.drafters.embed(prompts).read() if engine.profile.routes else None)


def warm_up(engine: Engine, batches: Sequence[Batch], temperature: float) -> None:
    """Captures every plan that the governor may choose for these batches, in the domains of their prompts."""
    if not engine.has_kernels or engine.profile is None:
        return
    for domain in sorted({route(engine, batch.prompts) for batch in batches}):
        engine.warmup(max(len(batch.prompts) for batch in batches), domain, (temperature,), engine.context)


def transformers_way(hf: Any, pad: int, **settings: Any) -> Way:
    """`hf.generate` with these arguments."""

    def write(batch: Batch, task: Task) -> Written:
        ids, mask = batch.tensors()
        torch.manual_seed(batch.seeds[0])
        layers = hf.config.num_hidden_layers  # transformers' early exit changes it and leaves it so if it fails
        try:
            out = hf.generate(
                ids, attention_mask=mask, max_new_tokens=task.max_new_tokens, pad_token_id=pad, **task.sampling,
                **settings,
            )  # fmt: skip
        finally:
            hf.config.num_hidden_layers = layers
        return Written([until_end(tokens, _end_tokens(hf)) for tokens in out[:, batch.width :].tolist()])

    return write


def until_end(tokens: list[int], ends: set[int]) -> list[int]:
    """The tokens up to the first end token, without the padding behind it."""
    place = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: place + 1]


def _end_tokens(hf: Any) -> set[int]:
    ends = hf.generation_config.eos_token_id
    return set() if ends is None else set(ends) if isinstance(ends, list) else {ends}


def compiled(hf: Any, pad: int) -> Way:
    """A static cache, for which transformers compiles the model by itself on a GPU."""
    way = transformers_way(hf, pad, cache_implementation="static")

    def write(batch: Batch, task: Task) -> Written:
        if hf.device.type != "cuda":
            raise NotImplementedError("transformers compiles decoding on accelerators only")
        return way(batch, task)

    return write


def transformers_ways(hf: Any, pad: int, chosen: Sequence[str]) -> dict[str, Way]:
    """transformers' decoding modes by name. Its early exit leaves after four fifths of the layers."""
    layer = max(1, hf.config.num_hidden_layers * 4 // 5)
    ways = {
        "eager": ("transformers eager", transformers_way(hf, pad)),
        "compile": ("transformers static+compile", compiled(hf, pad)),
        "lookup": ("transformers prompt lookup", transformers_way(hf, pad, prompt_lookup_num_tokens=LOOKUP_TOKENS)),
        "early-exit": (f"transformers early exit {layer}", transformers_way(hf, pad, assistant_early_exit=layer)),
    }
    return dict(ways[name] for name in TRANSFORMERS if name in chosen)


def release() -> None:
    """Returns memory that no tensor holds to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
