"""Estimates on the host how many tokens a copied branch would bring to a sequence in each step.

Follows one earlier occurrence through the text: a token that continues as there is a hit; after a miss the latest
occurrence of the missed token is followed. The device compares up to 4 tokens (`kernels/copy_draft.py`), so it finds
slightly more. Every token counts, whatever was drafted, so nothing has to be tried to learn that copying would pay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST_COPIED = 15  # nodes of a copied branch at most: with the root 16 rows, one tile of the matrix products
_MEMORY = 16  # tokens after which a hit or miss counts 1/e
_STEPS = 16  # levels between a share of 0 and 1
_PRIOR = 0.1  # share of hits that a text begins with: so low that copying starts only where a text repeats
_CONTINUES = 0.85  # chance that a branch is right at one more depth, where texts copy
# Share of the copied tokens at depths where the exit is wrong that are right: both are right where a text is easy. It
# was 0.4 to 1.0 on the demo model's own texts, the least where little is copied.
WITH_EXIT = 0.7

_depths = _CONTINUES ** np.arange(MOST_COPIED)
WEIGHTS = _depths / _depths.sum()  # [MOST_COPIED]: share of the copied tokens at each depth, from depth 1 on
_shares = np.arange(_STEPS) / _STEPS
# By level: tokens that MOST_COPIED copied nodes bring to a step: with a share s of hits, s / (1 - s) before a miss.
TOKENS = np.minimum(np.append(_shares / (1 - _shares), MOST_COPIED), MOST_COPIED)


class Copying:
    """The share of a sequence's tokens that followed an earlier occurrence of the tokens before them."""

    def __init__(self, share: float = _PRIOR) -> None:
        self.share = share
        self._latest: dict[int, int] = {}  # the latest position of every token
        self._count = 0  # tokens that were read
        self._next = -1  # position of the token that is followed; -1: there is none

    @property
    def level(self) -> int:
        """Index into TOKENS."""
        return round(_STEPS * self.share)

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
            if following >= 0 and tokens[following] == token:
                share += (1 - share) / _MEMORY
                following += 1
            else:
                share -= share / _MEMORY
                following = latest.get(token, -2) + 1
            latest[token] = position
        self._count, self._next, self.share = len(tokens), following, share
        return self.level
