"""Exits: how a hidden state after layer N becomes draft logits.

An exit is a norm and the model's own head, optionally with a trained block (one decoder layer and an affine) before
them and optionally only some rows of the head. What it computes is advice: it may be wrong without changing a token.
Training exits and choosing among them is left to calibration.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from selfspec.cache import Cache, Rows
from selfspec.config import LayerConfig
from selfspec.model import Decoder, Layer


@dataclass
class ExitBlock:
    """A decoder layer whose keys and values live in the cache's extra layer, then `hidden + affine(hidden)`."""

    layer: Layer
    affine_weight: torch.Tensor  # [hidden, hidden]
    affine_bias: torch.Tensor  # [hidden]


@dataclass
class Exit:
    """An exit after `layer` layers of `model`."""

    model: Decoder
    layer: int
    norm: torch.Tensor | None = None  # [hidden]; None: the model's final norm
    block: ExitBlock | None = None
    head_rows: torch.Tensor | None = None  # [K] token ids of the trimmed head, ascending; None: all rows

    def __post_init__(self) -> None:
        check_exit_layer(self.layer, self.model.config.num_layers)
        if self.norm is None:
            self.norm = self.model.norm
        # A gather of rows at every step would cost more than the rows it saves.
        self._head = self.model.head if self.head_rows is None else self.model.head[self.head_rows]

    @property
    def vocabulary(self) -> int:
        """How many tokens the exit can draft."""
        return self._head.shape[0]

    @property
    def nbytes(self) -> int:
        """Memory beyond the model's own: block, affine, norm and trimmed head."""
        tensors = [] if self.head_rows is None else [self._head, self.head_rows]
        if self.norm is not None and self.norm is not self.model.norm:
            tensors.append(self.norm)
        if self.block is not None:
            tensors += [self.block.affine_weight, self.block.affine_bias]
            tensors += [tensor for tensor in vars(self.block.layer).values() if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def logits(self, hidden: torch.Tensor, rows: Rows, cache: Cache) -> torch.Tensor:
        """Draft logits [B, M, vocabulary] (float32) from the hidden states after layer N of `rows`."""
        assert self.norm is not None
        if self.block is not None:
            rotations = self.model.rotations(rows)
            index = cache.exit_layer_index
            hidden = self.model.run_layer(self.block.layer, self._block_config, index, hidden, rotations, rows, cache)
            hidden = hidden + F.linear(hidden, self.block.affine_weight, self.block.affine_bias)
        return self.model.project(self.model.normalise(hidden, self.norm), self._head)

    def fill(self, hidden: torch.Tensor, rows: Rows, cache: Cache) -> None:
        """Stores the block's keys and values for rows that need no draft logits: prompt, leaves, plain steps."""
        if self.block is None:
            return
        rotation = self.model.rotations(rows)[self._block_config.rope]
        _, k, v = self.model.queries_keys_values(self.block.layer, hidden, rotation)
        cache.write(cache.exit_layer_index, rows.flat_slots, k, v)

    def to_token_ids(self, ranked: torch.Tensor) -> torch.Tensor:
        """Indices into the draft vocabulary to token ids."""
        return ranked if self.head_rows is None else self.head_rows[ranked]

    @property
    def _block_config(self) -> LayerConfig:
        return self.model.config.layers[self.layer]


def check_exit_layer(layer: int, num_layers: int) -> None:
    """An exit needs at least one layer below it and one above."""
    if not isinstance(layer, int) or isinstance(layer, bool) or not 1 <= layer < num_layers:
        raise ValueError(
            f"exit_layer={layer!r} is impossible: this model has {num_layers} layers, so an exit can follow layer 1 to "
            f"{num_layers - 1}"
        )
