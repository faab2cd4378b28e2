"""An exit's own passes, as kernels: what is known at the rows of a pass, its block's keys and values, what its head
reads, and what it drafts. Which rows these are is decided elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.backends.cuda.decoder import FusedDecoder, Nodes, Stream
from selfspec.kernels.embed_rope import embed_rope
from selfspec.kernels.final_norm import UnfilledStates
from selfspec.kernels.gemm import linear
from selfspec.kernels.lm_head_topk import lm_head_scores
from selfspec.kernels.logits_processing import Processing
from selfspec.kernels.noise import Noise
from selfspec.kernels.norm import NextNorm, Norm, scaled_reference, squares_per_row, squares_reference
from selfspec.kernels.topk import Ranking, Scores
from selfspec.models.decoder import Decoder
from selfspec.speculation.exit import FEATURE_STATES, Exit, ExitBlock


@dataclass(frozen=True)
class DraftHead:
    """The rows of the head that drafts look at, in a buffer with room for a request's own tokens."""

    tokens: torch.Tensor  # [capacity] int32
    count: torch.Tensor  # [1] int32: how many of them are there

    @classmethod
    def empty(cls, capacity: int, device: torch.device) -> DraftHead:
        """Filled with token 0, so that a step can run once before it is captured."""
        ints = torch.zeros(capacity + 1, dtype=torch.int32, device=device)
        ints[:1].fill_(capacity)
        return cls(ints[1:], ints[:1])

    def fill(self, tokens: torch.Tensor) -> None:
        """The first of these tokens, as many as there is room for."""
        count = min(len(tokens), len(self.tokens))
        self.tokens[:count].copy_(tokens[:count])
        self.count.fill_(count)


@dataclass(frozen=True)
class Drafter:
    """An exit as passes over slots use it."""

    exit: Exit
    head: DraftHead | None  # None: all rows
    known: torch.Tensor | None  # [rows, 2 * hidden]: each slot's state for the next position, then every node's
    first_node: int  # the row of the first slot's root in it
    waiting: UnfilledStates  # states of tokens that the exit's cache lacks


@dataclass(frozen=True)
class Reads:
    """What an exit's head reads at some rows: normed, or scaled for its norm, with the squares that it needs."""

    values: torch.Tensor  # [R, hidden]
    squares: torch.Tensor  # [R, T]; of an exit without a block nothing is in them

    @classmethod
    def empty(cls, rows: int, model: Decoder) -> Reads:
        hidden, device = model.config.hidden_size, model.device
        values = torch.zeros(rows, hidden, dtype=model.dtype, device=device)
        return cls(values, torch.zeros(rows, squares_per_row(hidden), device=device))

    def rows(self, start: int, stop: int) -> Reads:
        return Reads(self.values[start:stop], self.squares[start:stop])


@dataclass(frozen=True)
class Past:
    """What was known one position before each of some rows: row r is row gather[r] of `known`, or row r. Reads of the
    exit itself come with their squares."""

    known: torch.Tensor  # [..., up to 2 * hidden]
    gather: torch.Tensor | None  # [R] int64
    squares: torch.Tensor | None = None


class FusedExit:
    """An exit over the rows that a decoder's passes are made for."""

    def __init__(self, fused: FusedDecoder, exit: Exit) -> None:
        self.fused, self.exit = fused, exit

    def know(
        self,
        stream: Stream,
        late: Stream,
        nodes: Nodes,
        known: torch.Tensor,
        later: Stream | None = None,
        waiting: UnfilledStates | None = None,
    ) -> None:
        """The states after layer N through the rest of the model, in `late` and from the middle on in `later`: what is
        then known at every row goes to `known` [R, 2 * hidden], first what the model's head reads. Rows may be left
        waiting. Without `later` it takes a launch more and less memory."""
        fused, hidden, layers = self.fused, stream.states.shape[1], self.fused.model.config.num_layers
        middle = fused.run(range(self.exit.layer, self.exit.feature_layer), stream, late, nodes)
        rest = range(self.exit.feature_layer, layers)
        if later is None:
            fused.normalise(middle.states, None, known[:, hidden:])
            fused.know(fused.run(rest, middle, late, nodes), known[:, :hidden])
        else:
            last, states = fused.run(rest, middle, later, nodes), None if waiting is None else stream.states
            fused.know(last, known, middle, hidden=states, unfilled=waiting)

    def stand(self, nodes: Nodes, pending: torch.Tensor, counts: torch.Tensor) -> None:
        """Where rows stand whose states are known; of each text the first few, `counts` of them, store something."""
        fused, model = self.fused, self.fused.model
        nobodys = self.own(len(nodes.places.tokens))
        embed_rope(
            nodes.places, nobodys.states, fused.next_norm(model.layers[0].attention_norm, nobodys), model.embedding,
            model._embedding_scale, fused.texts.lengths, fused.texts.page_table, nodes.depths, fused.inv_freq,
            fused.rope_scaling, 0, pending=pending, counts=counts,
        )  # fmt: skip

    def fill(self, states: torch.Tensor, past: Past, nodes: Nodes) -> None:
        """The block's keys and values of all rows, from the states after layer N and what was known before each."""
        block = self.exit.block
        assert block is not None
        entered = self._recall(block, states, past)
        spec, cache_layer = self.fused.model.config.layers[self.exit.layer], self.fused.cache.exit_layer_index
        self.fused.store(block.layer, spec, cache_layer, entered, nodes, None)

    def read(self, states: torch.Tensor, past: Past | None, nodes: Nodes, reads: Reads) -> torch.Tensor:
        """What the exit's head reads at the rows, to `reads`; the block's keys and values are filled. Returns the
        states that the exit leaves, before its norm, until others are left."""
        exit, block = self.exit, self.exit.block
        assert exit.norm is not None
        if block is None:
            self.fused.normalise(states, exit.norm, reads.values)
            return states
        assert past is not None
        own, left = self.own(len(states)), self._scratch("left", len(states))
        entered = self._recall(block, states, past)
        spec, cache_layer = self.fused.model.config.layers[exit.layer], self.fused.cache.exit_layer_index
        self.fused.layer(block.layer, spec, cache_layer, entered, own, nodes, None)
        next_norm = NextNorm(exit.norm, self.fused.model.config.norm_offset, reads.squares, reads.values)
        linear(
            own.states, block.affine_weight, left, bias=block.affine_bias, residual=own.states, next_norm=next_norm
        )  # fmt: skip
        return left

    def rank(
        self, head: DraftHead | None, reads: Reads, width: int, noise: Noise | None, processing: Processing | None
    ) -> Ranking:
        """The best draft tokens after rows of which the head reads these; kept until others are ranked."""
        model, scratch = self.fused.model, self.fused.scratch
        tokens = None if head is None else head.tokens
        columns = model.config.vocab_size if tokens is None else len(tokens)
        scores = scratch.take_like(Scores.empty(len(reads.values), columns, width, "meta"))
        lm_head_scores(
            reads.values, model.head, scores, token_ids=tokens, gather=tokens is not None,
            count=None if head is None else head.count, norm=self._norm(reads.squares),
            softcap=model.config.logit_softcap, noise=noise, processing=processing,
        )  # fmt: skip
        return Ranking(scores, width, tokens)

    def _recall(self, block: ExitBlock, states: torch.Tensor, past: Past) -> Stream:
        """The block's input: the states after layer N, and what was known one position earlier."""
        own, norm = self.own(len(states)), block.layer.attention_norm
        if block.recall is None:
            own.states.copy_(states)
            own.squares.copy_(squares_reference(states))
            own.scaled.copy_(scaled_reference(states, norm, self.fused.model.config.norm_offset))
            return own
        columns = block.recall[:, : past.known.shape[1]]
        next_norm = self.fused.next_norm(norm, own)
        linear(
            past.known, columns, own.states, norm=self._norm(past.squares), residual=states, next_norm=next_norm,
            gather=past.gather,
        )  # fmt: skip
        return own

    def _norm(self, squares: torch.Tensor | None) -> Norm | None:
        """What is left to do of the exit's norm where its head's input is scaled: nothing without a block."""
        if squares is None or self.exit.block is None:
            return None
        return Norm(self.fused.model.config.norm_eps, squares)

    def reads(self, rows: int) -> Reads:
        """Room for what the head reads, kept until others read."""
        return Reads(self._scratch("reads", rows), self._squares("reads", rows))

    def own(self, rows: int) -> Stream:
        """The exit block's stream. Between its passes it may serve others: nothing in it is kept."""
        return self.stream("own", rows)

    def stream(self, name: str, rows: int) -> Stream:
        """One of which nothing is kept after the next few kernels."""
        states, scaled = (self._scratch(f"{name} {part}", rows) for part in ("states", "scaled"))
        return Stream(states, self._squares(name, rows), scaled)

    def _squares(self, name: str, rows: int) -> torch.Tensor:
        width = squares_per_row(self.fused.model.config.hidden_size)
        return self.fused.scratch.take(f"{name} squares", rows, width, dtype=torch.float32)

    def _scratch(self, name: str, rows: int) -> torch.Tensor:
        model = self.fused.model
        return self.fused.scratch.take(name, rows, model.config.hidden_size, dtype=model.dtype)


def known_buffer(model: Decoder, rows: int) -> torch.Tensor:
    """Room for what is known at so many rows."""
    return torch.zeros(rows, FEATURE_STATES * model.config.hidden_size, dtype=model.dtype, device=model.device)
