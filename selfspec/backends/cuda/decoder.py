"""The decoder's passes as a few kernels a layer, over buffers that stay where they are: what a CUDA graph can replay.

Rows are node-major (row = node * B + sequence), so a level of a tree, and the whole tree, is one range of rows. Every
kernel gives a row the same bits whatever other rows are there. `step.py` combines passes into a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import torch

from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.kernels.embed_rope import RowMetadata
from selfspec.kernels.final_norm import final_norm
from selfspec.kernels.gate_up_gemm import gated_linear
from selfspec.kernels.gemm import linear
from selfspec.kernels.norm import NextNorm, Norm, rms_norm, squares_per_row
from selfspec.kernels.qkv_rope_gemm import qkv_linear
from selfspec.kernels.tree_attention import counters_size, ranges_for, tree_attention, workspace_size
from selfspec.kernels.triton_compat import INTERPRETED, triton
from selfspec.models.config import LayerConfig
from selfspec.models.decoder import Decoder, Layer
from selfspec.speculation.plan import Plan

WANTED = (
    "the kernels need Triton, a GPU from sm_80 on, and a model in bfloat16 or float16, of sizes in multiples of 16; "
    "without kernels=True this model runs on PyTorch's own operations"
)


def is_supported(model: Decoder) -> bool:
    """Whether the kernels can decode with this model where it is."""
    config = model.config
    sizes = (config.hidden_size, config.intermediate_size, config.head_dim)
    if triton is None or any(size % 16 for size in sizes) or config.head_dim > 256:
        return False
    if config.num_heads > 16 * config.num_kv_heads:
        return False
    if model.device.type != "cuda":
        return INTERPRETED and model.dtype == torch.float32
    if torch.version.hip is not None or model.dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(model.device) >= (8, 0) and can_launch()


@cache
def can_launch() -> bool:
    """Whether Triton can start kernels here: it builds its launcher with a C compiler when it is first needed."""
    try:
        _ = triton.runtime.driver.active.utils
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        warnings.warn(
            "decoding by PyTorch's own operations, far slower: Triton cannot launch kernels here, for want of a C "
            f"compiler or Python's headers ({text})",
            UserWarning,
            stacklevel=2,
        )
        return False
    return True


@dataclass(frozen=True)
class Stream:
    """A residual stream: states [R, hidden], and what the norm that reads them next needs: their squares [R, T], and
    the states scaled by its weights."""

    states: torch.Tensor
    squares: torch.Tensor
    scaled: torch.Tensor  # [R, hidden]

    @classmethod
    def empty(cls, rows: int, model: Decoder) -> Stream:
        hidden, device = model.config.hidden_size, model.device
        states, scaled = (torch.zeros(rows, hidden, dtype=model.dtype, device=device) for _ in range(2))
        return cls(states, torch.zeros(rows, squares_per_row(hidden), device=device), scaled)

    def rows(self, start: int, stop: int) -> Stream:
        return Stream(self.states[start:stop], self.squares[start:stop], self.scaled[start:stop])


class Texts(Protocol):
    """Whose past the rows of a pass see: for each of `count` texts, how long it is and where it lies."""

    @property
    def count(self) -> int: ...
    @property
    def lengths(self) -> torch.Tensor: ...  # [count] int32
    @property
    def page_table(self) -> torch.Tensor: ...  # [count, P] int32


class Tree:
    """A plan on the device, for B sequences."""

    def __init__(self, plan: Plan, sequences: int, device: torch.device) -> None:
        self.plan, self.sequences, self.device = plan, sequences, device
        widest = max(1, *map(len, plan.children))
        self.depths = self._ints(list(plan.depths))  # [n + 1]
        self.paths = self._ints([self._path(node) for node in range(len(plan) + 1)])  # [n + 1, depth + 1]
        self.children = self._ints([[*kids, *[-1] * (widest - len(kids))] for kids in plan.children])  # [n + 1, W]

    def parents(self, level: range) -> torch.Tensor:
        """The place of each node's parent in the level above."""
        above = self.plan.levels[self.plan.depths[level.start] - 1].start
        return self._ints([self.plan.parents[node - 1] - above for node in level])

    def ranks(self, level: range) -> torch.Tensor:
        return self._ints([self.plan.ranks[node - 1] for node in level])

    def rows(self, level: range) -> tuple[int, int]:
        return level.start * self.sequences, level.stop * self.sequences

    def parent_rows(self, level: range, first_node: int) -> torch.Tensor:
        """For each row of some nodes, the row of its parent, where the root's row of slot b is `first_node` + b and its
        own parent's row is b."""
        parents = [first_node + self.plan.parents[node - 1] * self.sequences if node else 0 for node in level]
        rows = [parent + sequence for parent in parents for sequence in range(self.sequences)]
        return torch.tensor(rows, device=self.device)

    def _path(self, node: int) -> list[int]:
        path = [node]
        while path[0]:
            path.insert(0, self.plan.parents[path[0] - 1])
        return path + [0] * (self.plan.depth + 1 - len(path))

    def _ints(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


@dataclass(frozen=True)
class Nodes:
    """The nodes of one pass: where their rows stand and what they see."""

    places: RowMetadata
    paths: torch.Tensor  # [M, depth + 1]
    depths: torch.Tensor  # [M]

    @classmethod
    def chain(cls, model: Decoder, length: int, texts: int) -> Nodes:
        """So many positions one after the other, in each of some texts."""
        tree = Tree(Plan.tree((1,) * (length - 1)), texts, model.device)
        return cls(empty_places(model, length * texts), tree.paths, tree.depths)

    def first(self, count: int) -> Nodes:
        """The first few of them, in all texts."""
        rows = count * (len(self.places.tokens) // len(self.depths))
        return Nodes(self.places.rows(0, rows), self.paths[:count], self.depths[:count])


def empty_places(model: Decoder, rows: int) -> RowMetadata:
    """Room for where so many rows of a model stand."""
    return RowMetadata.empty(rows, len(model.config.ropes), model.config.head_dim // 2, model.dtype, model.device)


class Scratch:
    """Buffers that no kernel needs after the next few, shared by all passes: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []  # captured cycles still write to them

    def take(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of this name, zero when new; where it is too small a larger one takes its place from now on."""
        count = 1
        for size in shape:
            count *= size
        held = self._buffers.get((name, dtype))
        if held is None or held.numel() < count:
            larger = torch.zeros(count, dtype=dtype, device=self._device)
            if held is not None:
                self._outgrown.append(held)
            held = self._buffers[name, dtype] = larger
        return held[:count].view(shape)

    def take_like(self, sizes: Any, name: str = "") -> Any:
        """The same as a tensor, or as something made of tensors, of which only the sizes count."""
        if sizes is None or isinstance(sizes, torch.Tensor):
            return None if sizes is None else self.take(f"scores {name}", *sizes.shape, dtype=sizes.dtype)
        return type(sizes)(**{part: self.take_like(of, part) for part, of in vars(sizes).items()})

    @property
    def nbytes(self) -> int:
        held = [*self._buffers.values(), *self._outgrown]
        return sum(buffer.numel() * buffer.element_size() for buffer in held)


class FusedDecoder:
    """A model's layers over the rows of B texts, each seeing its own past of fewer than `reach` positions."""

    def __init__(self, model: Decoder, cache: Cache, scratch: Scratch, texts: Texts, reach: int) -> None:
        self.model, self.cache, self.scratch, self.texts = model, cache, scratch, texts
        self.ranges = ranges_for(reach)

    @cached_property
    def inv_freq(self) -> torch.Tensor:
        return torch.stack(self.model._inv_freqs).contiguous()

    @cached_property
    def rope_scaling(self) -> torch.Tensor:
        return torch.tensor([rope.scaling for rope in self.model.config.ropes], device=self.model.device)

    def run(self, layers: range, source: Stream, target: Stream, nodes: Nodes) -> Stream:
        """Some layers over `source`; what they leave is in `target`, which may be the same."""
        for index in layers:
            layer, following = self.model.layers[index], self.reader(index + 1)
            self.layer(layer, self.model.config.layers[index], index, source, target, nodes, following)
            source = target
        return source

    def reader(self, index: int) -> torch.Tensor | None:
        """The weights of the norm that reads what enters layer `index`; what leaves the last one has a launch of its
        own for that."""
        return self.model.layers[index].attention_norm if index < len(self.model.layers) else None

    def layer(
        self,
        layer: Layer,
        spec: LayerConfig,
        cache_layer: int,
        source: Stream,
        target: Stream,
        nodes: Nodes,
        following: torch.Tensor | None,
    ) -> None:
        """One decoder layer over a source scaled for it. `cache_layer` is where its keys and values live, `following`
        the weights of the norm that reads the target next, if one does."""
        config, (rows, _) = self.model.config, source.states.shape
        q = self._take("q", rows, config.num_heads * config.head_dim)
        attended = self._take("attended", rows, config.num_heads * config.head_dim)
        inner = self._take("inner", rows, config.intermediate_size)
        self.store(layer, spec, cache_layer, source, nodes, q)
        self._attend(q, cache_layer, spec, nodes, attended)
        between = self.next_norm(layer.mlp_norm, target)
        self._add(attended, layer.out, layer.out_bias, layer.attention_out_norm, source, target, between)
        gated_linear(
            target.scaled, layer.gate_up, inner, bias=layer.gate_up_bias, norm=self._norm(target),
            activation=config.activation,
        )  # fmt: skip
        after = None if following is None else self.next_norm(following, target)
        self._add(inner, layer.down, layer.down_bias, layer.mlp_out_norm, target, target, after)

    def store(
        self, layer: Layer, spec: LayerConfig, cache_layer: int, source: Stream, nodes: Nodes, q: torch.Tensor | None
    ) -> None:
        """Keys and values of the rows into the cache, and their queries into `q`, if wanted."""
        places = nodes.places
        qkv_linear(
            source.scaled, layer.qkv, q, self.cache.keys[cache_layer], self.cache.values[cache_layer],
            bias=layer.qkv_bias, norm=self._norm(source),
            q_norm=layer.q_norm, k_norm=layer.k_norm, head_offset=self.model.config.norm_offset,
            cos=places.cos[spec.rope], sin=places.sin[spec.rope], slots=places.slots,
        )  # fmt: skip

    def next_norm(self, weight: torch.Tensor, stream: Stream) -> NextNorm:
        """What to write along with a stream that a norm of these weights reads next."""
        return NextNorm(weight, self.model.config.norm_offset, stream.squares, stream.scaled)

    def _norm(self, stream: Stream) -> Norm:
        return Norm(self.model.config.norm_eps, stream.squares)

    def normalise(self, states: torch.Tensor, weight: torch.Tensor | None, out: torch.Tensor) -> None:
        """What a head reads, or with no weight the plain norm."""
        config = self.model.config
        if weight is None:
            rms_norm(states, None, torch.finfo(states.dtype).eps, 0.0, out)
        else:
            rms_norm(states, weight, config.norm_eps, config.norm_offset, out)

    def know(self, last: Stream, known: torch.Tensor, middle: Stream | None = None, **waiting: Any) -> None:
        """What is known where all layers have left `last`, and those up to the middle one `middle`."""
        config, of_middle = self.model.config, None if middle is None else middle.states
        final_norm(last.states, self.model.norm, config.norm_eps, config.norm_offset, known, of_middle, **waiting)

    def _attend(
        self, q: torch.Tensor, cache_layer: int, spec: LayerConfig, nodes: Nodes, attended: torch.Tensor
    ) -> None:
        config, texts, count = self.model.config, self.texts, len(nodes.depths)
        size = workspace_size(texts.count, count, config.num_heads, config.head_dim, self.ranges)
        counters = counters_size(texts.count, count, config.num_kv_heads)
        tree_attention(
            q, self.cache.keys[cache_layer], self.cache.values[cache_layer], texts.page_table, texts.lengths,
            nodes.paths, nodes.depths, attended,
            self.scratch.take("partials", max(size, 1), dtype=torch.float32),
            self.scratch.take("counters", max(counters, 1), dtype=torch.int32),
            ranges=self.ranges, window=spec.window, scale=config.attention_scale,
        )  # fmt: skip

    def _add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_norm: torch.Tensor | None,
        source: Stream,
        target: Stream,
        next_norm: NextNorm | None,
    ) -> None:
        """target = source + x @ weight, normed first where the family does that."""
        if out_norm is None:
            linear(x, weight, target.states, bias=bias, residual=source.states, next_norm=next_norm)
            return
        config, update = self.model.config, self._take("update", *source.states.shape)
        linear(x, weight, update, bias=bias)
        rms_norm(
            update, out_norm, config.norm_eps, config.norm_offset, target.states,
            residual=source.states, next_norm=next_norm,
        )  # fmt: skip

    def _take(self, name: str, rows: int, width: int) -> torch.Tensor:
        return self.scratch.take(name, rows, width, dtype=self.model.dtype)


def table_pages(slots: int) -> int:
    """Entries of a page table for so many slots."""
    return -(-slots // PAGE_SIZE)


Launch = Callable[[], None]


def captured(launch: Launch, pool: Any, stream: torch.cuda.Stream | None) -> Launch:
    """`launch` as a CUDA graph, captured on a stream of its own; without one as it is. It must have run once, so that
    every kernel is compiled."""
    if stream is None:
        return launch
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        launch()
    return graph.replay
