"""The governor: when it starts, stops, switches and returns, the reasons it gives, and what its budget bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.governor.acceptance import LEVELS, MEMORY, UNFAMILIAR, Acceptance, Skill
from selfspec.governor.candidates import PlanCandidates, SharedPlans
from selfspec.governor.copying import Copying
from selfspec.governor.costs import FORGET_AFTER, LEAST_SAMPLES, Costs, estimated_cost
from selfspec.governor.governor import MEASURING, Budget, Governor
from selfspec.governor.rules import Rules
from selfspec.kernels.copy_draft import copy_reference
from selfspec.speculation.plan import NONE, Plan

SHARES = [[0.64, 0.10, 0.05, 0.03, 0.02, 0.01]] * 4
CONTEXT = 40
SCORE_COST = 0.1
RULES = Rules(max_step=inf)
PLAN = Plan.parse("tree:4")


def governor_of(rules: Rules = RULES, measured: bool = True, depth: float = 0.17, batch: int = 1) -> Governor:
    """With a cost model in which a depth takes so many plain steps; plain steps are measured unless told otherwise."""
    model = estimated_cost(round(30 * depth) - 2, 30)
    parts = Acceptance(SHARES), {16: model}
    candidates = PlanCandidates(*parts, SharedPlans(*parts, 4, max_step=rules.step_limit), SCORE_COST)
    governor = Governor(candidates, Costs(), rules, Budget(rules.budget, rules.budget_refill))
    for _ in range(LEAST_SAMPLES if measured else 0):
        governor.costs.bucket(batch, CONTEXT).observe(NONE, 1.0, 1.0)
    return governor


def skilled(value: float) -> Skill:
    return Skill(value)


def choose(governor: Governor, *skills: Skill, batch: int | None = None) -> tuple[Plan, Any]:
    return governor.choose(skills, batch or len(skills), CONTEXT, lambda plan: 0.0)


def speed(governor: Governor, plan: Plan, skill: float, batch: int = 1, drafting: int = 1) -> float:
    """As the formula says."""
    length = float(governor.candidates.acceptance.reach(plan.without_copy).sum(0)[Skill(skill).level])
    modelled = governor.candidates.cost(plan, batch)
    ratio = governor.costs.bucket(batch, CONTEXT).cost(plan, modelled)
    return batch / (drafting / length + batch - drafting) / ratio


def set_cost(governor: Governor, plan: Plan, ratio: float, batch: int = 1) -> None:
    """Steps of this plan were measured to take so many plain steps."""
    for _ in range(LEAST_SAMPLES):
        governor.costs.bucket(batch, CONTEXT).observe(plan, ratio, 1.0)


# Start, stop, switch


def test_the_first_steps_in_a_bucket_are_plain_until_enough_were_measured() -> None:
    governor = governor_of(measured=False)
    for seconds in (None, *[1.0] * LEAST_SAMPLES):  # the first step's time is not its plan's alone
        assert choose(governor, skilled(1.0)) == (NONE, MEASURING)
        governor.observe(NONE, [(skilled(1.0), 0)], seconds, CONTEXT)
    assert choose(governor, skilled(1.0))[1] is None


def test_plain_steps_are_measured_again_while_drafting() -> None:
    governor, skill = governor_of(), skilled(1.0)
    plan, _ = choose(governor, skill)
    for _ in range(FORGET_AFTER):
        assert choose(governor, skill)[1] is None
        governor.costs.bucket(1, CONTEXT).observe(plan, 1.2, 1.2)
    for _ in range(LEAST_SAMPLES):
        assert choose(governor, skill) == (NONE, MEASURING)
        governor.observe(NONE, [(skill, 0)], 1.0, CONTEXT)
    assert choose(governor, skill)[1] is None


def test_the_fastest_plan_is_chosen() -> None:
    governor = governor_of()
    for skill in (0.3, 0.5, 1.0, 2.0):
        plan, reason = choose(governor, skilled(skill))
        assert reason is None
        best = max(speed(governor, plan, skill) for plan in governor.candidates.table(1).plans)
        assert speed(governor, plan, skill) == pytest.approx(best)


@pytest.mark.parametrize(("gain", "drafts"), [(-0.03, False), (0.03, True)])
def test_drafting_starts_above_plain_speed_and_stops_below(gain: float, drafts: bool) -> None:
    governor = governor_of()
    governor.budget.charge(0.1)  # a full budget would probe
    for plan in governor.candidates.table(1).plans:
        length = float(governor.candidates.acceptance.reach(plan.without_copy).sum(0)[skilled(1.0).level])
        set_cost(governor, plan, length / (1 + gain))
    assert choose(governor, skilled(1.0))[1] == (None if drafts else "goodput")


@pytest.mark.parametrize(("gain", "switches"), [(-0.02, False), (0.02, True)])
def test_the_faster_of_two_plans_is_chosen(gain: float, switches: bool) -> None:
    governor = governor_of()
    first, other, *rest = sorted(governor.candidates.table(1).plans, key=lambda plan: plan.copied)
    for plan in rest:
        set_cost(governor, plan, 9.0)
    lengths = {
        plan: float(governor.candidates.acceptance.reach(plan.without_copy).sum(0)[skilled(1.0).level])
        for plan in (first, other)
    }
    set_cost(governor, first, lengths[first] / 1.2)
    set_cost(governor, other, lengths[other] / (1.2 * (1 + gain)))
    assert choose(governor, skilled(1.0))[0] == (other if switches else first)


def test_nodes_are_copied_where_the_text_repeats_and_only_there() -> None:
    governor = governor_of()
    repeats, differs, bad = skilled(1.0), skilled(1.0), skilled(0.05)
    repeats.copying_level = bad.copying_level = 13
    assert choose(governor, repeats)[0].copied and not choose(governor, differs)[0].copied
    assert str(choose(governor, bad)[0]) == "copy:15", "an exit that is always wrong is not used"


def test_without_an_exit_copying_stops_where_the_text_no_longer_repeats() -> None:
    """60 tokens of one period, then 140 different ones; every step that copies takes 1.2 plain steps."""
    models = {1: estimated_cost(0, 30)}
    candidates = PlanCandidates(None, models, SharedPlans(None, models, max_tree_batch=4))
    governor = Governor(candidates, Costs(), RULES, Budget(RULES.budget, RULES.budget_refill))
    text, skill, copying = [1, 2, 3] * 20 + list(range(10, 150)), Skill(), Copying()
    position, taken, plans = 6, 0.0, []
    while position < len(text):
        plan, reason = choose(governor, skill)
        governor.charge_step(plan, 1, CONTEXT)
        draft = copy_reference(torch.tensor(text[:position]), plan.copied).tolist() if len(plan) else []
        same = [copied == token for copied, token in zip(draft, text[position : position + len(draft)], strict=False)]
        last = (*same, False).index(False)
        seconds = 1.2 if len(plan) else 1.0
        governor.observe(plan, [(skill, last)], seconds, CONTEXT, [0])
        position, taken = position + last + 1, taken + seconds
        skill.copying_level = copying.read(text[:position], 6)
        plans.append(plan)
        assert reason in (None, MEASURING, "no_profile")
    assert taken < 170, "the period was copied"
    copied = [number for number, plan in enumerate(plans) if plan.copied]
    assert copied and max(copied) < len(plans) - 100, "a few steps after the period has ended it decodes plainly"


def test_a_skill_learns_what_the_exit_alone_would_have_reached() -> None:
    """A copied branch that reaches farther than the exit does not make the exit's drafts right."""
    governor, alone, beside = governor_of(), skilled(1.0), skilled(1.0)
    tree = Plan.parse("tree:2,2")
    for last in (0, 2, 3, 0):
        governor.observe(tree, [(alone, last)], None, 1)
        exit_node = last and last + 6
        governor.observe(tree.with_copy(6), [(beside, 6)], None, 1, [exit_node])
    assert beside.value == pytest.approx(alone.value)
    governor.observe(Plan.parse("copy:6"), [(beside, 0)], None, 1, [0])
    assert beside.value == pytest.approx(alone.value)


def test_no_plan_takes_longer_than_a_step_may() -> None:
    limited, free = governor_of(Rules(max_step=1.4)), governor_of()
    for skill in (0.3, 1.0, 2.0):
        plan = choose(limited, skilled(skill))[0]
        assert len(plan) and limited.candidates.cost(plan, 1) <= 1.4
    assert free.candidates.cost(choose(free, skilled(2.0))[0], 1) > 1.4


def test_a_plan_whose_steps_were_measured_a_little_longer_than_the_limit_stays() -> None:
    """Noise of a few per cent must not forbid it: it would not run again, so that its cost would not be corrected."""
    governor = governor_of(Rules(max_step=1.4))
    plan = choose(governor, skilled(2.0))[0]
    set_cost(governor, plan, 1.45)
    assert choose(governor, skilled(2.0))[0] == plan


def test_sequences_that_may_not_draft_count_as_one_token() -> None:
    governor = governor_of(batch=4)
    governor.budget.charge(0.1)
    assert choose(governor, *[skilled(1.0)] * 4)[1] is None
    plans = governor.candidates.table(4).plans
    best = max(speed(governor, plan, 1.0, batch=4, drafting=1) for plan in plans)
    assert best < 1.05 < max(speed(governor, plan, 1.0, batch=4, drafting=4) for plan in plans)
    assert choose(governor, skilled(1.0), batch=4) == (NONE, "goodput")


@pytest.mark.parametrize("copying", [(16, 0, 0, 0), (0, 0, 0, 16)])
def test_a_batch_is_judged_by_the_mean_time_per_token_of_its_sequences(copying: tuple[int, ...]) -> None:
    """One sequence would copy 15 tokens in a step of 1.6 plain steps, for which the others would wait."""
    governor = governor_of(batch=4)
    governor.budget.charge(0.1)
    for plan in governor.candidates.table(4).plans:
        set_cost(governor, plan, 1.6, batch=4)

    def choose_with(levels: tuple[int, ...]) -> tuple[Plan, Any]:
        skills = [skilled(0.05) for _ in levels]
        for skill, level in zip(skills, levels, strict=True):
            skill.copying_level = level
        return choose(governor, *skills)

    assert choose_with(copying) == (NONE, "ood")
    assert choose_with((16, 16, 16, 0))[0].copied


@pytest.mark.parametrize(("skills", "reason"), [((0.1, 0.1), "ood"), ((0.1, UNFAMILIAR), "goodput")])
def test_the_reason_is_ood_where_every_text_is_unlike_calibration(skills: tuple[float, ...], reason: str) -> None:
    governor = governor_of(batch=2, depth=0.9)
    governor.budget.charge(0.1)
    assert choose(governor, *map(skilled, skills)) == (NONE, reason)


# Captures


def choose_captured(governor: Governor, skill: float, captured: Any, seconds: float) -> tuple[Plan, Any]:
    """Where steps of other plans are captured first, for so many seconds."""
    return governor.choose([skilled(skill)], 1, CONTEXT, lambda plan: seconds * (plan not in captured))


def test_the_first_plan_of_all_is_captured_at_once() -> None:
    governor = governor_of()
    assert choose_captured(governor, 1.0, {}, 1e9) == choose(governor, skilled(1.0))


@pytest.mark.parametrize("captured", [Plan.parse("chain:1"), Plan.parse("tree:4")], ids=str)
def test_a_faster_plan_is_captured_once_it_would_have_saved_the_time_of_its_capture(captured: Plan) -> None:
    governor, seconds = governor_of(), 9.9
    fastest, _ = choose(governor, skilled(1.0))
    saving = 1 - max(1.0, speed(governor, captured, 1.0)) / speed(governor, fastest, 1.0)
    chosen = [choose_captured(governor, 1.0, {captured}, seconds)[0] for _ in range(100)]
    waiting = chosen.index(fastest)
    assert set(chosen[:waiting]) == {captured} and waiting == int(seconds / saving)  # a plain step takes 1 s
    assert choose_captured(governor, 1.0, {fastest}, seconds)[0] == fastest


def test_steps_are_plain_until_a_capture_pays_if_the_captured_plans_are_slower_than_plain_decoding() -> None:
    governor, slow = governor_of(), Plan.parse("chain:1")
    for plan in governor.candidates.table(1).plans:
        set_cost(governor, plan, 3.0 if plan == slow else governor.candidates.cost(plan, 1))
    governor.budget.charge(0.1)
    reasons = [choose_captured(governor, 1.0, {slow}, 2.0)[1] for _ in range(10)]
    assert reasons[0] == "goodput" and reasons[-1] is None


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.5, 1.0, 2.0]), st.booleans()), max_size=200), st.floats(0.1, 30))
def test_captures_while_a_plan_is_captured_take_no_more_time_than_they_would_have_saved(
    texts: list[tuple[float, bool]], seconds: float
) -> None:
    """Also if steps must be captured again, with other options or for sequences of another exit."""
    governor, captured, saved, spent = governor_of(), set[Plan](), 0.0, 0.0
    for skill, drops in texts:
        fastest, _ = choose(governor, skilled(skill))
        plan, _ = choose_captured(governor, skill, captured, seconds)
        if len(plan) and plan not in captured:
            spent += seconds if captured else 0.0
            captured.add(plan)
            saved += 1.0  # at most, by the step that captures
        elif len(fastest):
            saved += 1 - max(1.0, speed(governor, plan, skill)) / max(1.0, speed(governor, fastest, skill))
        if drops and len(captured) > 1:
            captured.discard(max(captured, key=str))
    assert spent <= saved + 1e-6


# Sequences


@dataclass
class Run:
    """Decodes one text step by step, each step chosen while the one before is in flight."""

    governor: Governor
    skill: Skill = field(default_factory=Skill)
    steps: list[tuple[Plan, int]] = field(default_factory=list)  # plan, and tokens before it
    tokens: int = 0
    unfilled: int = 0
    lost: float = 0.0  # plain steps

    def go(self, tokens: int, is_right: bool) -> None:
        """Tokens of which every draft of rank 0 is right, or none is."""
        end = self.tokens + tokens
        plan = choose(self.governor, self.skill)[0]
        self.governor.charge_step(plan, 1, CONTEXT)
        while self.tokens < end:
            self.steps.append((plan, self.tokens))
            self.unfilled = 0 if len(plan) else self.unfilled + 1
            following = choose(self.governor, self.skill)[0]
            self.governor.charge_step(following, 1, CONTEXT)
            last = len(plan.first_chain()) if is_right and len(plan) else 0
            node = plan.path(max(range(len(plan) + 1), key=lambda node: (plan.depths[node] == last, -node)))[-1]
            cost = self.governor.candidates.cost(plan, 1)
            self.lost += cost - plan.depths[node] - 1
            self.tokens += plan.depths[node] + 1
            self.governor.observe(plan, [(self.skill, node)], cost, CONTEXT)
            self.score(is_right)
            plan = following

    def score(self, is_right: bool) -> None:
        if self.unfilled >= self.governor.score_interval and self.governor.may_score:
            self.governor.charge_score()
            self.lost += SCORE_COST
            self.governor.observe_score(self.skill, [is_right] * self.unfilled)
            self.unfilled = 0

    def drafts_after(self, token: int) -> int | None:
        """Tokens after this one until drafting that lasts for 3 steps."""
        places = [place for place, (_, at) in enumerate(self.steps) if at >= token]
        for place in places:
            if all(len(plan) for plan, _ in self.steps[place : place + 3]):
                return self.steps[place][1] - token
        return None


def test_a_text_whose_drafts_are_right_is_drafted_from_the_first_step_on() -> None:
    run = Run(governor_of())
    run.go(100, is_right=True)
    assert all(len(plan) for plan, _ in run.steps)
    assert run.skill.value > 1.5 and run.lost < -50


def test_drafting_stops_within_the_budget_where_no_draft_is_right() -> None:
    run = Run(governor_of())
    run.go(200, is_right=False)
    drafted = [at for plan, at in run.steps if len(plan)]
    assert 0 < len(drafted) < 30
    assert run.skill.was_ood
    assert 0 < run.lost <= RULES.budget + 200 * RULES.budget_refill


@pytest.mark.parametrize("hostile", [20, 64, 300])
def test_drafting_returns_within_96_tokens_after_hostile_text(hostile: int) -> None:
    run = Run(governor_of())
    run.go(60, is_right=True)
    run.go(hostile, is_right=False)
    turn = run.tokens
    run.go(200, is_right=True)
    back = run.drafts_after(turn)
    assert back is not None and back <= 96


def test_drafting_that_does_not_pay_for_a_text_like_calibration_is_probed_when_the_budget_is_full() -> None:
    """Costs that were too high when they were measured are measured again."""
    governor = governor_of()
    for plan in governor.candidates.table(1).plans:
        set_cost(governor, plan, 4.5)
    skill = skilled(1.0)
    assert choose(governor, skill)[1] is None
    governor.budget.charge(0.05)
    assert choose(governor, skill) == (NONE, "goodput")
    for _ in range(6):
        governor.observe(NONE, [(skill, 0)], 1.0, CONTEXT)
    assert choose(governor, skill)[1] is None


def test_a_probe_drafts_with_the_exit() -> None:
    """Copied nodes are the fastest plan for a text that cannot be drafted, and would never raise its skill."""
    governor, skill = governor_of(), skilled(LEVELS[0])
    table = governor.candidates.table(1)
    speeds = [speed(governor, plan, LEVELS[0]) for plan in table.plans]
    assert not table.plans[speeds.index(max(speeds))].uses_exit
    assert choose(governor, skill)[0].uses_exit


def test_a_probe_ends_after_one_step() -> None:
    governor = governor_of()
    for plan in governor.candidates.table(1).plans:
        set_cost(governor, plan, 3.9)
    plan = choose(governor, skilled(1.0))[0]
    governor.charge_step(plan, 1, CONTEXT)
    assert choose(governor, skilled(1.0)) == (NONE, "goodput")


# Scores


def test_scores_use_at_most_half_of_the_refills() -> None:
    assert governor_of().score_interval == 2 * SCORE_COST / 0.01
    poor = governor_of()
    poor.budget.charge(poor.budget.left - SCORE_COST / 2)
    assert not poor.may_score


def test_a_score_counts_best_drafts_that_were_right() -> None:
    governor, right, wrong = governor_of(), Skill(), Skill()
    governor.observe_score(right, [True] * MEMORY)
    governor.observe_score(wrong, [False] * MEMORY)
    assert wrong.value < 0.5 and right.value > 1.2


# The budget

EVENTS = st.lists(
    st.tuples(st.sampled_from(["step", "score"]), st.floats(0, 1), st.floats(0.5, 2.0)), min_size=1, max_size=120
)


@settings(max_examples=150)
@given(
    events=EVENTS,
    seed=st.integers(0, 2**16),
    batch=st.integers(1, 5),
    capacity=st.floats(0, 8),
    refill=st.floats(0, 0.1),
)
def test_losses_never_exceed_the_capacity_and_the_refills(
    events: list[tuple[str, float, float]], seed: int, batch: int, capacity: float, refill: float
) -> None:
    """Over any stretch of steps, scores included, whatever is accepted and however costs change meanwhile."""
    rules, random = Rules(max_step=inf, budget=capacity, budget_refill=refill), Random(seed)
    governor = governor_of(rules, batch=batch)
    skills = [Skill(random.choice((0.1, 1.0, 3.0))) for _ in range(batch)]
    in_flight = None
    lost = worst = 0.0  # since any step: the largest sum of losses that ends here
    for kind, right, seconds in events:
        if kind == "score" and governor.may_score:
            governor.charge_score()
            governor.observe_score(skills[0], [random.random() <= right for _ in range(8)])
            lost += SCORE_COST
        plan = choose(governor, *skills, batch=batch)[0]
        before = governor.budget.left
        governor.charge_step(plan, batch, CONTEXT)
        lost += before - governor.budget.left if len(plan) else -refill
        assert governor.budget.left >= -1e-9
        if in_flight is not None:
            outcomes = [(skill, _accepted(in_flight, right, random)) for skill in skills]
            if len(in_flight):
                lost -= sum(in_flight.depths[last] for _, last in outcomes) / batch
            governor.observe(in_flight, outcomes, seconds, CONTEXT)
        worst = max(worst, lost)
        lost = max(0.0, lost)  # a stretch that has gained begins anew
        assert worst <= capacity + len(events) * refill + 1e-6
        in_flight = plan


def _accepted(plan: Plan, right: float, random: Random) -> int:
    node = 0
    while plan.children[node] and random.random() < right:
        node = random.choice(plan.children[node])
    return node
