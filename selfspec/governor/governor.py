"""The governor: picks the plan of every cycle by what it is expected to bring for what it costs.

Expected tokens come from what each sequence has shown so far, costs from the engine's measurements. It steps aside
where no plan beats plain decoding, looks again from time to time, and keeps a ledger so that looking never costs more
than its bound. Tokens do not depend on plans, so all of this can change only their speed. The hard rules come before
it and are the policy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import inf
from typing import NamedTuple

import numpy as np

from selfspec.governor.acceptance import FAMILIAR, STRANGE, UNFAMILIAR, Belief, Chances
from selfspec.governor.candidates import Ladder
from selfspec.governor.costs import Costs, Setting
from selfspec.governor.rules import Rules
from selfspec.speculation.plan import DEEPEST_PLAN, NONE, Plan

# Why the first cycles of a kind, and some later ones, are plain: to compare with. Also while a prompt is judged.
MEASURING = "measuring"
_FIRST_PROBE = 8  # tokens after stepping aside, where nobody watches; twice as many after every one without effect
_AGAIN = 8  # tokens after which a probe that was due is thought of again, if too much was owed for it
_RETHOUGHT = 4  # plain cycles after which news that did not make a difference are thought of again
_MOST_FEARED = 0.5  # plain steps that a probe of unknown costs is expected to lose
_MOST_CREDIT = 6.0  # plain steps won earlier that may be lost again before the ledger closes
_UNSEEN = 3  # cycles in a row that go by unseen where the host is slower than the device
_MISHAP = 1.5  # times its usual cost
_NOISE = 0.015  # by which the plan in use may turn out to be longer than a cycle may be
_FEWEST = 8  # positions of a prompt that can tell anything
_SURE = 0.8  # of being strange text
_LEAST_SHARE = 0.5  # of the sequence that will be the last one, in what plans are judged by
_LONG = 1 << 20  # tokens that a text may still get where nobody says how many


@dataclass(frozen=True)
class Change:
    """A sequence goes on with another plan."""

    cycle: int
    token: int  # new tokens so far
    plan: str
    reason: str | None  # why nothing is drafted; None where something is


@dataclass
class Watch:
    """What is known of one sequence's text."""

    belief: Belief = field(default_factory=Belief)
    ood: bool = False  # it was, at some time, surely strange

    @classmethod
    def of_prompt(cls, far: bool) -> Watch:
        """For a sequence that joins; `far` from every domain that calibration saw, or not."""
        return cls(Belief(UNFAMILIAR if far else FAMILIAR))

    def learn_prompt(self, agreement: float, places: int, usual: float, deviation: float) -> None:
        """The exit agreed with the model on this share of so many last positions of the prompt."""
        if places >= _FEWEST:
            self.belief.learn_agreement(agreement, places, usual, deviation)
            self.ood = self.ood or self.belief.strangeness > _SURE

    @staticmethod
    def learn_together(watches: Sequence[Watch], chances: Sequence[Chances], tokens: Sequence[int]) -> None:
        """Each learns its own, and something of the others."""
        Belief.learn_together([watch.belief for watch in watches], chances, tokens)
        for watch in watches:
            watch.ood = watch.ood or watch.belief.strangeness > _SURE

    @property
    def is_unfamiliar(self) -> bool:
        """Its prompt lies far from every domain that calibration saw."""
        return self.belief.prior == UNFAMILIAR

    @property
    def is_strange(self) -> bool:
        """It was surely strange, and still is more likely so than not."""
        return self.ood and self.belief.strangeness > 0.5


class Ledger:
    """What speculation has cost so far against plain decoding, in plain steps. Gains are remembered up to a limit;
    while too much is owed nothing is drafted, and every plain step pays a little of it back."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.owed = 0.0

    def spend(self, cost: float) -> None:
        self.owed = max(-_MOST_CREDIT, self.owed + cost)

    def pay_back(self) -> None:
        self.owed = max(min(self.owed, 0.0), self.owed - self.share)

    def allows(self, allowance: float) -> bool:
        return self.owed <= allowance


class Prospects(NamedTuple):
    """The plans that may be chosen in some setting."""

    plans: list[Plan]  # the smallest first
    places: dict[Plan, int]  # where each of them is in that list
    tokens: np.ndarray  # [kinds, plans]: what they bring for each kind of text
    ratios: np.ndarray  # [plans]: what they cost, in plain steps


class Governor:
    """Chooses the plans of one session. What it chooses follows only from what it is told to have happened; of a choice
    it remembers only by which sequence it was made."""

    def __init__(
        self,
        ladder: Ladder,
        costs: Costs,
        rules: Rules,
        usual_agreement: tuple[float, float] | None = None,  # of exit and model on familiar prompts, and its deviation
    ) -> None:
        self.ladder, self.costs, self.rules, self.usual_agreement = ladder, costs, rules, usual_agreement
        self.plan = NONE  # the one in use
        self.is_watched = rules.shadow_tokens > 0  # exits are scored while nothing is drafted
        self.ledger = Ledger(rules.probe_share)
        self._has_news = True
        self._age = 0  # of these, in plain cycles
        self._why = "goodput"  # nothing was drafted when that was last decided
        self._is_blind = True  # no draft has been judged yet
        self._has_paid = False  # the newest cycle that drafted
        self._decisive: Watch | None = None  # the sequence that the newest plan will slow down, if any
        self._at: Setting | None = None  # where the plan in use was seen last
        self._batch = 0  # of the last cycle
        self._quiet = 0  # cycles since something was drafted
        self._patience = min(_FIRST_PROBE, rules.probe_interval)  # of them before a probe

    def choose(
        self,
        watches: Sequence[Watch],
        context: int,
        in_flight: tuple[Plan, str | None] | None = None,
        left: Sequence[int] | None = None,
    ) -> tuple[Plan, str | None]:
        """The plan of the next cycle of these sequences, the longest of `context` tokens; with `none`, the reason.
        `in_flight` was chosen for the cycle before, of which nothing is known yet; `left` counts the tokens that each
        sequence may still get."""
        measuring = in_flight is not None and in_flight[1] == MEASURING
        probing = in_flight is not None and self._is_probe(in_flight[0])  # what comes of it is not known yet
        if probing or self.costs.wants_plain(len(watches), context, int(measuring)):
            return NONE, MEASURING
        plan_in_use = self.plan if in_flight is None or measuring else in_flight[0]
        quiet = self._quiet + (in_flight is not None and not len(in_flight[0]))
        overdue = quiet - self._needed_patience
        may_probe = overdue >= 0 and overdue % _AGAIN == 0
        if not len(plan_in_use) and not may_probe and self._has_nothing_to_decide(len(watches)):
            return NONE, self._why
        at = self._setting(watches, context)
        prospects = self._look_up(at, len(watches), plan_in_use, _LONG if left is None else max(left))
        if not prospects.plans:
            return self._stay_plain(watches)
        speeds, lasts, slows = _speeds(watches, prospects, left)
        chosen = self._best(prospects, speeds, len(watches), plan_in_use)
        if chosen is None and may_probe:
            chosen = self._probe(prospects, speeds, at)
        if chosen is None:
            return self._stay_plain(watches)
        if self._is_blind and self._starts_small(watches):
            chosen = 0
        self._decisive = watches[lasts[chosen]] if slows[chosen] else None
        return prospects.plans[chosen], None

    def would_draft(self, watches: Sequence[Watch], context: int) -> bool:
        """Whether some plan is expected to pay for these sequences by as much as it takes to begin, whatever the ledger
        says."""
        prospects = self._look_up(self._setting(watches, context), len(watches), NONE, _LONG)
        speeds = _speeds(watches, prospects, None)[0] if prospects.plans else []
        return any(speed > 1 + self.rules.least_gain for speed in speeds)

    def _starts_small(self, watches: Sequence[Watch]) -> bool:
        """Whether the first draft is to tell more than to bring: those of many sequences tell much, and of texts unlike
        all that calibration saw most is unknown."""
        return len(watches) > self.rules.max_tree_batch or all(watch.is_unfamiliar for watch in watches)

    def _best(self, prospects: Prospects, speeds: list[float], batch: int, in_use: Plan) -> int | None:
        """The plan that is expected to be fastest, unless that in use is hardly slower; None if it does not pay."""
        best = speeds.index(max(speeds))
        place = prospects.places.get(in_use)
        if place is not None:
            best = place if speeds[best] <= (1 + self.rules.hysteresis) * speeds[place] else best
        return best if self._pays(speeds[best], batch, in_use) and self.ledger.allows(self._allowance(in_use)) else None

    def _allowance(self, in_use: Plan) -> float:
        """What may be owed where drafting begins or goes on. Beginning is a trial too, and goes on while it pays: what
        plans have lost before shall not keep a text that turned from being drafted again."""
        is_trial = self._has_paid or not len(in_use)
        return self.rules.loss_allowance + (self.rules.probe_allowance if is_trial else 0.0)

    def _probe(self, prospects: Prospects, speeds: list[float], at: Setting) -> int | None:
        """The plan that is expected to lose least by trying whether drafting would pay; None if even that is owed. No
        plan is given up for good: where costs may have changed, or nobody watches the texts, what is expected of it
        does not forbid to try it. Where a look is the cheaper way to find out, as without kernels, a probe counts as if
        nothing came of it."""
        ratios = prospects.ratios.tolist()
        losses = [ratio * (1 - speed) for ratio, speed in zip(ratios, speeds, strict=True)]
        cheapest = losses.index(min(losses))
        feared = losses[cheapest]
        if not self.is_watched or not self.costs.knows_any(at):
            feared = min(feared, _MOST_FEARED)
        elif self.costs.guessed_here:
            feared = ratios[cheapest] - 1
        return cheapest if self.ledger.allows(self.rules.probe_allowance - max(0.0, feared)) else None

    def _has_nothing_to_decide(self, batch: int) -> bool:
        """While nothing is drafted: nothing was learned since that was decided, or some time ago. When news are first
        thought of they may be a cycle old; of many sequences, learning keeps the host long enough for one cycle."""
        earliest = 2 if batch > self.rules.max_tree_batch else 0
        is_too_new, is_old = self._age < earliest, self._age > max(earliest, 1) and self._age % _RETHOUGHT != 0
        return batch == self._batch and (is_too_new or is_old or not self._has_news)

    def _stay_plain(self, watches: Sequence[Watch]) -> tuple[Plan, str]:
        """Until something is learned, for the same reason."""
        self._why = "ood" if all(watch.is_strange for watch in watches) else "goodput"
        return NONE, self._why

    def _pays(self, speedup: float, batch: int, in_use: Plan) -> bool:
        """Going on takes no less than plain speed; starting takes a little more, and something that was not known
        when drafting was given up."""
        if len(in_use):
            return speedup >= 1
        return speedup > 1 + self.rules.least_gain and (self._has_news or batch != self._batch)

    def ratio(self, plan: Plan, at: Setting) -> float:
        """What a cycle costs in plain steps."""
        if not len(plan):
            return 1.0
        known = self._ratios(at)
        if plan not in known:
            known[plan] = self.costs.ratio(at, plan, self.ladder.guess(at.batch))
        return known[plan]

    def _ratios(self, at: Setting) -> dict[Plan, float]:
        """Of all plans that may be chosen; found once for many cycles."""
        plans, guess = self.ladder.plans(at.batch), self.ladder.guess(at.batch)
        return self.costs.once(at, (self.ladder, at), lambda: self.costs.ratios(at, plans, guess))

    def knows(self, plan: Plan, sequences: int, context: int) -> bool:
        """Whether the plan has been run here, of late and often enough to be judged by what it took."""
        return self.costs.is_known(Setting.of(self.ladder.exit_layer, self.costs.size(sequences), context), plan)

    @property
    def unseen_cycles(self) -> int:
        """How many cycles of the plan in use may go by before anybody looks: some where drafting has won much, one
        where it is known what that costs and may still be lost, and else none."""
        if self.ledger.owed <= -_MOST_CREDIT / 2:
            return _UNSEEN
        return int(self.ledger.allows(self.rules.loss_allowance - self._at_stake))

    @property
    def _at_stake(self) -> float:
        """Plain steps that one more cycle of the plan in use can lose."""
        at = self._at
        return self.ratio(self.plan, at) - 1 if at is not None and self.costs.is_known(at, self.plan) else inf

    def _look_up(self, at: Setting, batch: int, in_use: Plan, most: int) -> Prospects:
        """What plans cost and bring, to texts that get `most` tokens more at most; found once for many cycles, also of
        other requests. Whether a plan may be chosen depends on that in use only where it is a little too long."""
        limit, trees = self.rules.cycle_limit, batch <= self.rules.max_tree_batch
        kept = in_use if limit < self.ratio(in_use, at) <= (1 + _NOISE) * limit else None
        most = min(most, DEEPEST_PLAN + 1)
        key = self.ladder, limit, at, trees, kept, most
        return self.costs.once(at, key, lambda: self._prospects(at, batch, kept, most))

    def _prospects(self, at: Setting, batch: int, kept: Plan | None, most: int) -> Prospects:
        plans, known = self.ladder.plans(batch), self._ratios(at)
        ratios = [known.get(plan) or self.ratio(plan, at) for plan in plans]
        may = [self._may_be_chosen(plan, ratio, at, kept) for plan, ratio in zip(plans, ratios, strict=True)]
        allowed, tokens = list(compress(plans, may)), self.ladder.tokens(batch, most)
        return Prospects(allowed, {plan: i for i, plan in enumerate(allowed)}, tokens[:, may], np.array(ratios)[may])

    def _may_be_chosen(self, plan: Plan, ratio: float, at: Setting, kept: Plan | None) -> bool:
        """Whether a plan's cycles are no longer than the rules allow. That in use may be so by a little, lest noise
        make it come and go; one that was run too rarely to be judged, by any length."""
        return ratio <= self.rules.cycle_limit or plan == kept or not self.costs.is_known(at, plan)

    def observe(
        self,
        watches: Sequence[Watch],
        plan: Plan,
        lasts: Sequence[int | None],
        seconds: float | None,
        context: int,
        reason: str | None = None,
        left: Sequence[int] | None = None,
    ) -> None:
        """A cycle of these sequences is over: where each stopped in its tree (None: its text ended), and its time,
        unless others had a part in that. A cycle that was there to measure changes nothing of what is in use. What it
        cost is booked by what plans are chosen by."""
        at = self._setting(watches, context)
        spent = self._spent(plan, at, seconds, context) if len(plan) else 1.0
        if seconds is not None:
            self.costs.observe(at, plan, seconds)
        if not len(plan):
            for watch in watches:
                watch.belief.fade(tokens=1)
            self.ledger.pay_back()
            self._quiet += 1
            self._age += 1
            if reason != MEASURING:
                self._has_news = self._has_news and not len(self.plan)
                self.plan, self._batch = NONE, len(watches)
            return
        self._is_blind = False
        emitted = _emitted(plan, lasts)
        loss = spent - self._counted(watches, emitted, left)
        self._learn(watches, plan, lasts, emitted)
        self.ledger.spend(loss)
        self._has_paid = loss < 0
        self._patience = self._patience_after(plan, self._has_paid)
        self.plan, self._quiet, self._batch, self._at = plan, 0, len(watches), at

    def overlook(
        self,
        watches: Sequence[Watch],
        plan: Plan,
        lasts: Sequence[int | None],
        context: int,
        left: Sequence[int] | None = None,
    ) -> None:
        """A cycle with the plan in use is over, and there is no time to learn from it: only what it cost is booked."""
        self.ledger.spend(
            self.ratio(plan, self._setting(watches, context)) - self._counted(watches, _emitted(plan, lasts), left)
        )

    def _counted(self, watches: Sequence[Watch], emitted: Sequence[int], left: Sequence[int] | None) -> float:
        """The tokens of a cycle that its plan is judged by, as in `_speeds`: of all sequences that go on and of the one
        that will be last, each for its share."""
        rows = zip(watches, emitted, left or emitted, strict=True)
        went_on = [(watch, tokens) for watch, tokens, row_left in rows if row_left]
        mean = sum(tokens for _, tokens in went_on) / len(went_on) if went_on else 1.0
        if self._decisive is None:
            return mean
        last = min(mean, next((tokens for watch, tokens in went_on if watch is self._decisive), mean))
        share = max(self._decisive.belief.strangeness, _LEAST_SHARE)
        return share * last + (1 - share) * mean

    def _learn(self, watches: Sequence[Watch], plan: Plan, lasts: Sequence[int | None], emitted: Sequence[int]) -> None:
        """From where sequences stopped in their trees; from those whose text ended, nothing."""
        stopped = [(index, last) for index, last in enumerate(lasts) if last is not None]
        if stopped:
            chances = [self.ladder.acceptance.chances(plan, last) for _, last in stopped]
            Watch.learn_together([watches[i] for i, _ in stopped], chances, [emitted[i] for i, _ in stopped])

    def _spent(self, plan: Plan, at: Setting, seconds: float | None, context: int) -> float:
        """What this cycle really took, in plain steps; of a mishap only so much is the plan's fault."""
        usual, plain = self.ratio(plan, at), self.costs.plain(at.batch, context)
        return usual if plain is None or seconds is None else min(seconds / plain, _MISHAP * usual)

    def _is_probe(self, plan: Plan) -> bool:
        """Whether a cycle of this plan only finds out if drafting would pay: nothing was drafted for long enough."""
        return len(plan) > 0 and not len(self.plan) and self._quiet >= self._needed_patience

    def _patience_after(self, plan: Plan, paid: bool) -> int:
        """A probe that paid is followed up at once; one that did not makes more patient."""
        if not self._is_probe(plan):
            return self._first_patience
        return 1 if paid else min(max(self._first_patience, 2 * self._patience), self.rules.probe_interval)

    @property
    def _needed_patience(self) -> int:
        """Plain cycles before the next probe."""
        return self._first_patience if self._is_blind else self._patience

    @property
    def _first_patience(self) -> int:
        """The same after something else was drafted, or nothing yet: shadows tell sooner than probes would."""
        return self.rules.probe_interval if self.is_watched else min(_FIRST_PROBE, self.rules.probe_interval)

    def scored(self, watches: Sequence[Watch], ranks: Sequence[Sequence[int]], offered: int) -> None:
        """While nothing was drafted, first draft tokens among `offered` would have had these ranks in each text."""
        self._has_news, self._age = True, 0
        scores = [self.ladder.acceptance.scores(of_text, offered) for of_text in ranks]
        Watch.learn_together(watches, scores, [0] * len(watches))

    def _setting(self, watches: Sequence[Watch], context: int) -> Setting:
        return Setting.of(self.ladder.exit_layer, self.costs.size(len(watches)), context)


def _emitted(plan: Plan, lasts: Sequence[int | None]) -> list[int]:
    """Tokens of each sequence; of one whose text ended, that it got any is all that counts."""
    return [1 if last is None else plan.depths[last] + 1 for last in lasts]


def _speeds(
    watches: Sequence[Watch], prospects: Prospects, left: Sequence[int] | None
) -> tuple[list[float], np.ndarray, np.ndarray]:
    """Of each plan, over plain decoding. A request takes as long as the sequence that ends last, but which one that
    will be, nobody knows yet: the one that is expected to counts as much as all together, more if it is rather strange
    than not, and alone if it surely is. Also tells which one that is with each plan, and whether it would end sooner
    without."""
    ratios, weights = prospects.ratios, np.array([watch.belief.weights for watch in watches])
    tokens = weights.dot(prospects.tokens)  # [sequences, plans]
    if len(watches) == 1:
        return (tokens[0] / ratios).tolist(), np.zeros(len(ratios), int), np.zeros(len(ratios), bool)
    of_all = tokens.sum(0) / len(watches)
    plainly = np.full(len(watches), _LONG) if left is None else np.array(left)
    cycles = plainly[:, None] / tokens  # that each sequence needs for what it has left
    last, of_last = cycles.argmax(0), plainly.max() / cycles.max(0)
    share = np.maximum(weights[:, :STRANGE].sum(1)[last], _LEAST_SHARE)
    judged = 1 / (share / np.minimum(of_all, of_last) + (1 - share) / of_all)
    return (judged / ratios).tolist(), last, of_last < ratios
