"""Whole calibrations through the command line: a tiny model, exact amounts, injected costs.

Tokens per step stand in for tokens per second, so that nothing depends on the load of this machine.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import normalize

from selfspec import Engine, Profile
from selfspec.calibrate import __main__ as command
from selfspec.calibrate import duration, outcome, resources, run, setup, timing, trial
from selfspec.calibrate.corpus import Corpus
from selfspec.calibrate.prompts import parse_domain
from selfspec.calibrate.settings import TRAINING_SHARE
from selfspec.calibrate.training import Recipe, Trainer
from selfspec.calibrate.trial import Setting
from selfspec.calibrate.writing import Writer
from selfspec.governor.rules import BATCHES, TEMPERATURES
from selfspec.profiles.exits_file import ExitsFile
from selfspec.profiles.router import prompt_embeddings
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import Plan
from selfspec.text import encode
from tests.calibrated import (
    CHAT_TEMPLATE,
    chat_tokenizer,
    cheap_drafting,
    documents_of,
    quieten,
    write_lines,
    write_prompts,
)
from tests.tiny import tiny_model
from tests.tiny_tokenizer import ids_of, tiny_tokenizer

pytestmark = pytest.mark.xdist_group("calibration")  # one calibration serves most tests

WORK = ".selfspec-calibration"
LENGTH = 64  # tokens of a row of text
WARM_UP = 5  # training steps before the full learning rate, of a calibration with a given time
AMOUNTS = ["--tokens", "1000", "--steps", "40", "--exits", "1,2"]  # three chunks
MEASURED_COSTS = run.Calibration._measured_costs
SHORT_TRIALS = (Setting("0", "1", 2, 3), Setting("0.7", "1", 1, 1), Setting("0", "2-4", 4, 0.5))


class Outcome(NamedTuple):
    """The result of a command."""

    code: int
    text: str
    out: Path

    @property
    def profile(self) -> Profile:
        return Profile.load(self.out)

    @property
    def content(self) -> dict[str, Any]:
        """The profile's file, without times."""
        content = json.loads((self.out / "profile.json").read_text())
        del content["trained"]["seconds"], content["created"]
        return content

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.out / "exits.safetensors")


class Place(NamedTuple):
    """A folder with a model and the prompts of two domains."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def domains(self) -> list[str]:
        return [f"--domain={name}={self.folder / name}.jsonl" for name in "ab"]

    def calibrate(self, out: Path | None, *arguments: str) -> Outcome:
        where = [] if out is None else ["--out", str(out)]
        text = io.StringIO()
        with redirect_stdout(text), redirect_stderr(text):
            code = command.main(["--model", str(self.model), *where, *self.domains, *arguments])
        return Outcome(code, text.getvalue(), out or self.folder)

    def engine(self, profile: Any) -> Engine:
        return Engine.from_pretrained(self.model, "cpu", profile=profile)

    def measuring_prompts(self, engine: Engine, name: str) -> list[torch.Tensor]:
        prompts = parse_domain(f"{name}={self.folder / name}.jsonl").measuring
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return [torch.tensor([encode(engine.tokenizer, chat)]) for chat in chats]


def distinct_costs(engine: Engine, exits: list[Exit]) -> run.Costs:
    """Cheap drafting, with different costs for each exit and batch."""
    cheap = cheap_drafting(engine, exits).items()
    return {(layer, batch): replace(cost, depth=0.03 + layer / 1000, head_rows=batch) for (layer, batch), cost in cheap}


def tokens_per_step(outputs: list) -> float:
    """Stands in for tokens per second."""
    tokens = sum(stats.new_tokens for output in outputs for stats in output.stats)
    return tokens / sum(max(stats.cycles for stats in output.stats) for output in outputs)


@contextmanager
def quick() -> Iterator[pytest.MonkeyPatch]:
    """Injected costs and speeds, small chunks, short answers and trials, and a checkpoint at every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.Calibration, "_measured_costs", lambda _, engine, exits: distinct_costs(engine, exits))
        recipe = Recipe.for_device
        patch.setattr(Recipe, "for_device", lambda *arguments: replace(recipe(*arguments), documents=8, length=LENGTH))
        patch.setattr(setup, "_MEASURED_WITHOUT_GPU", (24, 32))
        patch.setattr(duration, "training_step_seconds", lambda _: 0.01)
        patch.setattr(duration, "pass_cost", lambda _: duration.PassCost(1e-5, 1e-6))
        patch.setattr(run, "_CHECKPOINT_SECONDS", 0)
        patch.setattr(outcome, "SETTINGS", SHORT_TRIALS)
        patch.setattr(trial, "_speed", tokens_per_step)
        yield patch


@pytest.fixture
def quickly(tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    with quick() as patch:
        patch.setenv("SELFSPEC_HOME", str(tmp_path / "home"))
        yield patch


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A chat model whose upper layers change little, so that drafts of an exit below them are accepted at times."""
    here = Place(tmp_path_factory.mktemp("calibration"))
    quieten(tiny_model("llama", torch.float32, num_hidden_layers=4), 2, 0.7).save_pretrained(here.model)
    chat_tokenizer().save_pretrained(here.model)
    for name, letters in (("a", "abcdefgh"), ("b", "opqrstuv")):
        write_prompts(here.folder / f"{name}.jsonl", letters)
    return here


@pytest.fixture(scope="module")
def whole(place: Place) -> Outcome:
    """A calibration that was not interrupted."""
    with quick():
        return place.calibrate(place.folder / "whole", *AMOUNTS)


# The outcome


def test_a_calibration_writes_a_profile_and_a_report_and_removes_its_work(place: Place, whole: Outcome) -> None:
    assert whole.code == 0, whole.text
    assert sorted(path.name for path in whole.out.iterdir()) == ["exits.safetensors", "profile.json", "report.html"]
    assert f"<h1>Calibration of {place.model}</h1>" in (whole.out / "report.html").read_text()
    profile = whole.profile
    assert list(profile.domains) == ["a", "b"] and profile.objective == "throughput"
    assert profile.trained["steps"] == 40 and 0 < profile.trained["tokens"] < 6000
    assert profile.trained["router_accuracy"] > 0.5
    for choice in profile.domains.values():
        assert set(choice.plans) == set(TEMPERATURES)
        assert all(set(of_batch) == set(BATCHES) for of_batch in choice.plans.values())
        assert set(choice.exits) == {1, 2} and choice.exit_layer in (1, 2)
        assert choice.chain is not None and choice.chain.plan == "chain:4"
        assert choice.head_rows == 0, "a small vocabulary is not trimmed"


def test_measured_tokens_per_step_are_about_those_expected(whole: Outcome) -> None:
    for choice in whole.profile.domains.values():
        planned = choice.plans["0"]["1"]
        assert planned.expected is not None and planned.measured is not None
        assert len(Plan.parse(planned.plan)) > 0, "drafting is cheap with these costs"
        assert planned.measured.tokens_per_cycle == pytest.approx(planned.expected.tokens_per_cycle, rel=0.35)


def test_a_domain_has_the_ranks_of_its_exit_at_every_temperature(whole: Outcome) -> None:
    for choice in whole.profile.domains.values():
        rates = choice.exits[choice.exit_layer]
        assert set(choice.ranks) == set(TEMPERATURES)
        first = choice.ranks["0"][0]
        assert first[0] == pytest.approx(rates.top1, abs=1.1e-4)
        assert sum(first[:4]) == pytest.approx(rates.top4, abs=4.1e-4)
        assert all(1 <= len(depths) <= 5 and 0.05 < depths[0][0] < 1 for depths in choice.ranks.values())
        assert len({str(depths) for depths in choice.ranks.values()}) == len(TEMPERATURES)


def test_a_domain_has_the_costs_of_its_exit(whole: Outcome) -> None:
    costs = distinct_costs(None, [SimpleNamespace(layer=1), SimpleNamespace(layer=2)])  # type: ignore[arg-type]
    for choice in whole.profile.domains.values():
        assert list(choice.costs) == list(BATCHES)
        for band, cost in choice.costs.items():
            expected = costs[choice.exit_layer, BATCHES[band]]
            assert cost.depth == pytest.approx(expected.depth, rel=1e-4)
            assert (cost.plain, cost.head_row, cost.head_rows) == (1.0, 0.0, BATCHES[band])
            assert [nodes for nodes, _ in cost.drafting] == [nodes for nodes, _ in expected.drafting]
            seconds = [[seconds for _, seconds in each.drafting] for each in (cost, expected)]
            assert seconds[0] == pytest.approx(seconds[1], rel=1e-4)


def test_distances_are_of_measuring_prompts_to_the_centroid_of_their_domain(place: Place, whole: Outcome) -> None:
    """A distance is 1 minus the cosine."""
    engine, layer = place.engine(None), whole.profile.router_layer
    directions = {
        name: normalize(torch.tensor(choice.centroid), dim=0) for name, choice in whole.profile.domains.items()
    }
    for name, choice in whole.profile.domains.items():
        prompts = [prompt[0].tolist() for prompt in place.measuring_prompts(engine, name)]
        embeddings = prompt_embeddings(engine.model, engine.cache, prompts, layer)
        own, other = (1 - normalize(embeddings, dim=1) @ directions[to] for to in (name, "ab".replace(name, "")))
        assert choice.distance is not None
        assert choice.distance.mean == pytest.approx(own.mean().item(), rel=1e-3)
        assert choice.distance.deviation == pytest.approx(own.std(correction=0).item(), rel=1e-2)
        assert own.mean() < other.mean()


def test_the_command_prints_stages_tables_verdict_and_the_line_of_python(place: Place, whole: Outcome) -> None:
    for stage in ("write", "train", "measure", "try"):
        assert f"\n{stage:<9} " in whole.text
    assert "agreement with the model" in whole.text and " on this machine; Ctrl-C stops it" in whole.text
    assert "drafting is faster than plain decoding: " in whole.text
    assert "Chosen for one greedy sequence" in whole.text and "N = 1" in whole.text and "N = 2" in whole.text
    assert f'Engine.from_pretrained("{place.model}", profile="{whole.out}")' in whole.text
    for name in "ab":
        assert f"│ {name} " in whole.text
    rate = whole.profile.domains["a"].exits[2].accept_rate
    assert f"{rate:.1%}" in whole.text


@pytest.mark.parametrize("name", ["a", "b"])
def test_drafts_of_trained_exits_are_accepted_more_often(place: Place, whole: Outcome, name: str) -> None:
    """On measuring prompts, in chains, after the same layer."""
    layer = whole.profile.domains[name].exit_layer
    options = {"exit_layer": layer, "plan": "chain:3", "speculative_decoding": "force", "do_sample": False}
    rates = []
    for profile in (None, whole.out):
        engine = place.engine(profile)
        prompts = place.measuring_prompts(engine, name)
        options |= {"max_new_tokens": 48, "return_dict_in_generate": True, "eos_token_id": None}
        runs = [engine.generate(prompt, **options).stats[0] for prompt in prompts]
        rates.append(sum(stats.accepted for stats in runs) / sum(stats.cycles for stats in runs))
    untrained, trained = rates
    assert untrained > 0.02
    assert trained > 1.4 * untrained


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
def test_a_profile_does_not_change_any_token(place: Place, whole: Outcome, sampling: dict) -> None:
    plain, drafting = place.engine(None), place.engine(whole.out)
    for name in "ab":
        for prompt in place.measuring_prompts(plain, name)[:2]:
            expected = plain.generate(prompt, max_new_tokens=32, speculative_decoding=False, **sampling)
            assert torch.equal(drafting.generate(prompt, max_new_tokens=32, **sampling), expected)
            options = {"max_new_tokens": 32, "speculative_decoding": "force", "return_dict_in_generate": True}
            out = drafting.generate(prompt, **options, **sampling)
            assert torch.equal(out.sequences, expected)
            assert out.stats[0].drafted > 0, "forced"


# Stopping and resuming


def stop_at(patch: pytest.MonkeyPatch, owner: Any, name: str, when: Any) -> list[tuple]:
    """Makes a function raise KeyboardInterrupt where `when` is true of its arguments; returns its calls before."""
    real, calls = getattr(owner, name), []

    def stopping(*arguments: Any, **options: Any) -> Any:
        if when(*arguments):
            raise KeyboardInterrupt
        calls.append(arguments)
        return real(*arguments, **options)

    patch.setattr(owner, name, stopping)
    return calls


def test_a_run_stopped_in_every_stage_gives_the_same_profile(place: Place, whole: Outcome, quickly: Any) -> None:
    """Stopped while writing, training and measuring; one piece is damaged in between."""
    out = place.folder / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, Writer, "chunk", lambda writer, prompts, number, *_: number == 1)
        first = place.calibrate(out, *AMOUNTS)
    assert first.code == 130 and "the same command with --resume continues" in first.text
    assert "Traceback" not in first.text
    assert (out / WORK / "chunk-0000.safetensors").exists() and not (out / "profile.json").exists()

    with pytest.MonkeyPatch.context() as patch:
        written = stop_at(patch, Writer, "chunk", lambda *_: False)
        stop_at(patch, Trainer, "train_step", lambda trainer: trainer.step == 15)
        assert place.calibrate(out, *AMOUNTS, "--resume").code == 130
        assert [number for _, _, number, *_ in written] == [1, 2], "the first chunk is not written again"
    damaged = out / WORK / "chunk-0001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-9])

    with pytest.MonkeyPatch.context() as patch:
        written = stop_at(patch, Writer, "chunk", lambda *_: False)
        trained = stop_at(patch, Trainer, "train_step", lambda *_: False)
        stop_at(patch, run, "measure", lambda *_: True)
        assert place.calibrate(out, *AMOUNTS, "--resume").code == 130
        assert [number for _, _, number, *_ in written] == [1]
        assert len(trained) == 25 + 40, "fifteen steps of the first of two exits are not trained again"

    with pytest.MonkeyPatch.context() as patch:
        written = stop_at(patch, Writer, "chunk", lambda *_: False)
        trained = stop_at(patch, Trainer, "train_step", lambda *_: False)
        last = place.calibrate(out, *AMOUNTS, "--resume")
        assert last.code == 0 and not written and not trained
        assert "40 steps; loss " in last.text and "loss 0.000" not in last.text
    assert (last.out / "exits.safetensors").read_bytes() == (whole.out / "exits.safetensors").read_bytes()
    assert last.content == whole.content
    assert not (out / WORK).exists()


def test_a_stopped_run_with_other_settings_is_refused(place: Place, quickly: Any, tmp_path: Path) -> None:
    stop_at(quickly, Writer, "chunk", lambda *_: True)
    assert place.calibrate(tmp_path, *AMOUNTS).code == 130
    refused = place.calibrate(tmp_path, *AMOUNTS, "--seed", "5", "--resume")
    assert refused.code == 2 and "other settings (seed)" in refused.text
    assert place.calibrate(tmp_path, *AMOUNTS, "--resume").code == 130, "the stopped run can still be resumed"


def test_a_stopped_run_is_dropped_or_resumed_only_with_an_option(place: Place, quickly: Any, tmp_path: Path) -> None:
    stop_at(quickly, Writer, "chunk", lambda writer, prompts, number, *_: number == 1)
    assert place.calibrate(tmp_path, *AMOUNTS).code == 130
    first = tmp_path / WORK / "chunk-0000.safetensors"
    written = first.stat().st_mtime_ns
    refused = place.calibrate(tmp_path, *AMOUNTS)
    assert refused.code == 2 and str(tmp_path / WORK) in refused.text
    assert "--resume to continue it" in refused.text and "--restart to drop it" in refused.text
    assert first.stat().st_mtime_ns == written
    assert place.calibrate(tmp_path, *AMOUNTS, "--restart").code == 130
    assert first.stat().st_mtime_ns > written
    both = place.calibrate(tmp_path, *AMOUNTS, "--resume", "--restart")
    assert both.code == 2 and "pass one of them" in both.text


def test_a_users_folder_named_work_is_not_changed(place: Place, whole: Outcome, quickly: Any, tmp_path: Path) -> None:
    shutil.copytree(whole.out, tmp_path / "out")
    thesis = tmp_path / "out" / "work" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    stop_at(quickly, run, "measure", lambda *_: True)  # the work folder is open
    for option in ("--restart", "--resume"):
        assert place.calibrate(tmp_path / "out", "--no-train", option).code == 130
        assert thesis.read_text() == "years of work"


# Options


def test_no_train_chooses_among_the_profiles_exits(place: Place, whole: Outcome, quickly: Any, tmp_path: Path) -> None:
    shutil.copytree(whole.out, tmp_path / "again")
    quickly.setattr(run, "Trainer", None)  # fails where anything is trained
    again = place.calibrate(tmp_path / "again", "--no-train", "--objective", "accept")
    assert again.code == 0, again.text
    assert again.profile.objective == "accept"
    assert again.profile.trained["steps"] == whole.profile.trained["steps"], "of the exits' training"
    assert again.profile.exits_file.layers() == whole.profile.exits_file.layers() == [1, 2]
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, again.tensors[name])
    accepting = {name: choice.most_accepting_exit for name, choice in whole.profile.domains.items()}
    assert {name: choice.exit_layer for name, choice in again.profile.domains.items()} == accepting
    plans = [choice.plans["0"]["1"].plan for choice in again.profile.domains.values()]
    assert all(len(Plan.parse(plan)) for plan in plans)


def test_no_train_in_another_dtype_keeps_the_stored_exits(
    place: Place, whole: Outcome, quickly: Any, tmp_path: Path
) -> None:
    shutil.copytree(whole.out, tmp_path, dirs_exist_ok=True)
    again = place.calibrate(tmp_path, "--no-train", "--dtype", "bfloat16")
    assert again.code == 0, again.text
    exits = {name: tensor for name, tensor in whole.tensors.items() if not name.startswith("head_rows.")}
    kept = again.tensors
    assert all(kept[name].dtype == tensor.dtype and torch.equal(kept[name], tensor) for name, tensor in exits.items())


def test_no_train_with_some_of_the_exits_keeps_the_others(
    place: Place, whole: Outcome, quickly: Any, tmp_path: Path
) -> None:
    shutil.copytree(whole.out, tmp_path / "again")
    again = place.calibrate(tmp_path / "again", "--no-train", "--exits", "1")
    assert again.code == 0, again.text
    assert {choice.exit_layer for choice in again.profile.domains.values()} == {1}
    assert again.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, again.tensors[name])


def test_a_base_model_is_calibrated_in_a_given_time_with_a_users_text(quickly: Any, tmp_path: Path) -> None:
    """No chat template, no amounts, no folder; one exit at a time, measured costs; profile='auto' finds the result."""
    here = Place(tmp_path)
    tiny_model("qwen3", torch.float32).save_pretrained(here.model)
    tiny_tokenizer().save_pretrained(here.model)
    write_prompts(here.folder / "a.jsonl", "abcdefgh")
    chats = [{"messages": [{"role": "user", "content": f"number {number}"}]} for number in range(9)]
    write_lines(here.folder / "b.jsonl", [json.dumps(chat) for chat in chats])
    own = write_lines(tmp_path / "own.txt", ["zyx" * 32])

    quickly.setattr(run.Calibration, "_measured_costs", MEASURED_COSTS)
    quickly.setattr(timing, "_TIMED", 2)
    quickly.setattr(outcome, "SETTINGS", SHORT_TRIALS[:1])
    recipe = Recipe.for_device
    quickly.setattr(Recipe, "for_device", lambda *arguments: replace(recipe(*arguments), warmup=WARM_UP))
    corpora: list[Corpus] = []

    class Recorded(Trainer):
        def __init__(self, model: Any, layer: int, corpus: Corpus, *arguments: Any, **options: Any) -> None:
            corpora.append(corpus)
            super().__init__(model, layer, corpus, *arguments, **options)

    quickly.setattr(run, "Trainer", Recorded)
    done = here.calibrate(None, "--minutes", "0.1", "--exits", "1,2", "--text", str(own))
    assert done.code == 0, done.text
    assert "takes about " in done.text and "\ntime " in done.text
    assert len(corpora) == 2, "one for each exit"

    (folder,) = (tmp_path / "home" / "profiles").iterdir()
    profile = Profile.load(folder)
    assert set(profile.domains["a"].exits) == {1, 2}
    assert profile.trained["steps"] >= 2 * WARM_UP
    assert here.engine("auto").profile.folder == folder

    texts = {tuple(d.tokens): d for row in range(len(corpora[0])) for d in documents_of(corpora[0], row)}
    expected = (*ids_of(*"zyx") * 32, *ids_of("\n"))
    for piece in (expected[:LENGTH], expected[LENGTH:]):
        assert texts[piece].predicts == [True] * (len(piece) - 1) + [False]


# Errors

FAILURES = {  # arguments that cannot work, and words of the error
    "no model": ("--model {tmp}/nothing", "nothing"),
    "exits of letters": ("--exits x", "--exits 'x' must be numbers of layers"),
    "an exit too deep": ("--exits 4", "after 0 (the embedding) to 2 layers"),
    "no prompts": ("--domain c={tmp}/no.jsonl", "there is no file"),
    "a bad line": ("--domain c={tmp}/bad.jsonl", "bad.jsonl, line 1: expected"),
    "no domain": ("--domain c", "NAME=PROMPTS.jsonl"),
    "one name twice": ("--domain a={place}/b.jsonl", "two domains have the same name"),
    "no folder": ("--out {tmp}/bad.jsonl/out", "choose another folder with --out"),
    "no minutes": ("--minutes 0", "--minutes must be above 0"),
    "no text": ("--text {tmp}/no.txt", "there is no such file"),
    "a text of bytes": ("--text {place}/model/model.safetensors", "model.safetensors cannot be read as UTF-8 text"),
    "nothing trained": ("--no-train", "leave out --no-train"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_an_error_is_printed_and_the_exit_code_is_2(place: Place, quickly: Any, tmp_path: Path, case: str) -> None:
    arguments, said = FAILURES[case]
    (tmp_path / "bad.jsonl").write_text("{}\n")
    filled = [argument.format(tmp=tmp_path, place=place.folder) for argument in arguments.split()]
    failed = place.calibrate(tmp_path / "out", "--tokens", "1000", "--steps", "2", *filled)
    assert failed.code == 2
    assert "error: " in failed.text and said in failed.text
    assert not (tmp_path / "out" / "profile.json").exists()


@pytest.mark.parametrize(
    ("in_chats", "said"),
    [
        ("{{ raise_exception('one turn only') }}", "the model's chat template refuses"),
        ("<new>", "token id 101, outside"),
    ],
)
def test_a_training_prompt_that_the_model_cannot_read_is_an_error_before_any_work(
    place: Place, quickly: Any, tmp_path: Path, in_chats: str, said: str
) -> None:
    shutil.copytree(place.folder, tmp_path / "strict")
    here = Place(tmp_path / "strict")
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<new>"], special_tokens=True)
    tokenizer.chat_template = "{% if messages[1:] %}" + in_chats + "{% endif %}" + CHAT_TEMPLATE
    tokenizer.save_pretrained(here.model)
    turns = {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}
    with (here.folder / "a.jsonl").open("a") as prompts:
        prompts.write(json.dumps(turns) + "\n")
    failed = here.calibrate(tmp_path / "out", *AMOUNTS)
    assert failed.code == 2 and "error: domain 'a': " in failed.text and said in failed.text
    assert not (tmp_path / "out").exists()


def test_no_train_refuses_layers_without_an_exit(place: Place, whole: Outcome, quickly: Any, tmp_path: Path) -> None:
    shutil.copytree(whole.out, tmp_path / "one")
    quickly.setattr(ExitsFile, "layers", lambda _: [1])
    failed = place.calibrate(tmp_path / "one", "--no-train", "--exits", "2")
    assert failed.code == 2 and "none of the exits [1] of the profile is among those asked for" in failed.text


@pytest.mark.parametrize("what", ["memory", "disk", "tokenizer"])
def test_missing_memory_disk_or_tokenizer_is_an_error(place: Place, quickly: Any, tmp_path: Path, what: str) -> None:
    here, said = place, "has no tokenizer"
    if what == "memory":
        quickly.setattr(resources, "free_device_bytes", lambda _: 10_000)
        said = "too little to train exits"
    elif what == "disk":
        quickly.setattr("selfspec.calibrate.setup.shutil.disk_usage", lambda _: SimpleNamespace(free=10**6))
        said = "GB free, and calibration needs"
    else:
        here = Place(tmp_path)
        for name in ("model", "a.jsonl", "b.jsonl"):
            copy = shutil.copytree if name == "model" else shutil.copy
            copy(place.folder / name, tmp_path / name)
        for path in here.model.glob("tokenizer*"):
            path.unlink()
    failed = here.calibrate(tmp_path / "new", *AMOUNTS)
    assert failed.code == 2 and said in failed.text


def test_an_unknown_value_of_an_option_exits_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        command.main(["--objective", "fun"])
    assert error.value.code == 2 and "throughput" in capsys.readouterr().err


# Time


def test_a_time_that_is_too_short_is_refused_with_the_least(place: Place, quickly: Any, tmp_path: Path) -> None:
    quickly.setattr(duration, "training_step_seconds", lambda _: 3.0)
    failed = place.calibrate(tmp_path / "out", "--minutes", "0.05", "--exits", "1")
    least = 40 * 3.0 / TRAINING_SHARE / 60  # minutes: 40 steps in their share
    assert failed.code == 2 and "--minutes 0.05 is too short" in failed.text
    assert "120 s to train" in failed.text and f"pass --minutes {math.ceil(10 * least) / 10:g} or more" in failed.text
    assert not (tmp_path / "out").exists()
    stop_at(quickly, run, "Writer", lambda *_: True)
    assert place.calibrate(tmp_path / "out", *AMOUNTS).code == 130, "the refused run needs no --restart"


def test_a_stopped_run_continues_although_the_least_amounts_now_take_longer(
    place: Place, quickly: Any, tmp_path: Path
) -> None:
    out, arguments = tmp_path / "out", ["--minutes", "0.1", "--tokens", "1000", "--exits", "1"]
    stop_at(quickly, Writer, "chunk", lambda writer, prompts, number, *_: number == 1)
    assert place.calibrate(out, *arguments).code == 130
    quickly.setattr(duration, "training_step_seconds", lambda _: 3.0)
    resumed = place.calibrate(out, *arguments, "--resume")
    assert resumed.code == 130, resumed.text


def test_a_restart_that_is_refused_keeps_the_stopped_run(place: Place, quickly: Any, tmp_path: Path) -> None:
    out, amounts = tmp_path / "out", ["--tokens", "1000", "--exits", "1"]
    stop_at(quickly, Writer, "chunk", lambda writer, prompts, number, *_: number == 1)
    assert place.calibrate(out, *amounts, "--minutes", "0.2").code == 130
    quickly.setattr(duration, "training_step_seconds", lambda _: 3.0)
    assert place.calibrate(out, *amounts, "--minutes", "0.1", "--restart").code == 2
    assert (out / WORK / "chunk-0000.safetensors").exists()
    assert place.calibrate(out, *amounts, "--minutes", "0.2", "--resume").code == 130
    assert place.calibrate(out, *amounts, "--minutes", "9", "--restart").code == 130, "enough time: it is dropped"


def test_paths_after_an_equals_sign_may_begin_in_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    args = command.parse(["--out=~/profile", "--text=~/a.txt"])
    assert (args.out, args.text) == (tmp_path / "profile", [tmp_path / "a.txt"])


@pytest.mark.parametrize("arguments", [["--help"], ["--objective", "fun"], ["--version-of-what"]], ids=str)
def test_help_and_wrong_options_are_answered_without_importing_torch(arguments: list[str]) -> None:
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        "from selfspec.calibrate.__main__ import main\n"
        f"main({arguments!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 2) and "usage: python -m selfspec.calibrate" in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == "False"
