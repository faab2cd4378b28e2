"""The plans that the governor chooses from: for texts of several skills the one that the cost model makes fastest.

All domains and temperatures of an exit share the plans, so that few steps are captured; each domain has its own
expected lengths and costs of them. Made once, from the acceptance model and the cost model alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from heapq import heappop, heappush
from math import inf

import numpy as np

from selfspec.governor.acceptance import LEVELS, Acceptance, Skill
from selfspec.governor.costs import CostModel
from selfspec.speculation.plan import DEEPEST_PLAN, MAX_NODES, Plan

_SKILLS = tuple(2 ** (half / 2) for half in range(-6, 3))  # of texts that a tree is made for: 1/8 to 2
_WIDEST = 24  # ranks that plans draft from: the profile's shares of later ranks are hardly more than 0

Node = tuple[float, tuple[int, ...]]  # the chance that it is right, and the ranks from the root down to it


@dataclass(frozen=True, eq=False)
class PlanTable:
    """The plans for some batches, the smallest first."""

    plans: tuple[Plan, ...]
    costs: tuple[float, ...]  # plain steps that a step of each takes, by the cost model
    lengths: np.ndarray  # [levels, plans] expected accepted lengths


class SharedPlans:
    """The plans for every batch, made for the mean chances of all domains."""

    def __init__(
        self,
        acceptance: Acceptance,
        costs: dict[int, CostModel],  # by the largest batch each is for
        max_tree_batch: int,  # larger batches draft chains only
        widest: int = MAX_NODES,  # ranks that the exit can offer
        max_step: float = inf,  # plain steps that a step may take
    ) -> None:
        self._acceptance, self._costs, self._max_tree_batch = acceptance, costs, max_tree_batch
        self._widest, self._max_step = min(widest, _WIDEST), max_step
        self.plans = cache(self._plans)

    def _plans(self, size: int, chains: bool) -> tuple[Plan, ...]:
        """The fastest plan for each skill and smaller ones, which pay where larger ones take longer than modelled: all
        shorter chains, or two small trees. The smallest first. `size` is one of the cost models' batches."""
        if self._max_step < 1:
            return ()
        width, cost = 1 if chains else self._widest, self._costs[size]
        plans = {plan for skill in _SKILLS if (plan := self._fastest(skill, width, cost)) is not None}
        if width == 1:
            plans |= {Plan.tree((1,) * depth) for depth in range(1, max((plan.depth for plan in plans), default=1))}
        return tuple(
            sorted(plans | {Plan.tree((1,)), Plan.tree((min(4, width),))}, key=lambda plan: (len(plan), str(plan)))
        )

    def for_batch(self, batch: int) -> tuple[Plan, ...]:
        """The plans of the smallest size with a cost model that the batch fits in."""
        return self.plans(size_of(batch, self._costs), batch > self._max_tree_batch)

    def _fastest(self, skill: float, width: int, cost: CostModel) -> Plan | None:
        """The plan with most expected tokens per time, of those that take at most `max_step`; None: plain decoding.
        Nodes are taken in the order of their chances, for each depth that a plan may have."""
        level, best, speed = Skill(skill).level, None, 1.0
        for depth in range(1, DEEPEST_PLAN + 1):
            chances = [[self._acceptance.chance(at, rank, level) for rank in range(width)] for at in range(depth)]
            nodes, length = likeliest(chances), 1.0
            for count, (chance, _) in enumerate(nodes, start=1):
                length += chance
                taken = cost(depth, count)
                if taken <= self._max_step and length / taken > speed:
                    best, speed = nodes[:count], length / taken
        return None if best is None else Plan.from_paths([path for _, path in best])


class PlanCandidates:
    """The plans, and what is expected of them in one domain at one temperature."""

    def __init__(
        self,
        acceptance: Acceptance,
        costs: dict[int, CostModel],  # by the largest batch each is for
        shared: SharedPlans,
        score_cost: float = 0.1,  # plain steps that scoring the exit takes
    ) -> None:
        self.acceptance, self.score_cost = acceptance, score_cost
        self._costs, self._shared = costs, shared
        self.cost, self.table = lru_cache(maxsize=256)(self._cost), cache(self._table)

    def _table(self, batch: int) -> PlanTable:
        """The plans for a batch."""
        plans, cost = self._shared.for_batch(batch), self._costs[size_of(batch, self._costs)]
        lengths = np.array([self.acceptance.lengths(plan) for plan in plans])
        costs = tuple(cost(plan.depth, len(plan)) for plan in plans)
        return PlanTable(plans, costs, lengths.reshape(-1, len(LEVELS)).T)

    def _cost(self, plan: Plan, batch: int) -> float:
        """Plain steps that a step of any plan takes, by the cost model."""
        return self._costs[size_of(batch, self._costs)](plan.depth, len(plan)) if len(plan) else 1.0

    @property
    def all_plans(self) -> list[Plan]:
        """For any batch."""
        return [plan for size in (1, *self._costs) for plan in self._shared.for_batch(size)]


def size_of(batch: int, costs: Iterable[int]) -> int:
    """The smallest size with a cost model that a batch fits in, or the largest."""
    return min((size for size in costs if batch <= size), default=max(costs))


def likeliest(chances: Sequence[Sequence[float]]) -> list[Node]:
    """Of all nodes whose token has these chances [depth][rank], the MAX_NODES that are most likely to be right, in that
    order, without those whose chance is 0. A node comes after its parent and after likelier siblings: the next one is
    always the best child of a taken node or the next best sibling of one."""
    ranks = [sorted(range(len(level)), key=level.__getitem__, reverse=True) for level in chances]
    found: list[Node] = []
    # Heap entries: chance negated, depth, path, place among the siblings, parent.
    open_nodes: list[tuple[float, int, tuple[int, ...], int, Node]] = []

    def add(parent: Node, place: int) -> None:
        chance, path = parent
        depth = len(path)
        if depth < len(ranks) and place < len(ranks[depth]):
            rank = ranks[depth][place]
            heappush(open_nodes, (-chance * chances[depth][rank], depth + 1, (*path, rank), place, parent))

    add((1.0, ()), 0)
    while open_nodes and len(found) < MAX_NODES:
        negated, _, path, place, parent = heappop(open_nodes)
        if not negated:
            break
        found.append((-negated, path))
        add(parent, place + 1)
        add(found[-1], 0)
    return found
