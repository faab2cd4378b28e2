"""Exits: how a hidden state after layer N becomes draft logits.

An exit is a norm and the model's own head, optionally with a trained block (about one decoder layer) before them and
optionally only some rows of the head. The block also recalls what was known one position earlier: after a verified
token what the model's head read there and the state half-way up, after a drafted one what the exit's own head read.
What an exit computes is advice: it may be wrong without changing a token. Training exits and choosing among them is
left to calibration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F

from selfspec.cache.kv_cache import Cache
from selfspec.cache.layout import Rows
from selfspec.models.config import LayerConfig
from selfspec.models.decoder import Decoder, Layer

RECALLED = 2  # states per position that a block recalls: what the head read, and the state half-way up the model


@dataclass
class ExitBlock:
    """A decoder layer whose keys and values live in the cache's extra layer, then `hidden + affine(hidden)`."""

    layer: Layer
    affine_weight: torch.Tensor  # [hidden, hidden]
    affine_bias: torch.Tensor  # [hidden]
    recall: torch.Tensor | None = None  # [hidden, 2 * hidden]; None: nothing is recalled

    def enter(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """The layer's input: states after layer N, and what was known one position before each of them. That is
        [..., 2 * hidden] after verified tokens and [..., hidden], what a head read, after drafted ones."""
        if self.recall is None:
            return hidden
        return hidden + F.linear(previous, self.recall[:, : previous.shape[-1]])

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + F.linear(hidden, self.affine_weight, self.affine_bias)


class HeadRows:
    """The token ids of a domain's trimmed head: on the device, and where the host can look at them without waiting for
    it; and the rows themselves, for whoever has to copy them."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids  # [K]
        self.copy: torch.Tensor | None = None  # [K, hidden], once somebody wanted it
        self._known = frozenset(ids.tolist())

    def __len__(self) -> int:
        return len(self.ids)

    def joined_by(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """These rows, and after them the prompts' own tokens."""
        new = sorted({token for prompt in prompts for token in prompt} - self._known) if prompts else []
        if not new:
            return self.ids
        guests, on_gpu = torch.tensor(new, dtype=self.ids.dtype), self.ids.device.type == "cuda"
        guests = (guests.pin_memory() if on_gpu else guests).to(self.ids.device, non_blocking=on_gpu)
        return torch.cat((self.ids, guests))

    def of(self, head: torch.Tensor) -> torch.Tensor:
        """Copied once: for PyTorch a gather at every step would cost more than the rows it saves."""
        self.copy = head[self.ids] if self.copy is None else self.copy
        return self.copy


@dataclass(eq=False)
class Exit:
    """An exit after `layer` layers of `model`."""

    model: Decoder
    layer: int
    norm: torch.Tensor | None = None  # [hidden]; None: the model's final norm
    block: ExitBlock | None = None
    head_rows: torch.Tensor | None = None  # [K] token ids of the trimmed head; None: all rows
    shared: HeadRows | None = None  # the first of them, where these are a domain's
    guests: int = 0  # and how many others are there for a request's sake

    def __post_init__(self) -> None:
        check_exit_layer(self.layer, self.model.config.num_layers)
        if self.norm is None:
            self.norm = self.model.norm

    @cached_property
    def _heads(self) -> list[torch.Tensor]:
        """The rows that drafts look at, part by part. Only PyTorch needs copies; kernels take them where they are."""
        head = self.model.head
        if self.head_rows is None or self.shared is None:
            return [head if self.head_rows is None else head[self.head_rows]]
        return [self.shared.of(head), *([head[self.head_rows[-self.guests :]]] if self.guests else [])]

    def offering(self, head_rows: HeadRows | torch.Tensor | None, prompts: Sequence[Sequence[int]]) -> Exit:
        """The same exit with only some rows of the head: the given ones, and those of the prompts' own tokens, because
        texts like to repeat what they were asked about."""
        if head_rows is None:
            return self
        rows = HeadRows(head_rows) if isinstance(head_rows, torch.Tensor) else head_rows
        joined = rows.joined_by(prompts)
        return replace(self, head_rows=joined, shared=rows, guests=len(joined) - len(rows))

    @property
    def vocabulary(self) -> int:
        """How many tokens the exit can draft."""
        return self.model.config.vocab_size if self.head_rows is None else len(self.head_rows)

    @property
    def head_nbytes(self) -> int:
        """Memory of the trimmed head: its index and, once PyTorch has drafted with it, copies of rows that are nobody
        else's."""
        if self.head_rows is None:
            return 0
        copies = vars(self).get("_heads", [])
        return _nbytes([self.head_rows, *(copies if self.shared is None else copies[1:])])

    @property
    def nbytes(self) -> int:
        """Memory beyond the model's own: block, norm and what of a trimmed head is not shared with others."""
        tensors: list[torch.Tensor] = []
        if self.norm is not None and self.norm is not self.model.norm:
            tensors.append(self.norm)
        if self.block is not None:
            own = [self.block.affine_weight, self.block.affine_bias, self.block.recall]
            tensors += [tensor for tensor in (*own, *vars(self.block.layer).values()) if tensor is not None]
        return self.head_nbytes + _nbytes(tensors)

    def read(self, hidden: torch.Tensor, previous: torch.Tensor, rows: Rows, cache: Cache) -> torch.Tensor:
        """What the exit's head reads [B, M, hidden], from the hidden states after layer N of `rows` and from what was
        known one position before each of them."""
        assert self.norm is not None
        if self.block is not None:
            spec = self._block_config
            attend = self.model.attend_cached(spec, cache.exit_layer_index, rows, cache)
            hidden = self.block.enter(hidden, previous)
            hidden = self.model.run_layer(self.block.layer, spec, hidden, self.model.rotations_of(rows), attend)
            hidden = self.block.leave(hidden)
        return self.model.normalise(hidden, self.norm)

    def logits(self, read: torch.Tensor) -> torch.Tensor:
        """Draft logits [B, M, vocabulary] (float32)."""
        parts = [self.model.project(read, head) for head in self._heads]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def fill(self, hidden: torch.Tensor, previous: torch.Tensor, rows: Rows, cache: Cache) -> None:
        """Stores the block's keys and values of `rows`, without drafting from them."""
        if self.block is None:
            return
        rotation = self.model.rotations_of(rows)[self._block_config.rope]
        hidden = self.block.enter(hidden, previous)
        _, k, v = self.model.queries_keys_values(self.block.layer, hidden, rotation)
        cache.write(cache.exit_layer_index, rows.flat_slots, k, v)

    def to_token_ids(self, ranked: torch.Tensor) -> torch.Tensor:
        """Indices into the draft vocabulary to token ids."""
        return ranked if self.head_rows is None else self.head_rows[ranked]

    def over_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Draft logits [R, vocabulary] placed into the whole vocabulary: -inf for what the exit cannot draft."""
        if self.head_rows is None:
            return logits
        whole = logits.new_full((logits.shape[0], self.model.config.vocab_size), -math.inf)
        return whole.index_copy(1, self.head_rows, logits)

    @property
    def recalled_layer(self) -> int:
        """The state after this layer is kept for the next position to recall."""
        return max(half_way(self.model), self.layer)

    @property
    def _block_config(self) -> LayerConfig:
        return self.model.config.layers[self.layer]


def half_way(model: Decoder) -> int:
    return model.config.num_layers // 2


def recalled(model: Decoder, middle: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """What the model leaves for the next position to recall [..., 2 * hidden]: what its head reads, which comes first,
    and the state half-way up, which knows more of the text and less of the very next token."""
    return torch.cat((model.read(last), F.rms_norm(middle, middle.shape[-1:])), dim=-1)


def _nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_exit_layer(layer: int, num_layers: int) -> None:
    """An exit needs at least one layer below it and one above."""
    if not isinstance(layer, int) or isinstance(layer, bool) or not 1 <= layer < num_layers:
        raise ValueError(
            f"exit_layer={layer!r} is impossible: this model has {num_layers} layers, so an exit can follow layer 1 to "
            f"{num_layers - 1}"
        )
