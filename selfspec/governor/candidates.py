"""The plans that the governor chooses from: for each of several skills, the fastest one by the cost model.

All domains and temperatures of an exit share the plans, so that few steps are captured; expected lengths and costs of
the plans differ by domain. They follow from the acceptance model and the cost model alone, and are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from heapq import nsmallest
from itertools import product
from math import inf

import numpy as np

from selfspec.governor.acceptance import LEVELS, Acceptance, Skill
from selfspec.governor.copying import MOST_COPIED, REACH
from selfspec.governor.costs import CostModel
from selfspec.speculation.plan import DEEPEST_PLAN, MAX_NODES, NONE, Plan

# For each (skill, share of copying's hits) one tree is chosen: nine skills from 1/8 to 2 where nothing is copied, and
# two shares at which the tree also copies.
_TEXTS = tuple((2 ** (half / 2), 0.0) for half in range(-6, 3))
_COPYING = ((0.7, 0.5), (0.7, 0.75))
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
    """The plans for every batch size, chosen for the mean chances of all domains."""

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
        cost, width = self._costs[size], 1 if chains else self._widest
        small = {NONE.with_copy(count) for count in _ONLY_COPIES}
        if self._acceptance is not None:
            small |= {Plan.tree((1,)), Plan.tree((min(4, width),))}
        plans = {plan for plan in small if cost(plan.without_copy.depth, len(plan)) <= self._max_step}
        if self._acceptance is not None:
            texts = _TEXTS if chains else _TEXTS + _COPYING
            plans |= {self._fastest(skill, share, width, size) for skill, share in texts}
        if chains:
            plans |= {plan.truncated(depth) for plan in plans if plan.uses_exit for depth in range(1, plan.depth)}
        return tuple(sorted(plans - {NONE}, key=lambda plan: (len(plan), str(plan))))

    def for_batch(self, batch: int) -> tuple[Plan, ...]:
        """The plans for the smallest batch size with a cost model that holds this batch."""
        return self.plans(size_of(batch, self._costs), batch > self._max_tree_batch)

    def _fastest(self, skill: float, share: float, width: int, size: int) -> Plan:
        """The fastest plan (expected accepted length over cost) among those that take at most `max_step` plain steps.
        For each depth, adds nodes in the order of their chances. With a `share` of hits above 0 the plan has copied
        nodes."""
        assert self._acceptance is not None
        level, best, copies, speed, cost = Skill(skill).level, list[Node](), 0, 1.0, self._costs[size]
        chance_of, depths = self._acceptance.chance, range(DEEPEST_PLAN)
        likely = likeliest([[chance_of(depth, rank, level) for rank in range(width)] for depth in depths])
        for depth, count in product(range(1, DEEPEST_PLAN + 1), _COPIES if share else (0,)):
            copied = share ** np.arange(1, count + 1)  # by depth: the chance that the copied node is accepted
            nodes = [node for node in likely if len(node[1]) <= depth][: MAX_NODES - count]
            length = 1.0 + float(copied.sum())
            for taken, (chance, path) in enumerate(nodes, start=1):
                length += chance * (1 - (float(copied[len(path) - 1]) if len(path) <= count else 0.0))
                steps = cost(depth, taken + count)
                if steps <= self._max_step and length / steps > speed:
                    best, copies, speed = nodes[:taken], count, length / steps
        return Plan.from_paths(path for _, path in best).with_copy(copies)


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
        lengths = np.array([_lengths(plan, self._reach(plan.without_copy)) for plan in plans])
        costs = tuple(self._cost(plan, batch) for plan in plans)
        return PlanTable(plans, costs, np.moveaxis(lengths.reshape(-1, len(LEVELS), len(REACH)), 0, 2))

    def _reach(self, plan: Plan) -> np.ndarray:
        return np.ones((1, len(LEVELS))) if self.acceptance is None else self.acceptance.reach(plan)

    def _cost(self, plan: Plan, batch: int) -> float:
        """Plain steps that a step of any plan takes, by the cost model."""
        cost_model = self._costs[size_of(batch, self._costs)]
        return cost_model(plan.without_copy.depth, len(plan)) if len(plan) else 1.0

    @cached_property
    def widest_rank(self) -> int:
        """`widest_rank` of the plans for every batch size."""
        return widest_rank(plan for size in (1, *self._costs) for plan in self._shared.for_batch(size))


def widest_rank(plans: Iterable[Plan]) -> int:
    """The highest rank that these plans draft; 0 without nodes."""
    return max((rank for plan in plans for rank in (*plan.ranks, *(width - 1 for width in plan.beam))), default=0)


def _lengths(plan: Plan, reach: np.ndarray) -> np.ndarray:
    """[levels of skill, levels of copying]: expected accepted lengths, where the exit's nodes reach each depth with the
    chances `reach` [depth + 1, levels of skill]. A depth is reached by the exit's nodes or, independently, the copied
    ones."""
    missed = 1 - reach[1 : plan.copied + 1]
    copied = np.ones((plan.copied, len(LEVELS)))
    copied[: len(missed)] = missed
    return reach.sum(0)[:, None] + copied.T @ REACH[:, : plan.copied].T


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
        children = (
            (negated * chance, depth + 1, (*path, rank))
            for negated, depth, path in level
            for rank, chance in enumerate(by_rank)
        )
        level = nsmallest(MAX_NODES, children)
        found += level
    return [(-negated, path) for negated, _, path in sorted(found) if negated]
