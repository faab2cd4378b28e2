"""MemoryPlan: the bytes that an engine will take, from headers and shapes alone, and the settings that fit a limit.

Reads no weights. The KV cache has the size that `cache.size` gives it; `scratch` computes buffers of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Column, Table

from selfspec.buffer_sizes import graphs_nbytes, prefill_nbytes
from selfspec.cache.kv_cache import page_nbytes
from selfspec.cache.size import SHARE, USUAL_BATCH, cache_pages, longest_sequence
from selfspec.logprobs import logprobs_nbytes
from selfspec.memory import free_device_bytes, limit_memory
from selfspec.models.decoder import Decoder
from selfspec.models.loading import pick_device
from selfspec.models.pretrained import Weights, stored_weights
from selfspec.models.quantized.folder import BITS
from selfspec.profiles.profile import Profile
from selfspec.scheduler import MAX_DECODING

# Memory that CUDA takes outside of PyTorch's allocator. Estimates: measure them on each new kind of GPU as nvidia-smi's
# memory of the process less torch.cuda.memory_reserved(), after the first request and after a warm-up.
CUDA_CONTEXT_NBYTES = 500 * 10**6  # bytes: context, libraries, loaded kernels
GRAPH_NBYTES = 10**6  # bytes of one captured graph in the driver and in its memory pool

BATCHES = (1, 4, 16)  # sequences for which the longest context is given: the largest batches of a profile's bands


@dataclass(frozen=True)
class Limits:
    """The settings of an engine that decide its memory beside the weights; None: as in `Engine.from_pretrained`."""

    max_length: int | None = None
    max_batch: int | None = None
    kv_cache_gb: float | None = None
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        if self.memory_gb is not None and not 0 < self.memory_gb < float("inf"):
            raise ValueError(f"memory_gb={self.memory_gb} is not possible: it must be a number above 0")


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each part of an engine's memory, for one way to hold the weights."""

    weights_as: str  # a value of `dtype` or `quantize`, "as stored" (a quantized folder), "as loaded" (by an engine)
    weights: int
    exits: int
    cache: int
    buffers: int  # of captured steps, slots and temporary tensors
    cuda: int  # outside of PyTorch: context, kernels, graphs
    available: int  # the limit, or else all that is free now
    context: int  # tokens of the longest sequence
    longest: dict[int, int]  # tokens of each of so many sequences of one length that the cache holds, by their number
    fits: bool

    @property
    def total(self) -> int:
        return self.weights + self.exits + self.cache + self.buffers + self.cuda

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def plan_memory(
    path_or_name: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    profile: Profile | str | Path | None = "auto",
    quantize: str | None = None,
    max_length: int | None = None,
    max_batch: int | None = None,
    kv_cache_gb: float | None = None,
    memory_gb: float | None = None,
    kernels: bool | None = None,
) -> list[MemoryPlan]:
    """Returns the plan of an engine that `Engine.from_pretrained` builds with these arguments, then those of the other
    ways to hold the same weights. Reads headers only; `profile` 'auto' is found by the model's sizes."""
    device, limits = pick_device(device), Limits(max_length, max_batch, kv_cache_gb, memory_gb)
    ways = stored_weights(path_or_name, device, dtype, quantize)
    return [_plan_unread(way, device, profile, limits, kernels) for way in ways]


def _plan_unread(
    way: Weights, device: torch.device, profile: Profile | str | Path | None, limits: Limits, kernels: bool | None
) -> MemoryPlan:
    if profile == "auto":
        profile = Profile.find(way.model)
    elif isinstance(profile, str | Path):
        profile = Profile.load(profile)
    free = free_device_bytes(device)
    return plan_of(way.model, way.name, device, profile, limits, free, _runs_kernels(way.model, device, kernels))


def plan_of(
    model: Decoder,
    weights_as: str,
    device: torch.device,
    profile: Profile | None,
    limits: Limits,
    free: int,  # bytes on the device before the weights are loaded
    kernels: bool,
) -> MemoryPlan:
    """Returns the plan of one model, which may be on the meta device."""
    config, size = model.config, page_nbytes(model.config, model.dtype)
    wanted = min(config.context, limits.max_length or config.context)
    batch = limits.max_batch or USUAL_BATCH
    of_passes = prefill_nbytes(model), logprobs_nbytes(config.vocab_size)  # temporary tensors
    buffers = sum(of_passes) if kernels else max(of_passes)  # those of captured passes cannot be used by others
    cuda = CUDA_CONTEXT_NBYTES if device.type == "cuda" else 0
    if kernels:
        of_graphs, graphs = graphs_nbytes(model, profile, wanted, limits.max_batch or MAX_DECODING, batch)
        buffers, cuda = buffers + of_graphs, cuda + (graphs * GRAPH_NBYTES if device.type == "cuda" else 0)
    available = free if limits.memory_gb is None else min(free, int(limits.memory_gb * 1e9))
    exits = _exits_nbytes(model, profile, kernels)
    left = available - cuda - model.nbytes
    if limits.memory_gb is not None:  # then the cache, which takes SHARE of it, gets at most what all others leave
        left = min(left, int((left - exits - buffers) / SHARE))

    def pages(context: int, sequences: int | None) -> int:
        return cache_pages(config, model.dtype, context, sequences, limits.kv_cache_gb, left)

    held = pages(wanted, limits.max_batch)
    context = min(wanted, longest_sequence(held))
    longest = {batch: min(wanted, longest_sequence(pages(wanted, batch), batch)) for batch in BATCHES}
    total = model.nbytes + exits + held * size + buffers + cuda
    fits = total <= available and (limits.max_length is None or context >= wanted)
    return MemoryPlan(weights_as, model.nbytes, exits, held * size, buffers, cuda, available, context, longest, fits)


def _runs_kernels(model: Decoder, device: torch.device, kernels: bool | None) -> bool:
    """Whether an engine will run kernels once the model, now on the meta device, is on this device."""
    if not (kernels or (kernels is None and device.type == "cuda")):
        return False
    from selfspec.backends.cuda.decoder import is_supported  # imports Triton

    return is_supported(cast(Decoder, _OnDevice(model, device)))


class _OnDevice:
    """A model on the meta device as it will be on another one."""

    def __init__(self, model: Decoder, device: torch.device) -> None:
        self._model, self.device = model, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _exits_nbytes(model: Decoder, profile: Profile | None, kernels: bool) -> int:
    """Bytes of the exits that the profile's domains draft with and of their trimmed heads: token ids, without kernels
    also copies of the head's rows."""
    if profile is None:
        return 0
    layers = {choice.exit_layer for choice in profile.domains.values()}
    row = 8 + (0 if kernels else model.config.hidden_size * model.dtype.itemsize)
    rows = sum(choice.head_rows for choice in profile.domains.values())
    return sum(profile.exit(model, layer).nbytes for layer in layers) + rows * row


def limit_to_plan(plans: list[MemoryPlan], device: torch.device) -> float:
    """Limits GPU memory to that of the first plan; returns the size of its KV cache in 10^9 bytes. Raises ValueError,
    with all plans, if it does not fit."""
    plan = plans[0]
    if not plan.fits:
        raise ValueError(f"{_what_fits(plans)}\n{as_text(plans)}")
    if device.type == "cuda":
        limit_memory((plan.available - plan.cuda) / 1e9, device)
    return plan.cache / 1e9


def _what_fits(plans: list[MemoryPlan]) -> str:
    """Says why the first plan does not fit, and which settings would."""
    plan = plans[0]
    without_cache = plan.available - (plan.total - plan.cache)
    ways = [f"pass {_argument(other)}" for other in plans[1:] if other.fits]
    if plan.total <= plan.available:
        ways.insert(0, f"pass max_length={plan.context} or less")
    elif without_cache > 0:
        ways.insert(0, f"pass kv_cache_gb={int(without_cache / 1e7) / 100}")
    if not ways:
        drafts_nothing = [other for other in plans if other.exits and other.total - other.exits <= other.available]
        ways = [f"pass profile=None{'' if other is plan else f' and {_argument(other)}'}" for other in drafts_nothing]
    fix = ", or ".join(ways) or "use a smaller model, or a larger memory_gb"
    return f"the model does not fit {plan.available / 1e9:.2f} GB with these settings: {fix}"


def _argument(plan: MemoryPlan) -> str:
    """The argument of `Engine.from_pretrained` that holds the weights as in this plan."""
    return f"{'quantize' if plan.weights_as in BITS else 'dtype'}={plan.weights_as!r}"


def on_meta(model: Decoder) -> Decoder:
    """Returns a model's shapes, on PyTorch's meta device."""
    tensors = {"embedding": model.embedding.weight, "norm": model.norm}
    if model.head is not model.embedding:
        tensors["head"] = model.head.weight
    for index, layer in enumerate(model.layers):
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in layer.tensors().items()}
    return Decoder(model.config, {name: tensor.to("meta") for name, tensor in tensors.items()})


def table(plans: Sequence[MemoryPlan]) -> Table:
    """The plans as columns: gigabytes of each part, and the longest context of each of 1, 4 and 16 sequences."""
    shown = Table("GB (10^9 bytes)", *(Column(plan.weights_as, justify="right") for plan in plans))
    for field in ("weights", "exits", "cache", "buffers", "cuda", "total", "available"):
        shown.add_row(field, *(f"{getattr(plan, field) / 1e9:.2f}" for plan in plans))
    shown.add_row("fits", *("yes" if plan.fits else "no" for plan in plans), end_section=True)
    for batch in BATCHES:
        name = "most tokens of 1 sequence" if batch == 1 else f"most tokens of each of {batch} sequences"
        shown.add_row(name, *(f"{plan.longest[batch]:,}" if plan.fits else "-" for plan in plans))
    return shown


def as_text(plans: Sequence[MemoryPlan]) -> str:
    """The table as plain text."""
    text = StringIO()
    Console(file=text, width=100, color_system=None).print(table(plans))
    return text.getvalue().rstrip()
