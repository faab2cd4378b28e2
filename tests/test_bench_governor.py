"""The governor's benchmark, on a tiny model: its sets, what it notes of a call, what it concludes, and the command."""

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
from bench.governor_calls import Call, Mode, around, compare, detection, drafts_at, follow, returns, tokens_until_back
from bench.governor_sets import AWAY, HOT, IN_DOMAIN, Missing, PromptSet, Source
from selfspec import Engine, Rules
from selfspec.governor.governor import Change
from selfspec.sequence import Request, StepRecord
from selfspec.sequence import Sequence as Sequence_
from selfspec.speculation.plan import NONE
from tests.calibrated import chat_tokenizer, quieten
from tests.profiles import choice_of, profile_of
from tests.scripted import endless
from tests.tiny import tiny_model

RANKS = {"0": [[0.6, 0.2, 0.1], [0.5, 0.2]], "1": [[0.4, 0.2, 0.1]]}
PLAIN_STEP = StepRecord.of(NONE, NONE, None)
CHEAP = Rules(budget=1000.0, start_gain=0.0, hysteresis=0.0, max_step=inf)


@cache
def engine() -> Engine:
    """A model whose exit is right often, not always, with a profile that a governor can use."""
    engine = Engine.from_model(quieten(endless(tiny_model("llama")), 2, 0.2), chat_tokenizer(), rules=CHEAP)
    code = choice_of(2, "chain:1", ranks=RANKS)
    profile = profile_of(engine.model, {"code": code, "chat": choice_of(1, "chain:1", ranks=RANKS)})
    return Engine(engine.model, chat_tokenizer(), engine.generation_config, profile, CHEAP)


def source(**settings: Any) -> Source:
    return Source(engine(), **{"folder": None, "limit": 2, "new_tokens": 10, **settings})


def written(prompts: PromptSet, **options: Any) -> list[list[int]]:
    """What a set's prompts are continued with."""
    settings = {"max_new_tokens": prompts.new_tokens, "do_sample": False, **options}
    processors = [] if prompts.recital is None else [prompts.recital]
    outputs = [engine().generate(torch.tensor([p]), logits_processor=processors, **settings) for p in prompts.prompts]
    return [out[0, len(p) :].tolist() for out, p in zip(outputs, prompts.prompts, strict=True)]  # type: ignore[index]


# Sets


@pytest.mark.parametrize("plan", ["none", "tree:2,1"])
def test_a_recited_text_is_written_to_its_end_and_then_the_model_is_free(plan: str) -> None:
    prompts, texts = [[5, 6, 7], [5, 6], [8, 9, 10, 11]], [[20, 21, 22], [30, 31], [40]]
    recited = PromptSet("recited", prompts, new_tokens=6, recital=ForcedTexts(prompts, texts))
    options = {"plan": plan, "exit_layer": 2, "speculative_decoding": "force"}
    found = written(recited, **options)
    assert [text[: len(given)] for text, given in zip(found, texts, strict=True)] == texts
    joined = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    for text, given, whole in zip(found, texts, joined, strict=True):
        (free,) = written(PromptSet("free", [whole], new_tokens=6 - len(given)))
        assert text[len(given) :] == free


def test_a_mode_that_writes_other_texts_than_the_recited_ones_is_not_measured() -> None:
    prompts, texts = [[5, 6, 7], [8, 9]], [[20, 21, 22], [30, 31]]
    recited = PromptSet("recited", prompts, new_tokens=2, recital=ForcedTexts(prompts, texts))
    bench = governor.Bench(engine(), governor.profile_of(engine()))
    (batch,) = bench.batches(prompts, 2)
    plain, *_ = bench.modes(recited, 2, "code")
    assert bench.call(plain, recited, batch).tokens == [[20, 21], [30, 31]]
    deaf = replace(bench, recites=True)  # its engine does not, whatever it says
    with pytest.raises(RuntimeError, match="plain wrote other texts"):
        deaf.call(plain, recited, batch)


def test_texts_turn_from_what_the_model_writes_to_another_language() -> None:
    given, answers = source(), written(source().build("code"))
    switched = written(given.build("switch"))
    assert [text[:5] for text in switched] == [answer[:5] for answer in answers]
    assert [text[5:] for text in switched] == [given.foreign(0, 5), given.foreign(1, 5)]
    assert given.build("switch").turn == 5 and not given.build("switch").resumes


def test_texts_return_from_another_language_to_what_the_model_writes() -> None:
    given, answers = source(), written(source().build("code"))
    returned = given.build("return")
    assert returned.resumes and returned.turn == AWAY and returned.new_tokens == AWAY + 10
    found = written(returned)
    assert [text[:AWAY] for text in found] == [given.foreign(0, AWAY), given.foreign(1, AWAY)]
    assert [text[AWAY:] for text in found] == answers


def test_answers_that_end_early_are_continued_with_the_next_ones() -> None:
    given = source(new_tokens=6)
    answers = iter([[[7, 8, 2]], [[9, 10, 11, 12, 13, 2]]])  # 2 ends a text
    with mock.patch("bench.governor_sets.ours", lambda *_, **__: lambda *_: SimpleNamespace(tokens=next(answers))):
        assert given.own_code == [[7, 8, 9, 10, 11, 12], [9, 10, 11, 12, 13, 7]]


def test_a_phrase_is_repeated_and_then_stops() -> None:
    given = source(new_tokens=220)
    recital = given.build("repeat").recital
    assert recital is not None
    for number, text in enumerate(recital.texts.values()):
        assert text[:110] == given.phrase(number, 110) and text[110:] == given.foreign(number, 110)
        period = next(p for p in range(1, 110) if text[p:110] == text[: 110 - p])
        assert period < 60


def test_sets_are_read_from_files_or_are_what_calibration_ships(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "ab"}), json.dumps({"messages": [{"role": "user", "content": "cd"}]}), ""]
    (tmp_path / "medical.jsonl").write_text("\n".join(lines))
    given = source(folder=tmp_path)
    decode = engine().tokenizer.decode
    assert [decode(prompt) for prompt in given.prompts("medical")] == ["<s>u:ab;\na:", "<s>u:cd;\na:"]
    assert len(given.build("math").prompts) == 2
    with pytest.raises(Missing, match=r"multilingual is skipped.*multilingual\.jsonl"):
        given.build("multilingual")


def test_prompts_that_leave_no_room_for_their_text_are_left_out(tmp_path: Path) -> None:
    prompts = ["a" * length for length in (9, 400, 10)]
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    given = source(folder=tmp_path, new_tokens=200)
    assert [len(prompt) for prompt in given.prompts("chat")] == [16, 17]  # the template adds 7
    with pytest.raises(Missing, match="short enough"):
        source(folder=tmp_path, new_tokens=440).prompts("chat")


def test_random_prompts_are_the_same_for_a_seed_and_never_special() -> None:
    first, again, other = (source(limit=40, seed=seed).build("random").prompts for seed in (1, 1, 2))
    assert first == again != other and len(first) == 40
    assert {0, 1, 2}.isdisjoint(token for prompt in first for token in prompt)


def test_noise_goes_on_where_random_prompts_end_each_in_its_own_way() -> None:
    first, again, other = (source(limit=3, new_tokens=20, seed=seed).build("noise") for seed in (1, 1, 2))
    assert first.prompts == source(limit=3, seed=1).build("random").prompts and first.turn is None
    texts, same, others = (list(noise.recital.texts.values()) for noise in (first, again, other) if noise.recital)
    assert texts == same != others and len({tuple(text) for text in texts}) == 3
    assert {0, 1, 2}.isdisjoint(token for text in texts for token in text)
    assert written(first) == texts and first.is_hostile


def test_hot_prompts_are_of_every_kind(tmp_path: Path) -> None:
    for kind in IN_DOMAIN:
        lines = [json.dumps({"prompt": f"{kind} {number}"}) for number in range(3)]
        (tmp_path / f"{kind}.jsonl").write_text("\n".join(lines))
    given = source(limit=5, folder=tmp_path)
    found = given.build("hot")
    assert found.temperature == HOT
    expected = [given.prompts(kind)[0] for kind in IN_DOMAIN] + [given.prompts("chat")[1]]
    assert found.prompts == expected


@pytest.mark.parametrize("name", ["switch-asked", "repeat-asked", "return-asked"])
def test_twins_only_ask_for_such_texts(name: str) -> None:
    found = source(limit=100).build(name)
    assert found.recital is None and found.turn is None
    assert 16 <= len(found.prompts) == len({tuple(prompt) for prompt in found.prompts})


# Calls


class FakeScheduler:
    """Gives a request's sequences tokens as scripted; each step takes the seconds that are told."""

    def __init__(self, now: list[float], steps: Sequence[tuple[float, Sequence[int], int | None]]) -> None:
        self.now, self.steps = now, list(steps)
        self.waiting: list[Sequence_] = []

    def call(self, function: Callable[[], Any]) -> Any:
        return function()

    def step(self) -> None:
        seconds, news, flagged = self.steps.pop(0)
        self.now[0] += seconds
        for index, (sequence, new) in enumerate(zip(self.waiting, news, strict=True)):
            sequence.tokens += [9] * new
            sequence.skill.ood = sequence.skill.ood or flagged == index
            if new:
                sequence.records.append(PLAIN_STEP)
                sequence.last_nodes.append(0)
        if not self.steps:
            self.waiting[0].request.progress.end(self.waiting[0].new_tokens)


def test_a_call_notes_gaps_and_times_per_token_but_for_the_first_which_waits_for_the_prompt() -> None:
    now = [0.0]
    steps = [(4.0, (0, 0), None), (5.0, (1, 1), None), (2.0, (4, 1), 1), (3.0, (0, 3), 0), (1.0, (0, 1), 1)]
    scheduler: Any = FakeScheduler(now, steps)

    def opened() -> Request:
        now[0] += 0.5
        return Request([Sequence_([1], seed=0, sample_index=0, max_length=20) for _ in range(2)])

    call = follow(scheduler, opened, lambda: 10 * now[0], lambda: now[0])
    assert call.opening_s == 0.5 and call.cycle_s == pytest.approx(155.0) and call.seconds == 15.0
    assert call.gaps == [(2.0, 1), (2.0, 1), (3.0, 1), (1.0, 1)]
    assert call.token_times == [(0.5, 4), (2.0, 1), (1.0, 3), (1.0, 1)]
    assert call.count == 11 and call.cycles == 6
    assert call.flagged == [5, 2]


def test_a_call_has_the_tokens_that_generate_has() -> None:
    prompts = PromptSet("chat", [[5, 6, 7], [8, 9]], new_tokens=6)
    bench = governor.Bench(engine(), governor.profile_of(engine()))
    (batch,) = bench.batches(prompts.prompts, 2)
    expected = written(prompts, speculative_decoding=False)
    for mode in bench.modes(prompts, 2, "chat"):
        assert bench.call(mode, prompts, batch).tokens == expected, mode.name


def test_fixed_modes_draft_what_they_say_and_plain_nothing() -> None:
    prompts = PromptSet("chat", [[5, 6, 7]], new_tokens=12)
    bench = governor.Bench(engine(), governor.profile_of(engine()))
    (batch,) = bench.batches(prompts.prompts, 1)
    plain, *fixed, governed = bench.modes(prompts, 1, "code")
    assert {change.plan for change in bench.call(plain, prompts, batch).changes[0]} == {"none"}
    for mode in fixed:
        assert [change.plan for change in bench.call(mode, prompts, batch).changes[0]] == [mode.name]
    chosen = {change.plan for change in bench.call(governed, prompts, batch).changes[0]}
    assert chosen and chosen <= {"none", *(mode.name for mode in fixed)}


def test_fixed_plans_may_be_too_long_for_the_governor() -> None:
    prompts, limited = PromptSet("chat", [[5, 6, 7]], new_tokens=12), replace(CHEAP, max_step=2.5)
    plans = []
    for rules in (CHEAP, limited):
        model = Engine(engine().model, chat_tokenizer(), engine().generation_config, engine().profile, rules)
        bench = governor.Bench(model, governor.profile_of(model))
        plans.append({mode.name for mode in bench.modes(prompts, 1, "code")})
    assert plans[0] <= plans[1]
    own = {str(plan) for plan in bench._plans(bench.profile.choice("code"), "code", 0.0, 1)}
    assert own == plans[1] - {"plain", "governor"}


def test_fixed_plans_are_those_that_were_asked_for() -> None:
    bench = governor.Bench(engine(), governor.profile_of(engine()), plans=governor.parse(["--plans", "chain:3"]).plans)
    modes = bench.modes(PromptSet("chat", [[5, 6, 7]], new_tokens=12), 1, "code")
    assert [mode.name for mode in modes] == ["plain", "chain:3", "governor"]


def test_texts_end_at_the_end_token_unless_that_is_ignored() -> None:
    prompts = PromptSet("chat", [[5, 6, 7]], new_tokens=12)
    (text,) = written(prompts)
    model = engine()
    with mock.patch.object(model.generation_config, "eos_token_id", text[3]):
        for ignored in (False, True):
            bench = governor.Bench(model, governor.profile_of(model), ignore_eos=ignored)
            mode, *_ = bench.modes(prompts, 1, "code")
            (found,) = bench.call(mode, prompts, bench.batches(prompts.prompts, 1)[0]).tokens
            assert found == (text if ignored else text[: text.index(text[3]) + 1])


# Conclusions


def call(seconds: float, count: int = 10, **entries: Any) -> Call:
    usual = {
        "tokens": [[7] * count], "seconds": seconds, "opening_s": 0.0, "cycle_s": seconds, "cycles": count,
        "steps": [(seconds / count, [1])] * count, "flagged": [None], "changes": [[]],
    }  # fmt: skip
    return Call(**{**usual, **entries})


def mode(name: str, *seconds: float | Call) -> Mode:
    """A mode that took so long for each batch, once."""
    found = Mode(name, name, {})
    for number, of_batch in enumerate(seconds):
        found.add(number, of_batch if isinstance(of_batch, Call) else call(of_batch))
    return found


def test_repetitions_count_by_their_median() -> None:
    found = mode("plain", 1.0, 2.0)
    for number, seconds in ((0, 9.0), (0, 1.5), (1, 2.0), (1, 0.1)):
        found.add(number, call(seconds))
    assert found.total() == pytest.approx(1.5 + 2.0) and found.speed() == pytest.approx(20 / 3.5)


def test_the_best_fixed_plan_is_the_one_of_least_total_time() -> None:
    plain, a, b = mode("plain", 2.0, 2.0), mode("a", 1.0, 3.0), mode("b", 1.8, 1.8)
    found = compare(plain, [a, b], mode("governor", 2.0, 1.6), new_tokens=10)
    assert found["best_fixed"] == "b" and found["best_fixed_against_plain"] == pytest.approx(2 / 1.8, abs=1e-4)
    assert found["governor_against_plain"] == pytest.approx(4 / 3.6, abs=1e-4)
    assert found["governor_against_best_fixed"] == 1.0 and found["worst_call"] == 1.0


def test_times_in_cycles_have_a_best_plan_of_their_own() -> None:
    plain = mode("plain", 2.0)
    a, b = mode("a", call(1.0, cycle_s=1.0)), mode("b", call(2.0, cycle_s=0.5))
    found = compare(plain, [a, b], mode("governor", call(1.0, cycle_s=0.8)), new_tokens=10)
    assert found["best_fixed"] == "a" and found["governor_against_best_fixed"] == 1.0
    assert found["governor_against_plain_in_cycles"] == 2.5
    assert found["governor_against_best_fixed_in_cycles"] == 0.625


def test_what_the_host_adds_between_cycles_is_what_no_cycle_hides() -> None:
    steps = [(9.0, [1]), (0.5, [1]), (0.5, [1]), (0.25, [1])]  # the first waited for the prompt
    assert call(1.0, steps=steps, cycle_s=4 * 0.375).not_hidden == pytest.approx(1 - 3 * 0.375 / 1.25)
    assert call(1.0, steps=steps[:1], cycle_s=0.5).not_hidden == 0


def test_what_happens_before_the_prefill_is_told_separately() -> None:
    governed = mode("governor", call(1.0, opening_s=0.6))
    found = compare(mode("plain", 2.0), [mode("a", 1.0)], governed, new_tokens=10)
    assert found["governor_against_plain"] == 2.0 and found["governor_against_plain_with_opening"] == 1.25


def test_texts_that_ended_early_are_told_apart_from_whole_ones() -> None:
    plain, fixed = mode("plain", call(1.0), call(1.0, count=3)), mode("a", call(1.0), call(1.0, count=3))
    found = compare(plain, [fixed], mode("governor", call(1.25), call(2.0, count=3)), new_tokens=10)
    assert found["worst_call"] == 0.5 and found["worst_whole_call"] == 0.8 and found["whole_calls"] == 1


def test_the_longest_gaps_are_compared_with_plain_ones() -> None:
    steps = [(9.0, [1])] + [(0.001, [1])] * 98 + [(0.004, [1])] * 2
    governed, plain = mode("governor", call(1.0, steps=steps)), mode("plain", call(1.0, steps=[(0.002, [1])] * 3))
    found = compare(plain, [mode("a", 1.0)], governed, 10)
    assert found["gap_p99_against_plain"] == 2.0


def test_parts_of_a_text_have_paces_of_their_own() -> None:
    first, *rest = (9.0, [1, 1]), (2.0, [1, 3]), (4.0, [2, 2])  # rows of 1, 2, 4 and of 1, 4, 6 tokens
    found = call(1.0, tokens=[[7] * 4, [7] * 6], steps=[first, *rest])
    assert found.pace(0, 2) == pytest.approx((2.0 * 2 / 4) / 2)  # one token of each row came with the second step
    assert found.pace(2, float("inf")) == pytest.approx((2.0 * 2 / 4 + 4.0) / (2 + 4))
    assert found.pace(4, 5) == pytest.approx(4.0 / 4)


def test_speeds_are_told_for_what_comes_before_and_after_the_turn() -> None:
    def paced(name: str, before: float, after: float) -> Mode:
        return mode(name, call(1.0, steps=[(9.0, [1])] + [(before, [1])] * 4 + [(after, [1])] * 5))

    fixed = [paced("a", 0.5, 3.0), paced("b", 2.0, 2.5)]
    assert around(5, paced("plain", 1.0, 2.0), fixed, paced("governor", 0.8, 2.0)) == {
        "before": {"best_fixed_against_plain": 2.0, "governor_against_plain": 1.25},
        "after": {"best_fixed_against_plain": 0.8, "governor_against_plain": 1.0},
    }


def test_losing_texts_are_those_that_even_their_own_best_plan_slows_down() -> None:
    plain = mode("plain", 1.0, 1.0, 1.0, 1.0)
    fixed = [mode("a", 1.02, 2.0, 1.1, 1.1), mode("b", 2.0, 0.9, 1.2, 1.04)]  # the best of each: 0.98, 1.11, 0.91, 0.96
    flags = [None, 3, 31, 32]
    governed = mode("governor", *(call(1.0, flagged=[at]) for at in flags))
    assert detection(plain, fixed, governed) == {
        "rows": 4, "flagged": 3, "flagged_at": [3, 31, 32], "losing": 2, "losing_flagged_early": 1,
    }  # fmt: skip


def test_a_text_is_flagged_when_it_is_in_most_repetitions() -> None:
    found = mode("governor", call(1.0, flagged=[3, 4]))
    found.add(0, call(1.0, flagged=[None, None]))
    found.add(0, call(1.0, flagged=[9, None]))
    assert found.flagged(0) == [9, float("inf")]


def changes(*plans: tuple[int, str]) -> list[Change]:
    return [Change(0, token, plan, None) for token, plan in plans]


@pytest.mark.parametrize(
    ("plans", "expected"),
    [
        ([(0, "none"), (80, "chain:2")], 16),
        ([(0, "chain:2")], 0),  # never away
        ([(0, "chain:2"), (20, "none"), (60, "chain:1"), (75, "none")], 0),  # back a little early
        ([(0, "none"), (70, "chain:2"), (76, "none"), (90, "chain:1")], 26),  # a probe before
        ([(0, "none"), (70, "chain:2"), (74, "chain:1"), (78, "none")], 6),  # two plans in a row
        ([(0, "chain:1"), (66, "none")], None),  # it had not noticed yet
        ([(0, "none"), (124, "chain:1")], None),  # too late to tell
        ([(0, "none")], None),
    ],
)
def test_drafting_is_back_when_it_lasts(plans: list[tuple[int, str]], expected: int | None) -> None:
    assert tokens_until_back(changes(*plans), turn=64, end=128) == expected


def test_returns_are_counted_over_all_texts() -> None:
    def text(*plans: tuple[int, str]) -> Call:
        return call(1.0, count=128, changes=[changes(*plans)])

    governed = mode("governor", text((0, "none"), (80, "chain:2")), text((0, "chain:2")), text((0, "none")))
    found = returns(governed, turn=64)
    assert found == {"texts": 3, "plain_at_turn": 2, "never_back": 1, "tokens_median": 8, "tokens_most": 16}
    assert drafts_at(changes((0, "none"), (64, "chain:1"), (65, "none")), 64)


# The command


def test_modes_take_turns_and_change_who_goes_first() -> None:
    bench = governor.Bench(engine(), governor.profile_of(engine()), repeat=2)
    prompts = PromptSet("chat", [[5, 6], [7, 8], [9, 10]], new_tokens=2)
    called: list[tuple[str, int]] = []

    def note(mode: Mode, _: PromptSet, batch: Any, new_tokens: int | None = None) -> Call:
        if new_tokens is None:
            called.append((mode.name, batch.prompts[0][0]))
        return call(1.0)

    with mock.patch.object(bench, "call", note):
        cell = bench.cell(prompts, 1, 3)
    names = [mode["mode"] for mode in cell["modes"]]
    rounds = [called[at : at + len(names)] for at in range(0, len(called), len(names))]
    assert [{prompt for _, prompt in of_round} for of_round in rounds] == [{5}, {7}, {9}] * 2
    assert all({name for name, _ in of_round} == set(names) for of_round in rounds)
    assert [of_round[0][0] for of_round in rounds] == [names[turn % len(names)] for turn in range(6)]


def run(capsys: pytest.CaptureFixture[str], out: Path, command: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    with mock.patch.object(governor, "open_engine", lambda _: engine()):
        assert governor.main([*command.split(), "--out", str(out)]) == code
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


def test_the_command_measures_every_set_and_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        rows = 2 if cell["batch"] == 1 else 3
        assert {mode["same_tokens_as_plain"] for mode in cell["modes"]} == {f"{rows}/{rows}"}, cell["set"]
        assert cell["recited"] == (cell.get("turn") == 3) == (cell["set"] == "switch") and "return" not in cell
        assert cell["domain"] == "code"  # the profile's first: it routes nothing
    assert found["summary"]["all_tokens_same"]
    assert found["summary"]["in_domain_flagged"]["rows"] == 2 and found["summary"]["detected"]["rows"] == 2
    saved = json.loads((tmp_path / "governor.json").read_text())
    assert len(saved["cells"]) == len(cells) and saved["cells"][0]["governor_changes"]["0"][0][0]["token"] == 0
    assert (tmp_path / "governor.svg").exists() or "no plot" in text


@pytest.mark.parametrize("kernels", [True, False])
def test_other_tokens_than_plain_ones_fail_the_command_where_they_must_be_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kernels: bool
) -> None:
    with (
        mock.patch.object(Mode, "same_as", lambda *_: "0/1"),
        mock.patch("bench.machine.describe", lambda *_: {"kernels": kernels, "model": "tiny", "device": "cpu"}),
        mock.patch("bench.tables.setup", lambda _: []),
    ):
        command = "--limit 1 --max-new-tokens 2 --batch 1 --sets random"
        assert not run(capsys, tmp_path, command, code=int(kernels))[1]["summary"]["all_tokens_same"]


def test_a_model_whose_plans_cannot_be_governed_is_refused() -> None:
    bare = Engine(engine().model)
    with pytest.raises(SystemExit, match="no profile"):
        governor.profile_of(bare)
    known = {"code": choice_of(2, "chain:1", ranks=RANKS), "chat": choice_of(1, "chain:1")}
    fixed = Engine(engine().model, profile=profile_of(engine().model, known))
    with pytest.raises(SystemExit, match="no ranks"):
        governor.profile_of(fixed)


def test_what_cells_come_to_is_the_worst_of_them() -> None:
    def cell(name: str, hostile: bool, size: int, value: float, whole: float | None) -> dict[str, Any]:
        counts = {"rows": 4, "flagged": 2, "losing": 3, "losing_flagged_early": 1}
        return {
            "set": name, "hostile": hostile, "batch": size, "governor_against_best_fixed": value,
            "governor_against_plain": value, "worst_whole_call": whole, "gap_p99_against_plain": 2 * value,
            "detection": counts, "modes": [{"same_tokens_as_plain": "4/4"}],
        }  # fmt: skip

    cells = [cell("code", False, 1, 0.9, 0.1), cell("chat", False, 4, 0.8, 0.1)]
    cells += [cell("random", True, 1, 0.7, None), cell("hot", True, 1, 0.6, 0.5)]
    cells += [cell("noise", True, 1, 0.7, None), cell("noise", True, 4, 0.7, None)]
    found = governor_report.summary(cells)
    assert found["in_domain_least_against_best_fixed"] == 0.8 and found["in_domain_most_gap_p99_against_plain"] == 1.8
    assert found["hostile_least_against_plain"] == 0.6 and found["hostile_worst_whole_call"] == 0.5
    assert found["detected"] == {"rows": 8, "flagged": 4, "losing": 6, "losing_flagged_early": 2}  # one row at a time
    assert found["in_domain_flagged"]["rows"] == 4
    assert found["all_tokens_same"]
    cells[1]["modes"].append({"same_tokens_as_plain": "3/4"})
    assert not governor_report.summary(cells)["all_tokens_same"]
    assert governor_report.summary([])["hostile_least_against_plain"] is None


@pytest.mark.parametrize(("arguments", "longest"), [([], None), (["--max-step", "1.85"], 1.85)])
def test_a_step_may_take_as_long_as_asked_for(arguments: list[str], longest: float | None) -> None:
    with mock.patch.object(governor.Engine, "from_pretrained") as opened:
        governor.open_engine(governor.parse(arguments))
    assert opened.call_args.args[4] == Rules(max_step=longest)
