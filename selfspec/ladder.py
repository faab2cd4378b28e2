"""The plans worth thinking of: for each kind of text the best one by what cycles are guessed to cost.

Made once for a domain and temperature, from acceptance and costs alone; which of its plans a cycle uses is the
governor's business.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

import numpy as np

from selfspec.acceptance import EXPONENTS, STRANGE, Acceptance
from selfspec.costs import Guess
from selfspec.tree import MAX_NODES, NONE, Plan

DEEPEST, _WIDEST = 5, 24  # of the plans that are thought of
_SAFELY = 0.95  # of the longest cycle: how long plans are that will hardly turn out to be too long

Node = tuple[float, tuple[int, ...]]  # the chance that it is right, and the ranks from the root down to it


class Ladder:
    """The plans for each batch."""

    def __init__(
        self,
        acceptance: Acceptance,
        guesses: dict[int, Guess],  # by the largest batch each is for
        exit_layer: int,
        max_tree_batch: int,  # above this, chains only
        widest: int = MAX_NODES,  # ranks that the exit can offer
        longest_cycle: float = inf,  # plain steps that a cycle may cost, as guessed
    ) -> None:
        self.acceptance, self.guesses, self.exit_layer = acceptance, guesses, exit_layer
        self.max_tree_batch, self.widest, self.longest_cycle = max_tree_batch, min(widest, _WIDEST), longest_cycle
        self._sizes = sorted(guesses)
        self._plans: dict[tuple[int, bool], list[Plan]] = {}
        self._tokens: dict[tuple[int, bool, int], np.ndarray] = {}

    def guess(self, batch: int) -> Guess:
        return self.guesses[self._size(batch)]

    def plans(self, batch: int) -> list[Plan]:
        """Smallest first. What cycles really take shows later: beside each plan that is just short enough, as guessed,
        there is one that surely is. Small ones, which pay where little else does, are there whatever they are guessed
        to cost: only measuring can tell that even their cycles are too long. None is shorter than a plain step."""
        key = self._size(batch), batch > self.max_tree_batch
        if key not in self._plans:
            chains, guess = key[1], self.guesses[key[0]]
            kinds, limits = range(STRANGE - 1, len(EXPONENTS)), (self.longest_cycle, _SAFELY * self.longest_cycle)
            plans = [self._best(kind, guess, chains, limit) for kind in kinds for limit in limits]
            if self.longest_cycle >= 1:
                plans += [Plan.tree((1,)), Plan.tree((1, 1)), Plan.tree((1 if chains else min(4, self.widest),))]
            self._plans[key] = sorted({plan for plan in plans if len(plan)}, key=lambda plan: (len(plan), str(plan)))
        return self._plans[key]

    def tokens(self, batch: int, most: int) -> np.ndarray:
        """What the plans for a batch bring to texts that get `most` tokens more at most: [kinds, plans]."""
        key = self._size(batch), batch > self.max_tree_batch, most
        if key not in self._tokens:
            cut = [plan.truncated(most - 1) for plan in self.plans(batch)]
            self._tokens[key] = np.array([self.acceptance.tokens(plan) for plan in cut]).reshape(-1, len(EXPONENTS)).T
        return self._tokens[key]

    @property
    def all_plans(self) -> list[Plan]:
        """For any batch."""
        return [plan for size in (1, *self.guesses) for plan in self.plans(size)]

    def _size(self, batch: int) -> int:
        return self._sizes[min(bisect_left(self._sizes, batch), len(self._sizes) - 1)]

    def _best(self, kind: int, guess: Guess, chains: bool, longest: float) -> Plan:
        """The plan with most expected tokens for its cost, of those whose cycle is not too long: nodes are taken in
        the order of their chances."""
        best: Sequence[Node] = ()
        speed = 1.0
        for depth in range(1, DEEPEST + 1):
            nodes, expected = self._likeliest(kind, depth, 1 if chains else self.widest), 1.0
            for count, (chance, _) in enumerate(nodes, start=1):
                expected += chance
                cost = guess(depth, count)
                if cost <= longest and expected / cost > speed:
                    best, speed = nodes[:count], expected / cost
        return Plan.from_paths([path for _, path in best]) if best else NONE

    def _likeliest(self, kind: int, depth: int, width: int) -> list[Node]:
        """The nodes most likely to be right; a node never comes before its parent."""
        level: list[Node] = [(1.0, ())]
        found: list[Node] = []
        for above in range(depth):
            chances = [self.acceptance.chance(kind, above, rank) for rank in range(width)]
            children = [(own * chance, (*path, rank)) for own, path in level for rank, chance in enumerate(chances)]
            level = sorted(children, key=_likelier)[:MAX_NODES]
            found += level
        return sorted(found, key=_likelier)[:MAX_NODES]


def _likelier(node: Node) -> tuple[float, int, tuple[int, ...]]:
    chance, path = node
    return -chance, len(path), path
