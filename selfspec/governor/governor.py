"""The governor: chooses the plan of the next step.

The speed of a plan is the harmonic mean of the sequences' expected accepted lengths over its cost in plain steps: the
fastest plan has the least mean time per token. It is used where it is faster than plain decoding. A budget limits what
drafting and scoring the exit may lose. Tokens do not depend on plans, so choices change only the speed. The hard rules
come first: `rules.Policy` applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from selfspec.governor.acceptance import Skill
from selfspec.governor.candidates import PlanCandidates, PlanTable
from selfspec.governor.costs import CostBucket, Costs
from selfspec.governor.rules import NO_PROFILE, Rules
from selfspec.speculation.plan import NONE, Plan

# Reason of a plain step that is run to be timed: the first three of a bucket, and three once 512 others were measured.
MEASURING = "measuring"


class Budget:
    """Plain steps that drafting may still lose. The launch of a step charges what it loses if no draft is accepted;
    reading the step adds its accepted nodes back, a failure its whole charge; each plain step adds a refill. No
    launch overdraws it, so over any number of steps losses exceed gains by at most the capacity plus all refills."""

    def __init__(self, capacity: float, refill: float) -> None:
        self.capacity, self.refill = capacity, refill
        self.left = capacity

    @property
    def is_full(self) -> bool:
        return self.left >= self.capacity

    def charge(self, steps: float) -> None:
        self.left -= steps

    def add(self, steps: float) -> None:
        self.left = min(self.capacity, self.left + steps)


class Governor:
    """Chooses the plans of one batch."""

    def __init__(self, candidates: PlanCandidates, costs: Costs, rules: Rules, budget: Budget) -> None:
        self.candidates, self.costs, self.rules, self.budget = candidates, costs, rules, budget
        self._lengths: tuple[tuple, list[float]] = ((), [])  # the newest mean lengths, and what they were computed for

    def choose(
        self,
        skills: Sequence[Skill],
        batch: int,
        context: int,
        capture_s: Callable[[Plan], float],
    ) -> tuple[Plan, str | None]:
        """The plan of the next step and, where it is `none`, the reason. `skills` are those of the sequences that may
        draft, of `batch` in all; the longest has `context` tokens; `capture_s` gives the seconds that capturing a plan's
        step takes first, 0 once it is captured."""
        bucket = self.costs.bucket(batch, context)
        if bucket.plain is None:
            return NONE, MEASURING
        table = self.candidates.table(batch)
        speeds = self._speeds(skills, batch, table, bucket)
        needed, numbers = 1.0, list(range(len(speeds)))
        if self.budget.is_full and max(speeds, default=0.0) <= needed:
            # A probe. Copied nodes alone would not tell whether the exit's are accepted again.
            needed, numbers = 0.0, [number for number in numbers if table.plans[number].uses_exit]
        best = max(numbers, key=speeds.__getitem__, default=None)
        if best is not None and speeds[best] > needed:
            best = self._until_captured(best, numbers, speeds, table.plans, batch, bucket, capture_s)
            if speeds[best] > needed:
                return table.plans[best], None
        if self.candidates.acceptance is None:
            return NONE, NO_PROFILE
        return NONE, "ood" if all(skill.is_ood for skill in skills) else "goodput"

    def _until_captured(
        self,
        best: int,
        numbers: Sequence[int],
        speeds: Sequence[float],
        plans: Sequence[Plan],
        batch: int,
        bucket: CostBucket,
        capture_s: Callable[[Plan], float],
    ) -> int:
        """The fastest of the plans with these numbers, `best`, if its step is captured, or if no plan's is for this
        batch. Else the fastest captured one, until `best` would have saved the time that its capture takes."""
        seconds = capture_s(plans[best])
        captured = [number for number in numbers if not capture_s(plans[number])] if seconds else []
        if not captured:
            return best
        fastest = max(captured, key=speeds.__getitem__)
        assert bucket.plain is not None
        saved = bucket.plain * (1 - max(1.0, speeds[fastest]) / max(1.0, speeds[best]))
        return best if self.costs.pays_capture(batch, plans[best], saved, seconds) else fastest

    def _speeds(self, skills: Sequence[Skill], batch: int, table: PlanTable, bucket: CostBucket) -> list[float]:
        """Speed of each plan relative to plain decoding; 0 if its step may lose more than the budget has left."""
        most = 1 + self.budget.left
        costs = [bucket.cost(plan, modelled) for plan, modelled in zip(table.plans, table.costs, strict=True)]
        lengths = self._mean_lengths(skills, batch, table)
        return [length / steps if steps <= most else 0.0 for length, steps in zip(lengths, costs, strict=True)]

    def _mean_lengths(self, skills: Sequence[Skill], batch: int, table: PlanTable) -> list[float]:
        """Expected accepted length of each plan, as the harmonic mean over the batch; sequences that may not draft
        count 1. Computed again only when the level of a skill has changed."""
        levels, copying = [skill.level for skill in skills], [skill.copying_level for skill in skills]
        key = table, batch, levels, copying
        if key != self._lengths[0]:
            inverses = (1 / table.lengths[levels, copying]).sum(0)
            self._lengths = key, (batch / (inverses + (batch - len(levels)))).tolist()
        return self._lengths[1]

    def charge_step(self, plan: Plan, batch: int, context: int) -> float:
        """Charges a launched step's loss if no draft is accepted, and returns it in plain steps."""
        if not len(plan):
            return 0.0
        loss = self.costs.bucket(batch, context).cost(plan, self.candidates.cost(plan, batch)) - 1
        self.budget.charge(loss)
        return loss

    def observe(
        self,
        plan: Plan,
        outcomes: Sequence[tuple[Skill | None, int]],
        seconds: float | None,
        context: int,
        exit_nodes: Sequence[int] | None = None,
    ) -> None:
        """Updates skills, costs and budget with a step that was read. `outcomes`: of each sequence its skill (None: it
        accepts no drafts, or has ended) and last accepted node. `seconds`: device time; None if other work took
        part of it. `exit_nodes`: of each sequence the deepest reached node that the exit drafted; None: the last
        accepted node."""
        batch = len(outcomes)
        if seconds is not None:
            self.costs.bucket(batch, context).observe(plan, seconds, self.candidates.cost(plan, batch))
        if not len(plan):
            self.budget.add(self.budget.refill)
            return
        if plan.uses_exit and self.candidates.acceptance is not None:
            evidence = self.candidates.acceptance.evidence(plan.without_copy)
            lasts = exit_nodes or [last for _, last in outcomes]
            for (skill, _), last in zip(outcomes, lasts, strict=True):
                if skill is not None:
                    skill.observe(evidence[max(0, last - plan.copied)])
        self.budget.add(sum(plan.depths[last] for _, last in outcomes) / batch)

    # Scores of the exit

    @property
    def score_interval(self) -> float:
        """Plain steps between exit scores. Scores use at most half of the refills; the rest is for probes."""
        return 2 * self.candidates.score_cost / max(self.budget.refill, 1e-9)

    @property
    def may_score(self) -> bool:
        return self.candidates.score_cost <= self.budget.left

    def charge_score(self) -> None:
        self.budget.charge(self.candidates.score_cost)

    def observe_score(self, skill: Skill, right: Sequence[bool]) -> None:
        """Updates a skill with exit scores: at each scored position, whether the exit's best token is the decoded
        one."""
        assert self.candidates.acceptance is not None
        skill.observe_share(sum(right), len(right), self.candidates.acceptance.first_exposure)
