"""Replays of recorded texts: a plan takes the steps that an engine takes, and the governor drafts where that pays."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import replay
from bench.forced_text import ForcedTexts
from bench.governor_sets import PromptSet
from bench.replay import DomainTiming, Text
from selfspec import Engine, Rules
from selfspec.governor.acceptance import Acceptance
from selfspec.governor.candidates import PlanCandidates, SharedPlans
from selfspec.governor.costs import Costs, StepCost, estimated_cost
from selfspec.governor.governor import Budget
from selfspec.profiles.profile import Spread
from selfspec.speculation.plan import NONE, Plan
from tests.calibrated import quieten
from tests.profiles import choice_of, profile_of, random_exit
from tests.scripted import endless, random_prompt
from tests.tiny import tiny_model

RANKS = {"0": [[0.6, 0.1, 0.05], [0.6, 0.1], [0.5]], "1": [[0.5, 0.1], [0.4]]}
MISSED = 99  # a rank that no plan has
CHAIN, TREE = Plan.parse("chain:2"), Plan.parse("tree:2,1")


def text(*ranks: list[int], times: int = 1) -> Text:
    """A text whose tokens have these ranks by depth, repeated `times` times."""
    padded = [[*of_token, *[MISSED] * (5 - len(of_token))] for of_token in ranks]
    return Text(np.array(padded * times), "text", False, 0.5, 20, list(range(1 + len(padded) * times)), 1)


def timing() -> DomainTiming:
    """Plain steps of 1 s, and of 1.3 s for four sequences, in a domain whose drafts are mostly accepted."""
    costs = {
        band: StepCost(plain=plain, depth=0.1, drafting=((1, 1.1), (8, 1.2)), head_row=0.0, head_rows=0)
        for band, plain in (("1", 1.0), ("2-4", 1.3))
    }
    agreement, model = Spread(mean=0.5, deviation=0.1), estimated_cost(3, 30)
    acceptance = Acceptance([[0.64, 0.10, 0.05, 0.03, 0.02, 0.01]] * 4)
    models = {1: model, 4: model, 16: model}
    candidates = PlanCandidates(acceptance, models, SharedPlans(acceptance, models, max_tree_batch=4))
    return DomainTiming(candidates, choice_of(1, "none", costs=costs, prompt_agreement=agreement), Rules())


def engine_of(folder: Path, **entries: Any) -> Engine:
    """A model with a trained exit, some of whose drafts are accepted and some rejected."""
    hf = quieten(endless(tiny_model("llama")), 2, 0.3)
    exit = random_exit(Engine.from_model(hf).model, 2, scale=0.02)
    profile = profile_of(exit.model, {"text": choice_of(2, "chain:2", **{"ranks": RANKS, **entries})})
    return Engine.from_model(hf, profile=profile.save(folder, [exit]))


def test_a_plan_accepts_by_the_ranks_of_its_own_depths() -> None:
    one = text([0, 0], [1, 0], [1, 1], [MISSED])
    assert [one.last(CHAIN, position)[0] for position in range(5)] == [2, 0, 0, 0, 0]
    assert [one.last(TREE, position)[0] for position in range(5)] == [3, 4, 2, 0, 0]


def test_a_plan_accepts_copied_tokens_where_they_reach_farther_than_the_exit() -> None:
    """The text repeats three tokens; the exit is right about one token, at the first position only."""
    one = replace(text([0], [MISSED], [MISSED], [MISSED]), tokens=[5, 6, 7, 5, 6, 7, 5], prompt=3)
    assert [one.last(CHAIN.with_copy(3), position) for position in range(4)] == [(4, 4), (3, 0), (2, 0), (1, 0)]


@pytest.mark.parametrize(("rank", "steps"), [(0, ceil(20 / 3)), (MISSED, 20)])
def test_a_fixed_plan_takes_more_steps_where_its_drafts_are_rejected(rank: int, steps: int) -> None:
    assert replay.fixed([text([rank, rank], times=20)], CHAIN, lambda sequences, plan: 1.0) == steps
    assert replay.fixed([text([rank, rank], times=20)], NONE, lambda sequences, plan: 1.0) == 20


def test_a_step_takes_the_time_of_the_sequences_that_have_not_ended() -> None:
    texts = [text([0], times=4), text([0], times=10)]
    assert replay.fixed(texts, NONE, lambda sequences, plan: sequences) == 4 * 2 + 6
    assert timing().seconds(1, NONE) == 1.0
    assert timing().seconds(2, NONE) == pytest.approx(1.1)
    assert timing().seconds(3, NONE) == 1.3


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(("rank", "slowest", "fastest"), [(0, 0, 0.5), (MISSED, 1.0, 1.04)])
def test_the_governor_drafts_where_drafts_are_accepted_and_decodes_plainly_elsewhere(
    sequences: int, rank: int, slowest: float, fastest: float, noise: float
) -> None:
    texts = [text([rank] * 5, times=200)] * sequences
    plain = replay.fixed(texts, NONE, timing().seconds)
    governed = replay.Governed(texts, timing(), Costs(), Budget(4.0, 0.01), noise)
    assert slowest * plain <= governed.run() <= fastest * plain
    drafting = sum(len(plan) > 0 for plan in governed.plans) / len(governed.plans)
    assert drafting < 0.1 if rank == MISSED else drafting > 0.8


@pytest.mark.parametrize("plan", ["chain:2", "tree:2,1", "tree:3,2,1"])
def test_a_replay_takes_as_many_steps_as_an_engine(plan: str, tmp_path: Path) -> None:
    engine, prompt = engine_of(tmp_path), random_prompt(9)
    (one,) = replay.record(engine, PromptSet("text", [prompt], 40))
    forced = {"plan": plan, "speculative_decoding": "force", "do_sample": False, "return_dict_in_generate": True}
    out: Any = engine.generate(torch.tensor([prompt]), max_new_tokens=len(one.ranks), **forced)  # type: ignore[arg-type]
    (stats,) = out.stats
    steps = replay.fixed([one], Plan.parse(plan), lambda sequences, plan: 1.0)
    assert len(one.ranks) == 40
    assert stats.cycles == steps
    assert stats.cycles < 40, "nothing was accepted, so that nothing was compared"


def test_the_command_compares_all_batch_sizes_and_records_texts_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = StepCost(plain=1.0, depth=0.05, drafting=((1, 1.0), (8, 1.1)), head_row=0.0, head_rows=0)
    engine = engine_of(tmp_path, costs={"1": cost})
    prompts = PromptSet("text", [random_prompt(9), random_prompt(20)], 30)
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_, **__: engine)
    monkeypatch.setattr(replay, "sets_of", lambda *_: [prompts])
    texts = tmp_path / "texts.json"
    assert replay.main(["--batch", "1", "2", "--texts", str(texts)]) == 0
    monkeypatch.setattr(replay, "record", lambda *_: pytest.fail("recorded a set that the file has"))
    capsys.readouterr()
    assert replay.main(["--batch", "1", "2", "--texts", str(texts)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(cell["set"], cell["batch"], cell["texts"]) for cell in found["results"]] == [
        ("text", 1, 2),
        ("text", 2, 2),
    ]
    assert all(cell["best_fixed_against_plain"] > 0.5 for cell in found["results"])


def test_forced_texts_are_replayed_as_given(tmp_path: Path) -> None:
    prompt, given = random_prompt(9), random_prompt(30, seed=1)
    forced = ForcedTexts([prompt], [given])
    (one,) = replay.record(engine_of(tmp_path), PromptSet("noise", [prompt], 25, forced=forced))
    assert len(one.ranks) == 25
    assert (one.ranks[:, 0] == 0).mean() < 0.5, "the ranks are those of the model's own text"
