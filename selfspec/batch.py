"""A batch: the sequences that decode together, with one exit, on one backend.

Chooses the plan of every step (hard rules first, then the governor), launches it, hands its tokens to the sequences and
its outcome to the governor and the metrics. Sequences join and leave between steps. Which of them do is the scheduler's
business; what a step computes, the backend's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from contextlib import suppress

from selfspec.backends.base import Backend, Step
from selfspec.cache.kv_cache import CacheFull
from selfspec.drafters import Drafters
from selfspec.governor.costs import Setting
from selfspec.governor.governor import MEASURING, Governor
from selfspec.metrics import Metrics
from selfspec.sequence import Sequence, StepRecord
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import MAX_STEP_ROWS, NONE, Plan

_FIRST_FILL = 16  # plainly decoded tokens per sequence after which the exit's cache is filled
_SELDOM = 32  # tokens after which the exit is scored again, once a score has not led to drafting
_ENDING = 32  # tokens before its end at which it matters to a text how many a step in flight brings
_LATE = 1.05  # times its time on the device: what a step may be charged for a late host before its plan is known
_GOVERNED = (None, MEASURING, "ood", "goodput")  # reasons after which the governor may draft again


class Batch:
    """Sequences that decode together."""

    def __init__(self, backend: Backend, exit: Exit | None, drafters: Drafters, metrics: Metrics) -> None:
        self.backend, self.drafters, self.metrics = backend, drafters, metrics
        self.base_exit = exit  # over the whole head
        self.running: list[Sequence] = []
        self.in_flight: Step | None = None
        self.exit: Exit | None = None  # over the rows of the head that its sequences draft from; None: none drafts
        self.governor: Governor | None = None
        self._costs = drafters.costs((False,) * 4)  # of steps like those of the running sequences
        self._reasons: list[str | None] = []  # by sequence, why it is not drafted for
        self._plan: Plan | None = None  # of the newest step
        self._reason: str | None = None
        self._unscored_prompts = False  # scores of prompts are on their way
        self._unfilled = 0  # plain steps that the exit's cache lacks, those in flight included
        self._unscored = 0  # plain steps since the exit was scored
        self._patience = 0  # of them before it is scored
        self._is_late = False  # the device had ended a step before the next one was launched
        self._unseen = 0  # steps in a row that the governor has not learned from

    # Membership

    def join(self, sequences: Seq[Sequence]) -> None:
        """Prefilled sequences decode from the next step on."""
        if not self.running:  # whatever the exit did for texts that have ended
            self._unfilled = self._unscored = self._patience = 0
        self.running += sequences
        self._update(joined=True)
        self._score_prompts(sequences)

    def leave(self, sequences: Seq[Sequence]) -> None:
        """Sequences that have ended, or that have to wait, decode no longer."""
        for sequence in sequences:
            self.running.remove(sequence)
            self.backend.release(sequence)
        self._update(joined=False)

    def _update(self, joined: bool) -> None:
        """The members have changed: applies the rules to the new batch size, and finds exit and governor."""
        size = len(self.running)
        policies = [sequence.request.policy for sequence in self.running]
        self._reasons = ["request" if policy is None else policy.reason(size) for policy in policies]
        for sequence, reason in zip(self.running, self._reasons, strict=True):
            sequence.drafts = reason is None
        may_draft = [of for of in self.running if of.request.drafter is not None]
        if not may_draft or self.base_exit is None:
            self.exit = None
        elif (joined and self._rule() is None) or self.exit is None:
            # The head is not trimmed again when sequences leave: refilling costs more than the extra rows.
            drafters = [of.request.drafter for of in may_draft if of.request.drafter is not None]
            prompts = [of.prompt for of in may_draft if of.parent is None]
            self.exit = self.drafters.shared_exit(self.base_exit, drafters, prompts)
        self._costs = self.drafters.costs(self._cost_kind())
        self._choose_governor()
        self._unfilled = min(self._unfilled, self.backend.max_unfilled)
        if self.governor is not None:
            self._patience = max(self._patience, self._first_score)

    def _choose_governor(self) -> None:
        """Plans are those of the domain and temperature that most sequences have. A new governor keeps the losses that
        the one before has still to make good."""
        drafters = [of.request.drafter for of in self.running if of.request.drafter is not None]
        governed = [drafter for drafter in drafters if drafter.candidates is not None]
        if not governed:
            self.governor = None
            return
        ((candidates, _),) = Counter(drafter.candidates for drafter in governed).most_common(1)
        drafter = next(drafter for drafter in governed if drafter.candidates is candidates)
        before = self.governor
        if before is not None and before.ladder is candidates:
            before.costs = self._costs
            return
        policy = next(of.request.policy for of in self.running if of.request.drafter is drafter)
        assert policy is not None and candidates is not None
        self.governor = Governor(candidates, self._costs, policy.rules, drafter.usual_agreement)
        if before is not None:
            self.governor.ledger = before.ledger

    def _cost_kind(self) -> tuple[bool, ...]:
        """What makes a step's cost differ beside plan, batch size and length."""
        params = [sequence.params for sequence in self.running]
        requests = [sequence.request for sequence in self.running]
        return (
            any(of.do_sample for of in params),
            any(of.changes_logits for of in params),
            any(bool(of.processors) for of in requests),
            any(of.rejection for of in requests),
        )

    def _score_prompts(self, sequences: Seq[Sequence]) -> None:
        """How often the exit agrees with the model at a prompt's end tells what to expect of it. Batches too large for
        trees are not scored: their first steps tell more for less."""
        governor, exit = self.governor, self.exit
        if governor is None or exit is None or len(self.running) > governor.rules.max_tree_batch:
            return
        if governor.usual_agreement is None or self._rule() is not None:
            return
        if not self.backend.overlaps and not governor.would_draft(self._watches, self._context):
            return
        self.backend.score_prompts([sequence for sequence in sequences if sequence.parent is None], exit)
        self._unscored_prompts = True
        self._learn_prompts(wait=False)

    def _learn_prompts(self, wait: bool) -> None:
        """Scores of prompts that have arrived; with `wait` all of them."""
        scores = self.backend.prompt_scores(wait) if self._unscored_prompts else {}
        self._unscored_prompts = self._unscored_prompts and not scores and not wait
        agreement = None if self.governor is None else self.governor.usual_agreement
        if agreement is None:
            return
        for sequence, (share, places) in scores.items():
            for sample in sequence.request.sequences:
                if sample is sequence or sample.parent is sequence:
                    sample.watch.learn_prompt(share, places, *agreement)

    # Steps

    def step(self) -> None:
        """Every running sequence advances by at least one token. A backend that overlaps has the next step in flight
        before the tokens of this one are read."""
        step = self.in_flight or self.launch(None)
        self.in_flight = None
        if self._overlaps and self._goes_on(step):
            with suppress(CacheFull):  # what this step ends may leave enough
                self.in_flight = self.launch(step)
        self.backend.read(step)
        self._account(step)

    @property
    def _overlaps(self) -> bool:
        """Callables need the tokens of the step before."""
        return self.backend.overlaps and not any(of.request.processors for of in self.running)

    def drain(self) -> None:
        """Reads the step in flight, so that lengths and tokens are known."""
        step, self.in_flight = self.in_flight, None
        if step is not None:
            self.backend.read(step)
            self._account(step)

    def launch(self, before: Step | None) -> Step:
        """Launches the next step; `before` was launched and not read yet."""
        self._score_exit(before)
        chosen, reason = self._choose_plan(before)
        plan = chosen if self.backend.overlaps else chosen.truncated(max(of.tokens_left for of in self.running) - 1)
        if self.exit is not None and len(plan) and self._unfilled:
            self._fill_exit(score=False, before=before)
        step = self.backend.launch(self.running, StepRecord.of(plan, chosen, reason), self.exit, before)
        step.reasons = {of: why for of, why in zip(self.running, self._reasons, strict=True) if why is not None}
        self._reason, self._is_late = reason, step.is_late
        if len(plan):
            self._unscored, self._patience = 0, self._first_score
        elif self.exit is not None:
            self._unfilled += 1
            self._unscored += 1
        return step

    def _goes_on(self, step: Step) -> bool:
        """Whether the next step can be launched before this one is read: most likely some text goes on."""
        plan = step.record.plan
        return any(of.tokens_left > of.usual_tokens(plan) for of in self.running if not of.is_finished)

    def _rule(self) -> str | None:
        """The rule that forbids to draft for every sequence; None if one may be drafted for."""
        return None if None in self._reasons or not self._reasons else self._reasons[0]

    def _choose_plan(self, before: Step | None) -> tuple[Plan, str | None]:
        """The plan of the next step and, where it is `none`, the reason."""
        rule = self._rule()
        if rule is not None:
            return NONE, rule
        size = len(self.running)
        for sequence, reason in zip(self.running, self._reasons, strict=True):
            drafter, policy = sequence.request.drafter, sequence.request.policy
            if reason is None and policy is not None and (drafter is None or drafter.candidates is None):
                plan, why = policy.choose(size)  # a plan of the request's own, or forced
                return self._bounded(plan), why
        assert self.governor is not None
        if self._unscored_prompts and any(of.watch.is_unfamiliar for of in self.running):
            if before is None:
                return NONE, MEASURING  # the prompt's score arrives while this step runs
            self._learn_prompts(wait=True)
        if before is not None and self._may_repeat(before):
            return before.record.chosen, before.record.reason
        left = [of.tokens_left for of in self.running]
        in_flight = None
        if before is not None:
            in_flight = before.record.plan, before.record.reason
            if max(left) < _ENDING:
                usual = [round(of.usual_tokens(before.record.plan)) for of in self.running]
                left = [max(1, n - of) for n, of in zip(left, usual, strict=True)]
        plan, why = self.governor.choose(self._watches, self._context, in_flight, left)
        return self._bounded(plan), why

    def _bounded(self, plan: Plan) -> Plan:
        """Without the deepest nodes where all sequences' nodes together would be too many rows."""
        depth = plan.depth
        slots = self.backend.slots_for(len(self.running))
        while depth and (len(plan) + 1) * slots > MAX_STEP_ROWS:
            depth -= 1
            plan = plan.truncated(depth)
        return plan

    def _may_repeat(self, before: Step) -> bool:
        """Whether the plan in flight is used again without asking: the host is late, and the governor allows that many
        steps of a plan it knows to go unseen."""
        governor = self.governor
        assert governor is not None
        plan = before.record.plan
        if not self._is_late or not len(plan) or plan != governor.plan or len(before.sequences) != len(self.running):
            return False
        return self._unseen < governor.unseen_cycles

    @property
    def _watches(self) -> list:
        return [sequence.watch for sequence in self.running]

    @property
    def _context(self) -> int:
        return max(len(sequence.tokens) for sequence in self.running)

    # The exit while nothing is drafted

    @property
    def _first_score(self) -> int:
        """Plain steps before the exit is first scored; passes of a backend that does not overlap delay the text."""
        if self.governor is None:
            return _FIRST_FILL
        first = self.governor.rules.scored_after(len(self.running)) or _FIRST_FILL
        return first if self.backend.overlaps else 2 * first

    @property
    def _last_score(self) -> int:
        """Plain steps between scores at most, once scores have not led to drafting."""
        most = _SELDOM if len(self.running) <= 4 else 2 * _SELDOM
        return most if self.backend.overlaps else 2 * most

    def _score_exit(self, before: Step | None) -> None:
        """Fills the exit's cache when it lacks as much as it can, and scores it when the governor should look again."""
        if self.exit is None or not self._unfilled:
            return
        scores = (
            self.governor is not None
            and self.governor.rules.shadow_tokens > 0
            and self._unscored >= self._patience
            and self._reason in _GOVERNED
            and self._rule() is None
        )
        if scores or self._unfilled >= self.backend.max_unfilled:
            self._fill_exit(scores, before)
            if scores:
                self._unscored = 0
                self._patience = max(self._first_score, min(2 * self._patience, self._last_score))
                self._learn_scores()

    def _fill_exit(self, score: bool, before: Step | None) -> None:
        assert self.exit is not None
        self.backend.fill_exit(self.running, self.exit, score, before)
        self._unfilled = 0

    def _learn_scores(self) -> None:
        for scores in self.backend.exit_scores():
            going_on = [i for i, of in enumerate(scores.sequences) if not of.is_finished]
            if self.governor is not None and going_on:
                watches = [scores.sequences[i].watch for i in going_on]
                self.governor.scored(watches, [scores.ranks[i] for i in going_on], scores.offered)

    # Accounting

    def _account(self, step: Step) -> None:
        """A step was read: extends the records, and tells governor, costs and metrics."""
        record, plan, depths = step.record, step.record.plan, step.record.plan.depths
        context, left = 0, []  # the longest text before the step, and the tokens that each may still get
        ends: list[int | None] = list(step.last_nodes)  # None where nothing was drafted, or a text has ended
        for place, sequence in enumerate(step.sequences):
            last, rule = step.last_nodes[place], step.reasons.get(sequence)
            sequence.records.append(record if rule is None else StepRecord.of(NONE, NONE, rule))
            sequence.last_nodes.append(last)
            context = max(context, len(sequence.tokens) - depths[last] - 1)
            left.append(0 if sequence.is_finished else sequence.tokens_left)
            if sequence.is_finished or rule is not None:
                ends[place] = None
        if not step.sequences:
            return
        self._learn_scores()
        self._learn_prompts(wait=False)
        size, governor, costs = len(step.sequences), self.governor, self._costs
        charged = self._charged(step, context) if step.is_typical else None
        if governor is not None:
            watches = [sequence.watch for sequence in step.sequences]
            repeats = (
                self._is_late and len(plan) > 0 and plan == governor.plan and self._unseen < governor.unseen_cycles
            )
            self._unseen = self._unseen + 1 if repeats else 0
            if repeats:
                governor.overlook(watches, plan, ends, context, left)
            else:
                governor.observe(watches, plan, ends, charged, context, record.reason, left)
        elif not len(plan) and charged is not None:
            costs.observe(Setting.of(0, costs.size(size), context), plan, charged)
        if record.chosen != self._plan:
            self.metrics.add_plan_change(record.reason)
            self._plan = record.chosen
        emitted = [depths[last] + 1 for last in step.last_nodes]
        self.metrics.add_step(plan, step.seconds, emitted, costs.plain(size, context))

    def _charged(self, step: Step, context: int) -> float:
        """Seconds that the plan is charged: wall time if its steps are known, else at most 1.05x device time, since the
        first steps of a plan take the host longer than any later."""
        governor, plan, wall = self.governor, step.record.plan, max(step.seconds, step.wall_seconds)
        known = governor is not None and len(plan) > 0 and governor.knows(plan, len(step.sequences), context)
        return wall if known else min(wall, _LATE * step.seconds)
