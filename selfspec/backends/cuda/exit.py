"""An exit's passes as kernels: the features that it reads, its block's keys and values, and its ranked draft tokens.

The *feature* of a position is FEATURE_STATES = 2 normed states of the full model at that position, side by side
[2 * hidden]: the final state, which the LM head reads, and the state after the exit's `feature_layer`. The exit reads
the feature of the previous position. `step.py`, `step_draft.py`, `exit_scoring.py`, `prompt_scoring.py` and
`kernel_prefill.py` decide which rows these passes run over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.backends.cuda.decoder import FusedDecoder, Nodes, Residual
from selfspec.kernels.embed_rope import embed_rope
from selfspec.kernels.final_norm import SlotUnfilled
from selfspec.kernels.gemm import linear
from selfspec.kernels.lm_head_topk import lm_head_scores
from selfspec.kernels.logits_processing import Masks, Processing
from selfspec.kernels.noise import Noise
from selfspec.kernels.norm import NextNorm, Norm, squares_per_row
from selfspec.kernels.topk import Ranking, Scores
from selfspec.models.decoder import Decoder
from selfspec.speculation.exit import FEATURE_STATES, Exit, ExitBlock
from selfspec.speculation.exit_scoring import PROMPT_END

_HEAD_ROWS_MULTIPLE = 4096  # steps are captured for multiples of this number of head rows: domains share graphs
_PROMPT_HEAD_ROWS = 1024  # head rows for the prompts' own tokens, at least; tokens that do not fit are not drafted


@dataclass(frozen=True)
class DraftHead:
    """The token ids of the LM head rows that an exit drafts from, in a buffer with a fixed address."""

    tokens: torch.Tensor  # [capacity] int32
    count: torch.Tensor  # [1] int32: how many of them are in use

    @classmethod
    def empty(cls, capacity: int, device: torch.device) -> DraftHead:
        """Returns a head filled with token 0, so that a step can run once before it is captured."""
        ints = torch.zeros(capacity + 1, dtype=torch.int32, device=device)
        ints[:1].fill_(capacity)
        return cls(ints[1:], ints[:1])

    def fill(self, tokens: torch.Tensor) -> None:
        """Copies these tokens, or the first `capacity` of them, to the buffer."""
        count = min(len(tokens), len(self.tokens))
        self.tokens[:count].copy_(tokens[:count])
        self.count.fill_(count)


def draft_head_capacity(exit: Exit, model: Decoder) -> int:
    """Returns the number of head rows that steps with this exit are captured for: those of all domains together plus
    _PROMPT_HEAD_ROWS, rounded up to a multiple, at most the vocabulary. So batches of one domain and of several share
    graphs; steps skip the rows past `DraftHead.count`."""
    assert exit.head_rows is not None
    rows = len(exit.head_rows) if exit.domain_rows is None else exit.domain_rows.largest
    multiple = _HEAD_ROWS_MULTIPLE
    return min(-(-(rows + _PROMPT_HEAD_ROWS) // multiple) * multiple, model.config.vocab_size)


@dataclass(frozen=True)
class SlotExit:
    """An exit and its buffers for the first B slots of a batch."""

    exit: Exit
    head: DraftHead | None  # None: the whole LM head
    # [rows, 2 * hidden]: row b is the position before slot b's root; from `first_node_row` on come roots and nodes,
    # node-major. None without an exit block.
    features: torch.Tensor | None
    first_node_row: int  # row of the first slot's root in `features`
    unfilled: SlotUnfilled  # the exit's inputs at unfilled positions


@dataclass(frozen=True)
class HeadInput:
    """What an exit's LM head reads at R rows. With a block the head divides the values by their root mean square."""

    values: torch.Tensor  # [R, hidden]: with a block its output times the exit norm's weights; without, normed states
    squares: torch.Tensor  # [R, T] float32: sums of squares of the block's output, as in `Residual`; else unused

    @classmethod
    def empty(cls, rows: int, model: Decoder) -> HeadInput:
        hidden, device = model.config.hidden_size, model.device
        values = torch.zeros(rows, hidden, dtype=model.dtype, device=device)
        return cls(values, torch.zeros(rows, squares_per_row(hidden), device=device))

    def rows(self, start: int, stop: int) -> HeadInput:
        return HeadInput(self.values[start:stop], self.squares[start:stop])


@dataclass(frozen=True)
class PreviousFeatures:
    """The features of the positions before R rows: for row r, row `rows[r]` of `features`."""

    features: torch.Tensor  # [F, 2 * hidden]; of drafted nodes [F, hidden]: the inputs of the exit's head instead
    rows: torch.Tensor | None  # [R] int64; None: row r is row r of `features`
    squares: torch.Tensor | None = None  # [F, T], `HeadInput.squares`; None: `features` are normed


class FusedExit:
    """The passes of an exit over rows of a decoder."""

    def __init__(self, decoder: FusedDecoder, exit: Exit) -> None:
        self.decoder, self.exit = decoder, exit

    def verify(
        self,
        states: Residual,
        middle: Residual,
        nodes: Nodes,
        features: torch.Tensor,
        last: Residual | None = None,
        unfilled: SlotUnfilled | None = None,
    ) -> None:
        """Runs the states after N layers through the rest of the model and writes the features [R, 2 * hidden].

        `middle` is the buffer for the states up to the feature layer, `last` for the states after it. Without `last`,
        `middle` serves for both, which saves memory and costs one launch. With `unfilled` also saves there the states
        after N layers and the features that `features` held before.
        """
        decoder, hidden, layers = self.decoder, states.states.shape[1], self.decoder.model.config.num_layers
        at_middle = decoder.run(range(self.exit.layer, self.exit.feature_layer), states, middle, nodes)
        rest = range(self.exit.feature_layer, layers)
        if last is None:
            decoder.rms_norm(at_middle.states, None, features[:, hidden:])
            decoder.final_norm(decoder.run(rest, at_middle, middle, nodes), features[:, :hidden])
        else:
            at_last = decoder.run(rest, at_middle, last, nodes)
            kept = None if unfilled is None else states.states
            decoder.final_norm(at_last, features, at_middle, hidden=kept, unfilled=unfilled)

    def fill_metadata(self, nodes: Nodes, newest_tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Fills the metadata of rows whose states after N layers are given: positions, cache slots and rotations. Only
        the first `counts` [B] rows of each sequence get a cache slot; the others write no keys and values. The
        embeddings of `newest_tokens`, which the kernel computes too, are not used."""
        decoder, model = self.decoder, self.decoder.model
        unused = self.block_residual(len(nodes.metadata.tokens))
        embed_rope(
            nodes.metadata, unused.states, decoder.next_norm(model.layers[0].attention_norm, unused),
            model.embedding.weight, model.embedding_scale, decoder.contexts.lengths, decoder.contexts.page_table,
            nodes.depths, decoder.inv_freq, decoder.rope_scaling, 0, given_tokens=newest_tokens, counts=counts,
        )  # fmt: skip

    def fill(self, states: torch.Tensor, previous: PreviousFeatures, nodes: Nodes) -> None:
        """Writes the block's keys and values of all rows from the states after N layers [R, hidden]."""
        block = self.exit.block
        assert block is not None
        source = self._block_input(block, states, previous)
        spec, cache_layer = self.decoder.model.config.layers[self.exit.layer], self.decoder.cache.exit_layer_index
        self.decoder.write_kv(block.layer, spec, cache_layer, source, nodes, None)

    def run_block(
        self, states: torch.Tensor, previous: PreviousFeatures | None, nodes: Nodes, head_input: HeadInput
    ) -> torch.Tensor:
        """Runs the exit's block over the states after N layers [R, hidden]; writes `head_input` and the block's keys
        and values. Returns the states [R, hidden] before the exit's norm, in scratch that the next call overwrites. An
        exit without a block norms the given states and returns them."""
        exit, block = self.exit, self.exit.block
        assert exit.norm is not None
        if block is None:
            self.decoder.rms_norm(states, exit.norm, head_input.values)
            return states
        assert previous is not None
        residual, out = self.block_residual(len(states)), self._scratch("exit out", len(states))
        source = self._block_input(block, states, previous)
        spec, cache_layer = self.decoder.model.config.layers[exit.layer], self.decoder.cache.exit_layer_index
        self.decoder.run_layer(block.layer, spec, cache_layer, source, residual, nodes, None)
        next_norm = NextNorm(exit.norm, self.decoder.model.config.norm_offset, head_input.squares, head_input.values)
        linear(
            residual.states, block.affine_weight, out, bias=block.affine_bias, residual=residual.states,
            next_norm=next_norm,
        )  # fmt: skip
        return out

    def rank(
        self,
        head: DraftHead | None,
        head_input: HeadInput,
        width: int,
        noise: Noise | None,
        processing: Processing | None,
        masks: Masks | None = None,
    ) -> Ranking:
        """Scores the draft tokens after each row. Returns a ranking of the best `width` of them per row, in scratch
        that the next call overwrites."""
        model, scratch = self.decoder.model, self.decoder.scratch
        tokens = None if head is None else head.tokens
        columns = model.config.vocab_size if tokens is None else len(tokens)
        scores = scratch.take_like(Scores.empty(len(head_input.values), columns, width, "meta"))
        lm_head_scores(
            head_input.values, model.head.weight, scores, token_ids=tokens, gather=tokens is not None,
            count=None if head is None else head.count, norm=self._norm(head_input.squares),
            softcap=model.config.logit_softcap, noise=noise, processing=processing, masks=masks,
        )  # fmt: skip
        return Ranking(scores, width, tokens)

    def _block_input(self, block: ExitBlock, states: torch.Tensor, previous: PreviousFeatures) -> Residual:
        """Returns the block's input: states after N layers plus the projected features of the previous positions."""
        residual, norm = self.block_residual(len(states)), block.layer.attention_norm
        columns = block.feature_weight[:, : previous.features.shape[1]]
        next_norm = self.decoder.next_norm(norm, residual)
        linear(
            previous.features, columns, residual.states, norm=self._norm(previous.squares), residual=states,
            next_norm=next_norm, gather=previous.rows,
        )  # fmt: skip
        return residual

    def _norm(self, squares: torch.Tensor | None) -> Norm | None:
        """Returns the norm that scaled inputs of the head still need; None for normed ones (no squares or no block)."""
        if squares is None or self.exit.block is None:
            return None
        return Norm(self.decoder.model.config.norm_eps, squares)

    def head_input(self, rows: int) -> HeadInput:
        """Returns a head input in scratch, which the next call overwrites."""
        return HeadInput(self._scratch("head input", rows), self._squares("head input", rows))

    def block_residual(self, rows: int) -> Residual:
        """Returns the residual stream of the exit block, in scratch that other passes overwrite between the block's."""
        return self.scratch_residual("exit block", rows)

    def scratch_residual(self, name: str, rows: int) -> Residual:
        states, scaled = (self._scratch(f"{name} {part}", rows) for part in ("states", "scaled"))
        return Residual(states, self._squares(name, rows), scaled)

    def _squares(self, name: str, rows: int) -> torch.Tensor:
        width = squares_per_row(self.decoder.model.config.hidden_size)
        return self.decoder.scratch.take(f"{name} squares", rows, width, dtype=torch.float32)

    def _scratch(self, name: str, rows: int) -> torch.Tensor:
        model = self.decoder.model
        return self.decoder.scratch.take(name, rows, model.config.hidden_size, dtype=model.dtype)


def feature_buffer(model: Decoder, rows: int) -> torch.Tensor:
    """Returns zeros for the features of `rows` positions, [rows, 2 * hidden]."""
    return torch.zeros(rows, FEATURE_STATES * model.config.hidden_size, dtype=model.dtype, device=model.device)


def prompt_end_buffer(model: Decoder, prompts: int) -> torch.Tensor:
    """Returns zeros for the states by which the exit is scored on prompts, [PROMPT_END, prompts, 4 * hidden]: at each
    prompt's last positions the state after N layers, the feature of the previous position, and the model's normed final
    state."""
    width = (2 + FEATURE_STATES) * model.config.hidden_size
    return torch.zeros(PROMPT_END, prompts, width, dtype=model.dtype, device=model.device)
