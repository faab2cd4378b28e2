"""Costs of steps: modelled from their parts, measured while they run, and the plans that are candidates by them."""

from __future__ import annotations

from itertools import pairwise, product
from math import inf, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.governor.acceptance import Acceptance, Skill
from selfspec.governor.candidates import PlanCandidates, SharedPlans, likeliest
from selfspec.governor.copying import REACH
from selfspec.governor.costs import (
    FORGET_AFTER,
    LEAST_SAMPLES,
    SAMPLES,
    Costs,
    StepCost,
    calibrated_cost,
    estimated_cost,
    gpu_rows,
)
from selfspec.speculation.plan import DEEPEST_PLAN, MAX_NODES, NONE, Plan

CHAIN, TREE = Plan.parse("chain:2"), Plan.parse("tree:4,2")
SHARES = [[0.64, 0.10, 0.05, 0.03, 0.02, 0.01]] * 4
STEP = StepCost(plain=2.0, depth=0.5, drafting=((1, 2.2), (3, 2.4), (7, 3.0)), head_row=0.001, head_rows=100)


# The cost model


@pytest.mark.parametrize(
    ("depth", "nodes", "seconds"),
    [(0, 0, 2.0), (1, 1, 2.7), (2, 2, 3.3), (2, 5, 3.7), (1, 7, 3.5), (1, 10, 3.9)],
    ids=["plain", "measured", "between", "between later", "last", "past the last"],
)
def test_a_step_costs_its_parts(depth: int, nodes: int, seconds: float) -> None:
    assert STEP.seconds(depth, nodes) == pytest.approx(seconds)


def test_a_smaller_head_makes_each_depth_cheaper_and_never_free_of_cost() -> None:
    assert STEP.seconds(2, 2, head_rows=40) == pytest.approx(3.3 - 2 * 60 * 0.001)
    tiny = StepCost(2.0, 0.5, ((1, 2.2),), head_row=0.1, head_rows=100)
    assert tiny.seconds(3, 1, head_rows=1) == 2.2


def test_models_count_in_plain_steps() -> None:
    assert calibrated_cost(STEP)(2, 2) == pytest.approx(3.3 / 2.0)
    assert calibrated_cost(StepCost(2.0, 0.0, ((1, 1.0),)))(1, 1) == 1.0, "no step costs less than a plain one"
    assert estimated_cost(4, 30)(2, 3) == pytest.approx(gpu_rows(4) + 2 * 6 / 30)
    dear = estimated_cost(4, 30, batch=2, row_cost=lambda rows: float(rows))
    assert dear(1, 1) == pytest.approx(4 / 2 + 6 / 30)


# Measured costs


def measured_cost(costs: Costs, plan: Plan, modelled: float = 1.5, batch: int = 1, context: int = 9) -> float:
    return costs.bucket(batch, context).cost(plan, modelled)


def observe(costs: Costs, plan: Plan, *seconds: float, modelled: float = 1.5, batch: int = 1, context: int = 9) -> None:
    for sample in seconds:
        costs.bucket(batch, context).observe(plan, sample, modelled if len(plan) else 1.0)


def test_a_plan_costs_what_was_measured_and_before_that_what_is_modelled() -> None:
    costs = Costs()
    assert costs.bucket(1, 9).plain is None and measured_cost(costs, CHAIN) == 1.5
    observe(costs, NONE, 50.0, 2.0)
    assert costs.bucket(1, 9).plain is None
    observe(costs, NONE, 3.0)
    assert costs.bucket(1, 9).plain == 2.0, "the least of the first ones, which may have waited for something else"
    observe(costs, NONE, 3.0)
    assert costs.bucket(1, 9).plain == 3.0, "the median: a step may stall"
    assert measured_cost(costs, CHAIN) == 1.5
    observe(costs, CHAIN, 9.0)
    assert measured_cost(costs, CHAIN) == 3.0
    observe(costs, CHAIN, 6.0)
    assert measured_cost(costs, CHAIN) == 2.0, "the first step may have stalled"


def test_plans_that_have_not_run_are_corrected_by_those_that_have() -> None:
    costs = Costs()
    observe(costs, NONE, *[1.0] * LEAST_SAMPLES)
    observe(costs, CHAIN, *[1.8] * LEAST_SAMPLES, modelled=1.5)
    assert costs.correction.value == pytest.approx(1.2)
    assert measured_cost(costs, TREE, modelled=2.0) == pytest.approx(2.4)
    assert measured_cost(costs, TREE, modelled=2.0, context=5000) == pytest.approx(2.4), "in other buckets too"
    assert measured_cost(costs, TREE, modelled=0.5) == 1.0, "no step costs less than a plain one"


def test_drafted_steps_correct_nothing_before_a_plain_step_was_measured() -> None:
    costs = Costs()
    observe(costs, CHAIN, *[100.0] * LEAST_SAMPLES)
    assert costs.correction.value == 1.0 and measured_cost(costs, CHAIN) == 1.5


@pytest.mark.parametrize(
    ("one", "other", "is_shared"),
    [
        ((1, 1), (1, 256), True),
        ((1, 256), (1, 257), False),
        ((1, 257), (1, 1024), True),
        ((1, 1024), (1, 1025), False),
        ((3, 9), (4, 9), True),
        ((4, 9), (5, 9), False),
        ((1, 9), (2, 9), False),
    ],
)
def test_batches_and_lengths_share_buckets(one: tuple[int, int], other: tuple[int, int], is_shared: bool) -> None:
    costs = Costs()
    assert (costs.bucket(*one) is costs.bucket(*other)) == is_shared


@given(st.lists(st.floats(0.5, 2.0), min_size=LEAST_SAMPLES, max_size=60))
def test_a_median_stays_within_its_samples_and_follows_the_newest(samples: list[float]) -> None:
    costs = Costs()
    observe(costs, NONE, *samples)
    assert min(samples) - 1e-9 <= (costs.bucket(1, 9).plain or 0) <= max(samples) + 1e-9
    observe(costs, NONE, *[1.0] * SAMPLES)
    assert costs.bucket(1, 9).plain == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("plan", [NONE, CHAIN], ids=["plain", "drafted"])
def test_one_stall_changes_no_time(plan: Plan) -> None:
    early, late = Costs(), Costs()
    observe(early, plan, 1000.0, *[1.0] * (LEAST_SAMPLES - 1))
    observe(late, plan, *[1.0] * SAMPLES, 1000.0)
    assert early.bucket(1, 9).times(plan).value == late.bucket(1, 9).times(plan).value == 1.0


@pytest.mark.parametrize("before", [0, 1, 60])
def test_one_stall_hardly_changes_the_costs_of_plans_that_have_not_run(before: int) -> None:
    costs = Costs()
    for context in (9, 5000):
        observe(costs, NONE, *[1.0] * LEAST_SAMPLES, context=context)
    observe(costs, CHAIN, *[1.5] * before)
    observe(costs, CHAIN, 1000.0, context=5000)
    assert costs.correction.value <= 2.0


@pytest.mark.parametrize("plan", [NONE, CHAIN], ids=["plain", "drafted"])
def test_times_that_rest_on_stalls_are_forgotten_once_the_plan_has_not_run_for_long(plan: Plan) -> None:
    costs, other = Costs(), TREE
    observe(costs, NONE, *[1.0] * LEAST_SAMPLES)
    observe(costs, plan, *[50.0] * 60)
    observe(costs, other, *[2.0] * (FORGET_AFTER - 1))
    bucket = costs.bucket(1, 9)
    assert bucket.times(plan).value > 20
    observe(costs, other, 2.0)
    assert not len(bucket.times(plan))
    observe(costs, plan, *[1.5] * LEAST_SAMPLES)
    assert bucket.times(plan).value == 1.5


def test_a_plan_that_has_become_slower_costs_more() -> None:
    costs = Costs()
    observe(costs, NONE, *[1.0] * LEAST_SAMPLES)
    observe(costs, CHAIN, *[1.5] * SAMPLES, *[3.0] * SAMPLES)
    assert measured_cost(costs, CHAIN) == pytest.approx(3.0, rel=0.01)


def test_a_clock_that_stands_still_divides_nothing_by_zero() -> None:
    costs = Costs()
    observe(costs, NONE, *[0.0] * LEAST_SAMPLES)
    observe(costs, CHAIN, *[0.0] * LEAST_SAMPLES)
    assert measured_cost(costs, CHAIN) == 1.0


# Candidates


def candidates(max_step: float = inf, row: float = 0.02, **options: int) -> PlanCandidates:
    models = {size: estimated_cost(3, 30, size, row_cost=lambda rows: 1 + (rows - 1) * row) for size in (1, 4, 16)}
    parts = Acceptance(SHARES), models
    return PlanCandidates(*parts, SharedPlans(*parts, max_tree_batch=4, max_step=max_step, **options))


def speed(candidates: PlanCandidates, batch: int, plan: Plan, skill: float) -> float:
    length = candidates.acceptance.reach(plan.without_copy).sum(0)[Skill(skill).level]
    return float(length) / candidates.cost(plan, batch)


def test_domains_share_plans_and_have_their_own_lengths() -> None:
    models = {16: estimated_cost(3, 30)}
    shared = SharedPlans(Acceptance(SHARES), models, max_tree_batch=4)
    good, bad = (PlanCandidates(Acceptance(shares), models, shared).table(1) for shares in (SHARES, [[0.2, 0.1]]))
    assert good.plans == bad.plans
    drafting = [place for place, plan in enumerate(good.plans) if plan.uses_exit]
    assert (good.lengths > bad.lengths)[:, 0, drafting].all(), "where nothing is copied"
    both = [place for place in drafting if good.plans[place].copied]
    of_good, of_bad = (table.lengths[:, 8] - table.lengths[:, 0] for table in (good, bad))
    assert (of_good < of_bad)[:, both].all() and both, "a copy adds less where the exit is right"


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("skill", [0.5, 1.0, 2.0])
def test_no_regular_tree_is_faster_than_the_candidates(batch: int, skill: float) -> None:
    found = candidates()
    best = max(speed(found, batch, plan, skill) for plan in found.table(batch).plans)
    widths = [shape for depth in range(1, DEEPEST_PLAN + 1) for shape in product(range(1, 4), repeat=depth)]
    small = [shape for shape in widths if sum(prod(shape[: d + 1]) for d in range(len(shape))) <= MAX_NODES]
    assert best >= max(speed(found, batch, Plan.tree(shape), skill) for shape in small) - 1e-9


def test_larger_batches_get_smaller_plans_and_above_the_limit_chains() -> None:
    found = candidates()
    sizes = [max(map(len, found.table(batch).plans)) for batch in (1, 4, 16)]
    assert all(larger >= smaller for larger, smaller in pairwise(sizes))
    assert all(plan.is_chain for batch in (5, 16, 99) for plan in found.table(batch).plans)
    assert any(not plan.is_chain for plan in found.table(4).plans)


def test_batches_of_any_size_copy_as_many_nodes_as_fit_a_step() -> None:
    found = candidates(max_step=1.67, row=0.01)
    copies = {batch: [str(plan) for plan in found.table(batch).plans if not plan.uses_exit] for batch in (1, 4, 16)}
    assert copies == {1: ["copy:3", "copy:15"], 4: ["copy:3", "copy:15"], 16: ["copy:3"]}


def test_a_table_has_the_modelled_costs_and_expected_lengths_of_its_plans() -> None:
    found = candidates()
    table = found.table(4)
    for place, plan in enumerate(table.plans):
        assert table.costs[place] == found.cost(plan, 4)
        assert table.lengths[:, 0, place] == pytest.approx(found.acceptance.reach(plan.without_copy).sum(0))
    assert found.cost(NONE, 4) == 1.0
    assert found.plans >= set(table.plans)


@pytest.mark.parametrize("max_step", [1.3, 1.67])
def test_plans_are_no_longer_than_a_step_may_be_but_for_the_smallest(max_step: float) -> None:
    table = candidates(max_step).table(1)
    assert all(cost <= max_step for plan, cost in zip(table.plans, table.costs, strict=True) if plan.depth > 1)


def test_there_is_no_plan_where_a_step_may_not_even_be_a_plain_one() -> None:
    assert candidates(max_step=0.5).table(1).plans == ()


def test_where_rows_are_dear_small_plans_remain_to_probe_with() -> None:
    assert [str(plan) for plan in candidates(row=1.0).table(1).plans] == ["chain:1", "copy:3", "tree:4", "copy:15"]


def test_without_an_exit_plans_only_copy() -> None:
    models = {size: estimated_cost(0, 30, size) for size in (1, 4, 16)}
    found = PlanCandidates(None, models, SharedPlans(None, models, max_tree_batch=4))
    table = found.table(2)
    assert [str(plan) for plan in table.plans] == ["copy:3", "copy:15"] == [str(plan) for plan in found.table(5).plans]
    assert (table.lengths[:, 0] == 1).all() and table.lengths[3, :, 1] == pytest.approx(1 + REACH.sum(1))
    assert (table.lengths[:, 1:, 0] < table.lengths[:, 1:, 1]).all()


def test_plans_ask_for_no_rank_that_the_exit_lacks() -> None:
    plans = candidates(widest=2).table(1).plans
    assert max(rank for plan in plans for rank in plan.ranks) == 1


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=3))
def test_nodes_are_taken_in_the_order_of_their_chances(chances: list[list[float]]) -> None:
    paths = {
        path: prod(level[rank] for level, rank in zip(chances, path, strict=False))
        for depth in range(1, len(chances) + 1)
        for path in product(*(range(len(level)) for level in chances[:depth]))
    }
    found = likeliest(chances)[:MAX_NODES]
    expected = sorted((chance for chance in paths.values() if chance), reverse=True)[:MAX_NODES]
    assert [chance for chance, _ in found] == pytest.approx(expected)
    taken = [path for _, path in found]
    assert len(set(taken)) == len(taken)
    assert all(path[:-1] in taken[:place] for place, path in enumerate(taken) if len(path) > 1)
