"""Fills the exit block's KV for plainly decoded tokens, many at a time, and scores the exit's drafts at some of them.

Plain steps do not run the exit: they save the states that the exit reads, and their positions stay *unfilled*. One pass
over all slots then fills the exit's KV at the unfilled positions and, to score the exit, drafts one token after each of
the oldest ones. The host compares the drafted tokens with the decoded ones; the governor reads the scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from selfspec.backends.cuda.decoder import FusedDecoder, Nodes, Tree
from selfspec.backends.cuda.exit import FusedExit, PreviousFeatures, SlotExit
from selfspec.backends.cuda.readback import Readback, Readbacks
from selfspec.backends.cuda.slots import Slots, StepOptions
from selfspec.backends.cuda.step_draft import SlotSampling
from selfspec.kernels.final_norm import unfilled_capacity
from selfspec.kernels.topk import topk_tokens
from selfspec.sequence import Sequence
from selfspec.speculation.plan import NONE

_MIN_POSITIONS = 4  # positions of each sequence that a pass scores, at least
_SCORED_ROWS = 64  # rows that a pass scores if _MIN_POSITIONS allows: a pass over 64 takes about as long as over 16


def scored_positions(slots: int) -> int:
    """Returns how many of each sequence's unfilled positions, the oldest ones, a pass over `slots` slots scores."""
    return min(unfilled_capacity(slots), max(_MIN_POSITIONS, _SCORED_ROWS // slots))


class ExitFill:
    """The pass over the unfilled positions of B slots: a chain per slot, from its first unfilled position."""

    def __init__(
        self, decoder: FusedDecoder, slots: Slots, slot_exit: SlotExit, options: StepOptions, scores: bool
    ) -> None:
        model, self.slots, self.slot_exit = decoder.model, slots, slot_exit
        self.count, self.page_table = slots.count, slots.page_table
        self.lengths = torch.zeros_like(slots.lengths)  # positions whose exit KV is filled
        self.decoder = decoder.with_contexts(self)
        self.nodes = Nodes.chain(model, slot_exit.unfilled.capacity, slots.count)
        # Drafts are scored without logits processing, which would need the token counts at each position.
        self.sampling = SlotSampling(slots, replace(options, processes=False), Tree(NONE, slots.count, model.device))
        scored = scored_positions(slots.count) if scores else 0
        self.scored = self.nodes.first(scored)
        # The best draft token after each scored position, position-major.
        self.report = torch.zeros(scored * slots.count, 1, dtype=torch.int32, device=model.device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.lengths, self.report, *vars(self.nodes.metadata).values()]

    def launch(self) -> None:
        slot_exit, unfilled = self.slot_exit, self.slot_exit.unfilled
        exit = FusedExit(self.decoder, slot_exit.exit)
        torch.sub(self.slots.lengths, unfilled.counts, out=self.lengths)
        self.lengths.clamp_(min=0)  # idle slots have length 0 but count plain steps
        exit.fill_metadata(self.nodes, self.slots.newest_tokens, unfilled.counts)
        rows = len(self.report)
        if rows < len(unfilled.hidden) and slot_exit.exit.block is not None:
            exit.fill(unfilled.hidden, PreviousFeatures(unfilled.previous, None), self.nodes)
        if rows:  # also fills the exit's KV of the positions that it scores
            head_input, previous = exit.head_input(rows), PreviousFeatures(unfilled.previous[:rows], None)
            exit.run_block(unfilled.hidden[:rows], previous, self.scored, head_input)
            noise = self.sampling.noise(self.scored.metadata)
            ranking = exit.rank(slot_exit.head, head_input, 1, noise, None)
            topk_tokens(ranking.scores, self.report, token_ids=ranking.token_ids)
        unfilled.counts.zero_()


@dataclass(frozen=True)
class _ScoringPass:
    """A launched pass whose scores have not been read, and the positions that it scores."""

    sequences: list[Sequence]
    slots: list[int]  # of the sequences
    counts: list[int]  # of each sequence, the number of unfilled positions
    ends: list[int]  # of each sequence, the number of tokens up to the one after its newest unfilled position
    size: int  # slots of the pass
    readback: Readback

    @property
    def is_comparable(self) -> bool:
        """Whether both the drafts and the decoded tokens that they are compared with have arrived on the host."""
        sequences = zip(self.sequences, self.ends, strict=True)
        arrived = (sequence.is_finished or len(sequence.tokens) >= end for sequence, end in sequences)
        return self.readback.is_done and all(arrived)

    def scores(self, drafts: list[list[int]]) -> list[tuple[Sequence, list[bool]]]:
        """Returns, for sequences that have not ended, whether the draft at each scored position is the decoded token.
        `drafts`: the pass's report, [scored positions * slots, 1]."""
        scores = []
        for sequence, slot, count, end in zip(self.sequences, self.slots, self.counts, self.ends, strict=True):
            positions = min(count, scored_positions(self.size))
            tokens = sequence.tokens[end - count : end - count + positions]
            drafted = drafts[slot :: self.size][:positions]
            if positions and not sequence.is_finished:
                right = [token == draft for token, (draft,) in zip(tokens, drafted, strict=True)]
                scores.append((sequence, right))
        return scores


class ExitScoresInFlight:
    """The passes whose scores have not been read."""

    def __init__(self, readbacks: Readbacks) -> None:
        self._readbacks = readbacks
        self._in_flight: list[_ScoringPass] = []

    def send(
        self, fill: ExitFill, sequences: list[Sequence], slots: list[int], counts: list[int], unread: list[Sequence]
    ) -> None:
        """Launches the copy of a pass's report to the host. `counts`: numbers of the sequences' unfilled positions.
        `unread`: the sequences of a plain step that was launched before the pass and has not been read."""
        readback = self._readbacks.take(fill.report)
        readback.send(fill.report)
        ends = [len(sequence.tokens) + (sequence in unread) for sequence in sequences]
        self._in_flight.append(_ScoringPass(sequences, slots, counts, ends, fill.count, readback))

    def read(self) -> list[tuple[Sequence, list[bool]]]:
        """Returns the scores that have arrived since the last call, in the order of their passes."""
        arrived: list[tuple[Sequence, list[bool]]] = []
        while self._in_flight and self._in_flight[0].is_comparable:
            scored = self._in_flight.pop(0)
            arrived += scored.scores(scored.readback.read())
            self._readbacks.give_back(scored.readback)
        return arrived
