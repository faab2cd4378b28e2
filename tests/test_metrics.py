"""Totals of an engine: what is counted, percentiles and shares, in bounded memory, as a table and for Prometheus."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.metrics import MAX_PLANS, OTHERS, WINDOW, Metrics, Percentiles, Summary, short
from selfspec.speculation.plan import NONE, Plan

TREE = Plan.parse("tree:4,2")
CHAIN = Plan.parse("chain:3")
IRREGULAR = Plan.parse("nodes:0.0,0.2,1.1")


def told(*cycles: tuple[Plan, float, list[int], float | None]) -> Summary:
    metrics = Metrics()
    for cycle in cycles:
        metrics.add_step(*cycle)
    return metrics.summary()


def busy() -> Metrics:
    """Two requests: ten plain cycles of 2 ms, five with a tree of 4 ms that bring three tokens each, changes."""
    metrics = Metrics()
    for _ in range(2):
        metrics.add_request()
    for _ in range(10):
        metrics.add_step(NONE, 0.002, [1], 0.002)
    for _ in range(5):
        metrics.add_step(TREE, 0.004, [3], 0.002)
        metrics.add_acceptance([1, 1], [1, 1])
    metrics.add_acceptance([0], [1])
    for reason in ("goodput", None, "goodput", None, "ood"):
        metrics.add_plan_change(reason)
    return metrics


class TestTotals:
    def test_an_engine_that_did_nothing_has_a_summary_too(self):
        summary = Metrics().summary()
        assert (summary.requests, summary.tokens, summary.cycles, summary.seconds) == (0, 0, 0, 0)
        assert (summary.accept_rate, summary.accept_rate_by_depth, summary.tokens_per_cycle) == (0, [], 0)
        assert (summary.plain_time_share, summary.plain_cycle_share, summary.time_share_by_plan) == (0, 0, {})
        assert summary.speedup is None
        assert summary.gap == summary.time_per_token == Percentiles(0, 0, 0)
        assert str(summary) and summary.prometheus()

    def test_requests_tokens_cycles_and_time_add_up(self):
        metrics = busy()
        summary = metrics.summary()
        assert (summary.requests, summary.tokens, summary.cycles) == (2, 10 + 5 * 3, 15)
        assert summary.seconds == metrics.seconds == pytest.approx(0.04)

    def test_tokens_per_cycle_are_those_of_one_sequence(self):
        summary = told((CHAIN, 0.1, [1, 2, 3, 2], None), (CHAIN, 0.1, [4], None))
        assert (summary.cycles, summary.emissions, summary.tokens) == (2, 5, 12)
        assert summary.tokens_per_cycle == 12 / 5

    def test_shares_of_time_and_cycles_by_plan(self):
        summary = told((NONE, 1.0, [1], None), (TREE, 6.0, [2], None), (NONE, 2.0, [1], None), (CHAIN, 1.0, [3], None))
        assert summary.time_share_by_plan == pytest.approx({"tree:4,2": 0.6, "none": 0.3, "chain:3": 0.1})
        assert list(summary.time_share_by_plan)[0] == "tree:4,2", "the longest comes first"
        assert summary.cycles_by_plan == {"tree:4,2": 1, "none": 2, "chain:3": 1}
        assert (summary.plain_time_share, summary.plain_cycle_share) == (pytest.approx(0.3), 0.5)

    def test_equal_plans_are_one_plan(self):
        summary = told((TREE, 1.0, [1], None), (Plan.parse("tree:4,2"), 1.0, [1], None))
        assert summary.seconds_by_plan == {"tree:4,2": 2.0}

    def test_acceptance_by_depth_adds_up_over_plans_of_any_depth(self):
        metrics = Metrics()
        metrics.add_acceptance([1, 0], [1, 1])
        metrics.add_acceptance([0], [1])
        metrics.add_acceptance([3, 2, 1, 1], [4, 3, 2, 1])
        metrics.add_acceptance([], [])
        summary = metrics.summary()
        assert summary.accepted_by_depth == [4, 2, 1, 1] and summary.reached_by_depth == [6, 4, 2, 1]
        assert summary.accept_rate_by_depth == [4 / 6, 2 / 4, 1 / 2, 1]
        assert summary.accept_rate == 8 / 13

    def test_acceptance_wants_both_counts_for_every_depth(self):
        metrics = Metrics()
        with pytest.raises(ValueError, match="2 depths accepted but 1 reached"):
            metrics.add_acceptance([1, 1], [1])
        assert metrics.summary().accepted_by_depth == []

    def test_changes_are_counted_and_those_to_plain_decoding_by_reason(self):
        summary = busy().summary()
        assert summary.mode_changes == 5
        assert summary.changes_by_reason == {"goodput": 2, "ood": 1}

    def test_a_summary_stays_as_it_was(self):
        metrics = busy()
        before = metrics.summary()
        kept = str(before), before.prometheus()
        metrics.add_step(CHAIN, 1.0, [2, 2], 0.5)
        metrics.add_acceptance([7, 7, 7], [9, 9, 9])
        metrics.add_plan_change("batch")
        assert (str(before), before.prometheus()) == kept
        assert before != metrics.summary()


class TestSpeed:
    def test_speed_against_plain_decoding_is_tokens_times_its_step_over_the_time(self):
        assert told((TREE, 4.0, [3], 2.0)).speedup == 3 * 2.0 / 4.0
        assert told((TREE, 4.0, [3], 2.0), (NONE, 2.0, [1], 2.0)).speedup == (3 + 1) * 2.0 / 6.0

    def test_a_plain_step_gives_every_sequence_a_token(self):
        assert told((CHAIN, 3.0, [1, 2, 3, 2], 2.0)).speedup == 2 * 2.0 / 3.0

    def test_cycles_without_a_known_plain_step_do_not_count_for_the_speed(self):
        assert told((TREE, 4.0, [3], 2.0), (TREE, 1000.0, [1], None)).speedup == 1.5
        assert told((TREE, 4.0, [3], None)).speedup is None

    def test_plain_decoding_at_its_own_speed_is_no_gain(self):
        assert told(*[(NONE, 0.002, [1, 1], 0.002)] * 7).speedup == pytest.approx(1)

    def test_a_cycle_that_nobody_is_left_to_read_costs_its_time(self):
        summary = told((TREE, 4.0, [3], 2.0), (TREE, 1.0, [], 2.0))
        assert (summary.seconds, summary.tokens, summary.cycles, summary.speedup) == (5.0, 3, 2, 1.5)
        assert summary.gap.p99 == 4.0


class TestPercentiles:
    def test_the_gap_is_the_cycle_and_the_time_per_token_its_part(self):
        summary = told((TREE, 6.0, [3], None), (TREE, 6.0, [3], None))
        assert summary.gap == Percentiles(6.0, 6.0, 6.0)
        assert summary.time_per_token == Percentiles(2.0, 2.0, 2.0)

    def test_tokens_are_counted_one_by_one_and_emissions_sequence_by_sequence(self):
        """Of 100 tokens one took 9 s; of six emissions, four took 1 s."""
        summary = told((CHAIN, 1.0, [25, 25, 25, 23], None), (CHAIN, 9.0, [1], None), (CHAIN, 3.0, [1], None))
        assert summary.gap == Percentiles(1.0, 9.0, 9.0)
        assert summary.time_per_token == Percentiles(1 / 25, 1 / 23, 3.0)

    def test_a_cycle_counts_for_every_sequence_in_it(self):
        summary = told((CHAIN, 1.0, [1, 1, 1], None), (CHAIN, 9.0, [1], None), (CHAIN, 9.0, [1], None))
        assert summary.gap.p50 == 1.0

    def test_of_the_numbers_from_1_to_100(self):
        assert Percentiles.of((float(value), 1) for value in range(100, 0, -1)) == Percentiles(50, 95, 99)

    @given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 5)), max_size=40))
    def test_a_weight_is_a_repetition(self, weighted: list[tuple[float, int]]):
        repeated = [(value, 1) for value, count in weighted for _ in range(count)]
        assert Percentiles.of(weighted) == Percentiles.of(repeated)

    @given(st.lists(st.floats(0, 10), min_size=1, max_size=300))
    def test_so_many_values_do_not_exceed_a_percentile_and_fewer_lie_below(self, values: list[float]):
        found = Percentiles.of((value, 1) for value in values)
        for percent, value in ((50, found.p50), (95, found.p95), (99, found.p99)):
            assert 100 * sum(v <= value for v in values) >= percent * len(values)
            assert 100 * sum(v < value for v in values) < percent * len(values)

    def test_only_recent_cycles_count(self):
        metrics = Metrics()
        for _ in range(WINDOW):
            metrics.add_step(NONE, 9.0, [1], None)
        for _ in range(WINDOW):
            metrics.add_step(NONE, 1.0, [1], None)
        summary = metrics.summary()
        assert summary.gap == summary.time_per_token == Percentiles(1.0, 1.0, 1.0)
        assert summary.cycles == 2 * WINDOW, "totals are of all"


def test_a_list_of_tokens_may_be_used_again():
    metrics, tokens = Metrics(), [4]
    metrics.add_step(CHAIN, 1.0, tokens, None)
    tokens[0] = 1
    assert metrics.summary().time_per_token.p50 == 0.25


def test_any_number_of_plans_takes_bounded_memory():
    metrics = Metrics()
    plans = [Plan(parents=(0,), ranks=(rank,)) for rank in range(MAX_PLANS + 50)]
    for plan in [*plans, *plans]:
        metrics.add_step(plan, 1.0, [1], None)
    summary = metrics.summary()
    assert len(summary.seconds_by_plan) == MAX_PLANS + 1
    assert summary.cycles_by_plan[OTHERS] == 2 * 50 and summary.cycles_by_plan[str(plans[0])] == 2
    assert summary.seconds == summary.cycles == 2 * len(plans)


class TestTable:
    def test_it_tells_what_matters(self):
        table = str(busy().summary())
        for line in (
            "requests               2",
            "tokens                 25 in 0.0 s",
            "tokens per step        1.67",
            "drafts accepted        91% (by depth: 83% 100%)",
            "time per token         1.33 / 2.00 / 2.00 ms (p50 / p95 / p99)",
            "gap between emissions  2.00 / 4.00 / 4.00 ms (p50 / p95 / p99)",
            "speed against plain    1.25x",
            "  none                 50.0% of the time, 66.7% of the steps",
            "plan changes           5 (to plain: 2 goodput, 1 ood)",
        ):
            assert line in table.split("\n"), line

    def test_unknowns_are_said_to_be_unknown(self):
        table = str(told((NONE, 1.0, [1], None)))
        assert "speed against plain    unknown" in table
        assert "drafts accepted        nothing drafted" in table
        assert table.endswith("plan changes           0")

    def test_it_stays_small_whatever_was_planned(self):
        plans = [Plan(parents=(0,), ranks=(rank,)) for rank in range(100)]
        assert str(told(*((plan, 1.0, [1], None) for plan in plans))).count("\n") < 20

    @pytest.mark.parametrize(
        ("plan", "name"),
        [("none", "none"), ("tree:4,2", "tree:4,2"), ("nodes:0.0,0.2,1.1", "tree of 3 nodes"), (OTHERS, OTHERS)],
    )
    def test_an_irregular_plan_has_a_short_name(self, plan: str, name: str):
        assert short(plan) == name


class TestPrometheus:
    def samples(self, summary: Summary) -> dict[tuple[str, str], float]:
        """What Prometheus' own reader finds: values by name and label."""
        from prometheus_client.parser import text_string_to_metric_families

        families = list(text_string_to_metric_families(summary.prometheus()))
        assert all(family.documentation for family in families)
        for family in families:
            totals = [sample.name.endswith("_total") for sample in family.samples]
            assert family.type == ("counter" if all(totals) else "gauge") and len(set(totals)) <= 1
        return {
            (sample.name.removeprefix("selfspec_"), "".join(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }

    def test_its_reader_finds_every_number(self):
        assert self.samples(busy().summary()) == pytest.approx(
            {
                ("requests_total", ""): 2,
                ("tokens_total", ""): 25,
                ("emissions_total", ""): 15,
                ("cycles_total", "none"): 10,
                ("cycles_total", "tree:4,2"): 5,
                ("cycle_seconds_total", "none"): 0.02,
                ("cycle_seconds_total", "tree:4,2"): 0.02,
                ("accepted_total", "1"): 5,
                ("accepted_total", "2"): 5,
                ("reached_total", "1"): 6,
                ("reached_total", "2"): 5,
                ("mode_changes_total", ""): 5,
                ("switched_off_total", "goodput"): 2,
                ("switched_off_total", "ood"): 1,
                ("time_per_token_seconds", "0.5"): 0.004 / 3,
                ("time_per_token_seconds", "0.95"): 0.002,
                ("time_per_token_seconds", "0.99"): 0.002,
                ("emission_gap_seconds", "0.5"): 0.002,
                ("emission_gap_seconds", "0.95"): 0.004,
                ("emission_gap_seconds", "0.99"): 0.004,
                ("speedup", ""): 1.25,
            }
        )

    def test_an_unknown_speed_is_left_out_and_an_irregular_plan_is_named_in_full(self):
        samples = self.samples(told((IRREGULAR, 1.0, [1], None)))
        assert ("speedup", "") not in samples
        assert samples["cycles_total", str(IRREGULAR)] == 1

    def test_counters_never_fall(self):
        metrics, before = busy(), {}
        for count in range(20):
            metrics.add_step((NONE, TREE, CHAIN)[count % 3], 0.1 / (count + 3), [1], 0.01)
            now = self.samples(metrics.summary())
            assert all(now[key] >= value for key, value in before.items() if key[0].endswith("_total"))
            before = now

    def test_without_the_client_the_error_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(ImportError, match=r"pip install selfspec\[prometheus\]"):
            busy().summary().prometheus()
