"""The policy's hard rules at their boundaries, the order of their reasons, and the plans chosen within them."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.governor.rules import BATCHES, Policy, Rules
from selfspec.sampling import SamplingParams
from selfspec.speculation.plan import NONE, Plan

GREEDY = SamplingParams()
TREE = Plan.parse("tree:3,2,1")
BANDS = {1: "tree:4,2", 4: "tree:2,1", 16: "chain:2"}


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


def profiled(plans: dict[int, str]) -> dict[int, Plan]:
    return {size: Plan.parse(plan) for size, plan in plans.items()}


# Every rule, on both sides of its boundary


@pytest.mark.parametrize("mode", [None, True, False, "force"], ids=str)
@pytest.mark.parametrize("plan", [None, NONE, TREE], ids=str)
def test_a_request_says_no_by_its_mode_or_by_the_plan_none(mode: Any, plan: Plan | None) -> None:
    assert reason(mode=mode, plan=plan) == ("request" if mode is False or plan is NONE else None)


@pytest.mark.parametrize(
    ("rules", "batch", "sampling", "expected"),
    [
        (Rules(), 16, GREEDY, None),
        (Rules(), 17, GREEDY, "batch"),
        (Rules(max_batch=2), 3, GREEDY, "batch"),
        (Rules(max_batch=20), 20, GREEDY, None),
        (Rules(), 1, sampled(1.5), None),
        (Rules(), 1, sampled(math.nextafter(1.5, 2)), "temperature"),
        (Rules(max_temperature=0.5), 1, sampled(0.6), "temperature"),
        (Rules(max_temperature=3), 1, sampled(2.0), None),
        (Rules(), 1, sampled(top_k=200), None),
        (Rules(), 1, sampled(top_k=201), "top_k"),
        (Rules(max_top_k=10), 1, sampled(top_k=11), "top_k"),
        (Rules(), 1, sampled(1.0, top_k=0), None),
        (Rules(), 1, sampled(math.nextafter(1.0, 2), top_k=0), "top_k"),
        (Rules(unset_top_k_temperature=0.5), 1, sampled(0.6, top_k=0), "top_k"),
    ],
)
def test_a_rule_holds_past_its_threshold(
    rules: Rules, batch: int, sampling: SamplingParams, expected: str | None
) -> None:
    assert reason(batch, sampling, rules) == expected


def test_without_an_exit_the_same_batches_draft() -> None:
    assert reason(16, has_exit=False) is None and reason(17, has_exit=False) == "batch"


@given(temperature=st.floats(0.1, 9), top_k=st.integers(0, 1000))
def test_sampling_rules_leave_greedy_requests_alone(temperature: float, top_k: int) -> None:
    assert choose(sampling=SamplingParams(temperature=temperature, top_k=top_k)) == ("tree:4,2,2,1", None)


HOLDS: dict[str, dict[str, Any]] = {  # in the order in which reasons are given
    "request": {"mode": False},
    "processor": {"stateful_processors": True},
    "batch": {"batch": 17},
    "temperature": {"sampling": sampled(2.0, top_k=500)},
    "top_k": {"sampling": sampled(top_k=500)},
    "goodput": {"plans": {1: NONE}},
}


@pytest.mark.parametrize(("first", "second"), list(combinations(HOLDS, 2)))
def test_where_two_reasons_hold_the_earlier_is_given(first: str, second: str) -> None:
    assert reason(**{**HOLDS[second], **HOLDS[first]}) == first


@pytest.mark.parametrize("name", HOLDS)
def test_forcing_skips_every_rule_but_what_the_request_itself_says(name: str) -> None:
    expected = {"request": "request", "processor": "processor"}.get(name)
    assert reason(**{"mode": "force", **HOLDS[name]}) == expected


@pytest.mark.parametrize("name", HOLDS)
def test_only_reasons_of_the_batch_may_pass(name: str) -> None:
    request = {key: value for key, value in HOLDS[name].items() if key != "batch"}
    policy = Policy(**{"rules": Rules(), "sampling": GREEDY, **request})
    assert policy.permanent_reason == (None if name == "batch" else name)


def test_a_request_for_one_token_decodes_plainly_and_keeps_its_drafter() -> None:
    policy = Policy(Rules(), GREEDY, new_tokens=1)
    assert (policy.reason(batch=1), policy.permanent_reason) == ("goodput", None)
    assert reason(new_tokens=1, plan=TREE) is reason(new_tokens=1, mode="force") is None
    assert Policy(Rules(), GREEDY, mode=False, new_tokens=1).permanent_reason == "request"


def test_goodput_holds_for_good_only_where_no_batch_pays() -> None:
    policy = Policy(Rules(), GREEDY, plans=profiled({1: "none", 4: "tree:2", 16: "none"}))
    assert policy.permanent_reason is None
    assert [policy.choose(batch)[1] for batch in (1, 2, 5)] == ["goodput", None, "goodput"]


# Plans


def test_the_default_plan_is_a_tree_and_in_larger_batches_its_first_chain() -> None:
    tree, chain = "tree:4,2,2,1", "chain:4"
    for sampling in (GREEDY, sampled(1.2)):
        assert [choose(batch, sampling)[0] for batch in (1, 4, 5, 16)] == [tree, tree, chain, chain]


@pytest.mark.parametrize("mode", [None, "force"])
def test_a_tree_becomes_the_chain_of_its_first_ranks_above_the_tree_batch_unless_it_is_forced(mode: Any) -> None:
    chain = "tree:3,2,1" if mode else "chain:3"
    for source in ({"plan": TREE}, {"plans": {16: TREE}}):
        assert [choose(batch, mode=mode, **source)[0] for batch in (4, 5)] == ["tree:3,2,1", chain]
        assert choose(2, mode=mode, rules=Rules(max_tree_batch=1), **source)[0] == chain


@pytest.mark.parametrize("mode", [None, True, "force"], ids=str)
def test_each_band_of_batches_has_the_profiles_plan(mode: Any) -> None:
    found = [choose(batch, mode=mode, plans=profiled(BANDS))[0] for batch in (1, 2, 4, 5, 16)]
    assert found == ["tree:4,2", "tree:2,1", "tree:2,1", "chain:2", "chain:2"]
    assert list(BANDS) == list(BATCHES.values()) and max(BANDS) == Rules().max_batch
    assert choose(3, plans=profiled({1: "tree:4,2"})) == ("tree:4,2", None), "past all bands: the largest"


def test_the_requests_plan_is_taken_before_the_profiles() -> None:
    assert choose(plan=Plan.parse("chain:7"), plans=profiled(BANDS)) == ("chain:7", None)
    assert choose(plan=Plan.parse("chain:2"), plans={1: NONE}) == ("chain:2", None)


def test_force_without_a_plan_takes_the_default_tree() -> None:
    assert choose(mode="force", has_exit=False) == ("tree:4,2,2,1", None)
    assert choose(mode="force", plans={1: NONE}) == ("tree:4,2,2,1", None)


def test_possible_plans_hold_all_that_may_be_drafted() -> None:
    for plan in (None, TREE):
        policy = Policy(Rules(), GREEDY, plan=plan, plans=profiled(BANDS))
        drafted = {policy.choose(batch)[0] for batch in range(1, 17)}
        assert max(max(p.ranks) for p in drafted) <= max(max(p.ranks) for p in policy.possible_plans)


# Rules


@given(field=st.sampled_from(list(vars(Rules()))), value=st.sampled_from([-1, "4", None, True, math.nan]))
def test_an_impossible_rule_is_refused_by_name(field: str, value: Any) -> None:
    if (field, value) == ("max_step", None):  # left to the device
        return
    with pytest.raises(ValueError, match=field):
        Rules(**{field: value})


def test_an_unknown_rule_is_refused_by_name_and_a_rule_cannot_be_changed() -> None:
    with pytest.raises(TypeError, match="max_rows"):
        Rules(max_rows=4)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        Rules().max_batch = 4  # type: ignore[misc]


def test_how_long_a_step_may_be_is_left_to_the_device_unless_it_is_given() -> None:
    assert (Rules().for_device("cuda").step_limit, Rules().for_device("cpu").step_limit) == (1.67, math.inf)
    assert Rules(max_step=2.0).for_device("cuda") == Rules(max_step=2.0).for_device("cpu") == Rules(max_step=2.0)
