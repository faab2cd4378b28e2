"""The governor's benchmark on a tiny model: sets of prompts, recorded calls, comparisons of modes, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from bench import governor, governor_report
from bench.forced_text import ForcedTexts
from bench.governor_calls import (
    Call,
    Mode,
    around_switch,
    compare,
    drafts_at,
    ood_counts,
    resumption,
    run_request,
    tokens_until_drafting,
)
from bench.governor_sets import FOREIGN_TOKENS, HIGH_TEMPERATURE, IN_DOMAIN, Missing, PromptSet, Source
from selfspec import Engine, Rules
from selfspec.governor.costs import gpu_rows
from selfspec.history import Change, StepRecord
from selfspec.sequence import Request
from selfspec.sequence import Sequence as Sequence_
from selfspec.speculation.plan import NONE
from tests.calibrated import chat_tokenizer, quieten
from tests.profiles import choice_of, profile_of
from tests.scripted import endless
from tests.tiny import tiny_model

RANKS = {"0": [[0.6, 0.2, 0.1], [0.5, 0.2]], "1": [[0.4, 0.2, 0.1]]}
PLAIN_STEP = StepRecord.of(NONE, NONE, None)
CHEAP = Rules(budget=1000.0, max_step=inf)


@cache
def engine() -> Engine:
    """A model with some drafts accepted and some rejected, and a profile with ranks for two domains."""
    engine = Engine.from_model(quieten(endless(tiny_model("llama")), 2, 0.2), chat_tokenizer(), rules=CHEAP)
    code = choice_of(2, "chain:1", ranks=RANKS)
    profile = profile_of(engine.model, {"code": code, "chat": choice_of(1, "chain:1", ranks=RANKS)})
    return Engine(engine.model, chat_tokenizer(), engine.generation_config, profile, CHEAP)


def source(**settings: Any) -> Source:
    return Source(engine(), **{"folder": None, "limit": 2, "new_tokens": 10, **settings})


def written(prompts: PromptSet, **options: Any) -> list[list[int]]:
    """The new tokens of each of a set's prompts."""
    settings = {"max_new_tokens": prompts.new_tokens, "do_sample": False, **options}
    processors = [] if prompts.forced is None else [prompts.forced]
    outputs = [engine().generate(torch.tensor([p]), logits_processor=processors, **settings) for p in prompts.prompts]
    return [out[0, len(p) :].tolist() for out, p in zip(outputs, prompts.prompts, strict=True)]  # type: ignore[index]


# Sets


@pytest.mark.parametrize("plan", ["none", "tree:2,1"])
def test_a_forced_text_is_written_to_its_end_and_then_the_model_chooses(plan: str) -> None:
    prompts, texts = [[5, 6, 7], [5, 6], [8, 9, 10, 11]], [[20, 21, 22], [30, 31], [40]]
    forced = PromptSet("forced", prompts, new_tokens=6, forced=ForcedTexts(prompts, texts))
    options = {"plan": plan, "exit_layer": 2, "speculative_decoding": "force"}
    found = written(forced, **options)
    assert [text[: len(given)] for text, given in zip(found, texts, strict=True)] == texts
    joined = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    for text, given, whole in zip(found, texts, joined, strict=True):
        (free,) = written(PromptSet("free", [whole], new_tokens=6 - len(given)))
        assert text[len(given) :] == free


def test_a_call_that_does_not_write_its_forced_text_is_an_error() -> None:
    prompts, texts = [[5, 6, 7], [8, 9]], [[20, 21, 22], [30, 31]]
    forced = PromptSet("forced", prompts, new_tokens=2, forced=ForcedTexts(prompts, texts))
    bench = governor.Bench(engine(), governor.profile_of(engine()))
    (batch,) = bench.batches(prompts, 2)
    plain, *_ = bench.modes(forced, 2, "code")
    assert bench.call(plain, forced, batch).tokens == [[20, 21], [30, 31]]
    free = replace(bench, forces_in_steps=True)  # without a processor, and its engine's steps force nothing
    with pytest.raises(RuntimeError, match="plain wrote other texts"):
        free.call(plain, forced, batch)


def test_switch_forces_the_models_answer_and_then_another_language() -> None:
    given, answers = source(), written(source().build("code"))
    switched = written(given.build("switch"))
    assert [text[:5] for text in switched] == [answer[:5] for answer in answers]
    assert [text[5:] for text in switched] == [given.foreign(0, 5), given.foreign(1, 5)]
    assert given.build("switch").switch_at == 5 and not given.build("switch").ends_in_domain


def test_return_forces_another_language_and_then_the_models_answer() -> None:
    given, answers = source(), written(source().build("code"))
    returned = given.build("return")
    assert returned.ends_in_domain and returned.switch_at == FOREIGN_TOKENS
    assert returned.new_tokens == FOREIGN_TOKENS + 10
    found = written(returned)
    assert [text[:FOREIGN_TOKENS] for text in found] == [
        given.foreign(0, FOREIGN_TOKENS),
        given.foreign(1, FOREIGN_TOKENS),
    ]
    assert [text[FOREIGN_TOKENS:] for text in found] == answers


def test_short_answers_are_continued_with_the_following_ones() -> None:
    given = source(new_tokens=6)
    answers = iter([[[7, 8, 2]], [[9, 10, 11, 12, 13, 2]]])  # 2 ends a text
    with mock.patch("bench.governor_sets.ours", lambda *_, **__: lambda *_: SimpleNamespace(tokens=next(answers))):
        assert given.own_code == [[7, 8, 9, 10, 11, 12], [9, 10, 11, 12, 13, 7]]


def test_repeat_forces_a_repeated_sentence_and_then_another_language() -> None:
    given = source(new_tokens=220)
    forced = given.build("repeat").forced
    assert forced is not None
    for number, text in enumerate(forced.texts.values()):
        assert text[:110] == given.phrase(number, 110) and text[110:] == given.foreign(number, 110)
        period = next(p for p in range(1, 110) if text[p:110] == text[: 110 - p])
        assert period < 60


def test_prompts_are_read_from_files_or_from_shipped_domains(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "ab"}), json.dumps({"messages": [{"role": "user", "content": "cd"}]}), ""]
    (tmp_path / "medical.jsonl").write_text("\n".join(lines))
    given = source(folder=tmp_path)
    decode = engine().tokenizer.decode
    assert [decode(prompt) for prompt in given.prompts("medical")] == ["<s>u:ab;\na:", "<s>u:cd;\na:"]
    assert len(given.build("math").prompts) == 2
    with pytest.raises(Missing, match=r"multilingual is skipped.*multilingual\.jsonl"):
        given.build("multilingual")


def test_prompts_that_do_not_fit_the_context_with_their_new_tokens_are_left_out(tmp_path: Path) -> None:
    prompts = ["a" * length for length in (9, 400, 10)]
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    given = source(folder=tmp_path, new_tokens=200)
    assert [len(prompt) for prompt in given.prompts("chat")] == [16, 17]  # the template adds 7
    with pytest.raises(Missing, match="short enough"):
        source(folder=tmp_path, new_tokens=440).prompts("chat")


def test_random_prompts_depend_on_the_seed_and_have_no_special_tokens() -> None:
    first, again, other = (source(limit=40, seed=seed).build("random").prompts for seed in (1, 1, 2))
    assert first == again != other and len(first) == 40
    assert {0, 1, 2}.isdisjoint(token for prompt in first for token in prompt)


def test_noise_forces_a_different_random_text_on_each_random_prompt() -> None:
    first, again, other = (source(limit=3, new_tokens=20, seed=seed).build("noise") for seed in (1, 1, 2))
    assert first.prompts == source(limit=3, seed=1).build("random").prompts and first.switch_at is None
    texts, same, others = (list(noise.forced.texts.values()) for noise in (first, again, other) if noise.forced)
    assert texts == same != others and len({tuple(text) for text in texts}) == 3
    assert {0, 1, 2}.isdisjoint(token for text in texts for token in text)
    assert written(first) == texts and not first.in_domain


def test_hot_has_prompts_of_every_domain_at_a_high_temperature(tmp_path: Path) -> None:
    for domain in IN_DOMAIN:
        lines = [json.dumps({"prompt": f"{domain} {number}"}) for number in range(3)]
        (tmp_path / f"{domain}.jsonl").write_text("\n".join(lines))
    given = source(limit=5, folder=tmp_path)
    found = given.build("hot")
    assert found.temperature == HIGH_TEMPERATURE
    expected = [given.prompts(domain)[0] for domain in IN_DOMAIN] + [given.prompts("chat")[1]]
    assert found.prompts == expected


@pytest.mark.parametrize("name", ["switch-asked", "repeat-asked", "return-asked"])
def test_asked_sets_have_distinct_prompts_and_force_nothing(name: str) -> None:
    found = source(limit=100).build(name)
    assert found.forced is None and found.switch_at is None
    assert 16 <= len(found.prompts) == len({tuple(prompt) for prompt in found.prompts})


# Calls


class FakeScheduler:
    """Each step takes given seconds, emits given numbers of tokens and finds one sequence out of distribution, or none:
    `steps` holds (seconds, new tokens of each sequence, index of the sequence)."""

    def __init__(self, now: list[float], steps: Sequence[tuple[float, Sequence[int], int | None]]) -> None:
        self.now, self.steps = now, list(steps)
        self.waiting: list[Sequence_] = []

    def call(self, function: Callable[[], Any]) -> Any:
        return function()

    def step(self) -> None:
        seconds, news, ood = self.steps.pop(0)
        self.now[0] += seconds
        for index, (sequence, new) in enumerate(zip(self.waiting, news, strict=True)):
            sequence.tokens += [9] * new
            sequence.skill.was_ood = sequence.skill.was_ood or ood == index
            if new:
                sequence.history.add(PLAIN_STEP, 0)
        if not self.steps:
            self.waiting[0].request.progress.end(self.waiting[0].new_tokens)


def test_gaps_and_times_per_token_leave_out_the_first_step() -> None:
    now = [0.0]
    steps = [(4.0, (0, 0), None), (5.0, (1, 1), None), (2.0, (4, 1), 1), (3.0, (0, 3), 0), (1.0, (0, 1), 1)]
    scheduler: Any = FakeScheduler(now, steps)

    def new_request() -> Request:
        now[0] += 0.5
        return Request([Sequence_([1], seed=0, sample_index=0, max_length=20) for _ in range(2)])

    call = run_request(scheduler, new_request, lambda: 10 * now[0], lambda: now[0])
    assert call.prepare_s == 0.5 and call.step_s == pytest.approx(155.0) and call.seconds == 15.0
    assert call.gaps == [(2.0, 1), (2.0, 1), (3.0, 1), (1.0, 1)]
    assert call.token_times == [(0.5, 4), (2.0, 1), (1.0, 3), (1.0, 1)]
    assert call.count == 11 and call.steps == 6
    assert call.ood_at == [5, 2]


def test_every_mode_writes_the_tokens_of_generate() -> None:
    prompts = PromptSet("chat", [[5, 6, 7], [8, 9]], new_tokens=6)
    bench = governor.Bench(engine(), governor.profile_of(engine()))
    (batch,) = bench.batches(prompts.prompts, 2)
    expected = written(prompts, speculative_decoding=False)
    for mode in bench.modes(prompts, 2, "chat"):
        assert bench.call(mode, prompts, batch).tokens == expected, mode.name


def test_fixed_modes_use_their_plan_and_plain_drafts_nothing() -> None:
    prompts = PromptSet("chat", [[5, 6, 7]], new_tokens=12)
    bench = governor.Bench(engine(), governor.profile_of(engine()))
    (batch,) = bench.batches(prompts.prompts, 1)
    plain, *fixed, governed = bench.modes(prompts, 1, "code")
    assert {change.plan for change in bench.call(plain, prompts, batch).changes[0]} == {"none"}
    for mode in fixed:
        assert [change.plan for change in bench.call(mode, prompts, batch).changes[0]] == [mode.name]
    chosen = {change.plan for change in bench.call(governed, prompts, batch).changes[0]}
    assert chosen and chosen <= {"none", *(mode.name for mode in fixed)}


def test_fixed_plans_include_those_whose_steps_are_too_long_for_the_governor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.engine.time_rows", lambda *_: gpu_rows)  # timed rows differ from engine to engine
    prompts, limited = PromptSet("chat", [[5, 6, 7]], new_tokens=12), replace(CHEAP, max_step=2.5)
    plans = []
    for rules in (CHEAP, limited):
        model = Engine(engine().model, chat_tokenizer(), engine().generation_config, engine().profile, rules)
        bench = governor.Bench(model, governor.profile_of(model))
        plans.append({mode.name for mode in bench.modes(prompts, 1, "code")})
    assert plans[0] <= plans[1]
    own = {str(plan) for plan in bench._plans(bench.profile.choice("code"), "code", 0.0, 1)}
    assert own == plans[1] - {"plain", "governor"}


def test_fixed_plans_are_those_of_the_option() -> None:
    bench = governor.Bench(engine(), governor.profile_of(engine()), plans=governor.parse(["--plans", "chain:3"]).plans)
    modes = bench.modes(PromptSet("chat", [[5, 6, 7]], new_tokens=12), 1, "code")
    assert [mode.name for mode in modes] == ["plain", "chain:3", "governor"]


def test_an_end_token_ends_a_sequence_unless_it_is_ignored() -> None:
    prompts = PromptSet("chat", [[5, 6, 7]], new_tokens=12)
    (text,) = written(prompts)
    model = engine()
    with mock.patch.object(model.generation_config, "eos_token_id", text[3]):
        for ignored in (False, True):
            bench = governor.Bench(model, governor.profile_of(model), ignore_eos=ignored)
            mode, *_ = bench.modes(prompts, 1, "code")
            (found,) = bench.call(mode, prompts, bench.batches(prompts.prompts, 1)[0]).tokens
            assert found == (text if ignored else text[: text.index(text[3]) + 1])


# Comparisons


def call(seconds: float, count: int = 10, **entries: Any) -> Call:
    """A call of one sequence that emits one token per step, where `entries` say nothing else."""
    defaults = {
        "tokens": [[7] * count], "seconds": seconds, "prepare_s": 0.0, "step_s": seconds, "steps": count,
        "emissions": [(seconds / count, [1])] * count, "ood_at": [None], "changes": [[]],
    }  # fmt: skip
    return Call(**{**defaults, **entries})


def mode(name: str, *seconds: float | Call) -> Mode:
    """A mode with one call for each batch, of these seconds."""
    found = Mode(name, name, {})
    for number, of_batch in enumerate(seconds):
        found.add(number, of_batch if isinstance(of_batch, Call) else call(of_batch))
    return found


def test_the_time_of_a_batch_is_the_median_over_repetitions() -> None:
    found = mode("plain", 1.0, 2.0)
    for number, seconds in ((0, 9.0), (0, 1.5), (1, 2.0), (1, 0.1)):
        found.add(number, call(seconds))
    assert found.total() == pytest.approx(1.5 + 2.0) and found.speed() == pytest.approx(20 / 3.5)


def test_the_best_fixed_plan_has_the_least_total_time() -> None:
    plain, a, b = mode("plain", 2.0, 2.0), mode("a", 1.0, 3.0), mode("b", 1.8, 1.8)
    found = compare(plain, [a, b], mode("governor", 2.0, 1.6), new_tokens=10)
    assert found["best_fixed"] == "b" and found["best_fixed_against_plain"] == pytest.approx(2 / 1.8, abs=1e-4)
    assert found["governor_against_plain"] == pytest.approx(4 / 3.6, abs=1e-4)
    assert found["governor_against_best_fixed"] == 1.0 and found["worst_call"] == 1.0


def test_times_in_steps_have_their_own_best_fixed_plan() -> None:
    plain = mode("plain", 2.0)
    a, b = mode("a", call(1.0, step_s=1.0)), mode("b", call(2.0, step_s=0.5))
    found = compare(plain, [a, b], mode("governor", call(1.0, step_s=0.8)), new_tokens=10)
    assert found["best_fixed"] == "a" and found["governor_against_best_fixed"] == 1.0
    assert found["governor_against_plain_in_steps"] == 2.5
    assert found["governor_against_best_fixed_in_steps"] == 0.625


def test_time_outside_steps_is_a_share_of_the_time_between_emissions() -> None:
    emissions = [(9.0, [1]), (0.5, [1]), (0.5, [1]), (0.25, [1])]  # the first gap includes prefill
    assert call(1.0, emissions=emissions, step_s=4 * 0.375).outside_steps == pytest.approx(1 - 3 * 0.375 / 1.25)
    assert call(1.0, emissions=emissions[:1], step_s=0.5).outside_steps == 0


def test_time_before_prefill_is_reported_separately() -> None:
    governed = mode("governor", call(1.0, prepare_s=0.6))
    found = compare(mode("plain", 2.0), [mode("a", 1.0)], governed, new_tokens=10)
    assert found["governor_against_plain"] == 2.0 and found["governor_against_plain_with_preparation"] == 1.25


def test_the_worst_call_is_reported_with_and_without_short_texts() -> None:
    plain, fixed = mode("plain", call(1.0), call(1.0, count=3)), mode("a", call(1.0), call(1.0, count=3))
    found = compare(plain, [fixed], mode("governor", call(1.25), call(2.0, count=3)), new_tokens=10)
    assert found["worst_call"] == 0.5 and found["worst_full_length_call"] == 0.8 and found["full_length_calls"] == 1


def test_the_p99_gap_is_divided_by_that_of_plain_decoding() -> None:
    emissions = [(9.0, [1])] + [(0.001, [1])] * 98 + [(0.004, [1])] * 2
    governed = mode("governor", call(1.0, emissions=emissions))
    plain = mode("plain", call(1.0, emissions=[(0.002, [1])] * 3))
    found = compare(plain, [mode("a", 1.0)], governed, 10)
    assert found["gap_p99_against_plain"] == 2.0


def test_seconds_per_token_are_those_of_a_part_of_the_text() -> None:
    first, *rest = (9.0, [1, 1]), (2.0, [1, 3]), (4.0, [2, 2])  # sequences of 1, 2, 4 and of 1, 4, 6 tokens
    found = call(1.0, tokens=[[7] * 4, [7] * 6], emissions=[first, *rest])
    assert found.seconds_per_token(0, 2) == pytest.approx(
        (2.0 * 2 / 4) / 2
    )  # one token of each sequence, of the second step
    assert found.seconds_per_token(2, float("inf")) == pytest.approx((2.0 * 2 / 4 + 4.0) / (2 + 4))
    assert found.seconds_per_token(4, 5) == pytest.approx(4.0 / 4)


def test_speeds_are_reported_before_and_after_the_switch() -> None:
    def timed(name: str, before: float, after: float) -> Mode:
        return mode(name, call(1.0, emissions=[(9.0, [1])] + [(before, [1])] * 4 + [(after, [1])] * 5))

    fixed = [timed("a", 0.5, 3.0), timed("b", 2.0, 2.5)]
    assert around_switch(5, timed("plain", 1.0, 2.0), fixed, timed("governor", 0.8, 2.0)) == {
        "before": {"best_fixed_against_plain": 2.0, "governor_against_plain": 1.25},
        "after": {"best_fixed_against_plain": 0.8, "governor_against_plain": 1.0},
    }


def test_a_batch_loses_if_each_fixed_plan_is_below_097_of_plain_speed() -> None:
    plain = mode("plain", 1.0, 1.0, 1.0, 1.0)
    fixed = [mode("a", 1.02, 2.0, 1.1, 1.1), mode("b", 2.0, 0.9, 1.2, 1.04)]  # the best of each: 0.98, 1.11, 0.91, 0.96
    found_at = [None, 3, 31, 32]
    governed = mode("governor", *(call(1.0, ood_at=[at]) for at in found_at))
    assert ood_counts(plain, fixed, governed) == {
        "sequences": 4, "found": 3, "found_at": [3, 31, 32], "losing": 2, "losing_found_early": 1,
    }  # fmt: skip


def test_a_sequence_is_out_of_distribution_if_it_is_in_most_repetitions() -> None:
    found = mode("governor", call(1.0, ood_at=[3, 4]))
    found.add(0, call(1.0, ood_at=[None, None]))
    found.add(0, call(1.0, ood_at=[9, None]))
    assert found.ood_at(0) == [9, float("inf")]


def changes(*plans: tuple[int, str]) -> list[Change]:
    return [Change(0, token, plan, None) for token, plan in plans]


@pytest.mark.parametrize(
    ("plans", "expected"),
    [
        ([(0, "none"), (80, "chain:2")], 16),
        ([(0, "chain:2")], 0),  # drafting all the time
        ([(0, "chain:2"), (20, "none"), (60, "chain:1"), (75, "none")], 0),  # resumed before the switch
        ([(0, "none"), (70, "chain:2"), (76, "none"), (90, "chain:1")], 26),  # a probe at first
        ([(0, "none"), (70, "chain:2"), (74, "chain:1"), (78, "none")], 6),  # two plans, one after the other
        ([(0, "chain:1"), (66, "none")], None),  # drafting stops soon after the switch
        ([(0, "none"), (124, "chain:1")], None),  # too few tokens to the end
        ([(0, "none")], None),
    ],
)
def test_drafting_resumes_where_it_lasts_for_8_tokens(plans: list[tuple[int, str]], expected: int | None) -> None:
    assert tokens_until_drafting(changes(*plans), switch_at=64, end=128) == expected


def test_resumption_counts_all_texts() -> None:
    def text(*plans: tuple[int, str]) -> Call:
        return call(1.0, count=128, changes=[changes(*plans)])

    governed = mode("governor", text((0, "none"), (80, "chain:2")), text((0, "chain:2")), text((0, "none")))
    found = resumption(governed, switch_at=64)
    assert found == {"texts": 3, "plain_at_switch": 2, "never_resumed": 1, "tokens_median": 8, "tokens_max": 16}
    assert drafts_at(changes((0, "none"), (64, "chain:1"), (65, "none")), 64)


# The command


def test_modes_alternate_and_each_batch_begins_with_the_next_mode() -> None:
    bench = governor.Bench(engine(), governor.profile_of(engine()), repeat=2)
    prompts = PromptSet("chat", [[5, 6], [7, 8], [9, 10]], new_tokens=2)
    called: list[tuple[str, int]] = []

    def record(mode: Mode, _: PromptSet, batch: Any, new_tokens: int | None = None) -> Call:
        if new_tokens is None:
            called.append((mode.name, batch.prompts[0][0]))
        return call(1.0)

    with mock.patch.object(bench, "call", record):
        cell = bench.cell(prompts, 1, 3)
    names = [mode["mode"] for mode in cell["modes"]]
    rounds = [called[at : at + len(names)] for at in range(0, len(called), len(names))]
    assert [{prompt for _, prompt in of_round} for of_round in rounds] == [{5}, {7}, {9}] * 2
    assert all({name for name, _ in of_round} == set(names) for of_round in rounds)
    assert [of_round[0][0] for of_round in rounds] == [names[number % len(names)] for number in range(6)]


def run(capsys: pytest.CaptureFixture[str], out: Path, command: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    with mock.patch.object(governor, "open_engine", lambda _: engine()):
        assert governor.main([*command.split(), "--out", str(out)]) == code
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


def test_the_command_measures_every_set_and_batch_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = "code medical random switch"
    text, found = run(capsys, tmp_path, f"--limit 2 --max-new-tokens 6 --batch 1 3 --sets {sets}")
    cells = found["cells"]
    expected = [(name, size) for name in sets.split() if name != "medical" for size in (1, 3)]
    assert [(cell["set"], cell["batch"]) for cell in cells] == expected
    assert "medical is skipped" in text and "after token 3: governor" in text
    for cell in cells:
        modes = [mode["mode"] for mode in cell["modes"]]
        assert modes[0] == "plain" and modes[-1] == "governor" and {"chain:1", "tree:4"} <= set(modes[1:-1])
        assert cell["calls"] == (2 if cell["batch"] == 1 else 1)
        sequences = 2 if cell["batch"] == 1 else 3
        assert {mode["same_tokens_as_plain"] for mode in cell["modes"]} == {f"{sequences}/{sequences}"}, cell["set"]
        assert cell["forced"] == (cell.get("switch_at") == 3) == (cell["set"] == "switch")
        assert "resumption" not in cell
        assert cell["domain"] == "code"  # the profile's first: it has no router
    assert found["summary"]["all_tokens_same"]
    assert all(found["summary"][name]["sequences"] == 2 for name in ("in_domain_ood", "ood_sets"))
    saved = json.loads((tmp_path / "governor.json").read_text())
    assert len(saved["cells"]) == len(cells) and saved["cells"][0]["governor_changes"]["0"][0][0]["token"] == 0
    assert (tmp_path / "governor.svg").exists() or "no plot" in text


@pytest.mark.parametrize("kernels", [True, False])
def test_the_command_fails_if_tokens_differ_from_plain_ones_on_an_engine_with_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kernels: bool
) -> None:
    with (
        mock.patch.object(Mode, "same_as", lambda *_: "0/1"),
        mock.patch("bench.machine.describe", lambda *_: {"kernels": kernels, "model": "tiny", "device": "cpu"}),
        mock.patch("bench.tables.setup", lambda _: []),
    ):
        command = "--limit 1 --max-new-tokens 2 --batch 1 --sets random"
        assert not run(capsys, tmp_path, command, code=int(kernels))[1]["summary"]["all_tokens_same"]


def test_a_model_without_a_profile_with_ranks_is_refused() -> None:
    bare = Engine(engine().model)
    with pytest.raises(SystemExit, match="no profile"):
        governor.profile_of(bare)
    known = {"code": choice_of(2, "chain:1", ranks=RANKS), "chat": choice_of(1, "chain:1")}
    fixed = Engine(engine().model, profile=profile_of(engine().model, known))
    with pytest.raises(SystemExit, match="no ranks"):
        governor.profile_of(fixed)


def test_the_summary_has_the_worst_figures_of_all_cells() -> None:
    def cell(name: str, in_domain: bool, size: int, value: float, full: float | None) -> dict[str, Any]:
        counts = {"sequences": 4, "found": 2, "losing": 3, "losing_found_early": 1}
        return {
            "set": name, "in_domain": in_domain, "batch": size, "governor_against_best_fixed": value,
            "governor_against_plain": value, "worst_full_length_call": full, "gap_p99_against_plain": 2 * value,
            "ood": counts, "modes": [{"same_tokens_as_plain": "4/4"}],
        }  # fmt: skip

    cells = [cell("code", True, 1, 0.9, 0.1), cell("chat", True, 4, 0.8, 0.1)]
    cells += [cell("random", False, 1, 0.7, None), cell("hot", False, 1, 0.6, 0.5)]
    cells += [cell("noise", False, 1, 0.7, None), cell("noise", False, 4, 0.7, None)]
    found = governor_report.summary(cells)
    assert found["in_domain_min_against_best_fixed"] == 0.8 and found["in_domain_max_gap_p99_against_plain"] == 1.8
    assert found["other_sets_min_against_plain"] == 0.6 and found["other_sets_worst_full_length_call"] == 0.5
    assert found["ood_sets"] == {"sequences": 8, "found": 4, "losing": 6, "losing_found_early": 2}  # batch 1 only
    assert found["in_domain_ood"]["sequences"] == 4
    assert found["all_tokens_same"]
    cells[1]["modes"].append({"same_tokens_as_plain": "3/4"})
    assert not governor_report.summary(cells)["all_tokens_same"]
    assert governor_report.summary([])["other_sets_min_against_plain"] is None


@pytest.mark.parametrize(("arguments", "longest"), [([], None), (["--max-step", "1.85"], 1.85)])
def test_max_step_is_the_rule_of_the_engine(arguments: list[str], longest: float | None) -> None:
    with mock.patch.object(governor.Engine, "from_pretrained") as opened:
        governor.open_engine(governor.parse(arguments))
    assert opened.call_args.kwargs["rules"] == Rules(max_step=longest)
