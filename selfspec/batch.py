"""A batch: the sequences that decode together, with one exit, on one backend.

Chooses the plan of every step (hard rules first, then the governor), launches and reads it, and passes its outcome to
the governor and the metrics. Sequences join and leave between steps, as the scheduler decides. The backend computes the
steps and appends their tokens to the sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from contextlib import suppress

from selfspec.backends.base import Backend, Step
from selfspec.batch_scoring import BatchScoring, is_unrouted
from selfspec.cache.kv_cache import CacheFull
from selfspec.drafters import Drafters
from selfspec.governor.acceptance import Skill
from selfspec.governor.governor import Governor
from selfspec.governor.rules import Policy
from selfspec.history import StepRecord
from selfspec.metrics import Metrics
from selfspec.sequence import Sequence
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import MAX_STEP_ROWS, NONE, Plan


class Batch:
    """Sequences that decode together."""

    def __init__(self, backend: Backend, exit: Exit | None, drafters: Drafters, metrics: Metrics) -> None:
        self.backend, self.drafters, self.metrics = backend, drafters, metrics
        self.base_exit = exit  # drafts from the whole LM head
        self.prefilling: list[Sequence] = []  # admitted; they join once their prompts are in the cache
        self.running: list[Sequence] = []
        self.unread: list[Step] = []  # launched steps, oldest first; two only while `step` runs
        self.exit: Exit | None = None  # drafts from the head rows of its sequences; None: no sequence has an exit
        self._head_prompts: set[Sequence] = set()  # sequences whose prompts' own tokens `exit` can draft
        self.governor: Governor | None = None  # None: a rule forbids drafting, or a request's policy chooses the plan
        self.scoring = BatchScoring(backend, drafters)
        self._costs = drafters.costs(None)  # measured costs of batches of this kind
        self._reasons: list[str | None] = []  # by sequence, the rule that forbids drafting for it
        self._last_read_plan: Plan | None = None  # plan of the newest step that was read
        self._capture_seconds: dict[Plan, float] = {}  # of candidates, for the present members

    # Membership

    def join(self, sequences: Seq[Sequence]) -> None:
        """Adds prefilled sequences, which decode from the next step on."""
        if not self.running:
            self.reset()
        self.running += sequences
        self.scoring.prompts += [sequence for sequence in sequences if sequence.parent is None]
        self._update(joined=True)
        if not self.backend.overlaps:
            self._score_and_route()

    def leave(self, sequences: Seq[Sequence]) -> None:
        """Removes sequences that have ended, or that were swapped out."""
        for sequence in sequences:
            self.running.remove(sequence)
            self.backend.release(sequence)
        self._update(joined=False)

    def reset(self) -> None:
        """Reads the step in flight of a batch whose sequences have all left, and drops what refers to them."""
        self.drain()
        self.scoring.reset()
        self._last_read_plan = None

    def _update(self, joined: bool) -> None:
        """Applies the rules after sequences joined, left or were routed; finds the batch's exit, costs and governor."""
        was_off = self._rule() is not None  # a rule forbade drafting for every member until now
        self._capture_seconds = {}
        if not self.running:
            self.exit = self.governor = None
            self._head_prompts = set()
            return
        size = len(self.running)
        policies = [sequence.request.policy for sequence in self.running]
        self._reasons = ["request" if policy is None else policy.reason(size) for policy in policies]
        for sequence, reason in zip(self.running, self._reasons, strict=True):
            sequence.drafts = reason is None
        may_draft = [sequence for sequence in self.running if sequence.request.drafter is not None]
        if not may_draft or self.base_exit is None:
            self.exit = None
        elif self.exit is None or ((joined or was_off) and self._rule() is None):
            self._trim_head(self.base_exit, may_draft)
        self._costs = self.drafters.costs(self._cost_kind())
        self._choose_governor()
        self.scoring.limit_unfilled()

    def _trim_head(self, exit: Exit, members: Seq[Sequence]) -> None:
        """Trims the draft head to the rows of these sequences, unless the present one has all of them. Rows of
        sequences that have left stay: they cost less than trimming it again."""
        rows = self.drafters.shared_rows([member.request.drafter for member in members if member.request.drafter])
        routed = {member for member in members if member.parent is None and not is_unrouted(member.request)}
        if self.exit is None or self.exit.domain_rows is not rows or not routed <= self._head_prompts:
            self.exit = self.drafters.exit_with_rows(exit, rows, [member.prompt_tokens for member in routed])
            self._head_prompts = routed

    def _choose_governor(self) -> None:
        """Makes the governor, with the candidates and rules of the domain and temperature that most sequences have.
        None if a request gives its own plan, which the whole batch then uses."""
        requests = [sequence.request for sequence in self.running if sequence.drafts]
        self.governor = None
        if requests and self._ungoverned_policy() is None:
            drafting = [(request.drafter, request.policy) for request in requests if request.drafter is not None]
            ((candidates, _),) = Counter(drafter.candidates for drafter, _ in drafting).most_common(1)
            policy = next(policy for drafter, policy in drafting if drafter.candidates is candidates)
            assert policy is not None and candidates is not None
            budget = self.drafters.budget(policy.rules)
            self.governor = Governor(candidates, self._costs, policy.rules, budget)

    def _cost_kind(self) -> Hashable:
        """Key of measured costs: the exit layer, the options of steps, and whether any sequence has Python logits
        processors, needs the host (for these or a grammar), uses rejection, or wants log probabilities."""
        requests = [sequence.request for sequence in self.running]
        return (
            None if self.exit is None else self.exit.layer,
            self.backend.step_options(self.running),
            any(request.processors for request in requests),
            any(request.uses_host for request in requests),
            any(request.rejection for request in requests),
            any(request.logprobs is not None for request in requests),
        )

    # Steps

    def step(self) -> None:
        """Advances every running sequence by at least one token. If the backend overlaps, launches the next step before
        it reads this one."""
        if not self.unread:
            self.launch()
        step = self.unread[0]
        continues = self._continues(step)
        if continues and self._overlaps:
            with suppress(CacheFull):  # sequences that end with this step may free enough pages
                self.launch()
        if continues and self.scoring.prompts:  # while the device runs their first steps
            self._score_and_route()
        self._read()

    @property
    def _overlaps(self) -> bool:
        """Whether the next step is launched before this one is read; not with callables, which need its tokens."""
        return self.backend.overlaps and not any(sequence.request.processors for sequence in self.running)

    def drain(self) -> None:
        """Reads the step in flight, so that the host has its lengths and tokens."""
        while self.unread:
            self._read()

    def _read(self) -> None:
        self.backend.read(self.unread[0])
        self._account(self.unread.pop(0))

    def abort(self) -> None:
        """Drops launched steps after one has failed, and returns what they charged to budgets."""
        for step in self.unread:
            if step.governor is not None:
                step.governor.budget.add(step.charge)
        self.unread = []

    def launch(self) -> None:
        """Launches the next step."""
        in_flight = self.unread[-1] if self.unread else None
        if self.scoring.apply_routing():
            self._update(joined=True)
        self.scoring.score_exit(self.running, self.exit, self.governor, in_flight)
        chosen, reason = self._choose_plan()
        plan = chosen
        if not self.backend.overlaps:
            plan = chosen.truncated(max(sequence.tokens_left for sequence in self.running) - 1)
        if self.scoring.unfilled and len(plan):
            assert self.exit is not None
            self.scoring.fill_exit(self.running, self.exit, False, in_flight)
        step = self.backend.launch(self.running, StepRecord.of(plan, chosen, reason), self.exit, in_flight)
        step.reasons = {
            sequence: rule for sequence, rule in zip(self.running, self._reasons, strict=True) if rule is not None
        }
        step.governor, step.costs = self.governor, self._costs
        if self.governor is not None:
            step.charge = self.governor.charge_step(plan, len(self.running), self._context)
        self.unread.append(step)
        self._capture_seconds[plan] = 0.0
        self.scoring.count_step(plan, self.exit)

    def _score_and_route(self) -> None:
        self.scoring.score_and_route(len(self.running), self.exit, self.governor)

    def _continues(self, step: Step) -> bool:
        """Whether some sequence is expected to need another step after this one, which is not read yet."""
        plan = step.record.plan
        return any(
            not sequence.is_finished and sequence.tokens_left > sequence.expected_tokens(plan)
            for sequence in self.running
        )

    def _rule(self) -> str | None:
        """The rule that forbids drafting for every sequence; None if one may be drafted for."""
        return None if None in self._reasons or not self._reasons else self._reasons[0]

    def _choose_plan(self) -> tuple[Plan, str | None]:
        """The plan of the next step and, where it is `none`, the reason."""
        rule = self._rule()
        if rule is not None:
            return NONE, rule
        policy = self._ungoverned_policy()
        if policy is not None:
            plan, reason = policy.choose(len(self.running))
        else:
            assert self.governor is not None
            skills = [sequence.skill for sequence in self.running if sequence.drafts]
            size, context = len(self.running), self._context
            plan, reason = self.governor.choose(skills, size, context, self._capture_s)
        return self._bounded(plan), reason

    def _capture_s(self, plan: Plan) -> float:
        """`Backend.capture_s` of a candidate; asks the backend once until sequences join or leave."""
        plan = self._bounded(plan)
        if plan not in self._capture_seconds:
            self._capture_seconds[plan] = self.backend.capture_s(self.running, plan, self.exit)
        return self._capture_seconds[plan]

    def _ungoverned_policy(self) -> Policy | None:
        """The policy of the first sequence that may draft and is not governed: its request has a plan or forces one."""
        for sequence in self.running:
            drafter, policy = sequence.request.drafter, sequence.request.policy
            if sequence.drafts and (drafter is None or drafter.candidates is None):
                return policy
        return None

    def _bounded(self, plan: Plan) -> Plan:
        """Drops the deepest levels until the rows of all slots fit MAX_STEP_ROWS. With rejection, replaces a beam by a
        chain: a beam's nodes depend on the draft noise."""
        if plan.beam and self.running[0].request.rejection:
            plan = plan.first_chain()
        depth = plan.depth
        slots = self.backend.slots_for(len(self.running))
        while depth and (len(plan) + 1) * slots > MAX_STEP_ROWS:
            depth -= 1
            plan = plan.truncated(depth)
        return plan

    @property
    def _context(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(sequence.tokens) for sequence in self.running)

    # Accounting

    def _account(self, step: Step) -> None:
        """Extends records, and updates skills, governor, costs and metrics, with a step that was read."""
        if not step.sequences:
            return
        record, plan, depths = step.record, step.record.plan, step.record.plan.depths
        context = 0  # tokens of the longest sequence before the step
        outcomes: list[tuple[Skill | None, int]] = []
        for sequence, last in zip(step.sequences, step.last_nodes, strict=True):
            rule = step.reasons.get(sequence)
            sequence.history.add(record if rule is None else StepRecord.of(NONE, NONE, rule), last)
            context = max(context, len(sequence.tokens) - depths[last] - 1)
            outcomes.append((None if sequence.is_finished or rule is not None else sequence.skill, last))
        self.scoring.apply_scores(self.governor)
        seconds = step.seconds if step.is_cost_sample else None
        if step.governor is not None:  # the one at the launch: `_update` may have replaced the batch's since
            step.governor.observe(plan, outcomes, seconds, context, step.exit_nodes)
            for sequence in step.sequences:
                sequence.skill.copying_level = sequence.copying.read(sequence.tokens, len(sequence.prompt))
        elif not len(plan) and seconds is not None:
            step.costs.bucket(len(step.sequences), context).observe(plan, seconds, modelled=1.0)
        if record.chosen != self._last_read_plan:
            self.metrics.add_plan_change(record.reason)
            self._last_read_plan = record.chosen
        plain = step.costs.bucket(len(step.sequences), context).plain
        self.metrics.add_step(plan, step.seconds, [depths[last] + 1 for last in step.last_nodes], plain)
