"""MemoryPlan: the bytes that an engine will take, from headers and shapes alone, and the settings that fit a limit.

Reads no weights. The KV cache has the size that `cache.size` gives it. Slot buffers and captured steps are built as for
a warm-up but on PyTorch's meta device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Column, Table
from transformers import GenerationConfig

from selfspec.backends.torch_backend import PREFILL_CHUNK
from selfspec.cache.kv_cache import Cache, page_nbytes
from selfspec.cache.size import SHARE, USUAL_BATCH, cache_pages, check_gigabytes, check_limits, longest_sequence
from selfspec.drafters import Drafters
from selfspec.governor.rules import BATCHES, Rules
from selfspec.logprobs import logprobs_nbytes
from selfspec.memory import free_device_bytes, limit_memory
from selfspec.models.decoder import Decoder
from selfspec.models.linear import EXPANDED_TOGETHER, EXPANDING_NBYTES
from selfspec.models.loading import pick_device
from selfspec.models.pretrained import Weights, stored_weights
from selfspec.models.quantized.folder import BITS
from selfspec.profiles.profile import Profile
from selfspec.profiles.router import Embedded
from selfspec.scheduler import MAX_DECODING
from selfspec.speculation.exit import Exit

if TYPE_CHECKING:
    from selfspec.backends.cuda.graphs import Graphs

# Memory that CUDA takes outside of PyTorch's allocator. Estimates: measure them on each new kind of GPU as nvidia-smi's
# memory of the process less torch.cuda.memory_reserved(), after the first request and after a warm-up.
CUDA_CONTEXT_NBYTES = 500 * 10**6  # bytes: context, libraries, loaded kernels
GRAPH_NBYTES = 10**6  # bytes of one captured graph in the driver and in its memory pool
# Parts of PyTorch's segments (20 MiB or one tensor each) that no tensor takes: one segment of weights, one of passes
# and one of captured graphs: PyTorch shares no segment between these. Without them a model of 127 MB did not load
# within its plan on an H200.
SEGMENTS_NBYTES = 3 * 20 * 2**20


@dataclass(frozen=True)
class MemoryLimits:
    """The settings of an engine that decide its memory beside the weights; None: as in `Engine.from_pretrained`."""

    max_length: int | None = None
    max_batch: int | None = None
    kv_cache_gb: float | None = None
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        check_limits(max_length=self.max_length, max_batch=self.max_batch)
        if self.memory_gb is not None:
            check_gigabytes("memory_gb", self.memory_gb)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each part of an engine's memory, for one way to hold the weights."""

    weights_as: str  # a value of `dtype` or `quantize`, "as stored" (a quantized folder)
    weights: int
    exits: int
    cache: int
    buffers: int  # of captured steps, slots and temporary tensors
    cuda: int  # in no tensor: context, kernels, graphs, unused parts of PyTorch's segments
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
    device, limits = pick_device(device), MemoryLimits(max_length, max_batch, kv_cache_gb, memory_gb)
    return [
        _plan(way, device, profile, limits, kernels) for way in stored_weights(path_or_name, device, dtype, quantize)
    ]


def _plan(
    way: Weights, device: torch.device, profile: Profile | str | Path | None, limits: MemoryLimits, kernels: bool | None
) -> MemoryPlan:
    """Returns the plan for one way to hold the weights."""
    model = way.model
    if profile == "auto":
        profile = Profile.find(model)
    elif isinstance(profile, str | Path):
        profile = Profile.load(profile)
    free, has_kernels = free_device_bytes(device), _runs_kernels(model, device, kernels)
    config, size = model.config, page_nbytes(model.config, model.dtype)
    wanted = min(config.context, limits.max_length or config.context)
    batch = limits.max_batch or USUAL_BATCH
    buffers = logprobs_nbytes(config.vocab_size)
    cuda = CUDA_CONTEXT_NBYTES + SEGMENTS_NBYTES if device.type == "cuda" else 0
    if has_kernels:
        of_graphs, graphs = graphs_nbytes(model, profile, wanted, limits.max_batch or MAX_DECODING, batch)
        buffers, cuda = buffers + of_graphs, cuda + (graphs * GRAPH_NBYTES if device.type == "cuda" else 0)
    available = free if limits.memory_gb is None else min(free, int(limits.memory_gb * 1e9))
    exits = _exits_nbytes(model, profile, has_kernels)
    left = available - cuda - model.nbytes

    def pages(sequences: int | None, buffers: int) -> int:
        """Pages of the cache for so many sequences of the wanted context, beside these buffers."""
        most = SHARE * left if limits.memory_gb is None else min(SHARE * left, left - exits - buffers)
        return cache_pages(config, model.dtype, wanted, sequences, limits.kv_cache_gb, most)

    longest_prompt = min(wanted, longest_sequence(pages(limits.max_batch, buffers)))
    of_prefill = prefill_nbytes(model, longest_prompt, has_kernels)
    # Buffers of captured passes serve no other.
    buffers = buffers + of_prefill if has_kernels else max(buffers, of_prefill)
    held = pages(limits.max_batch, buffers)
    context = min(wanted, longest_sequence(held))
    longest = {batch: min(wanted, longest_sequence(pages(batch, buffers), batch)) for batch in BATCHES.values()}
    total = model.nbytes + exits + held * size + buffers + cuda
    fits = total <= available and (limits.max_length is None or context >= wanted)
    return MemoryPlan(way.name, model.nbytes, exits, held * size, buffers, cuda, available, context, longest, fits)


def _runs_kernels(model: Decoder, device: torch.device, kernels: bool | None) -> bool:
    """Whether an engine will run kernels once the model, now on the meta device, is on this device."""
    if not (kernels or (kernels is None and device.type == "cuda")):
        return False
    from selfspec.backends.cuda.decoder import is_supported  # imports Triton

    return is_supported(model, device)


def _exits_nbytes(model: Decoder, profile: Profile | None, kernels: bool) -> int:
    """Bytes of the exits that the profile's domains draft with and of their trimmed heads: token ids, without kernels
    also copies of the head's rows."""
    if profile is None:
        return 0
    layers = {choice.exit_layer for choice in profile.domains.values()}
    row = 8 + (0 if kernels else model.config.hidden_size * model.dtype.itemsize)
    rows = sum(choice.head_rows for choice in profile.domains.values())
    return sum(profile.exits_file.exit(model, layer).nbytes for layer in layers) + rows * row


def prefill_nbytes(model: Decoder, context: int, has_kernels: bool) -> int:
    """Bytes of the temporary tensors of PyTorch's operations over the last chunk of a prompt of `context` tokens; 0
    where kernels prefill a prompt of this length.

    Of the MLP: its input and output, gate and up projection, the activated gate and its product with up. Of attention:
    gathered keys and values, and the mask of the rows, then of each query head that shares a KV head, in bool and in
    the model's dtype. Of quantized weights: the expanded part."""
    if has_kernels:
        from selfspec.backends.cuda.kernel_prefill import longest_kernel_prompt  # imports Triton

        if context <= longest_kernel_prompt(model):
            return 0
    config, itemsize = model.config, model.dtype.itemsize
    mlp = PREFILL_CHUNK * (3 * config.hidden_size + 4 * config.intermediate_size) * itemsize
    mask = PREFILL_CHUNK * (1 + config.num_heads // config.num_kv_heads * (1 + itemsize))
    attention = context * (2 * config.num_kv_heads * config.head_dim * itemsize + mask)
    expanding = min(EXPANDED_TOGETHER, prod(model.head.shape)) * EXPANDING_NBYTES if model.is_quantized else 0
    return mlp + attention + expanding


def graphs_nbytes(model: Decoder, profile: Profile | None, context: int, max_batch: int, batch: int) -> tuple[int, int]:
    """Bytes of slot buffers, captured steps and their scratch, and the number of graphs, once `Engine.warmup(batch)`
    has captured the greedy steps of a model on the meta device."""
    from selfspec.backends.cuda.graphs import Graphs  # these import Triton
    from selfspec.backends.cuda.kernel_prefill import longest_kernel_prompt
    from selfspec.backends.cuda.warmup import WarmUp
    from selfspec.warmup import ExpectedRequests, expected_steps

    drafters = Drafters(model, profile, lambda *_: Embedded(lambda: torch.empty(0)), kernels=True)
    graphs = Graphs(model, Cache(model.config, model.device, model.dtype, 1), context, max_batch)
    expected = ExpectedRequests(batch, None, (0.0,), context)
    rules = Rules().for_device("cuda")
    preparing = WarmUp(graphs, context, rules.max_tree_batch)
    exits: dict[Exit | None, None] = {None: None}
    for step in dict.fromkeys(expected_steps(drafters, rules, GenerationConfig(), expected)):
        preparing.prepare(step)
        exits[step.exit] = None
    graphs.max_kernel_prompt = longest_kernel_prompt(model)
    for exit in exits:
        preparing.prepare_prompts(exit, batch, profile.router_layer if profile is not None and profile.routes else None)
    return graphs.nbytes + _scratch_nbytes(graphs), len(graphs.captured.entries)


def _scratch_nbytes(graphs: Graphs) -> int:
    """Bytes of scratch that all captured steps and passes take. Sizes each buffer for the pass with most rows, so
    buffers that this pass does not use are not counted exactly."""
    from selfspec.backends.cuda.step import DeviceStep
    from selfspec.kernels.topk import Scores
    from selfspec.kernels.tree_attention import workspace_size

    config, itemsize = graphs.model.config, graphs.model.dtype.itemsize
    rows, partials, scores, has_exit = 0, 0, 0, False
    for made, *_ in graphs.captured.entries.values():
        is_step = isinstance(made, DeviceStep)
        sequences, nodes = (made.slots.count, len(made.plan) + 1) if is_step else (made.count, len(made.nodes.depths))
        rows = max(rows, sequences * nodes)
        attention = sequences, nodes, config.num_heads, config.head_dim, made.decoder.ranges
        partials = max(partials, workspace_size(*attention))
        if is_step and made.exit is not None:
            has_exit = True
            columns = config.vocab_size if made.exit.head is None else len(made.exit.head.tokens)
            drafting = sequences * max(len(level) for level in made.plan.levels)
            ranked = Scores.empty(drafting, columns, 2, "meta")  # two or more tokens of a row are ranked
            scores = max(scores, sum(tensor.nbytes for tensor in vars(ranked).values() if tensor is not None))
    # Of a layer: queries, attended values, MLP; normed product. Of prompts: two residual streams. Of an exit: features
    # of two states, residual streams of its block and of the last layer, its output, the head's input.
    layer = 2 * config.num_heads * config.head_dim + config.intermediate_size
    states = config.sandwich_norms + 4 + (2 + 2 + 1 + 1 if has_exit else 0)
    return rows * (layer + states * config.hidden_size) * itemsize + 4 * partials + scores


def limit_to_plan(plans: list[MemoryPlan], device: torch.device) -> float:
    """Limits GPU memory to that of the first plan; returns the size of its KV cache in 10^9 bytes. Raises ValueError,
    with all plans, if it does not fit."""
    plan = plans[0]
    if not plan.fits:
        raise ValueError(f"{_what_fits(plans)}\n{as_text(plans)}")
    if device.type == "cuda":
        limit_memory((plan.available - plan.cuda + SEGMENTS_NBYTES) / 1e9, device)
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


def table(plans: Sequence[MemoryPlan]) -> Table:
    """The plans as columns: gigabytes of each part, and the longest context of each of 1, 4 and 16 sequences."""
    caption = "exits: of the profile, 0 without one; buffers: captured steps, temporary tensors; cuda: in no tensor"
    columns = (Column(plan.weights_as, justify="right") for plan in plans)
    shown = Table("GB (10^9 bytes)", *columns, caption=caption, caption_justify="left")
    for field in ("weights", "exits", "cache", "buffers", "cuda", "total", "available"):
        shown.add_row(field, *(f"{getattr(plan, field) / 1e9:.2f}" for plan in plans))
    shown.add_row("fits", *("yes" if plan.fits else "no" for plan in plans), end_section=True)
    for batch in BATCHES.values():
        name = "most tokens of 1 sequence" if batch == 1 else f"most tokens of each of {batch} sequences"
        shown.add_row(name, *(f"{plan.longest[batch]:,}" if plan.fits else "-" for plan in plans))
    return shown


def as_text(plans: Sequence[MemoryPlan]) -> str:
    """The table as plain text."""
    text = StringIO()
    Console(file=text, width=100, color_system=None).print(table(plans))
    return text.getvalue().rstrip()
