"""Exit scoring during plain decoding: scores and agreements equal those of the drafts that were not made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from selfspec.backends import torch_backend
from selfspec.governor.acceptance import Acceptance, Skill
from selfspec.governor.candidates import PlanCandidates, SharedPlans
from selfspec.governor.governor import Governor
from selfspec.governor.rules import Policy, Rules
from selfspec.sampling import NoiseKey, SamplingParams
from selfspec.speculation import exit_scoring
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import NONE, Plan
from tests.scripted import Decoding, new_cache
from tests.test_exit import (
    GREEDY,
    SEED,
    assert_same_sequences,
    decoding,
    drafted,
    random_tokens,
    trained_once,
)
from tests.tiny import VOCABULARY

STEPS = 11
WARM = SamplingParams(do_sample=True, temperature=0.8)


def plainly_decoded(exit: Exit, params: SamplingParams = GREEDY) -> Decoding:
    running = decoding(exit, [random_tokens(20), random_tokens(9, seed=1)], params=params)
    running.step(STEPS)
    return running


def is_drafted(running: Decoding, params: SamplingParams = GREEDY, steps: int = STEPS) -> list[list[bool]]:
    """Of all tokens that were decoded plainly: whether the exit would have drafted them."""
    assert running.exit is not None
    sequences = running.sequences
    unfilled = [sequence.unfilled for sequence in sequences]
    assert {len(states) for states in unfilled} == {steps}
    head_input = exit_scoring.fill(
        running.exit, running.cache, [sequence.kv for sequence in sequences], unfilled, steps
    )
    assert head_input is not None and {len(states) for states in unfilled} == {0}
    tokens = torch.tensor([sequence.tokens[-steps:] for sequence in sequences])
    positions = [
        (sequence, at) for sequence in sequences for at in range(len(sequence.tokens) - steps, len(sequence.tokens))
    ]
    columns = torch.tensor([(sequence.seed, sequence.sample_index, at) for sequence, at in positions])
    key = NoiseKey(*columns.unbind(1))
    return exit_scoring.is_drafted(running.exit, head_input, tokens, [params] * len(sequences), key).tolist()


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_the_best_draft_is_that_of_the_exits_logits_as_a_model_of_its_own(family: str) -> None:
    trained = trained_once(family)
    running = plainly_decoded(trained.exit)
    for sequence, got in zip(running.sequences, is_drafted(running), strict=True):
        best = trained.hf_exit_logits(sequence.tokens[:-1])[-STEPS:].argmax(-1)
        assert got == (best == torch.tensor(sequence.tokens[-STEPS:])).tolist()
        assert len(set(got)) > 1, "some drafts must be right and some wrong"


def test_sampled_tokens_are_compared_with_drafts_with_the_same_noise() -> None:
    exit = trained_once("llama").exit
    running = plainly_decoded(exit, WARM)
    for sequence, got in zip(running.sequences, is_drafted(running, WARM), strict=True):
        for place in range(STEPS):
            text, token = sequence.tokens[: place - STEPS], sequence.tokens[place - STEPS]
            assert got[place] == (drafted(exit, text, "chain:1", WARM) == [token])


def test_a_token_that_the_trimmed_head_lacks_is_a_miss() -> None:
    exit = trained_once("llama").exit
    said = {token for sequence in plainly_decoded(exit).sequences for token in sequence.tokens[-STEPS:]}
    lacking = torch.tensor([token for token in range(VOCABULARY) if token not in said])
    assert not any(map(any, is_drafted(plainly_decoded(replace(exit, head_rows=lacking)))))


def test_the_newest_unfilled_positions_are_read_and_all_are_filled() -> None:
    exit = trained_once("llama").exit
    some, all_of_it = plainly_decoded(exit), plainly_decoded(exit)
    head_inputs = []
    for running, scored in ((some, 4), (all_of_it, STEPS)):
        kvs, unfilled = (
            [sequence.kv for sequence in running.sequences],
            [sequence.unfilled for sequence in running.sequences],
        )
        head_inputs.append(exit_scoring.fill(exit, running.cache, kvs, unfilled, scored))
    assert head_inputs[0].shape[1] == 4 and torch.allclose(head_inputs[0], head_inputs[1][:, -4:])
    assert_same_sequences(some, all_of_it)


# In a batch under a governor


def governed(
    exit: Exit, prompts: list[list[int]], params: SamplingParams = GREEDY, samples: int = 1, cost: float = 1.1
) -> Decoding:
    """With a governor to which a drafting step costs `cost` plain steps; drafting pays up to a cost of about 1.4."""
    parts: tuple = Acceptance([[0.5, 0.1]]), {16: lambda depth, nodes: cost}
    candidates = PlanCandidates(*parts, SharedPlans(*parts, max_tree_batch=4))
    options: dict[str, Any] = {"params": params, "samples": samples, "seed": SEED, "new_tokens": 400}
    options |= {"candidates": candidates, "agreement": 0.5}
    return Decoding(exit.model, new_cache(exit.model), prompts, exit, **options)


def follow(running: Decoding, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Makes the batch take plan and reason from the returned list; the governor does not observe its steps."""
    chosen: list[Any] = [NONE, "goodput"]
    monkeypatch.setattr(running.batch, "_choose_plan", lambda: tuple(chosen))
    monkeypatch.setattr(running.batch.governor, "observe", lambda *args: None)
    return chosen


@pytest.fixture
def agreements(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The agreements of prompts that `observe_prompt` is called with."""
    seen: list[float] = []

    def remember(self: Skill, agreement: float, positions: int, calibrated: float) -> None:
        assert calibrated == 0.5
        assert positions in (5, exit_scoring.CPU_SCORED_POSITIONS)
        seen.append(agreement)

    monkeypatch.setattr(Skill, "observe_prompt", remember)
    return seen


@pytest.mark.parametrize(("family", "chunk"), [("llama", 512), ("gemma3_text", 7)])
def test_a_prompt_is_scored_by_its_last_positions(
    family: str, chunk: int, agreements: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = trained_once(family)
    prompts = [random_tokens(70), random_tokens(6, seed=2)]
    monkeypatch.setattr(torch_backend, "PREFILL_CHUNK", chunk)
    governed(trained.exit, prompts).prefill()
    expected = []
    for prompt in prompts:
        text = prompt[:-1]
        drafts = trained.hf_exit_logits(text).argmax(-1)
        with torch.no_grad():
            own = trained.hf(torch.tensor([text])).logits[0].argmax(-1)
        expected.append((drafts == own)[-exit_scoring.CPU_SCORED_POSITIONS :].double().mean().item())
    assert agreements == pytest.approx(expected)
    assert 0 < min(agreements) < 1


def test_a_prompt_of_one_token_is_not_scored(agreements: list[float]) -> None:
    governed(trained_once("llama").exit, [random_tokens(1)]).prefill()
    assert not agreements


def test_sequences_of_one_prompt_start_with_its_score() -> None:
    running = governed(trained_once("llama").exit, [random_tokens(40)], WARM, samples=3).prefill()
    first, *others = (sequence.skill for sequence in running.sequences)
    assert first.value != Skill().value
    assert all(vars(skill) == vars(first) and skill is not first for skill in others)


@pytest.mark.parametrize("count", [1, 2])
def test_plain_decoding_is_scored_once_per_interval(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 plain steps: scores of 0.1 plain steps take half of the 0.01 that each plain step refills."""
    prompts = [random_tokens(20 + 10 * index) for index in range(count)]
    running = governed(trained_once("llama").exit, prompts, cost=3.0).prefill()
    chosen, scored = follow(running, monkeypatch), []
    monkeypatch.setattr(running.batch.governor, "observe_score", lambda skill, right: scored.append((step, len(right))))
    for step in range(170):
        chosen[:] = [Plan.parse("chain:1"), None] if step == 130 else [NONE, "goodput"]
        running.step()
    steps = [20, 40, 60, 80, 100, 120, 151]
    assert scored == [(step, exit_scoring.CPU_SCORED_POSITIONS) for step in steps for _ in range(count)]
    assert all(len(sequence.unfilled) == 19 for sequence in running.sequences)


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_score_compares_the_newest_tokens(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    exit, prompts = trained_once("llama").exit, [random_tokens(20), random_tokens(9, seed=1)]
    newest: list[list[bool]] = []
    running, other = (governed(exit, prompts, params).prefill() for _ in range(2))
    for each in (running, other):
        follow(each, monkeypatch)
        each.step(20)
    monkeypatch.setattr(running.batch.governor, "observe_score", lambda skill, right: newest.append(right))
    running.step()
    expected = is_drafted(other, params, steps=20)
    assert newest == [of_sequence[-exit_scoring.CPU_SCORED_POSITIONS :] for of_sequence in expected]
    assert len({is_right for of_sequence in newest for is_right in of_sequence}) > 1


def test_plain_decoding_is_not_scored_if_a_rule_forbids_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    running = governed(trained_once("llama").exit, [random_tokens(20)])
    running.request.policy = Policy(Rules(max_batch=0), GREEDY)
    running.prefill()
    monkeypatch.setattr(Governor, "observe_score", lambda *_: pytest.fail("scored"))
    running.step(65)
    assert len(running.sequences[0].unfilled) == 65
    assert {record.reason for record in running.sequences[0].history.records} == {"batch"}


def test_a_finished_sequence_has_no_unfilled_states(monkeypatch: pytest.MonkeyPatch) -> None:
    running = governed(trained_once("llama").exit, [random_tokens(20), random_tokens(20)])
    running.sequences[0].max_length = 23
    running.prefill()
    follow(running, monkeypatch)
    running.step(5)
    assert [len(sequence.unfilled) for sequence in running.sequences] == [0, 5]
    running.close()
    assert not any(len(sequence.unfilled) for sequence in running.sequences)


def test_a_steps_cost_is_observed_at_the_context_with_which_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose tokens reach the next page has not attended to that page."""
    running = governed(trained_once("llama").exit, [random_tokens(20), random_tokens(30)]).prefill()
    follow(running, monkeypatch)[:] = [Plan.parse("chain:2"), None]
    assert isinstance(running.batch.governor, Governor)
    contexts: list[int] = []
    monkeypatch.setattr(running.batch.governor, "observe", lambda *observed: contexts.append(observed[3]))
    before = []
    for _ in range(6):
        before.append(max(len(sequence.tokens) for sequence in running.sequences))
        running.step()
    assert contexts == before
