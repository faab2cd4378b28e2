"""The governor with scripted texts and a clock of its own: what it picks, when it steps aside, and what that costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import inf
from operator import mul
from random import Random
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.batch import _SELDOM
from selfspec.governor.acceptance import EXPONENTS, Acceptance
from selfspec.governor.candidates import Ladder, likeliest
from selfspec.governor.costs import Costs, Setting, StepCost, almost_free, guessed_cost, measured_cost
from selfspec.governor.governor import MEASURING, Governor, Ledger, Watch, _speeds
from selfspec.governor.rules import Rules
from selfspec.speculation.exit_scoring import OFFERED
from selfspec.speculation.plan import MAX_NODES, NONE, Plan
from tests.strategies import SETTINGS

SHARES = [[0.64, 0.10, 0.05, 0.03, 0.02, 0.01]] * 4
NEVER = OFFERED  # the rank of a token that no draft offers

Text = Callable[[int], int]  # the rank that a place's token has in every draft
Clock = Callable[[Plan], float]  # how long a cycle takes


def on_gpu(plan: Plan) -> float:
    return guessed_cost(3, 30)(plan.depth, len(plan)) if len(plan) else 1.0


def two_cores(plan: Plan) -> float:
    """As measured on a small CPU: a second row costs almost two steps, those after it little."""
    rows = len(plan) + 1
    return 1 + 1.74 * min(rows - 1, 1) + 0.185 * max(0, rows - 2) + 0.17 * plan.depth


@cache
def ladder(gpu: bool) -> Ladder:
    guess = guessed_cost(3, 30, of_rows=almost_free if gpu else lambda rows: 0.85 + 0.15 * rows)
    return Ladder(Acceptance(SHARES), {1: guess, 4: guess, 16: guess}, 3, max_tree_batch=4)


def new_governor(rules: Rules | None = None, costs: Costs | None = None, gpu: bool = True) -> Governor:
    return Governor(ladder(gpu), costs or Costs(), rules or Rules())


@dataclass
class World:
    """A session without a model: sequences whose tokens have the ranks that their texts say."""

    governor: Governor
    texts: list[Text]
    clock: Clock = on_gpu
    shadows: bool = True
    offered: int = OFFERED  # drafts that shadows look at
    ahead: bool = False  # the next plan is chosen before a cycle is over
    watches: list[Watch] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)  # of each cycle
    reasons: list[str | None] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # tokens of the first sequence before each cycle
    seconds: float = 0.0
    losses: float = 0.0  # of cycles that drafted, against plain decoding
    waiting: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.governor.is_watched = self.shadows and self.governor.is_watched
        self.watches = [Watch() for _ in self.texts]
        self.lengths = [0] * len(self.texts)
        self.waiting = [[] for _ in self.texts]
        # As sessions look at what waits: at first, and then more seldom.
        self.first = self.patience = self.governor.rules.scored_after(len(self.texts)) or 16
        self.unscored = 0
        self.chosen: tuple[Plan, str | None] | None = None

    def run(self, tokens: int) -> World:
        while self.lengths[0] < tokens:
            self.cycle()
        return self

    def cycle(self) -> None:
        plan, reason = flying = self.chosen or self.governor.choose(self.watches, 100)
        self.chosen = self.governor.choose(self.watches, 100, flying) if self.ahead else None
        assert (plan == NONE) == (reason is not None)
        self.starts.append(self.lengths[0])
        if len(plan):
            self._score()
        lasts = [self._last(plan, text, length) for text, length in zip(self.texts, self.lengths, strict=True)]
        seconds = self.clock(plan)
        self.governor.observe(self.watches, plan, lasts, seconds, 100, reason)
        emitted = [plan.depths[last] + 1 for last in lasts]
        for row, (text, length) in enumerate(zip(self.texts, self.lengths, strict=True)):
            self.waiting[row] += [] if len(plan) else [text(length)]
            self.lengths[row] += emitted[row]
        self.unscored, self.patience = (0, self.first) if len(plan) else (self.unscored + 1, self.patience)
        if len(self.waiting[0]) >= self.first:
            looks = self.unscored >= self.patience
            self._score(looks)
            if looks:
                most = _SELDOM if len(self.watches) <= 4 else 2 * _SELDOM
                self.unscored, self.patience = 0, max(self.first, min(2 * self.patience, most))
        self.plans.append(plan)
        self.reasons.append(reason)
        self.seconds += seconds
        self.losses += seconds - sum(emitted) / len(emitted) if len(plan) else 0

    def _score(self, looks: bool = True) -> None:
        ranks = [[min(rank, self.offered) for rank in of_text] for of_text in self.waiting]
        if self.shadows and looks:
            self.governor.scored(self.watches, ranks, self.offered)
        for of_text in self.waiting:
            of_text.clear()

    @staticmethod
    def _last(plan: Plan, text: Text, length: int) -> int:
        node = 0
        while True:
            rank = text(length + plan.depths[node])
            child = next((child for child in plan.children[node] if plan.ranks[child - 1] == rank), None)
            if child is None:
                return node
            node = child

    @property
    def speed(self) -> float:
        """Against plain decoding."""
        return self.lengths[0] / self.seconds

    @property
    def changes(self) -> int:
        return sum(before != after for before, after in pairwise(self.plans))


def drawn(top1: float, seed: int = 0) -> Text:
    """Right at the first guess with this chance, otherwise nowhere near."""
    return lambda place: 0 if Random(f"{seed} {place}").random() < top1 else NEVER


def familiar(seed: int) -> Text:
    """As calibration saw it."""

    def text(place: int) -> int:
        chance, ranks = Random(f"{seed} {place}").random(), SHARES[0]
        return next((rank for rank in range(len(ranks)) if chance < sum(ranks[: rank + 1])), NEVER)

    return text


# What it picks


def test_it_first_measures_a_plain_step_and_only_once() -> None:
    world = World(new_governor(), [drawn(1.0)]).run(30)
    assert world.reasons[:4] == [MEASURING, MEASURING, MEASURING, None]
    again = World(new_governor(costs=world.governor.costs), [drawn(1.0)]).run(10)
    assert again.reasons[0] is None, "what one request has measured, the next one knows"


def test_text_that_is_always_guessed_is_drafted_deep() -> None:
    world = World(new_governor(Rules()), [drawn(1.0)]).run(100)
    assert world.plans[-1].depth >= 4
    assert world.speed > 2


def test_where_rows_cost_the_plans_are_small() -> None:
    world = World(new_governor(gpu=False), [drawn(0.8)], clock=lambda plan: 1 + 0.3 * len(plan)).run(200)
    assert 1 <= len(world.plans[-1]) <= 2
    assert world.speed > 1.05


def test_a_device_where_nothing_pays_is_found_out_cheaply() -> None:
    speeds = []
    for seed in range(10):
        world = World(new_governor(gpu=False), [familiar(seed)], clock=two_cores).run(128)
        assert sum(not len(plan) for plan in world.plans) > 0.9 * len(world.plans)
        speeds.append(world.speed)
    assert mean(speeds) > 0.97
    assert min(speeds) > 0.95


def test_a_plan_that_becomes_slow_is_given_up() -> None:
    slow: dict[Plan, float] = {}
    world = World(new_governor(), [drawn(0.9)], clock=lambda plan: on_gpu(plan) * slow.get(plan, 1.0)).run(100)
    favourite = world.plans[-1]
    assert len(favourite)
    slow[favourite] = 4.0
    world.run(300)
    assert favourite not in world.plans[-10:]
    assert len(world.plans[-1]), "another plan still pays"


def test_two_plans_of_equal_value_do_not_take_turns() -> None:
    """Costs are such that a chain of 1 and of 2 bring exactly the same; chance alone moves the belief about."""

    def fair(plan: Plan) -> float:
        return (
            0.8 * sum(0.7**depth for depth in range(plan.depth + 1)) if plan.is_chain and len(plan) else 1.0 + len(plan)
        )

    world = World(new_governor(gpu=False), [drawn(0.7)], clock=fair).run(600)
    assert world.changes < len(world.plans) / 12


def test_a_small_advantage_is_no_reason_to_change() -> None:
    rules = Rules(hysteresis=0.5)
    world = World(new_governor(rules), [drawn(0.9)]).run(400)
    assert world.changes <= 2


@pytest.mark.parametrize("stalled", range(2, 8))
def test_a_single_stall_does_not_end_speculation(stalled: int) -> None:
    """A cycle that takes six times as long, whichever it is, is forgotten."""
    cycles = iter(range(10**6))
    world = World(
        new_governor(), [familiar(1)], clock=lambda plan: on_gpu(plan) * (6 if next(cycles) == stalled else 1)
    )
    assert world.run(200).speed > 1.3


def test_a_slow_start_of_plain_decoding_does_not_flatter_drafts() -> None:
    cycles = iter(range(10**6))
    world = World(new_governor(), [drawn(0.02)], clock=lambda plan: on_gpu(plan) * (2 if next(cycles) < 2 else 1))
    world.run(200)
    world.seconds -= 2
    assert world.speed > 0.96


def test_time_that_others_had_a_part_in_is_not_believed() -> None:
    world = World(new_governor(), [familiar(1)]).run(60)
    at, plan = world.governor._setting(world.watches, 100), world.governor.ladder.plans(1)[0]
    before = world.governor.ratio(plan, at)
    for _ in range(20):
        world.governor.observe(world.watches, plan, [0], None, 100)
    assert world.governor.ratio(plan, at) == before


# How long a cycle may be


def governor_of(limit: float, ratios: dict[Plan, float], times: int = 4) -> Governor:
    """One whose plans cost what is told, as measured so many times."""
    governor = new_governor(Rules(longest_cycle=limit))
    for plan, seconds in [(NONE, 1.0)] * 3 + [pair for pair in ratios.items() for _ in range(times)]:
        governor.costs.observe(governor._setting([Watch()], 100), plan, seconds)
    return governor


def sure(text_is_guessed: bool = True) -> Watch:
    watch = Watch()
    watch.belief._weights = [0.0] * 5 + [1.0] if text_is_guessed else [1.0] + [0.0] * 5
    watch.ood = not text_is_guessed
    return watch


def deepest(plans: list[Plan]) -> Plan:
    return max(plans, key=lambda plan: (plan.depth, len(plan)))


@pytest.mark.parametrize(
    ("left", "drafts"), [(None, False), ([100, 100], False), ([100, 85], False), ([100, 70], True), ([70, 100], False)]
)
def test_a_request_is_over_when_its_last_row_is(left: list[int] | None, drafts: bool) -> None:
    """One row is always guessed, the other never, and a cycle costs 1.25 plain steps: drafting pays where the first one
    has most of the work left, so that the other will still not be the last. What all gain by is judged by all."""
    governor = governor_of(inf, dict.fromkeys(ladder(True).plans(2), 1.25))
    plan, reason = governor.choose([sure(), sure(text_is_guessed=False)], 100, left=left)
    assert (len(plan) > 0, reason) == (drafts, None if drafts else "goodput")
    assert governor.choose([sure(), sure()], 100, left=left)[1] is None


@pytest.mark.parametrize(("strange", "share"), [(0.0, 0.5), (0.5, 0.5), (0.75, 0.75), (1.0, 1.0)])
def test_a_row_that_may_be_the_last_counts_as_much_as_all_together(strange: float, share: float) -> None:
    """More if it is rather strange than not, and alone if it surely is: with `chain:1` one row gets 1.87 tokens a
    cycle, the one behind fewer, and drafting begins where that is worth 5% more than a plain step."""
    only, *others = ladder(True).plans(2)
    behind = Watch()
    behind.belief._weights = [0.0, strange, 0.0, 1 - strange, 0.0, 0.0]
    ahead, last = (sum(map(mul, of.belief.weights, ladder(True).acceptance.tokens(only))) for of in (sure(), behind))
    assert ahead == pytest.approx(1.87, abs=0.01) and 1.0 < last < 1.5
    together = (ahead + last) / 2
    worth = 1 / (share / last + (1 - share) / together)
    for cost, drafts in ((worth / 1.06, True), (worth / 1.04, False)):
        governor = governor_of(inf, {only: cost} | dict.fromkeys(others, 9.0))
        assert (len(governor.choose([sure(), behind], 100, left=[50, 50])[0]) > 0) == drafts


@pytest.mark.parametrize("decides", [None, 0])
def test_rows_that_have_ended_are_no_loss(decides: int | None) -> None:
    """How far their last drafts would have been right is not known, even if the plan was chosen by one of them."""
    governor = governor_of(inf, dict.fromkeys(ladder(True).plans(2), 1.25))
    plan = deepest(ladder(True).plans(2))
    watches = [sure(), sure()]
    governor._decisive = None if decides is None else watches[decides]
    governor.observe(watches, plan, [None, len(plan)], 1.25, 100, left=[0, 50])
    assert governor.ledger.owed == pytest.approx(1.25 - (plan.depths[len(plan)] + 1))


@pytest.mark.parametrize(
    ("decides", "strange", "tokens"), [(None, 0, 2), (0, 0, 1.5), (0, 0.75, 1.25), (0, 1, 1), (1, 0, 2)]
)
def test_a_cycle_is_booked_as_its_plan_was_judged(decides: int | None, strange: float, tokens: float) -> None:
    """By all, and for half by the one that is behind; more by that one if it is rather strange than not, and by it
    alone if it surely is. Also if there is no time to learn from it."""
    plan = Plan.parse("chain:2")
    for overlooked in (False, True):
        governor = governor_of(inf, {plan: 1.25})
        watches = [sure(), sure()]
        watches[0].belief._weights = [strange, 0.0, 0.0, 0.0, 0.0, 1 - strange]
        governor._decisive = None if decides is None else watches[decides]
        known = [list(watch.belief.weights) for watch in watches]
        if overlooked:
            governor.overlook(watches, plan, [0, 2], 100, left=[50, 50])
            assert [watch.belief.weights for watch in watches] == known
        else:
            governor.observe(watches, plan, [0, 2], 1.25, 100, left=[50, 50])
        assert governor.ledger.owed == pytest.approx(1.25 - tokens)


def test_cycles_go_by_unseen_where_it_is_known_what_they_can_lose() -> None:
    """And may still be lost; a plan that was hardly ever timed is looked at."""
    plan = Plan.parse("chain:2")
    governor = Governor(ladder(True), Costs(), Rules(loss_allowance=4.0))
    allowed = []
    for seconds in (1.0,) * 3 + (1.5,) * 4:
        governor.observe([sure()], plan if seconds > 1 else NONE, [2 if seconds > 1 else 0], seconds, 100)
        governor.ledger.owed = 0.0
        allowed.append(governor.unseen_cycles)
    assert allowed == [0] * 5 + [1, 1]
    found = {}
    for owed in (-3.0, -2.9, 3.5, 3.6):
        governor.ledger.owed = owed
        found[owed] = governor.unseen_cycles
    assert found == {-3.0: 3, -2.9: 1, 3.5: 1, 3.6: 0}


@pytest.mark.parametrize(("rows", "trees"), [(3, True), (4, False)])
def test_trees_are_for_as_many_rows_as_the_rules_say_whatever_the_seats(rows: int, trees: bool) -> None:
    wide = Ladder(ladder(True).acceptance, ladder(True).guesses, 2, max_tree_batch=3)
    governor = Governor(wide, Costs(in_seats=True), Rules(max_tree_batch=3))
    plans = governor._look_up(governor._setting([Watch()] * rows, 100), rows, NONE, most=9).plans
    assert any(not plan.is_chain for plan in plans) == trees


def test_a_text_that_is_about_to_end_gets_no_deeper_plan_than_it_can_use() -> None:
    """Of two plans the deep one is faster, but not for the last tokens; for the very last one nothing is."""
    plans = sorted(ladder(True).plans(1), key=lambda plan: plan.depth)
    short, deep = plans[0], plans[-1]
    governor = governor_of(inf, dict.fromkeys(plans, 9.0) | {short: 1.05, deep: 1.3})
    chosen = {left: governor.choose([sure()], 100, left=[left])[0] for left in (1, 2, 50)}
    assert short.depth == 1 and deep.depth > 1
    assert chosen == {1: NONE, 2: short, 50: deep}


@pytest.mark.parametrize(
    ("rows", "far", "is_small"), [(4, 0, False), (5, 0, True), (1, 1, True), (4, 4, True), (4, 3, False)]
)
def test_batches_too_large_for_trees_and_unfamiliar_texts_begin_with_the_smallest_plan(
    rows: int, far: int, is_small: bool
) -> None:
    """What comes of it tells much of so many rows, or of texts of which little is known; then the best is chosen."""
    chains = Ladder(ladder(True).acceptance, ladder(True).guesses, 2, max_tree_batch=4)
    governor = Governor(chains, Costs(), Rules(longest_cycle=inf))
    governor.costs.observe(governor._setting([Watch()] * rows, 100), NONE, 1.0)
    for _ in range(3):
        governor.costs.observe(governor._setting([Watch()] * rows, 100), NONE, 1.0)
    watches = [Watch.of_prompt(far=True)] * far + [sure() for _ in range(rows - far)]
    first = governor.choose(watches, 100)[0]
    assert (first == chains.plans(rows)[0]) == is_small
    governor.observe(watches, first, [len(first)] * rows, None, 100)
    assert governor.choose(watches, 100)[0] != chains.plans(rows)[0]


def test_it_is_tried_with_what_loses_least() -> None:
    """Where nothing pays; the best plan of all for its cost may be a long one."""
    plans = sorted(ladder(True).plans(1), key=lambda plan: plan.depth)
    short, deep = plans[0], plans[-1]
    governor = governor_of(inf, dict.fromkeys(plans, 9.0) | {short: 1.24, deep: 1.9})
    doubtful = Watch()
    doubtful.belief._weights = [0.8, 0.0, 0.0, 0.0, 0.0, 0.2]
    prospects = governor._look_up(governor._setting([doubtful], 100), 1, NONE, most=50)
    speeds = dict(zip(prospects.plans, _speeds([doubtful], prospects, None)[0], strict=True))
    assert speeds[short] < speeds[deep] < 1
    governor._quiet = governor._first_patience
    assert governor.choose([doubtful], 100)[0] == short


def test_rows_that_gain_less_do_not_hold_back_the_others() -> None:
    """A deep plan is best for one row, a short one for the other, which gains by the deep one too."""
    plans = sorted(ladder(True).plans(1), key=lambda plan: plan.depth)
    short, deep = plans[0], plans[-1]
    governor = governor_of(inf, dict.fromkeys(plans, 9.0) | {short: 1.05, deep: 1.6})
    usual = Watch()
    usual.belief._weights = [0.0] * 3 + [1.0] + [0.0] * 2
    assert governor.choose([usual], 100)[0] == short
    assert governor.choose([sure(), usual], 100, left=[50, 50])[0] == deep


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_that_are_guessed_do_not_make_it_probe_for_one_that_is_not(ahead: bool) -> None:
    texts = [drawn(0.0), *(drawn(0.9, seed) for seed in range(3))]
    world = World(new_governor(), texts, ahead=ahead).run(200)
    probes = [cycle for cycle, plan in enumerate(world.plans) if len(plan)]
    assert min(after - before for before, after in pairwise(probes[-4:])) > 24
    assert world.speed > 0.97


@pytest.mark.parametrize(("limit", "allowed"), [(1.5, True), (1.4999, False), (inf, True)])
def test_a_cycle_may_be_as_long_as_the_limit_and_no_longer(limit: float, allowed: bool) -> None:
    best = deepest(ladder(True).plans(1))
    others = dict.fromkeys(ladder(True).plans(1), 1.25)
    governor = governor_of(limit, others | {best: 1.5})
    plan, reason = governor.choose([sure()], 100)
    assert (plan == best) == allowed
    assert reason is None, "others are short enough"


def test_where_every_cycle_is_too_long_nothing_is_drafted_or_tried() -> None:
    governor = governor_of(1.2, dict.fromkeys(ladder(True).plans(1), 1.21))
    for _ in range(100):
        assert governor.choose([sure()], 100) == (NONE, "goodput")
        governor.observe([sure()], NONE, [0], 1.0, 100)
    strange = sure(text_is_guessed=False)
    strange.ood = True
    assert governor.choose([strange], 100) == (NONE, "ood")


@given(
    st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=3), min_size=1, max_size=4),
)
def test_nodes_are_taken_in_the_order_of_their_chances(halvings: list[list[int]]) -> None:
    """As if all of them had been looked at: powers of two, so that no product is rounded."""
    chances = [[0.0 if count == 12 else 0.5**count for count in level] for level in halvings]
    every = {(): 1.0}
    for level, of_level in enumerate(chances):
        parents = [path for path in every if len(path) == level]
        every |= {(*path, rank): every[path] * chance for path in parents for rank, chance in enumerate(of_level)}
    del every[()]
    order = sorted((-chance, len(path), path) for path, chance in every.items() if chance)
    assert likeliest(chances) == [(-chance, path) for chance, _, path in order[:MAX_NODES]]


def test_a_ladder_has_small_plans_and_of_others_those_guessed_short_enough() -> None:
    guess = guessed_cost(3, 30)
    wide = Plan.parse("tree:6")
    free, exact, less, none = (
        Ladder(Acceptance(SHARES), {1: guess, 16: guess}, 3, 4, longest_cycle=limit)
        for limit in (inf, guess(1, 6), guess(1, 6) - 1e-9, 0.99)
    )
    small = set(map(Plan.parse, ("chain:1", "chain:2", "tree:4")))
    assert max(guess(plan.depth, len(plan)) for plan in free.plans(1)) > 1.65
    assert wide in exact.plans(1) and wide not in less.plans(1)
    for limited in (exact, less):
        assert small < set(limited.plans(1))
        others = set(limited.plans(1)) - small
        assert all(guess(plan.depth, len(plan)) <= limited.longest_cycle for plan in others)
    assert set(exact.plans(1)) - set(free.plans(1)), "the best within the limit, not only what is left of the others"
    assert none.all_plans == []
    governor = Governor(none, governor_of(inf, {}).costs, Rules())
    assert governor.choose([sure()], 100) == (NONE, "goodput")


def test_where_the_longest_plan_turns_out_too_long_another_is_almost_as_good() -> None:
    """Costs like those measured of four rows; all cycles that draft take 2% more than that."""
    drafting = ((1, 0.48), (3, 0.49), (4, 0.52), (7, 0.56), (8, 0.605), (15, 0.625), (16, 0.74), (31, 1.0))
    guess = measured_cost(StepCost(plain=0.45, depth=0.041, drafting=drafting))
    shares = [[0.775, 0.11, 0.04, 0.02, 0.01, 0.01]] * 4
    ladder = Ladder(Acceptance(shares), {4: guess}, 1, max_tree_batch=4, longest_cycle=1.75)

    def cost(plan: Plan) -> float:
        return guess(plan.depth, len(plan))

    def speed(plan: Plan) -> float:
        return ladder.acceptance.tokens(plan)[EXPONENTS.index(1.0)] / cost(plan)

    best = max(ladder.plans(4), key=speed)
    others = [plan for plan in ladder.plans(4) if 1.02 * cost(plan) <= 1.75]
    assert best not in others
    assert max(map(speed, others)) > 0.97 * speed(best)


def test_a_plan_that_was_only_guessed_too_long_is_tried() -> None:
    governor = governor_of(1.1, {})
    plan, _ = governor.choose([sure()], 100)
    assert len(plan) and on_gpu(plan) > 1.1
    assert not len(governor_of(1.1, dict.fromkeys(governor.ladder.plans(1), 1.2)).choose([sure()], 100)[0])


@pytest.mark.parametrize("seed", range(5))
def test_noise_around_the_limit_does_not_make_plans_come_and_go(seed: int) -> None:
    noise = Random(seed)
    best = deepest(ladder(True).plans(1))

    def clock(plan: Plan) -> float:
        return (1.6 if plan == best else min(1.5, on_gpu(plan))) * noise.uniform(0.97, 1.03) if len(plan) else 1.0

    world = World(new_governor(Rules(longest_cycle=1.6)), [drawn(1.0)], clock).run(3000)
    assert world.changes < len(world.plans) / 40


def test_choosing_ahead_does_not_make_it_change_plans_all_the_time() -> None:
    """But for the first few cycles, when plain steps are measured in between."""

    def changes(rules: Rules, ahead: bool) -> float:
        worlds = [World(new_governor(rules), [drawn(0.75, seed)], ahead=ahead) for seed in range(12)]
        return mean(world.run(256).changes for world in worlds)

    assert changes(Rules(hysteresis=0.05), ahead=False) < 8
    assert changes(Rules(hysteresis=0.05), ahead=True) < 8 + 6
    assert changes(Rules(), ahead=False) < 16
    assert changes(Rules(), ahead=True) < changes(Rules(), ahead=False) + 6


def test_choosing_ahead_costs_little() -> None:
    speeds = {}
    for ahead in (False, True):
        worlds = [World(new_governor(), [drawn(0.7, seed)], ahead=ahead).run(256) for seed in range(20)]
        speeds[ahead] = mean(world.speed for world in worlds)
    assert speeds[True] > 0.98 * speeds[False]


def test_measuring_a_plain_step_changes_nothing_of_what_is_in_use() -> None:
    world = World(new_governor(), [drawn(0.9)], shadows=False).run(1500)
    measured = [place for place, reason in enumerate(world.reasons) if reason == MEASURING and world.plans[place - 1]]
    later = [place for place in measured if place > 10]
    assert later, "a plain step is measured again now and then"
    assert all(len(world.plans[place - 1]) and len(world.plans[place + 1]) for place in later)


@pytest.mark.parametrize("right", [True, False])
def test_behind_a_probe_in_flight_a_plain_step_is_measured(right: bool) -> None:
    """Nobody waits for the probe; what comes of it is known one cycle later, and counts then."""
    world = World(new_governor(Rules(probe_allowance=2.0)), [drawn(0.0)], shadows=False).run(100)
    governor, watches = world.governor, world.watches
    while not len(world.plans[-1]):
        world.cycle()
    while not len(probe := governor.choose(watches, 100)[0]):
        governor.observe(watches, NONE, [0], 1.0, 100, "goodput")
    assert governor.choose(watches, 100, (probe, None)) == (NONE, MEASURING)
    watches[0].belief._weights = [0.0] * 5 + [1.0] if right else watches[0].belief._weights
    governor.observe(watches, probe, [len(probe) if right else 0], on_gpu(probe), 100)
    governor.observe(watches, NONE, [0], 1.0, 100, MEASURING)
    assert governor.plan == probe, "the step behind it gives nothing up"
    after = governor.choose(watches, 100, (NONE, MEASURING))
    assert (len(after[0]) > 0, after[1]) == (right, None if right else "ood")


def test_what_is_in_flight_is_what_is_in_use() -> None:
    """Two plans of about the same worth: it stays with the one that was chosen last, observed or not."""
    world = World(new_governor(Rules(hysteresis=0.5)), [drawn(0.8)]).run(60)
    governor, watches = world.governor, world.watches
    options = [plan for plan in governor.ladder.plans(1) if plan.depth == governor.plan.depth and plan != governor.plan]
    other = max(options or governor.ladder.plans(1), key=len)
    assert governor.choose(watches, 100)[0] == governor.plan
    assert governor.choose(watches, 100, (other, None))[0] == other != governor.plan
    assert governor.choose(watches, 100, (NONE, MEASURING))[0] == governor.plan


def test_a_plan_in_use_is_left_when_it_is_clearly_too_long() -> None:
    slow: dict[Plan, float] = {}
    limit = 1.5
    governor = governor_of(limit, {plan: on_gpu(plan) for plan in ladder(True).plans(1)})
    world = World(governor, [drawn(1.0)], lambda plan: slow.get(plan, on_gpu(plan)))
    favourite = world.run(100).plans[-1]
    assert len(favourite) and on_gpu(favourite) <= limit
    slow[favourite] = 1.01 * limit
    assert set(world.run(200).plans[-15:]) == {favourite}, "within the tolerance"
    slow[favourite] = 1.04 * limit
    world.run(500)
    assert favourite not in world.plans[-15:]


def test_a_plan_whose_first_cycle_was_slow_is_not_judged_by_that() -> None:
    """What is done only once, as compiling, comes with the first."""
    seen: set[Plan] = set()

    def clock(plan: Plan) -> float:
        first = plan not in seen
        seen.add(plan)
        return on_gpu(plan) * (2 if first and len(plan) else 1)

    world = World(new_governor(Rules(longest_cycle=1.65)), [drawn(1.0)], clock).run(200)
    assert world.plans[-1] == World(new_governor(Rules(longest_cycle=1.65)), [drawn(1.0)]).run(200).plans[-1]
    assert len(world.plans[-1])


def test_a_plan_that_was_too_long_for_a_while_is_tried_again_much_later() -> None:
    slow: dict[Plan, float] = {}
    world = World(new_governor(Rules(longest_cycle=1.65)), [drawn(1.0)], lambda plan: slow.get(plan, on_gpu(plan)))
    favourite = world.run(100).plans[-1]
    slow[favourite] = 2.0
    world.run(300)
    left = len(world.plans)
    slow.clear()
    while favourite not in world.plans[left:]:
        world.cycle()
        assert len(world.plans) < left + 2000
    assert len(world.plans) > left + 500
    for _ in range(20):
        world.cycle()
    assert world.plans[-1] == favourite


# Batches


@pytest.mark.parametrize(("batch", "chains"), [(1, False), (4, False), (5, True), (16, True)])
def test_trees_for_up_to_four_chains_above(batch: int, chains: bool) -> None:
    plans = new_governor(Rules(longest_cycle=1.65)).ladder.plans(batch)
    assert all(plan.is_chain for plan in plans) == chains


def test_rows_that_leave_or_join_change_the_mode_at_once() -> None:
    world = World(new_governor(Rules(longest_cycle=1.65)), [drawn(0.9, seed) for seed in range(5)]).run(40)
    assert len(world.plans[-1])
    assert world.plans[-1].is_chain
    one, world.watches = world.watches[4], world.watches[:4]
    world.texts, world.lengths, world.waiting = world.texts[:4], world.lengths[:4], world.waiting[:4]
    world.cycle()
    assert not world.plans[-1].is_chain, "four rows: a tree"
    world.watches.append(one)
    world.texts, world.lengths, world.waiting = [*world.texts, drawn(0.9)], [*world.lengths, 0], [*world.waiting, []]
    world.cycle()
    assert world.plans[-1].is_chain, "five again"


def test_a_batch_is_judged_by_all_its_rows() -> None:
    mixed = World(new_governor(), [drawn(1.0), *[drawn(0.0, seed) for seed in range(3)]]).run(200)
    good = World(new_governor(), [drawn(1.0)] * 4).run(200)
    assert len(good.plans[-1]) > len(mixed.plans[-1])


# Stepping aside and coming back


@pytest.mark.parametrize("shadows", [True, False])
def test_strange_text_is_flagged_and_decoded_plainly(shadows: bool) -> None:
    world = World(new_governor(), [drawn(0.02)], shadows=shadows).run(128)
    assert world.watches[0].ood
    assert "ood" in world.reasons
    assert sum(not len(plan) for plan in world.plans) > 0.8 * len(world.plans)
    assert world.speed > 0.97


def test_familiar_text_is_not_flagged() -> None:
    flagged = [World(new_governor(), [familiar(seed)]).run(200).watches[0].ood for seed in range(40)]
    assert sum(flagged) <= 2


def test_a_strange_prompt_is_decoded_plainly_from_the_start() -> None:
    def clock(plan: Plan) -> float:
        return 1 + 0.2 * len(plan)

    costs = World(new_governor(gpu=False), [familiar(0)], clock).run(60).governor.costs
    world = World(new_governor(costs=costs, gpu=False), [drawn(0.02)], clock)
    world.watches[0].learn_prompt(0.0, places=4, usual=0.5, deviation=0.09)
    assert not world.watches[0].ood, "four positions tell nothing"
    world.watches[0].learn_prompt(0.03, places=32, usual=0.5, deviation=0.09)
    assert world.watches[0].ood
    world.cycle()
    assert (world.plans[0], world.reasons[0]) == (NONE, "ood")


def test_probes_back_off_and_are_never_further_apart_than_their_interval() -> None:
    rules = Rules(probe_allowance=1000.0, shadow_tokens=0)
    world = World(new_governor(rules), [drawn(0.0)], shadows=False).run(400)
    probes = [start for start, plan in zip(world.starts, world.plans, strict=True) if len(plan)]
    pauses = [after - before for before, after in pairwise(probes)]
    settled = pauses[pauses.index(max(pauses)) :]
    assert max(pauses) <= rules.probe_interval + 1
    assert set(settled) == {rules.probe_interval + 1}
    assert 9 in pauses
    assert 17 in pauses


@pytest.mark.parametrize("shadows", [True, False])
def test_without_an_allowance_nothing_is_tried(shadows: bool) -> None:
    tried = []
    for allowance in (0.0, 0.5):
        world = World(new_governor(Rules(probe_allowance=allowance), gpu=False), [drawn(0.0)], two_cores, shadows)
        world.watches = [sure(text_is_guessed=False)]
        tried.append(any(map(len, world.run(40).plans)))
    assert tried == [False, True]


def test_the_first_plan_that_shadows_bring_about_is_no_probe() -> None:
    """Nothing is measured behind it."""
    world = World(new_governor(), [drawn(0.9)], ahead=True)
    world.watches = [sure(text_is_guessed=False)]
    world.run(60)
    first = next(place for place, plan in enumerate(world.plans) if len(plan))
    assert 16 <= first < 32
    assert len(world.plans[first + 1])


@pytest.mark.parametrize("shadows", [True, False])
def test_what_is_known_to_cost_too_much_is_tried_only_where_nobody_watches(shadows: bool) -> None:
    """Once its costs are known, what shadows say of a text is all that a probe could tell."""
    costs = Costs()
    World(new_governor(costs=costs, gpu=False), [drawn(0.0)], two_cores, shadows).run(2000)
    drafted = []
    for seed in range(4):
        world = World(new_governor(costs=costs, gpu=False), [drawn(0.0, seed)], two_cores, shadows).run(128)
        drafted.append(sum(map(len, world.plans)))
    assert all(drafted) if not shadows else not any(drafted)


@pytest.mark.parametrize("guessed_here", [False, True])
def test_what_cost_too_much_with_short_texts_is_tried_again_with_long_ones(guessed_here: bool) -> None:
    """Of which no draft is wrong; on a device that had something else to do, and has no longer."""
    costs, drafted = Costs(guessed_here=guessed_here), [0, 0]
    for number in range(30):
        governor, watches, context = new_governor(costs=costs), [sure()], 50 if number < 6 else 300
        for cycle in range(100):
            plan, reason = governor.choose(watches, context)
            slow = 3.0 if number < 6 and len(plan) else 1.0
            governor.observe(watches, plan, [plan.path(len(plan))[-1]], slow * on_gpu(plan), context, reason)
            drafted[number >= 20] += number >= 6 and len(plan) > 0
            if cycle % 32 == 31:
                governor.scored(watches, [[0] * 16], offered=1)
    assert drafted[1] > 800, "of the last thousand"


@pytest.mark.parametrize("guessed_here", [False, True])
def test_where_rows_are_dear_looks_are_enough(guessed_here: bool) -> None:
    """Of a text that is guessed far worse than would pay there."""
    guess = guessed_cost(3, 30, of_rows=lambda rows: 1.0 if rows == 1 else 2.0 + 0.2 * rows)
    dear = Ladder(Acceptance(SHARES), {16: guess}, 3, max_tree_batch=4)
    governor = Governor(dear, Costs(guessed_here=guessed_here), Rules())
    world = World(governor, [drawn(0.3)], lambda plan: guess(plan.depth, len(plan)) if len(plan) else 1.0)
    probes = sum(len(plan) > 0 for plan in world.run(1000).plans)
    assert (probes == 0) == guessed_here


def test_guesses_that_were_timed_at_a_bad_moment_do_not_last() -> None:
    """Texts are guessed well, and cycles would be short."""
    guess = guessed_cost(3, 30, of_rows=lambda rows: 3.0 * rows - 2.0)
    dear = Ladder(Acceptance(SHARES), {16: guess}, 3, max_tree_batch=4)
    world = World(Governor(dear, Costs(guessed_here=True), Rules()), [drawn(0.9)]).run(1000)
    assert not any(map(len, world.plans))
    world.run(2000)
    assert sum(len(plan) > 0 for plan in world.plans[-200:]) > 150


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("cost", [1.0, 1.5, 2.0, 2.4, 2.6, 2.8, 3.0, 4.0])
def test_what_would_be_drafted_is_what_is_begun(cost: float, batch: int) -> None:
    governor, watches = new_governor(), [Watch() for _ in range(batch)]
    at = governor._setting(watches, 100)
    for plan in [NONE, *governor.ladder.plans(batch)] * 4:
        governor.costs.observe(at, plan, cost if len(plan) else 1.0)
    would = governor.would_draft(watches, 100)
    assert would == (len(governor.choose(watches, 100)[0]) > 0)
    assert would or cost > 1.5
    assert not would or cost < 4.0


@pytest.mark.parametrize("guessed_here", [False, True])
def test_costs_of_long_ago_are_looked_at_again_even_where_texts_are_watched(guessed_here: bool) -> None:
    governor = new_governor(gpu=False, costs=Costs(guessed_here=guessed_here))
    world = World(governor, [drawn(0.0)], two_cores).run(5000)
    drafted = [place for place, plan in enumerate(world.plans) if len(plan)]
    pauses = [after - before for before, after in pairwise(drafted)]
    long = [pause for pause in pauses if pause > 600]
    assert len(long) >= 2 and all(1024 < pause <= 1024 + 33 for pause in long)


def test_plans_that_were_too_long_long_ago_are_tried_again_though_nothing_but_plain_cycles_ran() -> None:
    """On a device that was busy with something else then; texts are guessed well, as their shadows tell."""
    governor, watches = governor_of(1.5, dict.fromkeys(ladder(True).plans(1), 3.0)), [sure()]
    drafted = 0
    for cycle in range(1300):
        plan, reason = governor.choose(watches, 100)
        governor.observe(watches, plan, [len(plan)], 1.0, 100, reason)
        drafted += len(plan) > 0
        if not cycle % 32:
            governor.scored(watches, [[0] * 8], offered=1)
        assert cycle > 900 or not drafted
    assert drafted > 100


def test_a_probe_that_cannot_be_afforded_is_thought_of_only_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the host while nothing is drafted; it comes once enough was paid back."""
    world = World(new_governor(Rules(probe_allowance=0.01)), [drawn(0.0)], shadows=False).run(200)
    thought: list[int] = []
    look_up = Governor._look_up
    monkeypatch.setattr(Governor, "_look_up", lambda self, *at: thought.append(world.lengths[0]) or look_up(self, *at))
    world.run(1000)
    assert 50 < len(thought) < 150
    assert sum(map(len, world.plans[-600:])) > 0


@pytest.mark.parametrize(("rows", "expected"), [(2, [4, 5, 8, 12]), (8, [6, 8, 12])])
def test_news_that_make_no_difference_are_thought_of_again_only_now_and_then(
    rows: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, of many rows two cycles later, and then in every fourth cycle: what was believed before fades, but the
    device shall not wait for it."""
    governor, watches, roots = new_governor(Rules(probe_interval=64)), [Watch() for _ in range(rows)], [0] * rows
    for _ in range(3):
        governor.observe(watches, NONE, roots, 1.0, 100, MEASURING)
    while len(plan := governor.choose(watches, 100)[0]):
        governor.observe(watches, plan, roots, on_gpu(plan), 100)
    governor.observe(watches, NONE, roots, 1.0, 100, "goodput")
    thought: list[int] = []
    look_up = Governor._look_up
    monkeypatch.setattr(Governor, "_look_up", lambda self, *at: thought.append(cycle) or look_up(self, *at))
    for cycle in range(16):
        if cycle == 4:
            governor.scored(watches, [[1] * 16] * rows, offered=1)
        assert governor.choose(watches, 100)[0] == NONE
        governor.observe(watches, NONE, roots, 1.0, 100, "goodput")
    assert thought == expected


def test_text_that_shadows_watch_is_probed_as_seldom_as_can_be() -> None:
    rules = Rules(probe_allowance=1000.0)
    world = World(new_governor(rules), [drawn(0.0)]).run(200)
    probes = [start for start, plan in zip(world.starts, world.plans, strict=True) if len(plan)]
    aside = [after - before for before, after in pairwise(probes) if after - before > 2]
    assert len(aside) >= 4
    assert set(aside) == {rules.probe_interval + 1}


def test_a_plain_cycle_in_flight_counts_when_a_probe_is_due() -> None:
    """Whatever it is there for."""
    governor, watches = new_governor(Rules(probe_allowance=1000.0)), [Watch()]
    for seconds in (1.0, 1.0, 1.0):
        governor.observe(watches, NONE, [0], seconds, 100, MEASURING)
    while len(plan := governor.choose(watches, 100)[0]):
        governor.observe(watches, plan, [0], on_gpu(plan), 100)
    pause = governor._patience
    for _ in range(pause - 1):
        governor.observe(watches, NONE, [0], 1.0, 100, "goodput")
    assert not len(governor.choose(watches, 100)[0])
    assert len(governor.choose(watches, 100, (NONE, "goodput"))[0])
    assert len(governor.choose(watches, 100, (NONE, MEASURING))[0])


def test_probes_of_strange_text_come_when_shadows_have_just_left_nothing_waiting() -> None:
    """From the very first: this text was known to be strange before anything was drafted."""
    world = World(new_governor(Rules(probe_allowance=1000.0)), [drawn(0.0)], ahead=True)
    world.watches = [sure(text_is_guessed=False)]
    found: list[tuple[int, int]] = []
    for _ in range(200):
        waiting = len(world.waiting[0])
        world.cycle()
        if len(world.plans[-1]):
            found.append((len(world.plans) - 1, waiting))
    assert [waiting for _, waiting in found] == [0] * len(found)
    assert [cycle for cycle, _ in found] == [32 + 33 * number for number in range(len(found))]
    assert len(found) >= 4


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("offered", "within"),
    [(OFFERED, 64), (1, 64), (0, 100)],
    ids=["shadows", "best drafts", "probes alone"],
)
def test_it_is_back_soon_when_the_text_turns(seed: int, offered: int, within: int) -> None:
    """A single probe in 32 tokens can miss; shadows look at half of them."""

    def text(place: int) -> int:
        return drawn(0.02 if place < 100 else 0.8, seed)(place)

    world = World(new_governor(), [text], shadows=offered > 0, offered=offered).run(100)
    assert sum(map(len, world.plans[-20:])) <= 8, "off, but for a probe"
    world.run(100 + within)
    assert all(map(len, world.plans[-2:])), "drafting again"


# The ledger


def test_a_ledger_allows_up_to_its_allowance_and_is_paid_back_slowly() -> None:
    ledger = Ledger(share=0.1)
    ledger.spend(1.5)
    assert ledger.allows(1.5)
    assert not ledger.allows(1.4)
    for _ in range(4):
        ledger.pay_back()
    assert ledger.owed == pytest.approx(1.1)
    for _ in range(100):
        ledger.pay_back()
    assert ledger.owed == 0, "plain steps earn no credit"
    ledger.spend(-3.0)
    ledger.pay_back()
    assert ledger.owed == -3.0, "what was won stays won"
    ledger.spend(-100.0)
    assert ledger.owed > -10, "but not without limit"


def test_what_was_lost_does_not_keep_a_text_that_turned_from_being_drafted() -> None:
    """A plan in use stops where it has lost what it may; beginning, after a look that convinces, may lose as much more
    as trying may."""
    governor, watches = new_governor(Rules(loss_allowance=4.0, probe_allowance=0.5)), [Watch()]
    for _ in range(3):
        governor.observe(watches, NONE, [0], 1.0, 100, MEASURING)
    governor.observe(watches, NONE, [0], 1.0, 100, "goodput")
    governor.scored(watches, [[0] * 16], offered=1)
    governor.ledger.owed = 4.6
    assert not len(governor.choose(watches, 100)[0])
    governor.ledger.owed = 4.4
    plan, _ = governor.choose(watches, 100)
    assert len(plan)
    governor.observe(watches, plan, [0], on_gpu(plan), 100)
    governor.ledger.owed = 4.4
    assert not len(governor.choose(watches, 100)[0])
    governor.observe(watches, plan, [len(plan)], on_gpu(plan), 100)
    governor.ledger.owed = 4.4
    assert len(governor.choose(watches, 100)[0]), "as long as it pays"


@settings(SETTINGS, max_examples=80)
@given(
    ranks=st.lists(st.integers(0, NEVER), min_size=1, max_size=150),
    of_row=st.floats(0, 1.5),
    of_depth=st.floats(0, 1.5),
    shadows=st.booleans(),
)
def test_whatever_happens_trying_costs_no_more_than_its_bound(
    ranks: list[int], of_row: float, of_depth: float, shadows: bool
) -> None:
    """Against plain decoding, at every moment: both allowances, a share of every plain step, and one cycle."""

    def clock(plan: Plan) -> float:
        return 1 + of_depth * plan.depth + of_row * len(plan) if len(plan) else 1.0

    rules = Rules()
    costs = Costs()
    governor = new_governor(rules, costs)
    for plan in [NONE, *governor.ladder.plans(1)]:  # known from the start: guesses are another matter
        for _ in range(3):
            costs.observe(governor._setting([Watch()], 100), plan, clock(plan))
    world = World(governor, [lambda place: ranks[place % len(ranks)]], clock, shadows)
    worst = max(clock(plan) - 1 for plan in governor.ladder.plans(1))
    for _ in range(150):
        world.cycle()
        plain = sum(not len(plan) for plan in world.plans)
        allowed = rules.loss_allowance + rules.probe_allowance + rules.probe_share * plain
        assert world.losses <= allowed + worst + 1e-6


@settings(SETTINGS, max_examples=60)
@given(seed=st.integers(0, 10**6), top1=st.floats(0, 1))
def test_choosing_changes_nothing(seed: int, top1: float) -> None:
    world = World(new_governor(), [drawn(top1, seed)])
    for _ in range(60):
        first, second = (world.governor.choose(world.watches, 100) for _ in range(2))
        assert first == second
        world.cycle()


@pytest.mark.parametrize("what", ["ladder", "guess", "limit", "length", "plan in use", "trees", "tokens left"])
def test_what_was_found_for_one_request_is_no_other_ones(what: str) -> None:
    """Governors of an engine share what they find; each finds what it would alone."""
    usual = ladder(True)
    worse = Ladder(Acceptance([[0.2, 0.1, 0.05]] * 3), usual.guesses, 3, max_tree_batch=4)
    dearer = Ladder(usual.acceptance, {16: guessed_cost(9, 30)}, 3, max_tree_batch=4)
    narrow = Ladder(usual.acceptance, usual.guesses, 3, max_tree_batch=3)
    longest = max(usual.plans(4), key=on_gpu)
    edge = on_gpu(longest) / 1.01  # which it may exceed only where it is in use
    first: dict[str, Any] = {"ladder": usual, "limit": edge, "context": 100, "rows": 4, "in_use": NONE, "most": 16}
    others: dict[str, dict[str, Any]] = {
        "ladder": {"ladder": worse},
        "guess": {"ladder": dearer},
        "limit": {"limit": 1.2},
        "length": {"context": 5000},
        "plan in use": {"in_use": longest},
        "trees": {"ladder": narrow, "rows": 3},
        "tokens left": {"most": 2},
    }
    second = first | others[what]
    if what == "trees":
        first["ladder"] = narrow

    def look_up(costs: Costs, asked: dict[str, Any]) -> Any:
        rules = Rules(longest_cycle=asked["limit"], max_tree_batch=asked["ladder"].max_tree_batch)
        governor, watches = Governor(asked["ladder"], costs, rules), [Watch()] * asked["rows"]
        at = governor._setting(watches, asked["context"])
        found = governor._look_up(at, asked["rows"], asked["in_use"], asked["most"])
        return found.plans, found.tokens.tolist(), found.ratios.tolist(), governor.ratio(Plan.parse("chain:4"), at)

    def known() -> Costs:
        costs = Costs(in_seats=True)
        for context, slower in ((100, 1.0), (5000, 1.2)):
            for plan in (NONE, *usual.plans(4)):
                for _ in range(3):
                    costs.observe(Setting.of(3, 4, context), plan, on_gpu(plan) * (slower if len(plan) else 1.0))
        return costs

    shared, alone = known(), look_up(known(), second)
    assert look_up(shared, first) != alone
    assert look_up(shared, second) == alone
