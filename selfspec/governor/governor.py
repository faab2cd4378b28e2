"""The governor: chooses the plan of the next step.

The speed of a plan is the harmonic mean of the sequences' expected accepted lengths over its cost in plain steps: the
fastest plan has the least mean time per token. It is used where it is faster than plain decoding. A budget limits what
drafting and scoring the exit may lose. Tokens do not depend on plans, so choices change only the speed. The hard rules
come first: `rules.Policy` applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from selfspec.governor.acceptance import Skill
from selfspec.governor.candidates import PlanCandidates
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

    def choose(
        self, skills: Sequence[Skill], batch: int, context: int, capture_s: Callable[[Plan], float]
    ) -> tuple[Plan, str | None]:
        """The plan of the next step and, where it is `none`, the reason. `skills` are those of the sequences that may
        draft, of `batch` in all; the longest has `context` tokens; `capture_s` gives the seconds that capturing the
        step of a plan takes, 0 once it is captured."""
        bucket = self.costs.bucket(batch, context)
        if bucket.plain is None:
            return NONE, MEASURING
        speeds = self._speeds(skills, batch, bucket)
        if self.budget.is_full and max(speeds, key=speeds.__getitem__) == NONE:
            # A probe. It uses the exit: copied nodes say nothing about the exit's drafts.
            speeds = {plan: speed for plan, speed in speeds.items() if plan.uses_exit and speed} or speeds
        best = self._until_captured(speeds, bucket, capture_s)
        if best != NONE:
            return best, None
        if self.candidates.acceptance is None:
            return NONE, NO_PROFILE
        return NONE, "ood" if all(skill.is_ood for skill in skills) else "goodput"

    @staticmethod
    def _until_captured(speeds: dict[Plan, float], bucket: CostBucket, capture_s: Callable[[Plan], float]) -> Plan:
        """The fastest plan if its step is captured, or if no candidate's is. Else the fastest of `none` and the
        captured ones, until the fastest plan would have saved the time that its capture takes."""
        best = max(speeds, key=speeds.__getitem__)
        seconds = capture_s(best) if len(best) else 0.0
        captured = [plan for plan in speeds if not len(plan) or not capture_s(plan)] if seconds else []
        if not any(map(len, captured)):
            return best
        fastest = max(captured, key=speeds.__getitem__)
        assert bucket.plain is not None
        bucket.savings[best] += bucket.plain * (1 - max(1.0, speeds[fastest]) / max(1.0, speeds[best]))
        if bucket.savings[best] < seconds:
            return fastest
        bucket.savings[best] = 0.0
        return best

    def _speeds(self, skills: Sequence[Skill], batch: int, bucket: CostBucket) -> dict[Plan, float]:
        """Speeds of plain decoding, 1, and of each plan relative to it; 0 if its step may lose more than the budget has
        left. The expected length is the harmonic mean over the batch; sequences that may not draft count 1."""
        table, most = self.candidates.table(batch), 1 + self.budget.left
        levels, copying = [skill.level for skill in skills], [skill.copying_level for skill in skills]
        inverses = (1 / table.lengths[levels, copying]).sum(0) + (batch - len(skills))
        speeds = {NONE: 1.0}
        for plan, modelled, inverse in zip(table.plans, table.costs, inverses.tolist(), strict=True):
            steps = bucket.cost(plan, modelled)
            speeds[plan] = batch / inverse / steps if steps <= most else 0.0
        return speeds

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
