"""What drafts are expected to bring, by kind of text, and how a belief about the kind follows what happens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.governor.acceptance import EXPONENTS, FAMILIAR, STRANGE, UNFAMILIAR, Acceptance, Belief, Chances, hotter
from selfspec.speculation.plan import NONE, Plan
from tests.strategies import SETTINGS, plans

SHARES = [[0.6, 0.1, 0.05], [0.5, 0.2]]
FAMILIAR_KIND = EXPONENTS.index(1.0)


def expects(belief: Belief, plan: Plan) -> float:
    """Tokens of a cycle."""
    return sum(weight * tokens for weight, tokens in zip(belief.weights, acceptance().tokens(plan), strict=True))


def acceptance() -> Acceptance:
    return Acceptance(SHARES)


def test_the_familiar_kind_is_as_the_profile_says() -> None:
    for depth, of_depth in enumerate(SHARES):
        for rank, share in enumerate(of_depth):
            assert acceptance().chance(FAMILIAR_KIND, depth, rank) == pytest.approx(share)
    assert acceptance().chance(FAMILIAR_KIND, 0, 3) == 0, "a rank that calibration never saw"
    assert acceptance().chance(FAMILIAR_KIND, 7, 1) == pytest.approx(0.2), "deeper than it looked: as at its deepest"


def test_expected_tokens_are_the_chances_of_all_nodes() -> None:
    tree = Plan.parse("tree:2,1")  # two children of the root, one of each of them
    expected = 1 + 0.6 + 0.1 + (0.6 + 0.1) * 0.5
    assert acceptance().tokens(tree)[FAMILIAR_KIND] == pytest.approx(expected)
    assert acceptance().tokens(NONE) == (1.0,) * len(EXPONENTS)


def test_every_kind_is_guessed_better_than_the_one_before() -> None:
    tokens = acceptance().tokens(Plan.parse("tree:3,2"))
    assert list(tokens) == sorted(tokens)
    assert tokens[0] < 1.05, "of the strangest text almost nothing can be guessed"


@settings(SETTINGS, max_examples=50)
@given(plan=plans(max_nodes=12))
def test_something_always_happens(plan: Plan) -> None:
    """The chances of all ends that a cycle can have add up to one, whatever the kind."""
    ends = [acceptance().chances(plan, last) for last in range(len(plan) + 1)]
    for kind in range(len(EXPONENTS)):
        assert sum(of_end[kind] for of_end in ends) == pytest.approx(1, abs=1e-4)
    scores = [acceptance().score(rank, offered=2) for rank in range(3)]
    assert [sum(of_kind) for of_kind in zip(*scores, strict=True)] == pytest.approx([1] * len(EXPONENTS), abs=1e-4)


def test_many_scores_teach_together_what_they_teach_one_by_one() -> None:
    ranks, together, one_by_one = [0, 3, 0, 8, 1, 8, 0, 0], Belief(), Belief()
    together.learn(acceptance().scores(ranks, offered=8))
    for rank in ranks:
        one_by_one.learn(acceptance().score(rank, offered=8))
    assert together.weights == pytest.approx(one_by_one.weights, abs=1e-6)
    assert min(acceptance().scores([8] * 10_000, offered=8)) > 0


@settings(SETTINGS, max_examples=50)
@given(plan=plans(max_nodes=12))
def test_expected_tokens_are_the_mean_of_all_ends(plan: Plan) -> None:
    ends = [acceptance().chances(plan, last) for last in range(len(plan) + 1)]
    for kind in range(len(EXPONENTS)):
        mean = sum(of_end[kind] * (plan.depths[last] + 1) for last, of_end in enumerate(ends))
        assert acceptance().tokens(plan)[kind] == pytest.approx(mean, abs=1e-3)


def test_without_shares_nothing_can_be_expected() -> None:
    for shares in ([], [[]], [[0.0]]):
        with pytest.raises(ValueError, match="no shares by depth and rank"):
            Acceptance(shares)


def test_a_belief_follows_what_happens() -> None:
    belief, chain = Belief(), Plan.parse("chain:2")
    expected = [expects(belief, chain)]
    for _ in range(6):
        belief.learn(acceptance().chances(chain, 0))
    expected.append(expects(belief, chain))
    assert belief.strangeness > 0.7
    for _ in range(6):
        belief.learn(acceptance().chances(chain, 2))
    expected.append(expects(belief, chain))
    assert expected[1] < expected[0] < expected[2]
    assert belief.strangeness < 0.05


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_what_is_learned_after_some_tokens_is_learned_from_a_faded_belief(tokens: int) -> None:
    at_once, in_steps = Belief(UNFAMILIAR), Belief(UNFAMILIAR)
    for rank in (0, 8, 8):
        at_once.learn(acceptance().score(rank, offered=8), tokens)
        in_steps.fade(tokens)
        in_steps.learn(acceptance().score(rank, offered=8))
    assert at_once.weights == pytest.approx(in_steps.weights)


def test_what_is_hotter_than_anything_measured_is_guessed_worse_by_as_much() -> None:
    cool, hot = [[0.75, 0.1], [0.7]], [[0.5, 0.2], [0.4]]
    assert hotter(cool, hot, steps=0) == [pytest.approx(shares) for shares in hot]
    (first, second), (deeper,) = hotter(cool, hot, steps=1)
    assert first == pytest.approx(1 - 0.5**0.5), "a miss was as likely as its root, and is again"
    assert first + second == pytest.approx(1 - 0.3**0.5) and deeper == pytest.approx(1 - 0.6**0.5)
    assert hotter(hot, cool, steps=2) == [pytest.approx(shares) for shares in cool], "heat never helps"
    assert hotter([[1.0]], [[0.0]], steps=1)[0][0] < 0.01, "whatever was measured"


@pytest.mark.parametrize("priors", [(FAMILIAR, UNFAMILIAR, FAMILIAR), (FAMILIAR,) * 3], ids=["mixed", "one kind"])
def test_many_beliefs_learn_what_each_would_alone_and_then_of_the_others(priors: tuple[Chances, ...]) -> None:
    one_by_one, together = ([Belief(prior) for prior in priors] for _ in range(2))
    chances = [acceptance().score(rank, offered=2) for rank in (0, 1, 5)]
    for _ in range(3):
        for belief, chance, tokens in zip(one_by_one, chances, (1, 4, 2), strict=True):
            belief.learn(chance, tokens)
        found = [sum(kind) for kind in zip(*(belief.weights for belief in one_by_one), strict=True)]
        for belief in one_by_one:
            home = [(4 * own + all_) / (4 + 3) for own, all_ in zip(belief.prior, found, strict=True)]
            moved = [w * new / old for w, new, old in zip(belief.weights, home, belief.home, strict=True)]
            belief.home, belief._weights = home, [value / sum(moved) for value in moved]
        Belief.learn_together(together, chances, (1, 4, 2))
        for one, other in zip(one_by_one, together, strict=True):
            assert other.weights == pytest.approx(one.weights)
            assert other.home == pytest.approx(one.home)


def missing(count: int, times: int) -> list[Belief]:
    """Beliefs about texts of one request whose drafts all missed, so many times."""
    beliefs, missed = [Belief() for _ in range(count)], acceptance().score(8, offered=8)
    for _ in range(times):
        Belief.learn_together(beliefs, [missed] * count, [1] * count)
    return beliefs


def test_texts_of_one_request_tell_of_each_other() -> None:
    alone, together, pure = missing(1, 2)[0], missing(8, 2), Belief()
    assert all(belief.strangeness > 1.5 * alone.strangeness for belief in together)
    for _ in range(2):
        pure.learn(acceptance().score(8, offered=8), 1)
    assert alone.weights == pure.weights, "who is alone has nobody to compare with"


def test_a_text_that_shows_what_it_is_is_believed_whatever_the_others_are() -> None:
    beliefs = missing(8, 6)
    right = Belief()
    everybody = [*beliefs, right]
    chances = [acceptance().score(0 if belief is right else 8, offered=8) for belief in everybody]
    for _ in range(12):
        Belief.learn_together(everybody, chances, [0] * 9)
    assert right.strangeness < 0.02
    assert all(belief.strangeness > 0.98 for belief in beliefs)


def test_a_text_among_strange_ones_becomes_strange_again_sooner() -> None:
    among, alone = missing(8, 6)[0], missing(1, 6)[0]
    for belief in (among, alone):
        belief.fade(5000)
    assert sum(among.weights) == pytest.approx(1)
    assert among.strangeness > 2 * alone.strangeness


def test_a_text_that_the_others_have_left_is_no_longer_judged_by_them() -> None:
    left = missing(8, 6)[0]
    among = sum(left.home[:STRANGE])
    for _ in range(40):
        Belief.learn_together([left], [acceptance().score(0, offered=8)], [1])
    assert among > 0.4
    assert sum(left.home[:STRANGE]) < 0.12


def test_a_belief_fades_with_the_text_it_came_from() -> None:
    belief = Belief()
    for _ in range(10):
        belief.learn(acceptance().score(8, offered=8))
    sure = belief.strangeness
    belief.fade(tokens=5000)
    assert sure > 0.95
    assert belief.weights == pytest.approx(FAMILIAR, abs=1e-6)


@settings(SETTINGS, max_examples=100)
@given(events=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=200))
def test_weights_stay_weights(events: list[tuple[int, int]]) -> None:
    belief = Belief(UNFAMILIAR)
    for rank, tokens in events:
        belief.fade(tokens)
        belief.learn(acceptance().score(rank, offered=8))
        assert sum(belief.weights) == pytest.approx(1)
        assert all(weight >= 0 for weight in belief.weights)


@pytest.mark.parametrize(("agreement", "strange"), [(0.02, True), (0.15, True), (0.45, False), (0.5, False)])
def test_a_prompt_tells_what_to_expect(agreement: float, strange: bool) -> None:
    belief = Belief()
    belief.learn_agreement(agreement, places=32, usual=0.5, deviation=0.09)
    assert (belief.strangeness > 0.5) == strange


def test_few_places_of_a_prompt_tell_less() -> None:
    many, few = Belief(), Belief()
    many.learn_agreement(0.1, places=32, usual=0.5, deviation=0.09)
    few.learn_agreement(0.1, places=8, usual=0.5, deviation=0.09)
    assert few.strangeness < 0.7 * many.strangeness


def test_far_prompts_are_expected_to_be_strange_more_often() -> None:
    assert sum(UNFAMILIAR[:STRANGE]) > 4 * sum(FAMILIAR[:STRANGE])
    assert sum(FAMILIAR) == pytest.approx(1)
    assert sum(UNFAMILIAR) == pytest.approx(1)
