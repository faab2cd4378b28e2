"""Rows that are left when others have ended move up to the seats of a smaller batch, in one launch: where they stand is
known to the device alone while a cycle is in flight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfspec.backends.cuda.decoder import Seats, on_its_way
from selfspec.backends.cuda.exit import Drafter


class Move:
    """From some seats to others, for whoever drafts there."""

    def __init__(
        self, left: Seats, right: Seats, before: Drafter | None, after: Drafter | None, idle_page: int
    ) -> None:
        self.left, self.right, self.before, self.after, self.idle_page = left, right, before, after, idle_page
        device = right.page_table.device
        # Of each seat to be taken: who comes, by the seat that is left, and whether anybody does.
        self.who = torch.zeros(2, right.count, dtype=torch.int64, device=device)

    def load(self, places: Sequence[int]) -> None:
        """Who sat in these places takes the first seats; the others will be nobody's."""
        empty = [0] * (self.right.count - len(places))
        who = torch.tensor([[*places, *empty], [1] * len(places) + empty])
        self.who.copy_(on_its_way(who, self.who.device), non_blocking=True)

    def launch(self) -> None:
        """With what the exit recalls of them and the tokens it drafts from."""
        places, present = self.who
        self.right.take(self.left, places, present, self.idle_page)
        if self.before is None or self.after is None:
            return
        if self.before.known is not None and self.after.known is not None:
            self.after.known[: len(places)].copy_(self.before.known[places])
        if self.before.head is not None and self.after.head is not None:
            self.after.head.tokens.copy_(self.before.head.tokens)
            self.after.head.count.copy_(self.before.head.count)
