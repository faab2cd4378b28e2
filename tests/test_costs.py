"""What cycles cost: guessed, then measured, and carried over to settings like those that were measured."""

from __future__ import annotations

import pytest

from selfspec.governor.costs import Costs, OfRows, Setting, StepCost, almost_free, doubled, guessed_cost, measured_cost
from selfspec.speculation.plan import NONE, Plan

CHAIN, TREE = Plan.parse("chain:2"), Plan.parse("tree:4")
ONE = Setting.of(3, 1, 100)


def guess(depth: int, nodes: int) -> float:
    return 1 + 0.1 * depth + 0.05 * nodes


def costs(*cycles: tuple[Plan, float], at: Setting = ONE) -> Costs:
    known = Costs()
    for plan, seconds in cycles:
        for _ in range(3):
            known.observe(at, plan, seconds)
    return known


def test_what_was_never_run_is_guessed_with_the_benefit_of_the_doubt() -> None:
    assert 0.9 * guess(2, 2) < Costs().ratio(ONE, CHAIN, guess) < guess(2, 2)
    assert Costs().ratio(ONE, NONE, guess) == 1


def test_what_was_run_is_measured_in_plain_steps() -> None:
    known = costs((NONE, 0.010), (CHAIN, 0.014))
    assert known.ratio(ONE, CHAIN, guess) == pytest.approx(1.4)
    assert known.plain(1, 100) == pytest.approx(0.010)


def test_what_was_run_with_other_texts_is_compared_with_the_plain_steps_of_its_time() -> None:
    """All cycles take longer with longer texts: a plan that was last used there would look dear beside one in use."""
    known = costs((NONE, 0.0100), (CHAIN, 0.0150))
    for _ in range(60):
        known.observe(ONE, NONE, 0.0080)
        known.observe(ONE, TREE, 0.0120)
    assert known.ratio(ONE, CHAIN, guess) == pytest.approx(1.5)
    assert known.ratio(ONE, TREE, guess) == pytest.approx(1.5, rel=0.01)


def test_what_was_run_before_any_plain_step_is_compared_with_those_that_came() -> None:
    known = costs((CHAIN, 0.0150), (NONE, 0.0100))
    assert known.ratio(ONE, CHAIN, guess) == pytest.approx(1.5)
    for _ in range(60):
        known.observe(ONE, NONE, 0.0080)
    assert known.ratio(ONE, CHAIN, guess) == pytest.approx(0.015 / 0.008, rel=0.01)
    for _ in range(60):
        known.observe(ONE, CHAIN, 0.0120)
    assert known.ratio(ONE, CHAIN, guess) == pytest.approx(1.5, rel=0.01)


def test_a_single_time_is_believed_within_reason() -> None:
    known = costs((NONE, 0.010))
    known.observe(ONE, CHAIN, 0.020)
    assert known.ratio(ONE, CHAIN, guess) == pytest.approx(2.0)
    known = costs((NONE, 0.010))
    known.observe(ONE, CHAIN, 9.0)
    assert known.ratio(ONE, CHAIN, guess) < 4
    known.observe(ONE, CHAIN, 0.016)
    assert known.ratio(ONE, CHAIN, guess) == pytest.approx(1.6)


def test_a_single_time_is_believed_less_where_others_tell_how_right_guesses_are() -> None:
    """A host that stalls in its first cycle does not rule a plan out; one that is slow twice is believed."""
    known = costs((NONE, 0.010), (CHAIN, 0.010 * 1.5 * guess(2, 2)))
    known.observe(ONE, TREE, 0.090)
    assert known.ratio(ONE, TREE, guess) == pytest.approx(1.1 * 1.5 * guess(1, 4))
    known.observe(ONE, TREE, 0.080)
    assert known.ratio(ONE, TREE, guess) == pytest.approx(8.0)


def test_a_plain_step_is_known_after_three_and_by_their_fastest() -> None:
    known = Costs()
    for seconds in (5.0, 0.020):
        known.observe(ONE, NONE, seconds)
        assert known.plain(1, 100) is None
        assert known.wants_plain(1, 100)
    known.observe(ONE, NONE, 0.010)
    assert known.plain(1, 100) == pytest.approx(0.010)
    assert not known.wants_plain(1, 100)


def test_later_disturbances_weigh_little() -> None:
    known = Costs()
    for seconds in (1.0, 0.030, 0.010, 0.020, 10.0):
        known.observe(ONE, CHAIN, seconds)
        known.observe(ONE, NONE, 0.010)
    assert known.ratio(ONE, CHAIN, guess) == pytest.approx(1.1)


def test_a_stall_in_the_second_measurement_is_forgotten() -> None:
    known = costs((NONE, 0.010))
    for seconds in (0.015, 0.090, 0.015):
        known.observe(ONE, CHAIN, seconds)
    assert known.ratio(ONE, CHAIN, guess) == pytest.approx(1.5)


def test_a_plain_step_is_measured_again_from_time_to_time() -> None:
    known = costs((NONE, 0.010))
    for _ in range(127):
        known.observe(ONE, CHAIN, 0.015)
    assert not known.wants_plain(1, 100)
    known.observe(ONE, CHAIN, 0.015)
    assert known.wants_plain(1, 100)
    known.observe(ONE, NONE, 0.010)
    assert not known.wants_plain(1, 100)


def test_a_batch_that_borrows_a_plain_step_soon_measures_its_own() -> None:
    known = costs((NONE, 0.010))
    two = Setting.of(3, 2, 100)
    for _ in range(16):
        assert not known.wants_plain(2, 100)
        known.observe(two, CHAIN, 0.030)
    assert known.ratio(two, CHAIN, guess) == pytest.approx(3.0), "its own drafts count at once"
    for _ in range(3):
        assert known.wants_plain(2, 100)
        known.observe(two, NONE, 0.020)
    assert not known.wants_plain(2, 100)
    assert known.ratio(two, CHAIN, guess) == pytest.approx(1.5)


def test_a_single_slow_plain_step_flatters_no_plan() -> None:
    """It may be the last one for a hundred cycles; a second one after it is no accident."""
    known = costs(*[(NONE, 0.010), (CHAIN, 0.011)] * 8)
    usual = known.plain(1, 100)
    known.observe(ONE, NONE, 0.030)
    assert usual == pytest.approx(0.010) and known.plain(1, 100) < 1.03 * usual
    known.observe(ONE, NONE, 0.030)
    assert known.plain(1, 100) > 1.2 * usual
    for _ in range(30):
        known.observe(ONE, CHAIN, 0.011)
    assert known.ratio(ONE, CHAIN, guess) < 0.85 * 1.1


def test_what_has_become_slow_is_noticed() -> None:
    known = costs((NONE, 0.010), (CHAIN, 0.014))
    for _ in range(40):
        known.observe(ONE, CHAIN, 0.028)
    assert known.ratio(ONE, CHAIN, guess) == pytest.approx(2.8, rel=0.05)


def is_found_again(known: Costs, batch: int) -> bool:
    """Whether what follows from a batch's costs is not there any more; then it is."""
    finds: list[None] = []
    known.once(Setting.of(3, batch, 100), "what follows", lambda: finds.append(None))
    return bool(finds)


def test_nobody_looks_again_before_a_mean_has_changed_by_a_per_cent() -> None:
    """Neither at the first cycle that takes a little longer, nor never: small steps add up."""
    known = costs(*[(CHAIN, 1.0)] * 5)
    assert [is_found_again(known, 1) for _ in range(2)] == [True, False]
    known.observe(ONE, CHAIN, 1.05)  # the mean is 1.005 now
    assert not is_found_again(known, 1)
    known.observe(ONE, CHAIN, 1.05)
    known.observe(ONE, CHAIN, 1.05)
    assert is_found_again(known, 1)


@pytest.mark.parametrize(
    ("in_seats", "plan", "anew"), [(True, CHAIN, {4}), (True, NONE, {2, 4, 8}), (False, CHAIN, {1, 2, 4, 8, 16})]
)
def test_news_of_a_batch_are_others_too_where_they_know_nothing_better(
    in_seats: bool, plan: Plan, anew: set[int]
) -> None:
    known, sizes = Costs(in_seats), (1, 2, 4, 8, 16)
    assert all(is_found_again(known, size) for size in sizes)
    known.observe(Setting.of(3, 4, 100), plan, 1.0)
    assert {size for size in sizes if is_found_again(known, size)} == anew


def test_plain_steps_that_are_well_known_make_nobody_look_again() -> None:
    """Plans are compared with the plain steps of their own time; the first few tell what nobody knew."""
    known = costs(*[(NONE, 1.0)] * 16)
    is_found_again(known, 1)
    for _ in range(8):
        known.observe(ONE, NONE, 1.1)
    assert known.plain(1, 100) == pytest.approx(1.09, abs=0.01)
    assert not is_found_again(known, 1)
    known.observe(ONE, CHAIN, 1.3)
    assert is_found_again(known, 1)


def long_after(known: Costs) -> Costs:
    """When nothing but plain steps has run for long."""
    for _ in range(1100):
        known.observe(ONE, NONE, 0.010)
    return known


def test_what_a_plan_took_long_ago_is_not_forgotten_for_one_slow_cycle() -> None:
    """A host that is late in the first cycles of a request shall not rule out the best plan for good; one that has
    become faster is believed at once."""
    known = long_after(costs((NONE, 0.010), *[(CHAIN, 0.015)] * 4))
    assert not known.is_known(ONE, CHAIN)
    known.observe(ONE, CHAIN, 0.020)
    assert known.ratio(ONE, CHAIN, guess) == pytest.approx(1.5)
    known = long_after(known)
    known.observe(ONE, CHAIN, 0.013)
    assert known.ratio(ONE, CHAIN, guess) == pytest.approx(1.3)
    known.observe(ONE, TREE, 0.016)  # for the first time ever
    assert known.ratio(ONE, TREE, guess) == pytest.approx(1.6)


def test_what_was_tried_once_or_twice_long_ago_has_the_benefit_of_the_doubt_again() -> None:
    known = costs((NONE, 0.010), (CHAIN, 0.010 * guess(2, 2)))
    for _ in range(2):
        known.observe(ONE, TREE, 0.030)
    assert known.ratio(ONE, TREE, guess) == pytest.approx(3.0)
    assert long_after(known).ratio(ONE, TREE, guess) == pytest.approx(0.95 * guess(1, 4))


def test_guesses_become_as_right_as_they_were_for_other_plans() -> None:
    known = costs((NONE, 0.010), (CHAIN, 0.010 * 2 * guess(2, 2)))
    before, after = Costs().ratio(ONE, TREE, guess), known.ratio(ONE, TREE, guess)
    assert after == pytest.approx(2 * before)


@pytest.mark.parametrize(("batch", "carried"), [(2, True), (3, True), (8, True), (1, False), (9, False)])
def test_a_batch_is_like_those_up_to_twice_or_half_as_large(batch: int, carried: bool) -> None:
    known = costs((NONE, 0.010), (CHAIN, 0.017), at=Setting.of(3, 4, 100))
    assert (known.plain(batch, 100) is not None) == carried == (not known.wants_plain(batch, 100))
    assert (known.ratio(Setting.of(3, batch, 100), CHAIN, guess) == pytest.approx(1.7)) == carried


def test_batches_with_as_many_seats_are_one() -> None:
    known, eight = Costs(in_seats=True), Setting.of(3, 8, 100)
    assert list(map(known.size, (1, 2, 3, 5, 8, 9, 16))) == [1, 2, 4, 8, 8, 16, 16]
    for _ in range(3):
        assert known.wants_plain(6, 100)
        known.observe(eight, NONE, 0.010)
    assert not known.wants_plain(5, 100) and known.plain(7, 100) == pytest.approx(0.010)
    for _ in range(16):
        known.observe(eight, CHAIN, 0.014)
    assert not known.wants_plain(7, 100), "it is this batch's own, not one like it"


def test_longer_texts_are_measured_for_themselves() -> None:
    known = costs((NONE, 0.010), at=Setting.of(3, 1, 128))
    assert known.plain(1, 65) == known.plain(1, 128) is not None
    assert known.plain(1, 64) is known.plain(1, 129) is None
    assert known.wants_plain(1, 64) and known.wants_plain(1, 129) and not known.wants_plain(1, 128)
    assert Setting.of(3, 1, 1) == Setting.of(3, 1, 64) != Setting.of(3, 1, 65)
    assert Setting.of(3, 1, 1025) == Setting.of(3, 1, 2048) != Setting.of(3, 1, 2049)


def test_a_plan_that_ran_with_texts_of_another_length_costs_as_much_more_as_others_do() -> None:
    """The one that ran with both takes 10% more with longer ones."""
    short, longer = Setting.of(3, 1, 64), Setting.of(3, 1, 200)
    known = Costs(in_seats=True)
    for at, plan, ratio in [
        (short, NONE, 1.0), (longer, NONE, 1.2), (short, CHAIN, 1.5), (short, TREE, 1.6), (longer, CHAIN, 1.2 * 1.65),
    ]:  # fmt: skip
        for _ in range(3):
            known.observe(at, plan, 0.010 * ratio)
    assert known.ratio(short, TREE, guess) == pytest.approx(1.6)
    assert known.ratio(longer, CHAIN, guess) == pytest.approx(1.65)
    assert known.ratio(longer, TREE, guess) == pytest.approx(1.6 * 1.1)


def test_a_single_slow_cycle_makes_no_other_plan_look_dear_nor_itself_by_much() -> None:
    """The first one with texts of another length stalls: what is known elsewhere counts more."""
    known, short, longer = Costs(in_seats=True), Setting.of(3, 1, 64), Setting.of(3, 1, 200)
    for plan, seconds in [(NONE, 0.010), (CHAIN, 0.015), (TREE, 0.016)] * 3:
        known.observe(short, plan, seconds)
    for _ in range(3):
        known.observe(longer, NONE, 0.010)
    known.observe(longer, CHAIN, 0.030)
    assert known.ratio(longer, TREE, guess) == pytest.approx(1.6)
    assert 1.5 < known.ratio(longer, CHAIN, guess) < 1.7


def test_what_ran_once_or_twice_with_texts_of_another_length_tells_nothing() -> None:
    known, short, longer = Costs(in_seats=True), Setting.of(3, 1, 64), Setting.of(3, 1, 200)
    for at in (short, longer):
        for _ in range(3):
            known.observe(at, NONE, 0.010)
    for _ in range(2):
        known.observe(short, TREE, 0.050)
    assert known.ratio(longer, TREE, guess) < 5.0
    known.observe(short, TREE, 0.050)
    known.observe(longer, NONE, 0.010)
    assert known.ratio(longer, TREE, guess) == pytest.approx(5.0)


def test_what_is_found_is_forgotten_with_what_it_follows_from_alone() -> None:
    """Of one length: what cycles with longer texts take is no reason to look again at short ones."""
    known, short, longer = Costs(in_seats=True), Setting.of(3, 1, 64), Setting.of(3, 1, 200)
    finds: list[Setting] = []

    def look() -> list[Setting]:
        finds.clear()
        for at in (short, longer):
            known.once(at, "what follows", lambda at=at: finds.append(at))  # type: ignore[misc]
        return list(finds)

    assert look() == [short, longer] and look() == []
    known.observe(longer, CHAIN, 0.015)
    assert look() == [longer]
    known.observe(short, NONE, 0.010)
    assert look() == [short]


def test_a_plan_is_outdated_by_cycles_with_such_texts_alone() -> None:
    known, short, longer = Costs(in_seats=True), Setting.of(3, 1, 64), Setting.of(3, 1, 200)
    for plan, seconds in [(NONE, 0.010), (CHAIN, 0.015)] * 3:
        known.observe(short, plan, seconds)
    for _ in range(2000):
        known.observe(longer, NONE, 0.010)
    assert known.is_known(short, CHAIN)
    for _ in range(1025):
        known.observe(short, NONE, 0.010)
    assert not known.is_known(short, CHAIN)


def test_a_plan_that_ran_with_texts_of_another_length_alone_costs_what_it_took_there() -> None:
    known, short = Costs(in_seats=True), Setting.of(3, 1, 64)
    for plan, seconds in [(NONE, 0.010), (TREE, 0.016)] * 3:
        known.observe(short, plan, seconds)
    assert known.ratio(Setting.of(3, 1, 200), TREE, guess) == pytest.approx(1.6)


def test_costs_are_known_after_a_few_cycles_of_any_plans_with_texts_of_any_length() -> None:
    costs, long = Costs(in_seats=True), Setting.of(3, 1, 500)
    for at, plan in ((ONE, Plan.parse("chain:1")), (ONE, Plan.parse("chain:2")), (long, Plan.parse("chain:1"))):
        assert not costs.knows_any(ONE) and not costs.knows_any(long)
        costs.observe(at, plan, 1.5)
    assert costs.knows_any(ONE) and costs.knows_any(long)
    assert not costs.knows_any(Setting.of(3, 2, 100)) and not costs.knows_any(Setting.of(4, 1, 100))
    for _ in range(1100):
        costs.observe(ONE, NONE, 1.0)
    assert not costs.knows_any(ONE) and not costs.knows_any(long), "whatever ran since"


def test_guesses_of_this_very_machine_are_believed_as_they_are() -> None:
    timed, foreign = Costs(guessed_here=True), Costs()
    assert timed.knows_any(ONE) and not foreign.knows_any(ONE)
    assert timed.ratio(ONE, CHAIN, guess) == pytest.approx(guess(CHAIN.depth, len(CHAIN)))
    assert foreign.ratio(ONE, CHAIN, guess) < timed.ratio(ONE, CHAIN, guess)


def test_another_exit_costs_something_else() -> None:
    known = costs((NONE, 0.010), (CHAIN, 0.030))
    assert known.ratio(Setting.of(9, 1, 100), CHAIN, guess) == pytest.approx(Costs().ratio(ONE, CHAIN, guess))


def dear(rows: int) -> float:
    """Passes over more rows, as on a CPU."""
    return 0.85 + 0.15 * rows


def test_rows_are_almost_free_for_a_gpu_alone() -> None:
    on_gpu, on_cpu = guessed_cost(3, 30), guessed_cost(3, 30, of_rows=dear)
    assert on_gpu(1, 32) < 1.7 < 4 < on_cpu(1, 32)
    assert on_gpu(3, 3) > on_gpu(1, 3) > 1


@pytest.mark.parametrize("of_rows", [almost_free, dear])
def test_a_node_costs_more_in_a_batch_but_less_than_by_itself_so_many_times(of_rows: OfRows) -> None:
    one, four, sixteen = (
        guessed_cost(3, 30, batch, of_rows)(1, 8) - guessed_cost(3, 30, 1, of_rows)(1, 0) for batch in (1, 4, 16)
    )
    assert one < four < 4 * one and four < sixteen < 4 * four


def test_a_profiles_costs_are_told_in_its_plain_steps() -> None:
    cost = StepCost(plain=0.01, depth=0.002, drafting=((1, 0.012), (3, 0.016)), head_row=1e-6, head_rows=100)
    assert measured_cost(cost)(2, 2) == pytest.approx(1.8)
    assert measured_cost(cost, head_rows=600)(2, 2) == pytest.approx(1.9)


def test_no_head_is_so_small_that_a_depth_gives_time_back() -> None:
    cost = StepCost(plain=0.01, depth=0.002, drafting=((1, 0.012), (3, 0.016)), head_row=1e-4, head_rows=100)
    assert cost.of(2, 3, head_rows=90) == pytest.approx(0.016 + 2 * 0.001)
    assert [cost.of(depth, 3, head_rows=10) for depth in (1, 2, 3)] == [0.016] * 3


def test_kernels_pay_for_whole_tiles_of_rows() -> None:
    """Of one sequence 15 nodes fill a tile with the root, of four sequences 3 do; within a tile nothing jumps."""
    cost = StepCost(plain=1.0, depth=0.0, drafting=((1, 1.0), (3, 1.1), (8, 1.2), (16, 2.0), (32, 2.4)))
    straight = [cost.of(1, nodes) for nodes in range(1, 33)]
    tiled = {batch: [cost.of(1, nodes, tiled=batch) for nodes in range(1, 33)] for batch in (1, 4)}
    for found in tiled.values():
        assert found == sorted(found)
        assert [found[n - 1] for n, _ in cost.drafting] == [seconds for _, seconds in cost.drafting]
    assert tiled[1][:8] == straight[:8]
    assert tiled[1][14] == pytest.approx((straight[14] + 1.2) / 2) and tiled[1][15] == 2.0
    assert tiled[4][3] == pytest.approx((straight[3] + 1.2) / 2)
    assert measured_cost(cost, tiled=1)(1, 12) < measured_cost(cost)(1, 12)


def test_twice_as_many_sequences_cost_what_as_many_rows_do() -> None:
    """Eight with one node are sixteen rows, as four with three; with two they need another tile."""
    cost = StepCost(1.0, 0.1, ((1, 1.1), (3, 1.2), (4, 1.5), (7, 1.6)))
    of_eight = doubled(measured_cost(cost, tiled=4))
    assert of_eight(1, 1) == pytest.approx(1.3)
    assert of_eight(2, 2) > 1.7


def test_guesses_are_corrected_by_what_ran_often() -> None:
    """A plan that ran once, and slowly, says little of another one."""
    known = costs(*[(NONE, 0.010), (CHAIN, 0.010 * guess(2, 2))] * 16)
    other, untried = Plan.parse("chain:1"), Plan.parse("chain:3")
    before = known.ratio(ONE, untried, guess)
    known.observe(ONE, other, 0.010 * 2 * guess(1, 1))
    assert before < known.ratio(ONE, untried, guess) < 1.05 * before


@pytest.mark.parametrize("in_seats", [False, True])
def test_kernels_do_not_borrow_from_another_batch(in_seats: bool) -> None:
    known = Costs(in_seats)
    for _ in range(4):
        for size, plan, seconds in ((1, NONE, 0.010), (2, NONE, 0.010), (2, CHAIN, 0.030)):
            known.observe(Setting.of(3, size, 100), plan, seconds)
    assert (known.ratio(ONE, CHAIN, guess) == pytest.approx(3.0)) == (not in_seats)
