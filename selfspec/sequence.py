"""A row: one sequence being generated, what it has come to, and a record of how.

A cycle adds a line to the record and does nothing else, for the device may be waiting; what is told of the row is made
from it when somebody asks. Who makes its tokens is `runtime`'s business.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from selfspec.cache.kv_cache import Sequence
from selfspec.governor.governor import MEASURING, Change, Watch
from selfspec.speculation.exit_scoring import Waiting
from selfspec.speculation.plan import Plan


@dataclass(frozen=True, eq=False)  # told apart by identity, which makes counting fast
class Turn:
    """How a cycle was decided: the same for all rows in it, and mostly for the next one."""

    plan: Plan
    chosen: Plan  # what the plan was cut from
    reason: str | None  # why nothing is drafted

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, plan: Plan, chosen: Plan, reason: str | None) -> Turn:
        return cls(plan, chosen, reason)


@dataclass(eq=False)
class Row:
    """One sequence being generated."""

    prompt: list[int]
    seed: int
    copy: int  # index among the returned sequences of one prompt
    max_length: int  # prompt and new tokens together
    tokens: list[int] = field(default_factory=list)  # prompt and new tokens; the last one is pending
    sequence: Sequence = field(default_factory=Sequence)
    known: torch.Tensor | None = None  # [2 * hidden] what was known just before the pending token, to be recalled
    finish_reason: str | None = None
    elapsed_s: float = 0.0
    turns: list[Turn] = field(default_factory=list)  # the record: of every cycle, how it was decided
    lasts: list[int] = field(default_factory=list)  # and the last node accepted
    cut: int | None = None  # the cycle, if any, in which the text ended with a token that was drafted too
    watch: Watch = field(default_factory=Watch)  # what the governor knows of this text
    waiting: Waiting = field(default_factory=Waiting)  # for the exit's cache
    # What was made from the first cycles of the record.
    _counts: Counter[tuple[Turn, int]] = field(default_factory=Counter, init=False)
    _origins: list[str] = field(default_factory=list, init=False)
    _marked: int = field(default=0, init=False)  # cycles that the origins are of

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def ood(self) -> bool:
        return self.watch.ood

    @property
    def cycles(self) -> int:
        return len(self.lasts)

    def usual_tokens(self, plan: Plan) -> float:
        """That a cycle of this plan will likely bring: what cycles of this text did so far."""
        return min(self.new_tokens / self.cycles, plan.depth + 1) if self.cycles else plan.depth + 1

    @property
    def drafted(self) -> int:
        return sum(len(plan) * times for plan, times in self.plans.items())

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_depth)

    @property
    def rejections(self) -> int:
        """Cycles that ended because no child carried the target's token."""
        return sum(self.reached_by_depth) - self.accepted

    @property
    def plans(self) -> Counter[Plan]:
        """How many cycles each had, the first to be used first."""
        plans: Counter[Plan] = Counter()
        for (turn, _), times in self._counted().items():
            plans[turn.plan] += times
        return plans

    @property
    def disabled_reason(self) -> str | None:
        """The first that held."""
        reasons = (turn.reason for turn, _ in self._counted())
        return next((reason for reason in reasons if reason not in (None, MEASURING)), None)

    @property
    def outcomes(self) -> Counter[tuple[int, int]]:
        """Cycles by depths accepted and asked for."""
        outcomes: Counter[tuple[int, int]] = Counter()
        for (turn, last), times in self._counted().items():
            accepted = turn.plan.depths[last]
            outcomes[accepted, accepted + bool(turn.plan.children[last])] += times
        if self._is_cut:  # a child of the last one's was right
            accepted = self.turns[-1].plan.depths[self.lasts[-1]]
            outcomes -= Counter({(accepted, accepted + 1): 1})
            outcomes[accepted + 1, accepted + 1] += 1
        return outcomes

    @property
    def accepted_by_depth(self) -> list[int]:
        return self._by_depth(0)

    @property
    def reached_by_depth(self) -> list[int]:
        """How often a node of each depth was asked for."""
        return self._by_depth(1)

    @property
    def origins(self) -> list[str]:
        """Of every new token: "drafted", "decoded" after that, or "plain". Kept, for streams ask after every cycle."""
        for turn, last in zip(self.turns[self._marked :], self.lasts[self._marked :], strict=True):
            self._origins += ["drafted"] * turn.plan.depths[last] + ["decoded" if len(turn.plan) else "plain"]
        self._marked = self.cycles
        if self._is_cut:
            self._origins[-1] = "drafted"
        return self._origins

    @property
    def changes(self) -> list[Change]:
        """Of plan, the first one included; and to its own reason from being plain to measure."""
        changes: list[Change] = []
        before, tokens = None, 0
        for cycle, (turn, last) in enumerate(zip(self.turns, self.lasts, strict=True)):
            if turn is not before:
                measured = bool(changes) and changes[-1].reason == MEASURING != turn.reason
                if not changes or measured or changes[-1].plan != str(turn.chosen):
                    changes.append(Change(cycle, tokens, str(turn.chosen), turn.reason))
            before, tokens = turn, tokens + turn.plan.depths[last] + 1
        return changes

    @property
    def _is_cut(self) -> bool:
        return self.cut is not None and self.cut < self.cycles  # and not in one that failed, which nobody tells of

    def _counted(self) -> Counter[tuple[Turn, int]]:
        """Lines of the record, each in how many cycles."""
        start = self._counts.total()
        if start < self.cycles:
            self._counts.update(zip(self.turns[start:], self.lasts[start:], strict=True))
        return self._counts

    def _by_depth(self, which: int) -> list[int]:
        """Cycles that accepted (0) or asked for (1) a node of each depth."""
        outcomes = self.outcomes
        deepest = max((asked for _, asked in outcomes), default=0)
        return [sum(times for of, times in outcomes.items() if of[which] > depth) for depth in range(deepest)]
