"""Estimates on the host how often copied nodes would be accepted in a sequence.

Compares each new token with the token at a *followed* position earlier in the text. If they are equal, that is a hit,
and the next position is followed; if not, the position after the latest earlier occurrence of the new token. The device
looks for the newest 4 tokens (`kernels/copy_draft.py`), so it finds slightly more hits. Every token counts, whatever
was drafted, so no probe is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from selfspec.governor.acceptance import MEMORY

MOST_COPIED = 15  # copied nodes of a plan: with the root 16 rows, one tile of the matrix products
_LEVELS = 16  # levels between a share of 0 and 1
_shares = np.arange(_LEVELS + 1)[:, None] / _LEVELS
# [level, MOST_COPIED]: the chance that copied nodes are accepted down to each depth, if the level's share of tokens are
# hits.
REACH = _shares ** np.arange(1, MOST_COPIED + 1)


class Copying:
    """The share of hits among a sequence's tokens, as an exponential average."""

    def __init__(self, share: float = 0.0) -> None:
        self.share = share
        self._latest: dict[int, int] = {}  # the latest position of every token
        self._count = 0  # tokens that were read
        self._followed = -1  # position that the next token is compared with; -1: there is none
        self._forced: set[int] = set()  # positions of tokens that a grammar forced; copied nodes carry such tokens

    @property
    def level(self) -> int:
        """Index into REACH."""
        return round(_LEVELS * self.share)

    def add_forced(self, first: int, count: int) -> None:
        """Counts `count` tokens from position `first` on as hits: the grammar forces them."""
        self._forced.update(range(first, first + count))

    def read(self, tokens: Sequence[int], prompt_length: int) -> int:
        """Reads the tokens since the last call and returns the level. The first call also reads the first
        `prompt_length` tokens, which are neither hits nor misses."""
        latest, followed, share = self._latest, self._followed, self.share
        if not self._count:
            self._count = prompt_length - 1
            latest.update(zip(tokens[: self._count], range(self._count), strict=True))
        for position in range(self._count, len(tokens)):
            token = tokens[position]
            is_hit = followed >= 0 and tokens[followed] == token
            if position >= prompt_length:
                share += ((is_hit or position in self._forced) - share) / MEMORY
            followed = followed + 1 if is_hit else latest.get(token, -2) + 1
            latest[token] = position
        self._count, self._followed, self.share = len(tokens), followed, share
        return self.level
