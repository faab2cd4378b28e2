"""The acceptance model: expected accepted lengths at each skill, and how a skill follows the outcomes of steps."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.governor.acceptance import (
    LEVELS,
    MEMORY,
    UNFAMILIAR,
    Acceptance,
    Skill,
    exposure_of,
    extrapolated,
)
from selfspec.speculation.plan import NONE, Plan
from tests.scripted import PLANS

SHARES = [[0.64, 0.10, 0.05, 0.03], [0.6, 0.1, 0.05], [0.5, 0.1]]
CHAIN, TREE = Plan.parse("chain:2"), Plan.parse("tree:3,2")
CALIBRATED = Skill().level


def drawn(chances: list[float], random: Random) -> int:
    """The rank of the model's token; len(chances) for a miss."""
    at = random.random()
    for rank, chance in enumerate(chances):
        at -= chance
        if at < 0:
            return rank
    return len(chances)


def outcome(acceptance: Acceptance, plan: Plan, skill: float, random: Random) -> int:
    """The last node that a step accepts for a text of this skill."""
    node, level = 0, Skill(skill).level
    while plan.children[node]:
        chances = [acceptance.chance(plan.depths[node], rank, level) for rank in range(8)]
        rank = drawn(chances, random)
        child = next((other for other in plan.children[node] if plan.ranks[other - 1] == rank), None)
        if child is None:
            break
        node = child
    return node


def test_a_text_of_skill_one_has_the_shares_of_the_profile() -> None:
    acceptance = Acceptance(SHARES)
    found = [
        [acceptance.chance(depth, rank, CALIBRATED) for rank in range(len(shares))]
        for depth, shares in enumerate(SHARES)
    ]
    assert [pytest.approx(shares) for shares in found] == SHARES
    assert acceptance.chance(9, 0, CALIBRATED) == pytest.approx(0.5), "deeper than measured: as at the deepest"
    assert acceptance.chance(0, 9, CALIBRATED) == 0.0


def test_the_expected_length_adds_the_chances_of_all_nodes_to_one() -> None:
    lengths = {
        plan: Acceptance(SHARES).reach(Plan.parse(plan)).sum(0)[CALIBRATED] for plan in ("none", "chain:2", "tree:2")
    }
    assert lengths == {"none": 1.0, "chain:2": pytest.approx(1 + 0.64 + 0.64 * 0.6), "tree:2": pytest.approx(1.74)}


@pytest.mark.parametrize("plan", PLANS[1:])
def test_more_skill_never_makes_a_plan_shorter(plan: str) -> None:
    lengths = Acceptance(SHARES).reach(Plan.parse(plan)).sum(0)
    assert (np.diff(lengths) >= -1e-12).all()
    assert 1.0 <= lengths[0] < 1.2 and lengths[-1] <= Plan.parse(plan).depth + 1


@pytest.mark.parametrize("shares", [[], [[]], [[0.0, 0.0]]])
def test_a_profile_without_shares_is_refused(shares: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="calibrate the model again"):
        Acceptance(shares)


def test_evidence_is_the_exposure_of_every_rank_that_was_compared() -> None:
    acceptance = Acceptance(SHARES)
    second = TREE.children[0][1]
    missed, found, whole = acceptance.evidence(CHAIN)[0], acceptance.evidence(TREE)[second], acceptance.evidence(CHAIN)
    assert (missed.observed[CALIBRATED], missed.expected, missed.tokens) == (0.0, pytest.approx(exposure_of([0.64])), 1)
    assert found.expected == pytest.approx(exposure_of([0.64, 0.10]) + exposure_of([0.6, 0.1])) and found.tokens == 2
    exposure = exposure_of([0.64, 0.10]) - exposure_of([0.64])
    assert found.observed[CALIBRATED] == pytest.approx(exposure / (1 - np.exp(-exposure)))
    assert whole[2].expected == pytest.approx(exposure_of([0.64]) + exposure_of([0.6])), "no child was refused"


@pytest.mark.parametrize("plan", PLANS)
def test_evidence_of_a_text_of_skill_one_is_expected_on_average(plan: str) -> None:
    """Weighted with the chance of each outcome, so a skill of 1 stays."""
    acceptance, shape = Acceptance([[0.5, 0.2, 0.1, 0.1]]), Plan.parse(plan)
    reach = [1.0]
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        reach.append(reach[parent] * acceptance.chance(0, rank, CALIBRATED))
    ends = [chance - sum(reach[child] for child in shape.children[node]) for node, chance in enumerate(reach)]
    evidence = acceptance.evidence(shape)
    observed, expected = (
        sum(chance * value for chance, value in zip(ends, values, strict=True))
        for values in ([step.observed[CALIBRATED] for step in evidence], [step.expected for step in evidence])
    )
    if all(sorted(shape.ranks[child - 1] for child in kids) == list(range(len(kids))) for kids in shape.children):
        assert observed == pytest.approx(expected)


# Skills


@pytest.mark.parametrize("true", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=str)
def test_a_skill_comes_close_to_that_of_the_text_whatever_is_drafted(true: float, plan: Plan) -> None:
    acceptance, random, found = Acceptance(SHARES), Random(0), []
    skill = Skill()
    for _ in range(600):
        last = outcome(acceptance, plan, true, random)
        skill.observe(acceptance.evidence(plan)[last])
        found.append(skill.value)
    assert np.mean(found[100:]) == pytest.approx(true, rel=0.35, abs=0.12)


def test_a_few_misses_stop_and_a_few_hits_restore() -> None:
    acceptance, skill = Acceptance(SHARES), Skill()
    values = [skill.value]
    for _ in range(4):
        skill.observe(acceptance.evidence(TREE)[0])
        values.append(skill.value)
    assert all(before > after for before, after in pairwise(values)) and values[-1] < 0.35
    for _ in range(4):
        skill.observe(acceptance.evidence(TREE)[4])
    assert skill.value > 0.8


def test_a_text_is_out_of_distribution_once_its_skill_was_below_the_threshold() -> None:
    skill = Skill()
    assert not skill.was_ood and not skill.is_ood
    skill.observe_share(0, 4 * MEMORY, exposure_of([0.64]))
    assert skill.was_ood and skill.is_ood
    skill.observe_share(4 * MEMORY, 4 * MEMORY, exposure_of([0.64]))
    assert skill.was_ood and not skill.is_ood


def test_an_unfamiliar_prompt_begins_at_the_threshold_and_is_not_flagged_yet() -> None:
    unfamiliar, usual = Skill(UNFAMILIAR), Skill()
    assert (unfamiliar.value, usual.value) == (UNFAMILIAR, 1.0)
    assert not unfamiliar.was_ood and not usual.was_ood


@given(agreement=st.floats(0, 1), positions=st.integers(1, 64), usual=st.floats(0.01, 1.0))
def test_a_prompt_moves_a_skill_towards_what_exit_and_model_agreed_on(
    agreement: float, positions: int, usual: float
) -> None:
    skill, longer = Skill(), Skill()
    skill.observe_prompt(agreement, positions, usual)
    longer.observe_prompt(agreement, max(positions, MEMORY), usual)
    assert skill.value > 0 and 0 <= skill.level < len(LEVELS)
    if agreement == 0:
        assert longer.value <= skill.value < 1
    if agreement == 1:
        assert skill.value > 1


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 40)), max_size=30))
def test_a_skill_stays_finite_and_positive(scores: list[tuple[float, int]]) -> None:
    skill = Skill()
    for share, positions in scores:
        skill.observe_share(share * positions, positions, exposure_of([0.64]))
        assert 0 < skill.value < 1000 and 0 <= skill.level < len(LEVELS)


def test_levels_are_the_nearest_of_the_table() -> None:
    for level in range(0, len(LEVELS), 7):
        assert Skill(LEVELS[level]).level == level
    assert Skill(1e-9).level == 0 and Skill(99.0).level == len(LEVELS) - 1


# Temperatures past those measured


def test_hotter_text_is_harder_to_guess_by_as_much_for_each_step() -> None:
    cool, hot = [[0.6, 0.1]], [[0.5, 0.1]]
    assert extrapolated(cool, hot, 0)[0] == pytest.approx(hot[0])
    chances = [extrapolated(cool, hot, steps)[0][0] for steps in (0, 1, 2, 3)]
    logs = np.log(np.log(1 - np.array(chances)) / np.log(1 - chances[0]))
    assert np.diff(logs) == pytest.approx(np.full(3, logs[1])) and logs[1] < 0
    assert extrapolated([[0.5]], [[0.6]], 2)[0] == pytest.approx([0.6]), "never easier"


def test_plain_decoding_brings_one_token_at_every_skill() -> None:
    assert (Acceptance(SHARES).reach(NONE).sum(0) == 1.0).all()
