"""The plans worth thinking of: for each kind of text the best one by what cycles are guessed to cost.

Made once for a domain and temperature, from acceptance and costs alone; which of its plans a cycle uses is the
governor's business.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np

from selfspec.governor.acceptance import EXPONENTS, STRANGE, Acceptance
from selfspec.governor.costs import Guess
from selfspec.speculation.plan import DEEPEST_PLAN, MAX_NODES, NONE, Plan

_WIDEST = 24  # ranks of the plans that are considered
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
        self._nodes: dict[tuple[int, int, int], Sequence[Node]] = {}  # by kind, depth and width
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
        for depth in range(1, DEEPEST_PLAN + 1):
            nodes, expected = self._likeliest(kind, depth, 1 if chains else self.widest), 1.0
            for count, (chance, _) in enumerate(nodes, start=1):
                expected += chance
                cost = guess(depth, count)
                if cost <= longest and expected / cost > speed:
                    best, speed = nodes[:count], expected / cost
        return Plan.from_paths([path for _, path in best]) if best else NONE

    def _likeliest(self, kind: int, depth: int, width: int) -> Sequence[Node]:
        """The nodes most likely to be right; found once for all costs."""
        key = kind, depth, width
        if key not in self._nodes:
            chances = [[self.acceptance.chance(kind, above, rank) for rank in range(width)] for above in range(depth)]
            self._nodes[key] = likeliest(chances)
        return self._nodes[key]


def likeliest(chances: Sequence[Sequence[float]]) -> list[Node]:
    """Of all nodes whose token has these chances [depth][rank], the MAX_NODES that are most likely to be right, in that
    order, without those that cannot be. No node comes before its parent, nor before a likelier sibling: the next one is
    always the best child of a node taken already, or the next best sibling of one."""
    ranks = [sorted(range(len(level)), key=level.__getitem__, reverse=True) for level in chances]
    found: list[Node] = []
    nearest = [_Candidate.of((1.0, ()), 0, chances, ranks)]
    while nearest and len(found) < MAX_NODES:
        taken = heappop(nearest)
        if not taken.unlikeliness:
            break
        found.append(taken.node)
        above = len(taken.parent[1])
        if taken.place + 1 < len(ranks[above]):
            heappush(nearest, _Candidate.of(taken.parent, taken.place + 1, chances, ranks))
        if above + 1 < len(ranks):
            heappush(nearest, _Candidate.of(taken.node, 0, chances, ranks))
    return found


class _Candidate(NamedTuple):
    """A node that may be the next one; the likeliest, the shallowest, the first in order is the least."""

    unlikeliness: float
    depth: int
    path: tuple[int, ...]
    place: int  # among its siblings, the likeliest first
    parent: Node

    @classmethod
    def of(
        cls, parent: Node, place: int, chances: Sequence[Sequence[float]], ranks: Sequence[Sequence[int]]
    ) -> _Candidate:
        chance, path = parent
        rank = ranks[len(path)][place]
        return cls(-chance * chances[len(path)][rank], len(path) + 1, (*path, rank), place, parent)

    @property
    def node(self) -> Node:
        return -self.unlikeliness, self.path
