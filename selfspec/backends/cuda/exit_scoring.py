"""An exit in the shadow, on the device: `shadow` for seats, as kernels.

While nothing is drafted, plain cycles leave waiting what the exit did not see. One pass over all of it fills the exit's
cache and, if asked to, tells what would have been drafted at some of it. When that is done, and what it means, is
`device_session`'s business.
"""

from __future__ import annotations

import torch

from selfspec.backends.cuda.decoder import FusedDecoder, Nodes, Scratch, Seats
from selfspec.backends.cuda.exit import Drafter, FusedExit, Past
from selfspec.backends.cuda.step import Drawing
from selfspec.cache.kv_cache import Cache
from selfspec.kernels.final_norm import places_for
from selfspec.kernels.topk import top_merge
from selfspec.models.decoder import Decoder

OFFERED = 1  # best draft tokens that are looked at: more would take scores of all tokens, for every place
_FEWEST, _ENOUGH = 4, 64  # places of a text, and rows of all texts, that are scored at once


def scored_places(seats: int) -> int:
    """How many of the places that wait are scored, the oldest: of many texts a few of each tell enough."""
    return min(places_for(seats), max(_FEWEST, _ENOUGH // seats))


class Shadow:
    """A pass over what waits at all seats, after which nothing does. What is there of a text is a chain that begins
    where the exit's cache ends; places where nothing waits store nothing."""

    def __init__(
        self,
        model: Decoder,
        cache: Cache,
        scratch: Scratch,
        seats: Seats,
        reach: int,
        drafter: Drafter,
        drawing: Drawing,
        scores: bool,
    ) -> None:
        self.model, self.seats, self.drafter, self.drawing = model, seats, drafter, drawing
        self.count, self.page_table = seats.count, seats.page_table
        self.lengths = torch.zeros_like(seats.lengths)  # of the texts as far as the exit's cache knows them
        self.fused = FusedDecoder(model, cache, scratch, self, reach)
        self.nodes = Nodes.chain(model, drafter.waiting.places, seats.count)
        scored = scored_places(seats.count) if scores else 0
        self.scored = self.nodes.first(scored)
        # The best draft token after each place that is scored.
        self.report = torch.zeros(scored * seats.count, OFFERED, dtype=torch.int32, device=model.device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.lengths, self.report, *vars(self.nodes.places).values()]

    def launch(self) -> None:
        drafter, waiting = self.drafter, self.drafter.waiting
        exit, past = FusedExit(self.fused, drafter.exit), Past(waiting.previous, None)
        torch.sub(self.seats.lengths, waiting.counts, out=self.lengths)
        self.lengths.clamp_(min=0)  # seats that nobody sits on count too, and have no text
        exit.stand(self.nodes, self.seats.pending, waiting.counts)
        rows = len(self.report)
        if rows < len(waiting.hidden) and drafter.exit.block is not None:
            exit.fill(waiting.hidden, past, self.nodes)
        if rows:  # whose keys and values are filled, or filled again
            reads = exit.reads(rows)
            exit.read(waiting.hidden[:rows], Past(waiting.previous[:rows], None), self.scored, reads)
            noise = self.drawing.noise(self.seats, self.scored.places)
            ranking = exit.rank(drafter.head, reads, OFFERED, noise)
            top_merge(ranking.scores, self.report, rows=ranking.rows)
        waiting.counts.zero_()
