"""Exits scored in the shadow: the ranks and agreements that drafting itself would have shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from selfspec.backends import torch_backend as runtime
from selfspec.backends.torch_backend import Session
from selfspec.governor.acceptance import Acceptance
from selfspec.governor.candidates import Ladder
from selfspec.governor.costs import Costs
from selfspec.governor.governor import Governor, Watch
from selfspec.governor.rules import Policy, Rules
from selfspec.sampling import Sampling
from selfspec.sequence import Row
from selfspec.speculation import exit_scoring as shadow
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import Plan
from tests.test_exits import (
    GREEDY,
    SEED,
    assert_same_rows,
    drafted,
    families,
    open_session,
    random_tokens,
    trained_once,
)
from tests.tiny import VOCABULARY

STEPS = 11
WARM = Sampling(do_sample=True, temperature=0.8)


def plainly_decoded(exit: Exit, sampling: Sampling = GREEDY) -> Session:
    session = open_session(exit, [random_tokens(20), random_tokens(9, seed=1)], sampling=sampling)
    for _ in range(STEPS):
        session.cycle()
    return session


def shadow_ranks(session: Session, steps: int = STEPS) -> list[list[int]]:
    """The ranks of all tokens that were decoded plainly."""
    assert session.exit is not None
    waiting, sequences = [row.waiting for row in session.rows], [row.sequence for row in session.rows]
    assert {len(of_row) for of_row in waiting} == {steps}
    read = shadow.Caught.of(sequences, waiting).read(session.exit, session.cache, 0, steps)
    assert {len(of_row) for of_row in waiting} == {0}
    tokens = torch.tensor([row.tokens[-steps:] for row in session.rows])
    key = None
    if session.sampling.do_sample:
        positions = [at for row in session.rows for at in range(len(row.tokens) - steps, len(row.tokens))]
        key = session._noise_key([row for row in session.rows for _ in range(steps)], positions)
    return shadow.ranks(session.exit, read, tokens, session.sampling, key).tolist()


@families
def test_ranks_are_those_in_the_exits_logits_as_a_model_of_its_own(family: str) -> None:
    trained = trained_once(family)
    session = plainly_decoded(trained.exit)
    for row, got in zip(session.rows, shadow_ranks(session), strict=True):
        order = trained.hf_exit_logits(row.tokens[:-1])[-STEPS:].argsort(descending=True)
        expected = [order[at].tolist().index(token) for at, token in enumerate(row.tokens[-STEPS:])]
        assert got == [min(rank, shadow.OFFERED) for rank in expected]
        assert len(set(got)) > 1, "some are right and some are not"


def test_ranks_of_drawn_tokens_are_those_of_drafts_with_the_same_noise() -> None:
    exit = trained_once("llama").exit
    session = plainly_decoded(exit, WARM)
    for row, got in zip(session.rows, shadow_ranks(session), strict=True):
        for place in range(STEPS):
            text, token = row.tokens[: place - STEPS], row.tokens[place - STEPS]
            offered = drafted(exit, text, f"tree:{shadow.OFFERED}", WARM)
            assert got[place] == (offered.index(token) if token in offered else shadow.OFFERED)


def test_a_token_that_the_trimmed_head_lacks_is_a_miss() -> None:
    exit = trained_once("llama").exit
    whole = plainly_decoded(exit)
    said = {token for row in whole.rows for token in row.tokens[-STEPS:]}
    lacking = torch.tensor([token for token in range(VOCABULARY) if token not in said])
    ranks = shadow_ranks(plainly_decoded(replace(exit, head_rows=lacking)))
    assert {rank for of_row in ranks for rank in of_row} == {shadow.OFFERED}


def governed(
    exit: Exit, prompts: list[list[int]], sampling: Sampling = GREEDY, copies: int = 1, cycle: float = 1.1
) -> Session:
    """With a governor to whom every cycle that drafts is as long, and drafting pays up to about 1.4 plain steps."""
    governor = Governor(
        Ladder(Acceptance([[0.5, 0.1]]), {16: lambda depth, nodes: cycle}, exit.layer, 4),
        Costs(),
        Rules(),
        usual_agreement=(0.5, 0.1),
    )
    model = exit.model
    cache = runtime.Cache(model.config, model.device, model.dtype)
    rows = [Row(prompt, seed=SEED, copy=copy, max_length=500) for prompt in prompts for copy in range(copies)]
    policy = Policy(Rules(), sampling)
    return Session(model, cache, rows, sampling, policy, exit, governor=governor)


@pytest.fixture
def agreements(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The shares that watches learn from prompts."""
    seen: list[float] = []

    def remember(self: Watch, agreement: float, places: int, *usual: Any) -> None:
        assert usual == (0.5, 0.1)
        assert places in (5, shadow.FEW)
        seen.append(agreement)

    monkeypatch.setattr(Watch, "learn_prompt", remember)
    return seen


@pytest.mark.parametrize("chunk", [512, 7, 33])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_prompt_is_judged_by_its_last_positions(
    family: str, chunk: int, agreements: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = trained_once(family)
    prompts = [random_tokens(70), random_tokens(6, seed=2)]
    monkeypatch.setattr(runtime, "PREFILL_CHUNK", chunk)
    governed(trained.exit, prompts).prefill()
    expected = []
    for prompt in prompts:
        text = prompt[:-1]
        guesses = trained.hf_exit_logits(text).argmax(-1)
        with torch.no_grad():
            own = trained.hf(torch.tensor([text])).logits[0].argmax(-1)
        expected.append((guesses == own)[-shadow.FEW :].double().mean().item())
    assert agreements == pytest.approx(expected)
    assert 0 < min(agreements) < 1


def test_no_prompt_is_judged_where_nothing_would_be_drafted_anyway(agreements: list[float]) -> None:
    for cycle, judged in ((1.1, 1), (3.0, 0)):
        governed(trained_once("llama").exit, [random_tokens(70)], cycle=cycle).prefill()
        assert len(agreements) == judged
        agreements.clear()


def test_a_prompt_of_one_token_is_not_judged(agreements: list[float]) -> None:
    governed(trained_once("llama").exit, [[5]]).prefill()
    assert agreements == []


def test_copies_take_over_what_their_prompt_told() -> None:
    session = governed(trained_once("llama").exit, [random_tokens(40)], WARM, copies=3)
    session.prefill()
    first, *others = (row.watch for row in session.rows)
    assert first.belief.weights != Watch().belief.weights
    assert all(watch.belief.weights == first.belief.weights for watch in others)
    others[0].belief.fade(50)
    assert first.belief.weights != others[0].belief.weights, "each goes its own way from there"


@pytest.mark.parametrize(("cycle", "looks"), [(3.0, 1), (1.1, 2)])
@pytest.mark.parametrize(("rows", "steps", "waiting"), [(1, [32, 96, 130, 163], 7), (2, [16, 48, 112, 130, 147], 23)])
def test_while_nothing_is_drafted_scores_come_every_few_tokens(
    rows: int, steps: list[int], waiting: int, cycle: float, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, later, and at once again; of two rows sooner; a second time if something would be drafted, unless it is
    decided already."""
    session = governed(trained_once("llama").exit, [random_tokens(20 + 10 * row) for row in range(rows)], cycle=cycle)
    session.prefill()
    monkeypatch.setattr(session, "choose_plan", lambda rows: (plan, None if len(plan) else "goodput"))
    scored: list[tuple[int, list[int]]] = []

    def remember(watches: list[Watch], ranks: list[list[int]], offered: int) -> None:
        scored.append((step, [len(of_row) for of_row in ranks]))

    monkeypatch.setattr(session.governor, "scored", remember)
    monkeypatch.setattr(session.governor, "observe", lambda *args: None)
    for step in range(170):
        plan = Plan.parse("chain:1") if step == 130 else Plan()
        session.cycle()
    assert scored == [(step, [shadow.FEW] * rows) for step in steps for _ in range(1 if step == 130 else looks)]
    assert all(len(row.waiting) == waiting for row in session.rows)


@pytest.mark.parametrize(("start", "stop"), [(STEPS - 4, STEPS), (2, 5)])
def test_some_of_what_waits_is_read_and_all_of_it_filled(start: int, stop: int) -> None:
    exit = trained_once("llama").exit
    some, all_of_it = plainly_decoded(exit), plainly_decoded(exit)
    reads = []
    for session, places in ((some, (start, stop)), (all_of_it, (0, STEPS))):
        caught = shadow.Caught.of([row.sequence for row in session.rows], [row.waiting for row in session.rows])
        if session is some:
            caught.fill(exit, session.cache)
        reads.append(caught.read(exit, session.cache, *places))
    assert reads[0].shape[1] == stop - start and torch.allclose(reads[0], reads[1][:, start:stop])
    assert_same_rows(some, all_of_it)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_look_tells_the_ranks_of_the_newest_tokens_and_then_of_those_before(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    exit, prompts, scored = trained_once("llama").exit, [random_tokens(20), random_tokens(9, seed=1)], []
    session = governed(exit, prompts, sampling)
    monkeypatch.setattr(session, "choose_plan", lambda rows: (Plan(), "goodput"))
    monkeypatch.setattr(session.governor, "scored", lambda watches, ranks, offered: scored.append(ranks))
    session.prefill()
    for _ in range(16):
        session.cycle()
    tokens = [list(row.tokens) for row in session.rows]
    monkeypatch.setattr(session, "choose_plan", lambda rows: (Plan.parse("chain:1"), None))
    session.cycle()
    newest, before = scored
    beside = governed(exit, prompts, sampling)
    beside.prefill()
    monkeypatch.setattr(beside, "choose_plan", lambda rows: (Plan(), "goodput"))
    for _ in range(16):
        beside.cycle()
    assert [list(row.tokens) for row in beside.rows] == tokens
    all_of_it = shadow_ranks(beside, steps=16)
    assert [old + new for old, new in zip(before, newest, strict=True)] == all_of_it
    assert len({rank for ranks in all_of_it for rank in ranks}) > 1


@pytest.mark.parametrize(("reason", "expected", "waiting"), [("goodput", 1, 33), ("ood", 1, 33), ("batch", 0, 1)])
def test_nothing_is_scored_where_a_rule_forbids_drafting(
    reason: str, expected: int, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = governed(trained_once("llama").exit, [random_tokens(20)], cycle=3.0)
    session.prefill()
    monkeypatch.setattr(session, "choose_plan", lambda rows: (Plan(), reason))
    monkeypatch.setattr(session.policy, "reason", lambda batch: reason if reason == "batch" else None)
    scored: list[int] = []
    monkeypatch.setattr(session.governor, "scored", lambda watch, ranks, offered: scored.append(len(ranks)))
    for _ in range(65):
        session.cycle()
    assert len(scored) == expected
    assert len(session.rows[0].waiting) == waiting, "the exit's cache is kept up all the same"


def test_a_row_that_has_ended_keeps_nothing_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    session = governed(trained_once("llama").exit, [random_tokens(20), random_tokens(20)])
    session.rows[0].max_length = 23
    session.prefill()
    monkeypatch.setattr(session, "choose_plan", lambda rows: (Plan(), "goodput"))
    for _ in range(5):
        session.cycle()
    assert [len(row.waiting) for row in session.rows] == [0, 5]
    session.close()
    assert not any(len(row.waiting) for row in session.rows)


def test_cycles_are_booked_by_how_long_texts_were_when_they_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were chosen: one that brings a text to its next page has not paid for that page yet."""
    session = governed(trained_once("llama").exit, [random_tokens(20), random_tokens(30)])
    session.prefill()
    contexts: list[int] = []
    observe = type(session.governor).observe

    def remember(self: Governor, *told: Any) -> None:
        contexts.append(told[4])
        observe(self, *told)

    monkeypatch.setattr(type(session.governor), "observe", remember)
    monkeypatch.setattr(session, "choose_plan", lambda rows: (Plan.parse("chain:2"), None))
    before = []
    for _ in range(6):
        before.append(max(len(row.tokens) for row in session.rows))
        session.cycle()
    assert contexts == before
