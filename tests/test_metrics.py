"""Totals of an engine, percentiles and shares, in bounded memory, as a table and for Prometheus."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.metrics import MAX_PLANS, OTHERS, WINDOW, Metrics, Percentiles, Summary, short_plan_name
from selfspec.speculation.plan import NONE, Plan

TREE = Plan.parse("tree:4,2")
CHAIN = Plan.parse("chain:3")
IRREGULAR = Plan.parse("nodes:0.0,0.2,1.1")


def summary_of(*steps: tuple[Plan, float, list[int], float | None]) -> Summary:
    metrics = Metrics()
    for step in steps:
        metrics.add_step(*step)
    return metrics.summary()


def busy() -> Metrics:
    """2 requests, 10 plain steps of 2 ms, 5 steps of 4 ms with a tree and 3 tokens each, 5 changes of plan."""
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
    metrics.add_prompt(100, 0)
    metrics.add_prompt(300, 128)
    return metrics


class TestTotals:
    def test_an_engine_without_requests_has_a_summary(self):
        summary = Metrics().summary()
        assert (summary.requests, summary.tokens, summary.cycles, summary.seconds) == (0, 0, 0, 0)
        assert (summary.accept_rate, summary.accept_rate_by_depth, summary.tokens_per_cycle) == (0, [], 0)
        assert summary.time_share_by_plan == {}
        assert summary.speedup is None
        assert summary.gap == summary.time_per_token == Percentiles(0, 0, 0)
        assert str(summary) and summary.prometheus()

    def test_requests_tokens_steps_and_time_add_up(self):
        summary = busy().summary()
        assert (summary.requests, summary.tokens, summary.cycles) == (2, 10 + 5 * 3, 15)
        assert summary.seconds == pytest.approx(0.04)

    def test_tokens_per_cycle_is_the_mean_of_one_sequence(self):
        summary = summary_of((CHAIN, 0.1, [1, 2, 3, 2], None), (CHAIN, 0.1, [4], None))
        assert (summary.cycles, summary.emissions, summary.tokens) == (2, 5, 12)
        assert summary.tokens_per_cycle == 12 / 5

    def test_shares_of_time_and_steps_by_plan(self):
        summary = summary_of(
            (NONE, 1.0, [1], None), (TREE, 6.0, [2], None), (NONE, 2.0, [1], None), (CHAIN, 1.0, [3], None)
        )
        assert summary.time_share_by_plan == pytest.approx({"tree:4,2": 0.6, "none": 0.3, "chain:3": 0.1})
        assert list(summary.time_share_by_plan)[0] == "tree:4,2", "plans must be in descending order of time"
        assert summary.cycles_by_plan == {"tree:4,2": 1, "none": 2, "chain:3": 1}

    def test_equal_plans_have_one_total(self):
        summary = summary_of((TREE, 1.0, [1], None), (Plan.parse("tree:4,2"), 1.0, [1], None))
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

    def test_plan_changes_are_counted_and_those_to_plain_decoding_by_reason(self):
        summary = busy().summary()
        assert summary.mode_changes == 5
        assert summary.changes_by_reason == {"goodput": 2, "ood": 1}

    def test_a_summary_does_not_change_with_later_steps(self):
        metrics = busy()
        before = metrics.summary()
        kept = str(before), before.prometheus()
        metrics.add_step(CHAIN, 1.0, [2, 2], 0.5)
        metrics.add_acceptance([7, 7, 7], [9, 9, 9])
        metrics.add_plan_change("batch")
        assert (str(before), before.prometheus()) == kept
        assert before != metrics.summary()


class TestSpeed:
    def test_speedup_is_the_time_of_plain_steps_for_the_same_tokens_over_the_time(self):
        assert summary_of((TREE, 4.0, [3], 2.0)).speedup == 3 * 2.0 / 4.0
        assert summary_of((TREE, 4.0, [3], 2.0), (NONE, 2.0, [1], 2.0)).speedup == (3 + 1) * 2.0 / 6.0

    def test_a_plain_step_gives_every_sequence_a_token(self):
        assert summary_of((CHAIN, 3.0, [1, 2, 3, 2], 2.0)).speedup == 2 * 2.0 / 3.0

    def test_steps_without_a_plain_time_do_not_count_for_the_speedup(self):
        assert summary_of((TREE, 4.0, [3], 2.0), (TREE, 1000.0, [1], None)).speedup == 1.5
        assert summary_of((TREE, 4.0, [3], None)).speedup is None

    def test_the_speedup_of_plain_decoding_is_1(self):
        assert summary_of(*[(NONE, 0.002, [1, 1], 0.002)] * 7).speedup == pytest.approx(1)

    def test_a_step_whose_sequences_have_all_left_counts_its_time_only(self):
        summary = summary_of((TREE, 4.0, [3], 2.0), (TREE, 1.0, [], 2.0))
        assert (summary.seconds, summary.tokens, summary.cycles, summary.speedup) == (5.0, 3, 2, 1.5)
        assert summary.gap.p99 == 4.0


class TestPercentiles:
    def test_the_gap_is_the_time_of_a_step_and_the_time_per_token_a_part_of_it(self):
        summary = summary_of((TREE, 6.0, [3], None), (TREE, 6.0, [3], None))
        assert summary.gap == Percentiles(6.0, 6.0, 6.0)
        assert summary.time_per_token == Percentiles(2.0, 2.0, 2.0)

    def test_tokens_are_counted_one_by_one_and_emissions_sequence_by_sequence(self):
        """1 of 100 tokens took 9 s; 4 of 6 emissions took 1 s."""
        summary = summary_of((CHAIN, 1.0, [25, 25, 25, 23], None), (CHAIN, 9.0, [1], None), (CHAIN, 3.0, [1], None))
        assert summary.gap == Percentiles(1.0, 9.0, 9.0)
        assert summary.time_per_token == Percentiles(1 / 25, 1 / 23, 3.0)

    def test_a_step_counts_once_for_every_sequence_in_it(self):
        summary = summary_of((CHAIN, 1.0, [1, 1, 1], None), (CHAIN, 9.0, [1], None), (CHAIN, 9.0, [1], None))
        assert summary.gap.p50 == 1.0

    def test_percentiles_of_the_numbers_from_1_to_100(self):
        assert Percentiles.of((float(value), 1) for value in range(100, 0, -1)) == Percentiles(50, 95, 99)

    @given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 5)), max_size=40))
    def test_a_count_equals_repetitions(self, weighted: list[tuple[float, int]]):
        repeated = [(value, 1) for value, count in weighted for _ in range(count)]
        assert Percentiles.of(weighted) == Percentiles.of(repeated)

    @given(st.lists(st.floats(0, 10), min_size=1, max_size=300))
    def test_a_percentile_is_the_smallest_value_with_its_share_at_or_below(self, values: list[float]):
        found = Percentiles.of((value, 1) for value in values)
        for percent, value in ((50, found.p50), (95, found.p95), (99, found.p99)):
            assert 100 * sum(v <= value for v in values) >= percent * len(values)
            assert 100 * sum(v < value for v in values) < percent * len(values)

    def test_percentiles_are_of_recent_steps_only(self):
        metrics = Metrics()
        for _ in range(WINDOW):
            metrics.add_step(NONE, 9.0, [1], None)
        for _ in range(WINDOW):
            metrics.add_step(NONE, 1.0, [1], None)
        summary = metrics.summary()
        assert summary.gap == summary.time_per_token == Percentiles(1.0, 1.0, 1.0)
        assert summary.cycles == 2 * WINDOW, "totals must be of all steps"


def test_a_list_of_tokens_may_be_changed_after_it_was_added():
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
    def test_it_has_a_line_for_every_total(self):
        table = str(busy().summary())
        for line in (
            "requests               2",
            "tokens                 25 in 0.0 s",
            "tokens per step        1.67",
            "drafts accepted        91% (by depth: 83% 100%)",
            "time per token         1.33 / 2.00 / 2.00 ms (p50 / p95 / p99)",
            "time of a step         2.00 / 4.00 / 4.00 ms (p50 / p95 / p99)",
            "speed against plain    1.25x",
            "  none                 50.0% of the time, 66.7% of the steps",
            "prompt tokens          400, 32.0% of them reused",
            "plan changes           5 (to plain: 2 goodput, 1 ood)",
        ):
            assert line in table.split("\n"), line

    def test_it_says_that_the_speedup_is_unknown_and_nothing_was_drafted(self):
        table = str(summary_of((NONE, 1.0, [1], None)))
        assert "speed against plain    unknown" in table
        assert "drafts accepted        nothing drafted" in table
        assert table.endswith("plan changes           0")

    def test_it_has_fewer_than_20_lines_for_100_plans(self):
        plans = [Plan(parents=(0,), ranks=(rank,)) for rank in range(100)]
        assert str(summary_of(*((plan, 1.0, [1], None) for plan in plans))).count("\n") < 20

    @pytest.mark.parametrize(
        ("plan", "name"),
        [("none", "none"), ("tree:4,2", "tree:4,2"), ("nodes:0.0,0.2,1.1", "tree of 3 nodes"), (OTHERS, OTHERS)],
    )
    def test_an_irregular_plan_has_a_short_name(self, plan: str, name: str):
        assert short_plan_name(plan) == name


class TestPrometheus:
    def samples(self, summary: Summary) -> dict[tuple[str, str], float]:
        """Values by name and label, read by Prometheus' parser."""
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

    def test_its_parser_reads_every_number(self):
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
                ("prefix_cache_queries_total", ""): 400,
                ("prefix_cache_hits_total", ""): 128,
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

    def test_an_unknown_speedup_is_left_out_and_an_irregular_plan_has_its_full_name(self):
        samples = self.samples(summary_of((IRREGULAR, 1.0, [1], None)))
        assert ("speedup", "") not in samples
        assert samples["cycles_total", str(IRREGULAR)] == 1

    def test_counters_never_decrease(self):
        metrics, before = busy(), {}
        for count in range(20):
            metrics.add_step((NONE, TREE, CHAIN)[count % 3], 0.1 / (count + 3), [1], 0.01)
            now = self.samples(metrics.summary())
            assert all(now[key] >= value for key, value in before.items() if key[0].endswith("_total"))
            before = now
