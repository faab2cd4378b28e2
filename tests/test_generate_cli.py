"""`python -m selfspec.generate` on a tiny saved model: what it prints where, and how it fails."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from selfspec import Engine
from selfspec.generate import PROMPT, main, parse
from tests.tiny import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"

pytestmark = pytest.mark.filterwarnings("ignore:decoding plainly")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model that never ends its text, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", torch.float32, eos_token_id=None).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder) -> Engine:
    return Engine.from_pretrained(folder, device="cpu", profile=None)


@pytest.fixture(autouse=True)
def no_profiles(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def run(folder, capsys):
    """Runs the command on the tiny model: what it printed as text, and what about it."""

    def call(*arguments: str, code: int = 0) -> tuple[str, str]:
        assert main(["--model", str(folder), "--device", "cpu", *arguments]) == code
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


def answer(engine: Engine, prompt: str, **kwargs) -> str:
    chat = [{"role": "user", "content": prompt}]
    return engine.complete(chat, **{"max_new_tokens": 12, "speculative_decoding": False, **kwargs}).text


def test_it_prints_the_answer_and_nothing_else_on_standard_output(run, engine):
    text, _ = run("hello", "--max-new-tokens", "12")
    assert text == answer(engine, "hello") + "\n"


def test_the_text_is_streamed(folder, engine, monkeypatch):
    """Pieces are flushed as they come: more than one write, together the whole text."""
    writes: list[str] = []

    class Recorder(io.StringIO):
        def flush(self) -> None:
            if self.getvalue():
                writes.append(self.getvalue())
            self.truncate(0)
            self.seek(0)

    monkeypatch.setattr(sys, "stdout", Recorder())
    main(["hello", "--model", str(folder), "--device", "cpu", "--max-new-tokens", "12"])
    sys.stdout.flush()
    assert len(writes) > 3
    assert "".join(writes) == answer(engine, "hello") + "\n"


def test_raw_continues_the_text_without_the_chat_template(run, engine):
    text, _ = run("hello", "--raw", "--max-new-tokens", "12")
    assert text == engine.complete("hello", max_new_tokens=12, speculative_decoding=False).text + "\n"
    assert text != answer(engine, "hello") + "\n"


def test_the_statistics_of_plain_decoding(run):
    _, report = run("hello", "--max-new-tokens", "12")
    assert re.search(r"12 tokens in [\d.]+ s \([\d.]+ tokens/s\), plain decoding \(no_profile\)", report)


def test_the_statistics_of_speculation(run, engine):
    _, report = run(
        "hello", "--max-new-tokens", "12", "--speculative", "force", "--exit-layer", "3", "--plan", "tree:3,2"
    )
    chat = [{"role": "user", "content": "hello"}]
    stats = engine.complete(chat, max_new_tokens=12, speculative_decoding="force", exit_layer=3, plan="tree:3,2").stats
    assert "12 tokens in" in report
    assert f"plan tree:3,2 after layer 3: {stats.tokens_per_cycle:.2f} tokens per cycle" in report
    assert f"{stats.accept_rate:.0%} of reached depths accepted" in report


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--speculative", "off"], "plain decoding (request)"),
        (["--speculative", "off", "--exit-layer", "2"], "plain decoding (request)"),
        (["--speculative", "auto"], "plain decoding (no_profile)"),
        (["--speculative", "auto", "--plan", "none"], "plain decoding (request)"),
        (["--speculative", "auto", "--exit-layer", "2"], "plan tree:4,2,2,1 after layer 2"),
        (["--speculative", "auto", "--plan", "chain:2"], "plan chain:2 after layer 1"),
        (["--speculative", "force"], "plan tree:4,2,2,1 after layer 1"),
        (["--speculative", "auto", "--exit-layer", "2", "--temperature", "1.6"], "plain decoding (temperature)"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_speculation_follows_the_options_and_the_text_does_not(run, arguments, told):
    text, report = run("hello", "--max-new-tokens", "24", *arguments)
    assert told in report
    sampling = ["--temperature", "1.6"] if "--temperature" in arguments else []
    assert text == run("hello", "--max-new-tokens", "24", "--speculative", "off", *sampling)[0]


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--seed", "3"]], ids=["greedy", "sampled"])
def test_compare_says_that_the_tokens_are_identical(run, sampling):
    _, report = run("hello", "--max-new-tokens", "12", "--speculative", "force", "--compare", *sampling)
    assert "tokens: identical" in report
    for word in ("plain", "speculative", "tokens/s", "tokens per cycle"):
        assert word in report
    assert "as fast" in report or ("slower" in report and "a CPU is already busy" in report and "untrained" in report)


def test_compare_would_say_that_the_tokens_differ(run, monkeypatch):
    """A comparison that cannot come out otherwise shows nothing: here the plain text is cut short."""
    complete = Engine.complete
    monkeypatch.setattr(Engine, "complete", lambda self, prompt, **kwargs: complete(self, prompt, **kwargs, min_p=1.0))
    _, report = run("hello", "--max-new-tokens", "12", "--speculative", "force", "--compare", "--temperature", "2")
    assert "DIFFERENT" in report and "identical" not in report


def test_temperature_samples_with_the_seed(run, engine):
    arguments = ["hello", "--max-new-tokens", "12", "--temperature", "0.9", "--top-k", "20", "--top-p", "0.95"]
    text, _ = run(*arguments, "--seed", "5")
    sampled = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 5}
    assert text == answer(engine, "hello", **sampled) + "\n"
    assert text != run(*arguments, "--seed", "6")[0]
    assert text != answer(engine, "hello") + "\n"


@pytest.mark.parametrize("compare", [[], ["--compare"]], ids=["alone", "compared"])
def test_a_dash_reads_the_prompt_from_standard_input(run, engine, monkeypatch, compare):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nyou"))
    text, report = run("-", "--max-new-tokens", "12", *compare)
    assert text == answer(engine, "hello\nyou") + "\n"
    assert not compare or "identical" in report


def test_without_a_prompt_there_is_one():
    assert parse([]).prompt == PROMPT and parse([]).model == "demo"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plan", "chain:x"], ["'chain:x'", "malformed"]),
        (["--exit-layer", "9"], ["exit_layer=9", "1 to 3"]),
        (["--max-new-tokens", "0"], ["max_new_tokens=0", "at least 1"]),
        (["--temperature", "0.5", "--top-p", "7"], ["top_p=7", "at most 1"]),
        (["--temperature", "-1"], ["temperature"]),
        (["--device", "tpu"], ["'tpu'", "cpu"]),
        (["--dtype", "int4"], ["'int4'", "bfloat16"]),
        (["--profile", "nowhere"], ["nowhere", "profile"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_a_bad_option_is_an_error_of_one_line(run, arguments, words):
    text, report = run("hello", *arguments, code=2)
    assert text == ""
    assert report.startswith("error: ") and report.count("\n") == 1
    assert all(word in report for word in words)


def test_an_empty_prompt_is_an_error(run):
    _, report = run("", "--raw", code=2)
    assert "error: prompt 0 is empty" in report


@pytest.mark.parametrize("name", ["nowhere", "empty", "odd[bold]name", "odd[/]name"])
def test_a_bad_folder_is_named(capsys, tmp_path, name):
    """The name comes back as it was given, brackets too, whatever the console makes of markup."""
    folder = tmp_path / name
    if name != "nowhere":
        folder.mkdir(parents=True)
    assert main(["hello", "--model", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error:" in captured.err and str(folder) in captured.err
    assert "Traceback" not in captured.err


def test_an_unknown_option_ends_with_code_2(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--speculative", "sometimes"])
    assert ended.value.code == 2
    assert "sometimes" in capsys.readouterr().err


def test_the_command_explains_itself():
    command = [sys.executable, "-m", "selfspec.generate", "--help"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False, timeout=120)
    assert done.returncode == 0
    for option in ("--model", "--speculative", "--plan", "--exit-layer", "--compare", "--temperature", "demo model"):
        assert option in done.stdout
