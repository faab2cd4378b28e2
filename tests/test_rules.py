"""The policy's hard rules at their boundaries, the order of their reasons, and the plans chosen within them."""

from __future__ import annotations

import math
from math import inf
from typing import Any

import pytest

from selfspec.governor.rules import BATCHES, Policy, Rules
from selfspec.sampling import SamplingParams
from selfspec.speculation.plan import NONE, Plan

GREEDY = SamplingParams()
TREE = Plan.parse("tree:3,2,1")


def sampled(temperature: float = 0.2, top_k: int = 50) -> SamplingParams:
    return SamplingParams(do_sample=True, temperature=temperature, top_k=top_k)


def choose(
    batch: int = 1, sampling: SamplingParams = GREEDY, rules: Rules | None = None, **request: Any
) -> tuple[str, Any]:
    plan, reason = Policy(rules or Rules(), sampling, **request).choose(batch)
    return str(plan), reason


def reason(batch: int = 1, sampling: SamplingParams = GREEDY, rules: Rules | None = None, **request: Any) -> str | None:
    plan, why = choose(batch, sampling, rules, **request)
    assert (plan == "none") == (why is not None), "a plan of none has a reason, and no other has"
    return why


# Every rule, on both sides of its boundary


@pytest.mark.parametrize(
    ("mode", "expected"), [(None, None), (True, None), (False, "request"), ("force", None)], ids=str
)
def test_request_can_say_no(mode: Any, expected: str | None) -> None:
    assert reason(mode=mode) == expected


@pytest.mark.parametrize("mode", [None, True, "force"], ids=str)
def test_asking_for_the_plan_none_is_saying_no(mode: Any) -> None:
    assert reason(mode=mode, plan=NONE) == "request"


@pytest.mark.parametrize("mode", [None, True], ids=str)
def test_without_an_exit_it_is_off(mode: Any) -> None:
    assert reason(mode=mode, has_exit=False) == "no_profile"


@pytest.mark.parametrize(("batch", "expected"), [(1, None), (4, None), (5, None), (16, None), (17, "batch")])
@pytest.mark.parametrize("plan", [None, TREE], ids=["default_plan", "explicit_plan"])
def test_off_above_16_rows(batch: int, expected: str | None, plan: Plan | None) -> None:
    assert reason(batch, plan=plan) == expected


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(0.2, None), (1.5, None), (math.nextafter(1.5, 2), "temperature"), (2.0, "temperature")],
)
def test_off_above_temperature_one_and_a_half(temperature: float, expected: str | None) -> None:
    assert reason(sampling=sampled(temperature)) == expected


@pytest.mark.parametrize(("top_k", "expected"), [(1, None), (200, None), (201, "top_k"), (100_000, "top_k")])
def test_off_above_top_k_200(top_k: int, expected: str | None) -> None:
    assert reason(sampling=sampled(top_k=top_k)) == expected


@pytest.mark.parametrize(
    ("temperature", "expected"), [(0.2, None), (1.0, None), (math.nextafter(1.0, 2), "top_k"), (1.1, "top_k")]
)
def test_unset_top_k_counts_as_large_above_temperature_one(temperature: float, expected: str | None) -> None:
    assert reason(sampling=sampled(temperature, top_k=0)) == expected


@pytest.mark.parametrize("fields", [{"temperature": 2.0}, {"top_k": 500}, {"temperature": 1.2, "top_k": 0}], ids=str)
def test_sampling_rules_leave_greedy_alone(fields: dict[str, Any]) -> None:
    assert reason(sampling=SamplingParams(do_sample=False, **fields)) is None


@pytest.mark.parametrize("mode", [None, True, "force"], ids=str)
def test_stateful_processors_switch_it_off_even_when_forced(mode: Any) -> None:
    assert reason(mode=mode, stateful_processors=True) == "processor"


@pytest.mark.parametrize(
    "case",
    [
        {"batch": 1000},
        {"sampling": sampled(5.0)},
        {"sampling": sampled(top_k=1000)},
        {"sampling": sampled(1.4, top_k=0)},
        {"has_exit": False},
        {"rules": Rules(0, 0, 0, 0, 0), "sampling": sampled()},
    ],
    ids=["batch", "temperature", "top_k", "unset_top_k", "no_profile", "rules_of_zero"],
)
def test_force_skips_all_rules(case: dict[str, Any]) -> None:
    assert choose(mode="force", plan=TREE, **case) == ("tree:3,2,1", None)


# The order of reasons

HOLDS: dict[str, dict[str, Any]] = {
    "request": {"mode": False},
    "processor": {"stateful_processors": True},
    "no_profile": {"has_exit": False},
    "temperature": {"sampling": sampled(temperature=2.0)},
    "top_k": {"sampling": sampled(top_k=500)},
}


@pytest.mark.parametrize("name", HOLDS)
def test_what_the_request_says_holds_for_good(name: str) -> None:
    assert Policy(**{"rules": Rules(), "sampling": GREEDY, **HOLDS[name]}).off_for_good == name


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("request", "processor"),
        ("request", "no_profile"),
        ("request", "temperature"),
        ("request", "top_k"),
        ("processor", "no_profile"),
        ("processor", "temperature"),
        ("processor", "top_k"),
        ("no_profile", "temperature"),
        ("no_profile", "top_k"),
    ],
)
def test_where_two_reasons_hold_the_earlier_is_given(first: str, second: str) -> None:
    assert reason(**HOLDS[first], **HOLDS[second]) == first


@pytest.mark.parametrize("top_k", [0, 500])
def test_temperature_is_given_before_top_k(top_k: int) -> None:
    assert reason(sampling=sampled(2.0, top_k)) == "temperature"


@pytest.mark.parametrize("first", ["request", "processor", "no_profile"])
def test_what_the_request_lacks_is_given_before_the_batch(first: str) -> None:
    assert reason(batch=17, **HOLDS[first]) == first


def test_a_large_batch_is_a_reason_of_the_moment() -> None:
    policy = Policy(Rules(), GREEDY)
    assert policy.off_for_good is None
    assert [policy.choose(batch)[1] for batch in (17, 16, 17, 1)] == ["batch", None, "batch", None]


# Plans


@pytest.mark.parametrize(
    ("temperature", "tree", "chain"),
    [
        (None, "tree:4,2,2,1", "chain:5"),
        (0.3, "tree:4,2,2,1", "chain:5"),
        (0.31, "tree:4,2,2", "chain:4"),
        (0.7, "tree:4,2,2", "chain:4"),
        (0.71, "tree:4,2", "chain:3"),
        (1.0, "tree:4,2", "chain:3"),
        (1.01, "tree:4", "chain:2"),
        (1.5, "tree:4", "chain:2"),
    ],
    ids=lambda value: "greedy" if value is None else str(value),
)
@pytest.mark.parametrize("batch", [1, 4, 5, 16], ids=lambda batch: f"batch_{batch}")
def test_default_plan(batch: int, temperature: float | None, tree: str, chain: str) -> None:
    sampling = GREEDY if temperature is None else sampled(temperature)
    assert choose(batch, sampling) == (tree if batch <= 4 else chain, None)


def test_temperature_without_sampling_does_not_shorten_the_default_plan() -> None:
    assert choose(sampling=SamplingParams(do_sample=False, temperature=1.2)) == ("tree:4,2,2,1", None)


@pytest.mark.parametrize(("batch", "expected"), [(1, "tree:3,2,1"), (4, "tree:3,2,1"), (5, "chain:3"), (16, "chain:3")])
def test_explicit_tree_becomes_the_chain_of_its_first_ranks_from_5_rows_on(batch: int, expected: str) -> None:
    assert choose(batch, plan=TREE) == (expected, None)


@pytest.mark.parametrize("batch", [1, 4, 5, 16])
def test_explicit_chain_stays_at_every_batch(batch: int) -> None:
    assert choose(batch, plan=Plan.parse("chain:7")) == ("chain:7", None)


@pytest.mark.parametrize("temperature", [0.2, 0.5, 0.9, 1.2])
def test_explicit_plan_is_not_shortened_by_temperature(temperature: float) -> None:
    assert choose(sampling=sampled(temperature), plan=TREE) == ("tree:3,2,1", None)


@pytest.mark.parametrize("batch", [1, 5, 17])
def test_forced_tree_stays_a_tree_at_every_batch(batch: int) -> None:
    assert choose(batch, mode="force", plan=TREE) == ("tree:3,2,1", None)


def test_force_without_a_plan_takes_the_default_tree() -> None:
    assert choose(mode="force", has_exit=False) == ("tree:4,2,2,1", None)


# A profile's plans

BANDS = {1: "tree:4,2", 4: "tree:2,1", 16: "chain:2"}


def profiled(plans: dict[int, str]) -> dict[int, Plan]:
    return {size: Plan.parse(plan) for size, plan in plans.items()}


@pytest.mark.parametrize(
    ("batch", "expected"),
    [(1, "tree:4,2"), (2, "tree:2,1"), (4, "tree:2,1"), (5, "chain:2"), (16, "chain:2")],
)
@pytest.mark.parametrize("mode", [None, True, "force"], ids=str)
def test_each_band_of_batches_has_its_plan(batch: int, expected: str, mode: Any) -> None:
    assert choose(batch, mode=mode, plans=profiled(BANDS)) == (expected, None)


def test_the_bands_are_those_of_a_profile() -> None:
    assert list(BANDS) == list(BATCHES.values())
    assert max(BANDS) == Rules().max_batch


def test_the_order_of_bands_does_not_matter() -> None:
    backwards = profiled(dict(reversed(BANDS.items())))
    assert [choose(batch, plans=backwards)[0] for batch in (1, 3, 6)] == ["tree:4,2", "tree:2,1", "chain:2"]


def test_a_batch_past_all_bands_takes_the_largest() -> None:
    assert choose(3, plans=profiled({1: "tree:4,2"})) == ("tree:4,2", None)
    assert choose(17, plans=profiled(BANDS), mode="force") == ("chain:2", None)


@pytest.mark.parametrize(("mode", "expected"), [(None, "chain:2"), ("force", "tree:2,1")], ids=["by_rules", "forced"])
def test_a_profiles_tree_is_narrowed_as_any_other(mode: Any, expected: str) -> None:
    assert choose(5, mode=mode, plans=profiled({16: "tree:2,1"})) == (expected, None)


@pytest.mark.parametrize("temperature", [0.5, 0.9, 1.2])
def test_a_profiles_plan_is_not_shortened_by_temperature(temperature: float) -> None:
    assert choose(sampling=sampled(temperature), plans=profiled(BANDS)) == ("tree:4,2", None)


@pytest.mark.parametrize("batch", [1, 3, 6])
def test_the_requests_plan_is_taken_before_the_profiles(batch: int) -> None:
    assert choose(batch, plan=Plan.parse("chain:7"), plans=profiled(BANDS)) == ("chain:7", None)
    assert choose(batch, plan=NONE, plans=profiled(BANDS)) == ("none", "request")


@pytest.mark.parametrize("mode", [None, True], ids=str)
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_where_no_plan_pays_the_reason_is_goodput(batch: int, mode: Any) -> None:
    assert choose(batch, mode=mode, plans={1: NONE}) == ("none", "goodput")


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_force_and_a_plan_of_the_request_overrule_goodput(batch: int) -> None:
    assert choose(batch, mode="force", plans={1: NONE}) == ("tree:4,2,2,1", None)
    assert choose(batch, plan=Plan.parse("chain:2"), plans={1: NONE}) == ("chain:2", None)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"mode": False}, "request"),
        ({"stateful_processors": True}, "processor"),
        ({"has_exit": False}, "no_profile"),
        ({"batch": 17}, "batch"),
        ({"sampling": sampled(2.0)}, "temperature"),
        ({"sampling": sampled(top_k=500)}, "top_k"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_other_reason_is_given_before_goodput(request_: dict[str, Any], expected: str) -> None:
    assert reason(**request_, plans={1: NONE}) == expected


@pytest.mark.parametrize(
    ("plans", "expected"),
    [
        ({1: "none"}, "goodput"),
        ({1: "none", 4: "none", 16: "none"}, "goodput"),
        ({1: "none", 4: "tree:2", 16: "none"}, None),
        ({1: "none", 4: "none", 16: "chain:2"}, None),
        ({1: "chain:2", 4: "none", 16: "none"}, None),
    ],
    ids=["one_band", "all_bands", "pays_in_the_middle", "pays_in_large_batches", "pays_alone"],
)
def test_goodput_holds_for_good_only_where_no_batch_pays(plans: dict[int, str], expected: str | None) -> None:
    """A request that is off for good gets no exit: no cycle may then draft, whatever its batch."""
    policy = Policy(Rules(), GREEDY, plans=profiled(plans))
    assert policy.off_for_good == expected
    assert any(len(policy.choose(batch)[0]) for batch in range(1, 18)) == (expected is None)


def test_possible_plans_hold_all_that_may_be_drafted() -> None:
    for plan in (None, TREE):
        policy = Policy(Rules(), GREEDY, plan=plan, plans=profiled(BANDS))
        drafted = {policy.choose(batch)[0] for batch in range(1, 17)}
        assert max(max(p.ranks) for p in drafted) <= max(max(p.ranks) for p in policy.possible_plans)


# Rules


@pytest.mark.parametrize(
    ("rules", "batch", "expected"),
    [
        (Rules(max_batch=2), 2, ("tree:4,2,2,1", None)),
        (Rules(max_batch=2), 3, ("none", "batch")),
        (Rules(max_tree_batch=1), 1, ("tree:4,2,2,1", None)),
        (Rules(max_tree_batch=1), 2, ("chain:5", None)),
        (Rules(max_tree_batch=20, max_batch=20), 20, ("tree:4,2,2,1", None)),
    ],
    ids=["at_max_batch", "over_max_batch", "at_max_tree_batch", "over_max_tree_batch", "both_raised"],
)
def test_batch_rules_can_be_set(rules: Rules, batch: int, expected: tuple[str, str | None]) -> None:
    assert choose(batch, rules=rules) == expected


@pytest.mark.parametrize(
    ("rules", "sampling", "expected"),
    [
        (Rules(max_temperature=0.5), sampled(0.5), None),
        (Rules(max_temperature=0.5), sampled(0.6), "temperature"),
        (Rules(max_temperature=3), sampled(2.0), None),
        (Rules(max_top_k=10), sampled(top_k=10), None),
        (Rules(max_top_k=10), sampled(top_k=11), "top_k"),
        (Rules(unset_top_k_temperature=0.5), sampled(0.6, top_k=0), "top_k"),
        (Rules(unset_top_k_temperature=1.2), sampled(1.2, top_k=0), None),
    ],
)
def test_sampling_rules_can_be_set(rules: Rules, sampling: SamplingParams, expected: str | None) -> None:
    assert reason(sampling=sampling, rules=rules) == expected


IMPOSSIBLE = [(field, value) for field in vars(Rules()) for value in (-1, "4", None, True, math.nan)]
IMPOSSIBLE.remove(("longest_cycle", None))  # left to the device


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE, ids=str)
def test_impossible_rule_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        Rules(**{field: value})


def test_unknown_rule_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="max_rows"):
        Rules(max_rows=4)  # type: ignore[call-arg]


def test_rules_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Rules().max_batch = 4  # type: ignore[misc]


def test_what_rules_leave_to_the_device_is_settled_there() -> None:
    assert (Rules().on("cuda").cycle_limit, Rules().on("cpu").cycle_limit) == (1.67, inf)
    assert Rules(longest_cycle=2.0).on("cuda") == Rules(longest_cycle=2.0).on("cpu") == Rules(longest_cycle=2.0)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 16), (2, 8), (4, 8), (5, 16), (16, 16)])
def test_of_a_few_rows_the_exit_is_scored_sooner(rows: int, tokens: int) -> None:
    assert Rules().scored_after(rows) == tokens
    assert Rules(shadow_tokens=0).scored_after(rows) == 0
