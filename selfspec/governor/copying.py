"""Estimates on the host how often copied nodes would be accepted in a sequence.

Compares each token with the continuation of one earlier occurrence: equal is a hit; after a miss it follows the latest
occurrence of the missed token. The device compares up to 4 tokens (`kernels/copy_draft.py`), so it finds slightly more
hits. Every token counts, whatever was drafted, so no probe is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from selfspec.governor.acceptance import MEMORY

MOST_COPIED = 15  # copied nodes of a plan: with the root 16 rows, one tile of the matrix products
_LEVELS = 16  # levels between a share of 0 and 1
_shares = np.arange(_LEVELS + 1)[:, None] / _LEVELS
# [level, MOST_COPIED]: the chance that copied nodes are accepted down to each depth, if each is with the share of the
# level.
REACH = _shares ** np.arange(1, MOST_COPIED + 1)


class Copying:
    """The share of hits among a sequence's tokens, as an exponential average."""

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
        """Counts `count` tokens from position `first` on as hits: the grammar forces them."""
        self._forced.update(range(first, first + count))

    def read(self, tokens: Sequence[int], prompt: int) -> int:
        """Reads the tokens since the last call and returns the level. The first call also reads the `prompt` tokens,
        which are neither hits nor misses."""
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
