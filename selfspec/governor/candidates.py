"""The plans that the governor chooses from: for each of several skills, the fastest one by the cost model.

All domains and temperatures of an exit share the plans, so that few steps are captured; expected lengths and costs of
the plans differ by domain. They follow from the acceptance model and the cost model alone, and are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from heapq import heappop, heappush
from itertools import product
from math import inf

import numpy as np

from selfspec.governor.acceptance import LEVELS, Acceptance, Skill
from selfspec.governor.copying import MOST_COPIED, REACH
from selfspec.governor.costs import CostModel
from selfspec.speculation.plan import DEEPEST_PLAN, MAX_NODES, NONE, Plan

_SKILLS = tuple(2 ** (half / 2) for half in range(-6, 3))  # skills for which a tree is chosen: 1/8 to 2
_COPYING = ((0.7, 0.5), (0.7, 0.75))  # (skill, share of hits, see `copying`) for which trees that copy are chosen
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
        max_step: float = inf,  # plain steps that a step may take
    ) -> None:
        self._acceptance, self._costs, self._max_tree_batch = acceptance, costs, max_tree_batch
        self._widest, self._max_step = min(widest, _WIDEST), max_step
        self.plans = cache(self._plans)

    def _plans(self, size: int, chains: bool) -> tuple[Plan, ...]:
        """Copied nodes alone, the fastest plan for each skill, and smaller plans, for devices on which large ones are
        slower than modelled: all shorter chains, or two small trees; without `chains` also trees with copied nodes.
        Smallest first. `size` is one of the batch sizes that have a cost model."""
        if self._max_step < 1:
            return ()
        width, cost = 1 if chains else self._widest, self._costs[size]
        plans = {NONE.with_copy(count) for count in _ONLY_COPIES if cost(0, count) <= self._max_step}
        if self._acceptance is not None:
            found = [self._fastest(skill, 0.0, width, size) for skill in _SKILLS]
            if width == 1:
                deepest = max((plan.depth for plan in found if plan is not None), default=1)
                plans |= {Plan.tree((1,) * depth) for depth in range(1, deepest)}
            if not chains:
                found += [self._fastest(skill, share, width, size) for skill, share in _COPYING]
            plans |= {plan for plan in found if plan is not None} | {Plan.tree((1,)), Plan.tree((min(4, width),))}
        return tuple(sorted(plans, key=lambda plan: (len(plan), str(plan))))

    def for_batch(self, batch: int) -> tuple[Plan, ...]:
        """The plans for the smallest batch size with a cost model that holds this batch."""
        return self.plans(size_of(batch, self._costs), batch > self._max_tree_batch)

    def _fastest(self, skill: float, share: float, width: int, size: int) -> Plan | None:
        """The fastest plan (expected accepted length over cost) among those that take at most `max_step` plain steps;
        None: plain decoding. For each depth, adds nodes in the order of their chances. With a `share` of hits above 0
        the plan has copied nodes."""
        assert self._acceptance is not None
        level, best, speed, copies, cost = Skill(skill).level, None, 1.0, 0, self._costs[size]
        for depth, count in product(range(1, DEEPEST_PLAN + 1), _COPIES if share else (0,)):
            chances = [[self._acceptance.chance(at, rank, level) for rank in range(width)] for at in range(depth)]
            copied = share ** np.arange(1, count + 1)  # by depth: the chance that the copied node is accepted
            nodes, length = likeliest(chances)[: MAX_NODES - count], 1.0 + float(copied.sum())
            for taken, (chance, path) in enumerate(nodes, start=1):
                length += chance * (1 - (float(copied[len(path) - 1]) if len(path) <= count else 0.0))
                steps = cost(depth, taken + count)
                if steps <= self._max_step and length / steps > speed:
                    best, speed, copies = nodes[:taken], length / steps, count
        return None if best is None else Plan.from_paths([path for _, path in best]).with_copy(copies)


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
    """The MAX_NODES nodes with the highest chances to be accepted, highest first, without those whose chance is 0; a
    token has the chance [depth][rank] after an accepted parent. A node comes after its parent and its likelier
    siblings, so the next one is the best child of a taken node or the next sibling of one."""
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
