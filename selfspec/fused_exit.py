"""An exit's own passes, as kernels: what is known at the rows of a pass, its block's keys and values, and what its head
reads. Which rows these are, and what is drafted from them, is decided elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from selfspec.exits import RECALLED, Exit, ExitBlock
from selfspec.fused import FusedDecoder, Nodes, Stream
from selfspec.kernels.linear import linear
from selfspec.kernels.norm import scaled_reference, tiles
from selfspec.model import Decoder


@dataclass(frozen=True)
class Past:
    """What was known one position before each of some rows: row r is row gather[r] of `known`, or row r."""

    known: torch.Tensor  # [..., up to 2 * hidden]
    gather: torch.Tensor | None  # [R] int64


class FusedExit:
    """An exit over the rows that a decoder's passes are made for."""

    def __init__(self, fused: FusedDecoder, exit: Exit) -> None:
        self.fused, self.exit = fused, exit

    def know(self, stream: Stream, late: Stream, nodes: Nodes, known: torch.Tensor) -> None:
        """The states after layer N through the rest of the model, in `late`: what is then known at every row goes to
        `known` [R, 2 * hidden], first what the model's head reads."""
        fused, model, hidden = self.fused, self.fused.model, self.fused.model.config.hidden_size
        middle, layers = self.exit.recalled_layer, model.config.num_layers
        states = fused.run(range(self.exit.layer, middle), stream, late, nodes)
        fused.normalise(states.states, None, known[:, hidden:])
        last = fused.run(range(middle, layers), states, late, nodes)
        fused.normalise(last.states, model.norm, known[:, :hidden])

    def fill(self, stream: Stream, past: Past, nodes: Nodes) -> None:
        """The block's keys and values of all rows, from what was known before each of them."""
        block = self.exit.block
        assert block is not None
        entered = self._recall(block, stream, past)
        spec, cache_layer = self.fused.model.config.layers[self.exit.layer], self.fused.cache.exit_layer_index
        self.fused.store(block.layer, spec, cache_layer, entered, nodes, None)

    def read(self, stream: Stream, past: Past | None, nodes: Nodes, reads: torch.Tensor) -> None:
        """What the exit's head reads at the rows, to `reads` [R, hidden]; the block's keys and values are filled."""
        exit, states = self.exit, stream.states
        assert exit.norm is not None
        if exit.block is not None:
            assert past is not None
            block, own = exit.block, self.own(len(states))
            entered = self._recall(block, stream, past)
            spec, cache_layer = self.fused.model.config.layers[exit.layer], self.fused.cache.exit_layer_index
            self.fused.layer(block.layer, spec, cache_layer, entered, own, nodes, None)
            states = self._scratch("left", len(states))
            linear(own.states, block.affine_weight, states, bias=block.affine_bias, residual=own.states)
        self.fused.normalise(states, exit.norm, reads)

    def _recall(self, block: ExitBlock, stream: Stream, past: Past) -> Stream:
        """The block's input: the states after layer N, and what was known one position earlier."""
        own = self.own(len(stream.states))
        if block.recall is None:
            return self._for_block(block, stream, own)
        columns = block.recall[:, : past.known.shape[1]]
        next_norm = self.fused.next_norm(block.layer.attention_norm, own)
        linear(past.known, columns, own.states, residual=stream.states, next_norm=next_norm, gather=past.gather)
        return own

    def _for_block(self, block: ExitBlock, stream: Stream, own: Stream) -> Stream:
        """The stream as it is, which layer N reads too, scaled for the block's norm."""
        config = self.fused.model.config
        own.scaled.copy_(scaled_reference(stream.states, block.layer.attention_norm, config.norm_offset))
        return replace(stream, scaled=own.scaled)

    def own(self, rows: int) -> Stream:
        """The exit block's stream. Between its passes it may serve others: nothing in it is kept."""
        model = self.fused.model
        squares = self.fused.scratch.take("squares", rows, tiles(model.config.hidden_size), dtype=torch.float32)
        return Stream(self._scratch("entered", rows), squares, self._scratch("scaled", rows))

    def _scratch(self, name: str, rows: int) -> torch.Tensor:
        model = self.fused.model
        return self.fused.scratch.take(name, rows, model.config.hidden_size, dtype=model.dtype)


def known_buffer(model: Decoder, rows: int) -> torch.Tensor:
    """Room for what is known at so many rows."""
    return torch.zeros(rows, RECALLED * model.config.hidden_size, dtype=model.dtype, device=model.device)
