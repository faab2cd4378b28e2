"""Estimates on the host how often the tokens of a copied branch would be right in a sequence.

Follows one earlier occurrence through the text: a token that continues as there is a hit; after a miss the latest
occurrence of the missed token is followed. The device compares up to 4 tokens (`kernels/copy_draft.py`), so it finds
slightly more. Every token counts, whatever was drafted, so nothing has to be tried to learn that copying would pay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from selfspec.governor.acceptance import MEMORY

MOST_COPIED = 15  # nodes of a copied branch at most: with the root 16 rows, one tile of the matrix products
_LEVELS = 16  # levels between a share of 0 and 1
_shares = np.arange(_LEVELS + 1)[:, None] / _LEVELS
# [level, MOST_COPIED]: the chance that a copied branch is right down to each depth, where each of its tokens is right
# with the share of the level.
REACH = _shares ** np.arange(1, MOST_COPIED + 1)


class Copying:
    """The share of a sequence's tokens that followed an earlier occurrence of the tokens before them."""

    def __init__(self, share: float = 0.0) -> None:
        self.share = share
        self._latest: dict[int, int] = {}  # the latest position of every token
        self._count = 0  # tokens that were read
        self._next = -1  # position of the token that is followed; -1: there is none
        self._forced: set[int] = set()  # positions of tokens that a grammar forces, which copied nodes carry too

    @property
    def level(self) -> int:
        """Index into REACH."""
        return round(_LEVELS * self.share)

    def add_forced(self, first: int, count: int) -> None:
        """A grammar forces `count` tokens from position `first` on: they are hits."""
        self._forced.update(range(first, first + count))

    def read(self, tokens: Sequence[int], prompt: int) -> int:
        """Reads the tokens since the last call, at first also the `prompt` ones, none of which is a hit or miss.
        Returns the level."""
        latest, following, share = self._latest, self._next, self.share
        if not self._count:
            newest = prompt - 1
            latest.update(zip(tokens[:newest], range(newest), strict=True))
            following, self._count = latest.get(tokens[newest], -2) + 1, prompt
            latest[tokens[newest]] = newest
        for position in range(self._count, len(tokens)):
            token = tokens[position]
            follows = following >= 0 and tokens[following] == token
            share += ((follows or position in self._forced) - share) / MEMORY
            following = following + 1 if follows else latest.get(token, -2) + 1
            latest[token] = position
        self._count, self._next, self.share = len(tokens), following, share
        return self.level
