"""Exit: computes draft logits from the hidden states after N layers.

An exit is a norm and the model's own LM head, optionally with a trained block (about one decoder layer) before them and
optionally with only some rows of the head. The block also reads the feature of the previous position: after a committed
token the model's normed final state and its state half-way up, after a drafted token the exit's own normed state. A
wrong draft costs time and changes no token. Calibration trains exits and chooses among them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F

from selfspec.cache.kv_cache import Cache
from selfspec.cache.layout import Rows
from selfspec.models.config import LayerConfig
from selfspec.models.decoder import Decoder, Layer
from selfspec.models.linear import Linear, Weight

FEATURE_STATES = 2  # states in the feature of a committed position: the normed final state and the state half-way up


@dataclass
class ExitBlock:
    """A projection of the feature, a decoder layer whose keys and values are the cache's last layer, an affine map."""

    layer: Layer
    affine_weight: torch.Tensor  # [hidden, hidden]
    affine_bias: torch.Tensor  # [hidden]
    feature_weight: torch.Tensor  # [hidden, 2 * hidden]: projects the feature

    def add_feature(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Returns the layer's input: states after N layers plus the projected features of the previous positions,
        [..., 2 * hidden] after committed tokens and [..., hidden] (the exit's normed state) after drafted ones."""
        return hidden + F.linear(previous, self.feature_weight[:, : previous.shape[-1]])

    def add_affine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Adds the affine map of the layer's output to it."""
        return hidden + F.linear(hidden, self.affine_weight, self.affine_bias)


class HeadRows:
    """A domain's trimmed head: its token ids on the device and on the host, and, for PyTorch, a copy of its rows."""

    def __init__(self, ids: torch.Tensor, largest: int = 0) -> None:
        self.ids = ids  # [K]
        self.largest = max(largest, len(ids))  # rows of the profile's largest head, that of all domains together
        self.copy: Linear | None = None  # [K, hidden]; made by the first call of `of`
        self._host_ids = frozenset(ids.tolist())

    def __len__(self) -> int:
        return len(self.ids)

    def with_tokens_of(self, prompts: Sequence[Collection[int]]) -> torch.Tensor:
        """Returns these token ids, followed by the prompts' other tokens in ascending order."""
        new = sorted(set().union(*prompts) - self._host_ids)
        if not new:
            return self.ids
        added, on_gpu = torch.tensor(new, dtype=self.ids.dtype), self.ids.device.type == "cuda"
        added = (added.pin_memory() if on_gpu else added).to(self.ids.device, non_blocking=on_gpu)
        return torch.cat((self.ids, added))

    def of(self, model: Decoder) -> Linear:
        """Returns the rows of the model's LM head [K, hidden]. Copies them once: a gather in every step would take
        longer than the full head."""
        self.copy = _head_rows(model, self.ids) if self.copy is None else self.copy
        return self.copy


@dataclass(eq=False)
class Exit:
    """An exit after the first `layer` layers of `model`."""

    model: Decoder
    layer: int
    norm: torch.Tensor | None = None  # [hidden]; None: the model's final norm
    block: ExitBlock | None = None
    head_rows: torch.Tensor | None = None  # [K] token ids of the trimmed head; None: the full head
    domain_rows: HeadRows | None = None  # with which head_rows begins; the others are the prompts' own tokens

    def __post_init__(self) -> None:
        check_exit_layer(self.layer, self.model.config.num_layers)
        if self.norm is None:
            self.norm = self.model.norm

    @cached_property
    def _heads(self) -> list[Linear]:
        """Rows of the LM head to draft with: the domain's, then the prompts'. Copies, for PyTorch only: the kernels
        gather rows from the full head."""
        if self.head_rows is None:
            return [self.model.head]
        if self.domain_rows is None:
            return [_head_rows(self.model, self.head_rows)]
        of_prompts = self.head_rows[len(self.domain_rows) :]
        return [self.domain_rows.of(self.model), *([_head_rows(self.model, of_prompts)] if len(of_prompts) else [])]

    def with_head_rows(self, head_rows: HeadRows | torch.Tensor | None, prompts: Sequence[Collection[int]]) -> Exit:
        """Returns this exit with a head of the given rows and the prompts' own tokens: a text often repeats tokens of
        its prompt. None: the full head."""
        if head_rows is None:
            return self
        rows = HeadRows(head_rows) if isinstance(head_rows, torch.Tensor) else head_rows
        return replace(self, head_rows=rows.with_tokens_of(prompts), domain_rows=rows)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the exit can draft."""
        return self.model.config.vocab_size if self.head_rows is None else len(self.head_rows)

    @property
    def head_nbytes(self) -> int:
        """Bytes of the trimmed head: its token ids and, once PyTorch has drafted with it, its copies of head rows, less
        the domain's, which all its exits share."""
        if self.head_rows is None:
            return 0
        copies: list[Linear] = vars(self).get("_heads", [])
        own = copies if self.domain_rows is None else copies[1:]
        return self.head_rows.nbytes + sum(copy.nbytes for copy in own)

    @property
    def nbytes(self) -> int:
        """Bytes in addition to the model's weights: block, norm and `head_nbytes`."""
        tensors: list[Weight | None] = [None if self.norm is self.model.norm else self.norm]
        if self.block is not None:
            tensors += [self.block.affine_weight, self.block.affine_bias, self.block.feature_weight]
            tensors += self.block.layer.tensors().values()
        return self.head_nbytes + sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def head_input(self, hidden: torch.Tensor, previous: torch.Tensor, rows: Rows, cache: Cache) -> torch.Tensor:
        """Returns the LM head's input, normed states [B, M, hidden], from the states after N layers and the features
        of the previous positions; stores the block's keys and values."""
        assert self.norm is not None
        if self.block is not None:
            spec = self._block_config
            attend = self.model.attend_cached(spec, cache.exit_layer_index, rows, cache)
            hidden = self.block.add_feature(hidden, previous)
            hidden = self.model.run_layer(self.block.layer, spec, hidden, self.model.rotations_of(rows), attend)
            hidden = self.block.add_affine(hidden)
        return self.model.normalise(hidden, self.norm)

    def logits(self, head_input: torch.Tensor) -> torch.Tensor:
        """Returns draft logits [B, M, vocabulary] (float32) of normed states [B, M, hidden]."""
        parts = [self.model.project(head_input, head) for head in self._heads]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def fill(self, hidden: torch.Tensor, previous: torch.Tensor, rows: Rows, cache: Cache) -> None:
        """Stores the block's keys and values of `rows` and computes nothing else."""
        if self.block is None:
            return
        rotation = self.model.rotations_of(rows)[self._block_config.rope]
        hidden = self.block.add_feature(hidden, previous)
        _, k, v = self.model.queries_keys_values(self.block.layer, hidden, rotation)
        cache.write(cache.exit_layer_index, rows.flat_slots, k, v)

    def to_token_ids(self, ranked: torch.Tensor) -> torch.Tensor:
        """Converts indices into the draft vocabulary to token ids."""
        return ranked if self.head_rows is None else self.head_rows[ranked]

    def over_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Places draft logits [R, vocabulary] into the model's vocabulary; tokens the exit cannot draft get -inf."""
        if self.head_rows is None:
            return logits
        whole = logits.new_full((logits.shape[0], self.model.config.vocab_size), -math.inf)
        return whole.index_copy(1, self.head_rows, logits)

    @property
    def feature_layer(self) -> int:
        """The output of this many layers is the second state of the feature: half of the model's, at least N."""
        return max(half_way(self.model), self.layer)

    @property
    def _block_config(self) -> LayerConfig:
        return self.model.config.layers[self.layer]


def exit_key(exit: Exit | None) -> tuple[int, int] | None:
    """Identifies an exit, whichever tokens it offers."""
    return None if exit is None else (exit.layer, id(exit.block))


def half_way(model: Decoder) -> int:
    """Half of the model's number of layers, rounded down."""
    return model.config.num_layers // 2


def position_features(model: Decoder, middle: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Returns the features [..., 2 * hidden] of positions from their states half-way up and after the last layer: the
    normed final states come first."""
    return torch.cat((model.head_input(last), F.rms_norm(middle, middle.shape[-1:])), dim=-1)


def _head_rows(model: Decoder, ids: torch.Tensor) -> Linear:
    """Returns a copy of rows of the LM head, dense: [K, hidden]."""
    return Linear(model.head.rows(ids, model.dtype))


def check_exit_layer(layer: int, num_layers: int) -> None:
    """Raises ValueError unless `layer`, the number of layers below the exit, is from 0 to `num_layers` - 1."""
    if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < num_layers:
        raise ValueError(
            f"exit_layer={layer!r} is not possible: this model has {num_layers} layers, so pass an integer from 0 to "
            f"{num_layers - 1}"
        )
