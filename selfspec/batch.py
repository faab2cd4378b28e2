"""A batch: the sequences that decode together, with one exit, on one backend.

Chooses the plan of every step (hard rules first, then the governor), launches it, hands its tokens to the sequences and
its outcome to the governor and the metrics. Sequences join and leave between steps. The scheduler decides which of them
do; the backend computes the steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from math import inf

from selfspec.backends.base import Backend, Step
from selfspec.cache.kv_cache import CacheFull
from selfspec.drafters import Drafters
from selfspec.governor.acceptance import Skill
from selfspec.governor.governor import MEASURING, Governor
from selfspec.governor.rules import Policy
from selfspec.metrics import Metrics
from selfspec.profiles.router import Embedded
from selfspec.sequence import Request, Sequence, StepRecord
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import MAX_STEP_ROWS, NONE, Plan


class Batch:
    """Sequences that decode together."""

    def __init__(self, backend: Backend, exit: Exit | None, drafters: Drafters, metrics: Metrics) -> None:
        self.backend, self.drafters, self.metrics = backend, drafters, metrics
        self.base_exit = exit  # over the whole head
        self.running: list[Sequence] = []
        self.in_flight: Step | None = None
        self.exit: Exit | None = None  # over the rows of the head that its sequences draft from; None: none drafts
        self.governor: Governor | None = None
        self._costs = drafters.costs(None)  # of steps of batches like this one
        self._reasons: list[str | None] = []  # by sequence, the rule that forbids drafting for it
        self._plan: Plan | None = None  # of the newest step that was read
        self._in_use = NONE  # plan of the newest launched step, without plain steps whose reason is `measuring`
        self._unfilled = 0  # plain steps since the exit's KV was filled, the one in flight included
        self._unscored = 0  # plain steps since the exit was scored, likewise
        self._joined: list[Sequence] = []  # first samples of prompts that were not examined yet
        self._routing: list[tuple[list[Request], Embedded]] = []  # requests whose domain is being found

    # Membership

    def join(self, sequences: Seq[Sequence]) -> None:
        """Prefilled sequences decode from the next step on."""
        if not self.running:
            self.drain()  # of sequences that have ended
            self._unfilled = self._unscored = 0
            self._plan, self._in_use, self._joined = None, NONE, []
        self.running += sequences
        self._joined += [of for of in sequences if of.parent is None]
        self._update(joined=True)
        if not self.backend.overlaps:
            self._examine_prompts()

    def leave(self, sequences: Seq[Sequence]) -> None:
        """Removes sequences that have ended or that have to wait."""
        for sequence in sequences:
            self.running.remove(sequence)
            self.backend.release(sequence)
        self._update(joined=False)

    def _update(self, joined: bool) -> None:
        """The members have changed: applies the rules to the new batch size, and finds exit, costs and governor."""
        if not self.running:
            self.exit = self.governor = None
            return
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
            prompts = [of.prompt for of in may_draft if of.parent is None and not _is_unrouted(of.request)]
            self.exit = self.drafters.shared_exit(self.base_exit, drafters, prompts)
        self._costs = self.drafters.costs(self._cost_kind())
        self._choose_governor()
        self._unfilled = min(self._unfilled, self.backend.max_unfilled)

    def _choose_governor(self) -> None:
        """Candidates and rules are those of the domain and temperature that most sequences have. Where a request brings
        its own plan, the whole batch uses it and nothing is governed."""
        requests = [of.request for of in self.running if of.drafts]
        self.governor = None
        if requests and self._own_plan() is None:
            found = [request.drafter.candidates for request in requests if request.drafter is not None]
            ((candidates, _),) = Counter(found).most_common(1)
            policy = next(
                of.policy for of in requests if of.drafter is not None and of.drafter.candidates is candidates
            )
            assert policy is not None and candidates is not None
            rules, masks = policy.rules, any(of.grammar is not None for of in self.running)
            # Steps with grammars wait for the host; the candidates' device times are within the limit all the same.
            limited = replace(rules, max_step=inf) if masks else rules
            self.governor = Governor(candidates, self._costs, limited, self.drafters.budget(rules))

    def _cost_kind(self) -> Hashable:
        """Key of measured costs beside plan, batch size and length: the exit layer; whether any sequence samples,
        processes logits, has callables or a grammar, uses the rejection rule, wants log probabilities."""
        params = [sequence.params for sequence in self.running]
        requests = [sequence.request for sequence in self.running]
        return (
            None if self.exit is None else self.exit.layer,
            any(of.do_sample for of in params),
            any(of.changes_logits for of in params),
            any(bool(of.processors) for of in requests),
            any(of.uses_host for of in requests),
            any(of.rejection for of in requests),
            any(of.logprobs is not None for of in requests),
        )

    # Steps

    def step(self) -> None:
        """Every running sequence advances by at least one token. A backend that overlaps has the next step in flight
        before the tokens of this one are read."""
        step = self.in_flight or self.launch(None)
        self.in_flight, goes_on = None, self._goes_on(step)
        if goes_on and self._overlaps:
            with suppress(CacheFull):  # sequences that end with this step may leave enough pages
                self.in_flight = self.launch(step)
        if goes_on and self._joined:  # while the device runs their first steps
            self._examine_prompts()
        self.backend.read(step)
        self._account(step)

    @property
    def _overlaps(self) -> bool:
        """Whether the next step is launched before this one is read; not with callables, which need its tokens."""
        return self.backend.overlaps and not any(of.request.processors for of in self.running)

    def drain(self) -> None:
        """Reads the step in flight, so that the host has its lengths and tokens."""
        step, self.in_flight = self.in_flight, None
        if step is not None:
            self.backend.read(step)
            self._account(step)

    def launch(self, before: Step | None) -> Step:
        """Launches the next step; `before` was launched and not read yet."""
        if self._routing:
            self._learn_domains()
        self._score_exit(before)
        chosen, reason = self._choose_plan()
        if reason != MEASURING:
            self._in_use = chosen
        plan = chosen if self.backend.overlaps else chosen.truncated(max(of.tokens_left for of in self.running) - 1)
        if self._unfilled and len(plan):
            self._fill_exit(before, score=False)
        step = self.backend.launch(self.running, StepRecord.of(plan, chosen, reason), self.exit, before)
        step.reasons = {of: why for of, why in zip(self.running, self._reasons, strict=True) if why is not None}
        step.governor = self.governor
        if self.governor is not None:
            self.governor.launched(plan, len(self.running), self._context)
        if len(plan):
            self._unscored = 0
        elif self.exit is not None:
            self._unfilled += 1
            self._unscored += 1
        return step

    def _goes_on(self, step: Step) -> bool:
        """Whether the next step can be launched before this one is read: some sequence is expected to continue."""
        plan = step.record.plan
        return any(of.tokens_left > of.usual_tokens(plan) for of in self.running if not of.is_finished)

    def _rule(self) -> str | None:
        """The rule that forbids drafting for every sequence; None if one may be drafted for."""
        return None if None in self._reasons or not self._reasons else self._reasons[0]

    def _choose_plan(self) -> tuple[Plan, str | None]:
        """The plan of the next step and, where it is `none`, the reason."""
        rule = self._rule()
        if rule is not None:
            return NONE, rule
        policy = self._own_plan()
        if policy is not None:
            plan, reason = policy.choose(len(self.running))
        else:
            assert self.governor is not None
            skills = [of.skill for of in self.running if of.drafts]
            plan, reason = self.governor.choose(skills, len(self.running), self._context, self._in_use)
        return self._bounded(plan), reason

    def _own_plan(self) -> Policy | None:
        """The policy of the first sequence that may draft and is not governed: its request has a plan or forces one."""
        for sequence in self.running:
            drafter, policy = sequence.request.drafter, sequence.request.policy
            if sequence.drafts and (drafter is None or drafter.candidates is None):
                return policy
        return None

    def _bounded(self, plan: Plan) -> Plan:
        """Drops the deepest levels until the rows of all slots fit MAX_STEP_ROWS. Rejection takes a chain in place of a
        beam: whether a beam has a node depends on the noise that it was drawn with."""
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

    # The exit while nothing is drafted

    def _score_exit(self, before: Step | None) -> None:
        """Scores the exit's drafts at plainly decoded tokens when that is due, and fills its KV for them; only fills it
        when the backend can hold no more of them."""
        governor, most, scores = self.governor, float(self.backend.max_unfilled), False
        if governor is not None and governor.may_score and self._unscored >= governor.score_interval:
            most, scores = min(most, governor.score_interval), True
        if self.exit is not None and self._unfilled >= most:
            self._fill_exit(before, scores)
            if scores and governor is not None:
                self._unscored = 0
                governor.charge_score()
                self._learn_scores()

    def _fill_exit(self, before: Step | None, score: bool) -> None:
        assert self.exit is not None
        self.backend.fill_exit(self.running, self.exit, score, before)
        self._unfilled = 0

    def _examine_prompts(self) -> None:
        """Launches the passes that score the exit at the ends of prompts, and that find their domains."""
        joined, self._joined = [of for of in self._joined if not of.is_finished], []
        self._score_prompts(joined)
        embedding = {request for requests, _ in self._routing for request in requests}
        requests = [of for of in dict.fromkeys(of.request for of in joined) if _is_unrouted(of) and of not in embedding]
        if not requests:
            return
        try:
            embedded = self.drafters.embed([of.prompt for request in requests for of in request.first_samples])
        except CacheFull:
            self._joined = joined  # tried again behind the next step
            return
        self.backend.note_other_work()
        self._routing.append((requests, embedded))

    def _learn_domains(self) -> None:
        """Replaces the drafters of requests whose domains were found."""
        arrived = [of for of in self._routing if of[1].is_done()]
        if not arrived:
            return
        self._routing = [of for of in self._routing if of not in arrived]
        for requests, embedded in arrived:
            rows = embedded.read()
            for request in requests:
                assert request.drafter is not None and request.drafter.routed is not None
                count = len(request.first_samples)
                request.draft_with(request.drafter.routed(rows[:count]))
                rows = rows[count:]
        self._update(joined=True)

    def _score_prompts(self, sequences: Seq[Sequence]) -> None:
        """Scores the exit at the ends of prompts. Larger batches are not scored: their first steps show as much."""
        governor = self.governor
        if governor is None or self.exit is None or len(self.running) > governor.rules.max_tree_batch:
            return
        own = [sequence for sequence in sequences if _prompt_agreement(sequence) is not None]
        if own and governor.may_score and self.backend.score_prompts(own, self.exit):
            governor.charge_score()
            self._learn_scores()

    def _learn_scores(self) -> None:
        """Scores that have arrived of plainly decoded tokens and of prompts."""
        for sequence, right in self.backend.exit_scores():
            if self.governor is not None:
                self.governor.scored(sequence.skill, right)
        for sequence, (share, positions) in self.backend.prompt_scores().items():
            usual = _prompt_agreement(sequence)
            for sample in sequence.request.sequences:
                if usual is not None and sequence in (sample, sample.parent):
                    sample.skill.observe_prompt(share, positions, usual)

    # Accounting

    def _account(self, step: Step) -> None:
        """A step was read: extends the records, and informs governor, costs and metrics."""
        if not step.sequences:
            return
        record, plan, depths = step.record, step.record.plan, step.record.plan.depths
        context = 0  # tokens of the longest sequence before the step
        outcomes: list[tuple[Skill | None, int]] = []
        for sequence, last in zip(step.sequences, step.last_nodes, strict=True):
            rule = step.reasons.get(sequence)
            sequence.records.append(record if rule is None else StepRecord.of(NONE, NONE, rule))
            sequence.last_nodes.append(last)
            context = max(context, len(sequence.tokens) - depths[last] - 1)
            outcomes.append((None if sequence.is_finished or rule is not None else sequence.skill, last))
        self._learn_scores()
        seconds = step.seconds if step.enters_costs else None
        if step.governor is not None:  # sequences that joined or left since the launch may have brought another one
            step.governor.observe(plan, outcomes, seconds, context, step.exit_nodes)
            if step.governor.copies(len(step.sequences)):
                for sequence in step.sequences:
                    sequence.skill.copied = sequence.copying.read(sequence.tokens, len(sequence.prompt))
        elif not len(plan) and seconds is not None:
            self._costs.observe(self._costs.cell(len(step.sequences), context), plan, seconds, modelled=1.0)
        if record.chosen != self._plan:
            self.metrics.add_plan_change(record.reason)
            self._plan = record.chosen
        plain = self._costs.cell(len(step.sequences), context).plain
        self.metrics.add_step(plan, step.seconds, [depths[last] + 1 for last in step.last_nodes], plain)


def _is_unrouted(request: Request) -> bool:
    """Whether the request drafts with another domain's drafter until its own is found."""
    return request.drafter is not None and request.drafter.routed is not None


def _prompt_agreement(sequence: Sequence) -> float | None:
    """How often exit and model agree on prompts that calibration saw."""
    drafter = sequence.request.drafter
    return None if drafter is None else drafter.prompt_agreement
