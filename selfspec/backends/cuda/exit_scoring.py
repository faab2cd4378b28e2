"""Fills the exit block's KV for plainly decoded tokens, many at a time, and scores the exit's drafts at some of them.

Plain steps keep the states that the exit would read. One pass over all slots fills the exit's cache from them and, if
asked to, drafts one token at the oldest of these positions.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from selfspec.backends.cuda.decoder import FusedDecoder, Nodes, Scratch, Tree
from selfspec.backends.cuda.exit import Drafter, FusedExit, Past
from selfspec.backends.cuda.slots import Features, Slots
from selfspec.backends.cuda.step import Drawing
from selfspec.cache.kv_cache import Cache
from selfspec.kernels.final_norm import unfilled_capacity
from selfspec.kernels.topk import topk_tokens
from selfspec.models.decoder import Decoder
from selfspec.speculation.plan import NONE

OFFERED = 1  # draft tokens that are scored for each position: more would take the scores of the whole head
_FEWEST, _ENOUGH = 4, 64  # positions of a sequence, and rows of all sequences, that are scored at once


def scored_places(slots: int) -> int:
    """Positions of each sequence that are scored, the oldest ones: of many sequences a few each tell enough."""
    return min(unfilled_capacity(slots), max(_FEWEST, _ENOUGH // slots))


class ExitFill:
    """A pass over the unfilled positions of all slots: a chain for each that begins where the exit's cache ends."""

    def __init__(
        self,
        model: Decoder,
        cache: Cache,
        scratch: Scratch,
        slots: Slots,
        reach: int,
        drafter: Drafter,
        features: Features,
        scores: bool,
    ) -> None:
        self.model, self.slots, self.drafter = model, slots, drafter
        self.count, self.page_table = slots.count, slots.page_table
        self.lengths = torch.zeros_like(slots.lengths)  # positions that the exit's cache has
        self.fused = FusedDecoder(model, cache, scratch, self, reach)
        self.nodes = Nodes.chain(model, drafter.waiting.capacity, slots.count)
        # Processing would need each position's own counts: drafts are scored without it.
        self.drawing = Drawing(slots, replace(features, processes=False), Tree(NONE, slots.count, model.device))
        scored = scored_places(slots.count) if scores else 0
        self.scored = self.nodes.first(scored)
        # The best draft token after each place that is scored.
        self.report = torch.zeros(scored * slots.count, OFFERED, dtype=torch.int32, device=model.device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.lengths, self.report, *vars(self.nodes.places).values()]

    def launch(self) -> None:
        drafter, waiting = self.drafter, self.drafter.waiting
        exit, past = FusedExit(self.fused, drafter.exit), Past(waiting.previous, None)
        torch.sub(self.slots.lengths, waiting.counts, out=self.lengths)
        self.lengths.clamp_(min=0)  # idle slots count too, and have no length
        exit.stand(self.nodes, self.slots.pending, waiting.counts)
        rows = len(self.report)
        if rows < len(waiting.hidden) and drafter.exit.block is not None:
            exit.fill(waiting.hidden, past, self.nodes)
        if rows:  # whose keys and values are filled, or filled again
            reads = exit.reads(rows)
            exit.read(waiting.hidden[:rows], Past(waiting.previous[:rows], None), self.scored, reads)
            ranking = exit.rank(drafter.head, reads, OFFERED, self.drawing.noise(self.scored.places), None)
            topk_tokens(ranking.scores, self.report, token_ids=ranking.token_ids)
        waiting.counts.zero_()
