"""The history of a sequence's steps: one record and one last node per step, and the statistics computed from them.

A step only appends to the history, to keep host time per step short; statistics are computed when they are read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

from selfspec.governor.governor import MEASURING
from selfspec.speculation.plan import Plan


@dataclass(frozen=True)
class Change:
    """A change of plan in one sequence."""

    step: int  # number of steps before the first one with this plan
    token: int  # new tokens before that step
    plan: str
    reason: str | None  # why nothing is drafted; None where something is


@dataclass(frozen=True, eq=False)  # compared by identity, which makes counting fast
class StepRecord:
    """Plan and reason of a step; equal ones share one object."""

    plan: Plan
    chosen: Plan  # the plan before it was truncated to the tokens that are left
    reason: str | None  # why nothing was drafted; None if something was

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, plan: Plan, chosen: Plan, reason: str | None) -> StepRecord:
        return cls(plan, chosen, reason)


@dataclass(eq=False)
class StepHistory:
    """The steps of one sequence."""

    records: list[StepRecord] = field(default_factory=list)  # one per step
    # Last accepted node of each step; in a beam, if a late stop cut its path, the first node of that depth.
    last_nodes: list[int] = field(default_factory=list)
    drafted_end: int | None = None  # index of the step whose drafted token ended the sequence
    # Computed from the first steps, and extended when statistics are read.
    _counts: Counter[tuple[StepRecord, int]] = field(default_factory=Counter, init=False)
    _origins: list[str] = field(default_factory=list, init=False)
    _steps_in_origins: int = field(default=0, init=False)

    @property
    def steps(self) -> int:
        return len(self.last_nodes)

    def add(self, record: StepRecord, last_node: int) -> None:
        """Appends a step; first its record, as another thread may read the history meanwhile."""
        self.records.append(record)
        self.last_nodes.append(last_node)

    @property
    def drafted(self) -> int:
        """Number of drafted nodes."""
        return sum(len(plan) * times for plan, times in self.plans.items())

    @property
    def accepted(self) -> int:
        """Number of accepted nodes."""
        return sum(self.accepted_by_depth)

    @property
    def rejections(self) -> int:
        """Number of steps that ended because no child carried the model's token."""
        return sum(self.reached_by_depth) - self.accepted

    @property
    def plans(self) -> Counter[Plan]:
        """Number of steps by plan, in the order of first use."""
        plans: Counter[Plan] = Counter()
        for (record, _), times in self._counted().items():
            plans[record.plan] += times
        return plans

    @property
    def first_reason(self) -> str | None:
        """The first reason why a step drafted nothing; plain steps that only measure do not count."""
        reasons = (record.reason for record, _ in self._counted())
        return next((reason for reason in reasons if reason not in (None, MEASURING)), None)

    @property
    def outcomes(self) -> Counter[tuple[int, int]]:
        """Number of steps by depths accepted and depths reached; reached = accepted + 1 where the last node's children
        were all rejected."""
        outcomes: Counter[tuple[int, int]] = Counter()
        for (record, last), times in self._counted().items():
            accepted = record.plan.depths[last]
            outcomes[accepted, accepted + (not record.plan.is_leaf(last))] += times
        # A drafted token ended the sequence: a child of the last node carried it. A step that failed is not recorded.
        if self.drafted_end is not None and self.drafted_end < self.steps:
            # Not so for a leaf: a copied node, at its depth and with its token, had that child.
            plan, last = self.records[-1].plan, self.last_nodes[-1]
            accepted = plan.depths[last]
            outcomes -= Counter({(accepted, accepted + (not plan.is_leaf(last))): 1})
            outcomes[accepted + 1, accepted + 1] += 1
        return outcomes

    @property
    def accepted_by_depth(self) -> list[int]:
        """Number of steps that accepted a node of each depth, from depth 1 on."""
        return self._by_depth(0)

    @property
    def reached_by_depth(self) -> list[int]:
        """Number of steps that accepted a node of each depth or rejected all of them, from depth 1 on."""
        return self._by_depth(1)

    @property
    def origins(self) -> list[str]:
        """For every new token "drafted", "decoded" (the model's own token of a step that drafted) or "plain". Computed
        once per step, since streams read it after every step."""
        steps = self.steps  # the loop may add a step meanwhile, first its record and then its last node
        new = slice(self._steps_in_origins, steps)
        for record, last in zip(self.records[new], self.last_nodes[new], strict=True):
            self._origins += ["drafted"] * record.plan.depths[last] + ["decoded" if len(record.plan) else "plain"]
        self._steps_in_origins = steps
        if self.drafted_end is not None and self.drafted_end < steps:
            self._origins[-1] = "drafted"
        return self._origins

    @property
    def changes(self) -> list[Change]:
        """Changes of plan, the first plan included, and changes from measuring to another reason for plain steps."""
        changes: list[Change] = []
        before, tokens = None, 0
        for step, (record, last) in enumerate(zip(self.records, self.last_nodes, strict=True)):
            if record is not before:
                measured = bool(changes) and changes[-1].reason == MEASURING != record.reason
                if not changes or measured or changes[-1].plan != str(record.chosen):
                    changes.append(Change(step, tokens, str(record.chosen), record.reason))
            before, tokens = record, tokens + record.plan.depths[last] + 1
        return changes

    def _counted(self) -> Counter[tuple[StepRecord, int]]:
        """Number of steps by record and last node."""
        counts, steps = self._counts, self.steps  # the loop may add a step meanwhile, or count the steps itself
        start = counts.total()
        if start < steps:
            new = zip(self.records[start:steps], self.last_nodes[start:steps], strict=True)
            self._counts = counts + Counter(new)
        return self._counts

    def _by_depth(self, which: int) -> list[int]:
        """Number of steps that accepted (`which` 0) or reached (1) each depth."""
        outcomes = self.outcomes
        deepest = max((reached for _, reached in outcomes), default=0)
        return [sum(times for outcome, times in outcomes.items() if outcome[which] > depth) for depth in range(deepest)]
