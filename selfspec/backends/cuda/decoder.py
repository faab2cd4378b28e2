"""The decoder's layers as a few kernels each, over buffers with fixed addresses, so that a CUDA graph can replay them.

Rows are node-major: row = node * B + sequence, so the nodes of one depth, and the whole tree, are ranges of rows. Every
kernel gives a row the same bits whatever other rows are in the pass. `step.py` combines passes into a step.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch

from selfspec.cache.kv_cache import Cache
from selfspec.kernels.accept import TreeTensors
from selfspec.kernels.beam import BeamTrees
from selfspec.kernels.embed_rope import RowMetadata
from selfspec.kernels.final_norm import final_norm
from selfspec.kernels.gate_up_gemm import gated_linear
from selfspec.kernels.gemm import linear
from selfspec.kernels.lm_head_topk import lm_head_logits
from selfspec.kernels.norm import NextNorm, Norm, rms_norm, squares_per_row
from selfspec.kernels.qkv_rope_gemm import qkv_linear
from selfspec.kernels.tree_attention import counters_size, ranges_for, tree_attention, workspace_size
from selfspec.kernels.triton_compat import INTERPRETED, can_launch, triton
from selfspec.models.config import LayerConfig
from selfspec.models.decoder import Decoder, Layer
from selfspec.models.linear import Linear
from selfspec.speculation.plan import NONE, Plan

REQUIREMENTS = (
    "the kernels need Triton, a GPU from sm_80 on, and a model in bfloat16 or float16, of sizes in multiples of 16, a "
    "head size up to 256 and up to 16 query heads per KV head; without kernels=True this model runs on PyTorch's own "
    "operations"
)


def is_supported(model: Decoder, device: torch.device) -> bool:
    """Whether the kernels can run this model on a device: whether it meets `REQUIREMENTS`."""
    config = model.config
    sizes = (config.hidden_size, config.intermediate_size, config.head_dim)
    if triton is None or any(size % 16 for size in sizes) or config.head_dim > 256:
        return False
    if config.num_heads > 16 * config.num_kv_heads:
        return False
    if device.type != "cuda":
        return INTERPRETED and model.dtype == torch.float32
    if torch.version.hip is not None or model.dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and can_launch()


@dataclass(frozen=True)
class Residual:
    """The residual stream of R rows, and two intermediate results of the RMSNorm that comes next."""

    states: torch.Tensor  # [R, hidden]
    squares: torch.Tensor  # [R, T] float32: sums of squares of the states, one for each of T tiles of columns
    scaled: torch.Tensor  # [R, hidden]: the states times the norm's weights, not divided by the root mean square

    @classmethod
    def empty(cls, rows: int, model: Decoder) -> Residual:
        hidden, device = model.config.hidden_size, model.device
        states, scaled = (torch.zeros(rows, hidden, dtype=model.dtype, device=device) for _ in range(2))
        return cls(states, torch.zeros(rows, squares_per_row(hidden), device=device), scaled)

    def rows(self, start: int, stop: int) -> Residual:
        return Residual(self.states[start:stop], self.squares[start:stop], self.scaled[start:stop])


class Contexts(Protocol):
    """The committed positions that the rows of a pass attend to, of `count` sequences or prompt segments."""

    @property
    def count(self) -> int: ...
    @property
    def lengths(self) -> torch.Tensor: ...  # [count] int32: committed positions
    @property
    def page_table(self) -> torch.Tensor: ...  # [count, P] int32


class Tree:
    """A plan as tensors on the device, for B sequences; the root is node 0, the n nodes are 1 to n. The nodes of a beam
    are chosen in every step for each sequence, and written to these tensors."""

    def __init__(self, plan: Plan, sequences: int, device: torch.device, first_feature_row: int = 0) -> None:
        """`first_feature_row`: row of the first sequence's root in the buffer of features."""
        self.plan, self.sequences, self.device = plan, sequences, device
        self.depths = self._ints(list(plan.depths))  # [n + 1]
        self._parents = [*plan.parents, *[0] * sum(plan.beam)]  # of nodes 1 to n; 0 for a beam's, until chosen
        fixed = NONE.with_copy(plan.copied) if plan.beam else plan  # the nodes that are the same in every step
        paths = [fixed.path(node) for node in range(len(fixed) + 1)] + [[0]] * sum(plan.beam)
        all_paths = self._ints([path + [0] * (plan.depth + 1 - len(path)) for path in paths])  # [n + 1, depth + 1]
        # [n + 1] int64: bit j - 1 is set if node j is on the path.
        ancestors = torch.tensor([sum(1 << node - 1 for node in path[1:]) for path in paths], device=device)
        parents = self._ints([0, *self._parents])  # [n + 1]
        expanded = [tensor.expand(sequences, *tensor.shape) for tensor in (parents, ancestors, all_paths)]
        parents, ancestors, self.paths = (tensor.clone() for tensor in expanded) if plan.beam else expanded
        self.tensors = TreeTensors(parents, ancestors, self.depths, self.paths, plan.copied)
        # [(n + 1) * B]: for each row, the row of the previous position in the buffer of features.
        self.previous_rows = self.parent_rows(range(len(plan) + 1), first_feature_row)
        self.beam: BeamTrees | None = None  # None: the plan has no beam
        if plan.beam:
            log_prob_sums = torch.zeros(parents.shape, dtype=torch.float32, device=device)
            rows = torch.zeros_like(self.previous_rows)
            self.beam = BeamTrees(self.tensors, log_prob_sums, rows, self.previous_rows, first_feature_row)

    def parents_in_level(self, level: range) -> torch.Tensor:
        """For each of a level's nodes, the index of its parent within the level above."""
        above = self.plan.levels[self.plan.depths[level.start] - 1].start
        return self._ints([self.plan.parents[node - 1] - above for node in level])

    def ranks(self, level: range) -> torch.Tensor:
        """For each of a level's nodes, the rank of its token among the draft tokens of its parent."""
        return self._ints([self.plan.ranks[node - 1] for node in level])

    def rows(self, nodes: range) -> tuple[int, int]:
        """The first row of these nodes, and one past the last."""
        return nodes.start * self.sequences, nodes.stop * self.sequences

    def parent_rows(self, nodes: range, first_node_row: int) -> torch.Tensor:
        """For each row of these nodes, the row of the position before it in a buffer: row b if the node is the root of
        sequence b, else the row of its parent. Row b of the buffer is the position before that root; the rows from
        `first_node_row` on are those of the tree."""
        parents = [first_node_row + self._parents[node - 1] * self.sequences if node else 0 for node in nodes]
        rows = [parent + sequence for parent in parents for sequence in range(self.sequences)]
        return torch.tensor(rows, device=self.device)

    def _ints(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


@dataclass(frozen=True)
class Nodes:
    """The M nodes of one pass, for each of its B sequences."""

    metadata: RowMetadata  # of M * B rows: token, position, cache slot, rotation
    paths: torch.Tensor  # [B, M, depth + 1]: the nodes from the root to each node: the node attends to these
    depths: torch.Tensor  # [M]

    @classmethod
    def chain(cls, model: Decoder, length: int, sequences: int) -> Nodes:
        """Returns a chain of `length` nodes, root included, for each of `sequences` sequences."""
        tree = Tree(Plan.tree((1,) * (length - 1)), sequences, model.device)
        return cls(empty_metadata(model, length * sequences), tree.paths, tree.depths)

    def first(self, count: int) -> Nodes:
        """Returns the first `count` nodes, for all sequences."""
        rows = count * (len(self.metadata.tokens) // len(self.depths))
        return Nodes(self.metadata.rows(0, rows), self.paths[:, :count], self.depths[:count])


def empty_metadata(model: Decoder, rows: int) -> RowMetadata:
    return RowMetadata.empty(rows, len(model.config.ropes), model.config.head_dim // 2, model.dtype, model.device)


class Scratch:
    """Buffers, by name and dtype, for values that one kernel writes and a later one reads. All passes share them, as
    they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []  # graphs captured before a buffer grew still write to them

    def take(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a view of the buffer of this name and dtype. Allocates the buffer with zeros on first use, and a
        larger one if it is too small."""
        count = prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < count:
            larger = torch.zeros(count, dtype=dtype, device=self._device)
            if buffer is not None:
                self._outgrown.append(buffer)
            buffer = self._buffers[name, dtype] = larger
        return buffer[:count].view(shape)

    def take_like(self, sizes: Any, name: str = "") -> Any:
        """Returns a buffer shaped like a tensor, or a dataclass of buffers shaped like each of its tensors, which may
        be on the meta device."""
        if sizes is None or isinstance(sizes, torch.Tensor):
            return None if sizes is None else self.take(f"scores {name}", *sizes.shape, dtype=sizes.dtype)
        return type(sizes)(**{part: self.take_like(size, part) for part, size in vars(sizes).items()})

    @property
    def nbytes(self) -> int:
        buffers = [*self._buffers.values(), *self._outgrown]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)


class FusedDecoder:
    """A model's layers over rows of B sequences, each with fewer than `max_context` committed positions."""

    def __init__(self, model: Decoder, cache: Cache, scratch: Scratch, contexts: Contexts, max_context: int) -> None:
        self.model, self.cache, self.scratch, self.contexts = model, cache, scratch, contexts
        self.max_context, self.ranges = max_context, ranges_for(max_context)  # how many ranges: see `tree_attention`

    def with_contexts(self, contexts: Contexts) -> FusedDecoder:
        """Returns a copy of this decoder whose rows attend to other contexts."""
        other = copy(self)
        other.contexts = contexts
        return other

    @cached_property
    def inv_freq(self) -> torch.Tensor:
        return torch.stack(self.model.inv_freqs).contiguous()

    @cached_property
    def rope_scaling(self) -> torch.Tensor:
        return torch.tensor([rope.scaling for rope in self.model.config.ropes], device=self.model.device)

    def run(self, layers: range, source: Residual, target: Residual, nodes: Nodes) -> Residual:
        """Runs layers over `source` and writes to `target`, which may be `source`. Returns the output: `target`, or
        `source` if the range is empty."""
        for index in layers:
            layer, spec = self.model.layers[index], self.model.config.layers[index]
            self.run_layer(layer, spec, index, source, target, nodes, self._input_norm(index + 1))
            source = target
        return source

    def _input_norm(self, index: int) -> torch.Tensor | None:
        """Weights of the first norm of layer `index`; None past the last layer, whose output `final_norm` norms."""
        return self.model.layers[index].attention_norm if index < len(self.model.layers) else None

    def run_layer(
        self,
        layer: Layer,
        spec: LayerConfig,
        cache_layer: int,
        source: Residual,
        target: Residual,
        nodes: Nodes,
        next_weight: torch.Tensor | None,
    ) -> None:
        """Runs one decoder layer over `source` and writes to `target`, which may be `source`. `cache_layer`: index of
        the KV cache's layer. `source.scaled` must be scaled by the weights of the layer's first norm. `next_weight`:
        weights of the norm that comes after the layer, by which `target.scaled` is scaled; None: it is not written."""
        config, (rows, _) = self.model.config, source.states.shape
        q = self._take("q", rows, config.num_heads * config.head_dim)
        attended = self._take("attended", rows, config.num_heads * config.head_dim)
        inner = self._take("inner", rows, config.intermediate_size)
        self.write_kv(layer, spec, cache_layer, source, nodes, q)
        self._attend(q, cache_layer, spec, nodes, attended)
        between = self.next_norm(layer.mlp_norm, target)
        self._project_and_add(attended, layer.out, layer.attention_out_norm, source, target, between)
        gated_linear(
            target.scaled, layer.gate_up.weight, inner, bias=layer.gate_up.bias, norm=self._norm(target),
            activation=config.activation,
        )  # fmt: skip
        after = None if next_weight is None else self.next_norm(next_weight, target)
        self._project_and_add(inner, layer.down, layer.mlp_out_norm, target, target, after)

    def write_kv(
        self, layer: Layer, spec: LayerConfig, cache_layer: int, source: Residual, nodes: Nodes, q: torch.Tensor | None
    ) -> None:
        """Writes the rows' keys and values to the cache and, unless None, their queries to `q`."""
        metadata = nodes.metadata
        qkv_linear(
            source.scaled, layer.qkv.weight, q, self.cache.keys[cache_layer], self.cache.values[cache_layer],
            bias=layer.qkv.bias, norm=self._norm(source),
            q_norm=layer.q_norm, k_norm=layer.k_norm, head_offset=self.model.config.norm_offset,
            cos=metadata.cos[spec.rope], sin=metadata.sin[spec.rope], slots=metadata.slots,
        )  # fmt: skip

    def next_norm(self, weight: torch.Tensor, residual: Residual) -> NextNorm:
        """Returns the argument by which a kernel that writes `residual.states` also writes `residual.squares`, and to
        `residual.scaled` the states times `weight`."""
        return NextNorm(weight, self.model.config.norm_offset, residual.squares, residual.scaled)

    def _norm(self, residual: Residual) -> Norm:
        return Norm(self.model.config.norm_eps, residual.squares)

    def rms_norm(self, states: torch.Tensor, weight: torch.Tensor | None, out: torch.Tensor) -> None:
        """Writes the RMSNorm of the states to `out`, with the model's epsilon and weight offset; without a weight, with
        the epsilon of the dtype."""
        config = self.model.config
        if weight is None:
            rms_norm(states, None, torch.finfo(states.dtype).eps, 0.0, out)
        else:
            rms_norm(states, weight, config.norm_eps, config.norm_offset, out)

    def final_norm(self, last: Residual, out: torch.Tensor, middle: Residual | None = None, **unfilled: Any) -> None:
        """Writes the model's final norm of the last layer's states to `out` [R, hidden], or with the `middle` layer's
        states the features to `out` [R, 2 * hidden]. `unfilled`: the arguments `hidden` and `unfilled` of the kernel.
        """
        config, of_middle = self.model.config, None if middle is None else middle.states
        final_norm(last.states, self.model.norm, config.norm_eps, config.norm_offset, out, of_middle, **unfilled)

    def _attend(
        self, q: torch.Tensor, cache_layer: int, spec: LayerConfig, nodes: Nodes, attended: torch.Tensor
    ) -> None:
        """Each row attends to its sequence's committed positions and to the nodes on its path."""
        config, contexts, count = self.model.config, self.contexts, len(nodes.depths)
        size = workspace_size(contexts.count, count, config.num_heads, config.head_dim, self.ranges)
        counters = counters_size(contexts.count, count, config.num_kv_heads)
        tree_attention(
            q, self.cache.keys[cache_layer], self.cache.values[cache_layer], contexts.page_table, contexts.lengths,
            nodes.paths, nodes.depths, attended,
            self.scratch.take("partials", max(size, 1), dtype=torch.float32),
            self.scratch.take("counters", max(counters, 1), dtype=torch.int32),
            ranges=self.ranges, window=spec.window, scale=config.attention_scale,
        )  # fmt: skip

    def _project_and_add(
        self,
        x: torch.Tensor,
        layer: Linear,
        out_norm: torch.Tensor | None,
        source: Residual,
        target: Residual,
        next_norm: NextNorm | None,
    ) -> None:
        """Writes source + layer(x) to `target`; with `out_norm` (gemma3_text) first norms the product."""
        if out_norm is None:
            linear(x, layer.weight, target.states, bias=layer.bias, residual=source.states, next_norm=next_norm)
            return
        config, update = self.model.config, self._take("update", *source.states.shape)
        linear(x, layer.weight, update, bias=layer.bias)
        rms_norm(
            update, out_norm, config.norm_eps, config.norm_offset, target.states,
            residual=source.states, next_norm=next_norm,
        )  # fmt: skip

    def _take(self, name: str, rows: int, width: int) -> torch.Tensor:
        return self.scratch.take(name, rows, width, dtype=self.model.dtype)


def head_logits(model: Decoder, states: torch.Tensor) -> torch.Tensor:
    """Returns the model's logits [R, V], float32, for normed final states [R, hidden]: bit for bit those from which a
    step chooses."""
    logits = torch.empty(len(states), model.config.vocab_size, dtype=torch.float32, device=states.device)
    lm_head_logits(states, model.head.weight, logits, softcap=model.config.logit_softcap)
    return logits
