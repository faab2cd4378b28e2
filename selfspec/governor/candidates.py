"""The plans that the governor chooses from: for each of several skills, the fastest one by the cost model.

All domains and temperatures of an exit share the plans, so that few steps are captured; expected lengths and costs of
the plans differ by domain. They follow from the acceptance model and the cost model alone, and are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from heapq import nsmallest
from math import inf

import numpy as np

from selfspec.governor.acceptance import LEVELS, Acceptance, Skill
from selfspec.governor.copying import MOST_COPIED, REACH
from selfspec.governor.costs import CostModel
from selfspec.speculation.plan import DEEPEST_PLAN, MAX_NODES, NONE, Plan

_SKILLS = tuple(2 ** (half / 2) for half in range(-6, 3))  # for each of them the fastest tree is a candidate
_COPYING_SKILLS = (0.5, 1.0)  # the trees for these skills are candidates with copied nodes too
_COPIES = (7, MOST_COPIED)  # copied nodes of such a tree
_ONLY_COPIES = (3, MOST_COPIED)  # copied nodes of plans without the exit: 3 where every row costs, as on a CPU
_WIDEST = 24  # ranks that plans draft from: the profile's shares of later ranks are hardly more than 0

Node = tuple[float, tuple[int, ...]]  # the chance that it is accepted, and the ranks from the root down to it


@dataclass(frozen=True, eq=False)
class PlanTable:
    """The plans for one range of batch sizes, the smallest plan first."""

    plans: tuple[Plan, ...]
    costs: tuple[float, ...]  # of each plan, in plain steps, by the cost model
    lengths: np.ndarray  # [levels of skill, levels of copying, plans]: expected accepted lengths


class SharedPlans:
    """The plans for every batch size, chosen for one domain and temperature and used for all."""

    def __init__(
        self,
        acceptance: Acceptance | None,  # None: there is no exit, and plans have copied nodes only
        costs: dict[int, CostModel],  # by the largest batch that each is for
        max_tree_batch: int,  # larger batches draft chains: of the exit, or of copied nodes
        widest: int = MAX_NODES,  # ranks that the exit can offer
        max_step: float = inf,  # plain steps that a plan may take by the cost model
    ) -> None:
        self._acceptance, self._costs, self._max_tree_batch = acceptance, costs, max_tree_batch
        self._widest, self._max_step = min(widest, _WIDEST), max_step
        self.plans = cache(self._plans)

    def _plans(self, size: int, chains: bool) -> tuple[Plan, ...]:
        """The fastest plan for each skill; smaller plans, for devices on which large ones are slower than modelled: all
        shorter chains, or two small trees; without `chains` also trees with copied nodes; and copied nodes alone.
        Smallest first. `size` is one of the batch sizes that have a cost model."""
        plans = {NONE.with_copy(count) for count in _ONLY_COPIES}
        if self._acceptance is not None:
            width = 1 if chains else self._widest
            fastest = {skill: self._fastest(self._acceptance, skill, width, size) for skill in _SKILLS}
            plans |= {*fastest.values(), Plan.tree((1,)), Plan.tree((min(4, width),))}
            if chains:
                plans |= {plan.truncated(depth) for plan in fastest.values() for depth in range(1, plan.depth)}
            else:
                trees = [tree for skill in _COPYING_SKILLS if len(tree := fastest[skill])]
                plans |= {tree.with_copy(n) for tree in trees for n in _COPIES if len(tree) + n <= MAX_NODES}
        cost = self._costs[size]
        short = [plan for plan in plans if cost(plan.without_copy.depth, len(plan)) <= self._max_step]
        return tuple(sorted(filter(len, short), key=lambda plan: (len(plan), str(plan))))

    def for_batch(self, batch: int) -> tuple[Plan, ...]:
        """The plans for the smallest batch size with a cost model that holds this batch."""
        return self.plans(size_of(batch, self._costs), batch > self._max_tree_batch)

    def _fastest(self, acceptance: Acceptance, skill: float, width: int, size: int) -> Plan:
        """The fastest plan (expected accepted length over cost) among those that take at most `max_step` plain steps.
        For each depth, adds nodes in the order of their chances."""
        level, best, speed, cost = Skill(skill).level, list[Node](), 1.0, self._costs[size]
        chances = [[acceptance.chance(depth, rank, level) for rank in range(width)] for depth in range(DEEPEST_PLAN)]
        likely = likeliest(chances)
        for depth in range(1, DEEPEST_PLAN + 1):
            nodes, length = [node for node in likely if len(node[1]) <= depth][:MAX_NODES], 1.0
            for taken, (chance, _) in enumerate(nodes, start=1):
                length, steps = length + chance, cost(depth, taken)
                if steps <= self._max_step and length / steps > speed:
                    best, speed = nodes[:taken], length / steps
        return Plan.from_paths(path for _, path in best)


class PlanCandidates:
    """The plans, with their expected lengths and costs in one domain at one temperature."""

    def __init__(
        self,
        acceptance: Acceptance | None,  # None: there is no exit
        costs: dict[int, CostModel],  # by the largest batch that each is for
        shared: SharedPlans,
        score_cost: float = 0.1,  # plain steps that scoring the exit takes
    ) -> None:
        self.acceptance, self.score_cost = acceptance, score_cost
        self._costs, self._shared = costs, shared
        self.cost, self.table = lru_cache(maxsize=256)(self._cost), cache(self._table)

    def _table(self, batch: int) -> PlanTable:
        """The plans for a batch."""
        plans = self._shared.for_batch(batch)
        lengths = np.array([self._lengths(plan) for plan in plans])
        costs = tuple(self._cost(plan, batch) for plan in plans)
        return PlanTable(plans, costs, np.moveaxis(lengths.reshape(-1, len(LEVELS), len(REACH)), 0, 2))

    def _cost(self, plan: Plan, batch: int) -> float:
        """Plain steps that a step of any plan takes, by the cost model."""
        cost_model = self._costs[size_of(batch, self._costs)]
        return cost_model(plan.without_copy.depth, len(plan)) if len(plan) else 1.0

    def _lengths(self, plan: Plan) -> np.ndarray:
        """[levels of skill, levels of copying]: expected accepted lengths. A depth is reached by the exit's nodes or,
        independently, by the copied ones."""
        drafted, missed = plan.without_copy, np.ones((plan.copied, len(LEVELS)))
        reach = np.ones((1, len(LEVELS))) if self.acceptance is None else self.acceptance.reach(drafted)
        missed[: drafted.depth] -= reach[1 : plan.copied + 1]
        return reach.sum(0)[:, None] + missed.T @ REACH[:, : plan.copied].T

    @cached_property
    def plans(self) -> set[Plan]:
        """The plans for every batch size."""
        return {plan for size in (1, *self._costs) for plan in self._shared.for_batch(size)}


def size_of(batch: int, costs: Iterable[int]) -> int:
    """The smallest batch size with a cost model that holds this batch, or the largest."""
    return min((size for size in costs if batch <= size), default=max(costs))


def likeliest(chances: Sequence[Sequence[float]]) -> list[Node]:
    """Nodes by their chances to be accepted, highest first, without those whose chance is 0. For each depth they
    include the MAX_NODES best of all nodes up to it; there may be more than MAX_NODES in all. A token has the chance
    [depth][rank] after an accepted parent. A node comes after its parent and its likelier siblings."""
    level: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]  # chance negated, depth, path; first the root
    found = level[1:]
    for by_rank in chances:
        ranks = sorted(range(len(by_rank)), key=by_rank.__getitem__, reverse=True)
        # With the n-th best parent, the k-th best rank comes after n * k - 1 other nodes.
        children = (
            (negated * by_rank[rank], depth + 1, (*path, rank))
            for place, (negated, depth, path) in enumerate(level, start=1)
            for rank in ranks[: MAX_NODES // place]
        )
        level = nsmallest(MAX_NODES, children)
        found += level
    return [(-negated, path) for negated, _, path in sorted(found) if negated]
