"""`python -m selfspec.generate` on a tiny saved model: what it prints where, and how it fails."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from selfspec import Completion, Engine, Stats
from selfspec.backends.base import Step
from selfspec.batch import Batch
from selfspec.generate import PROMPT, STYLES, main, parse, recount, report, verdict
from selfspec.governor.governor import Change
from selfspec.speculation.plan import NONE, Plan
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


@pytest.mark.parametrize(
    ("kernels", "compare", "rehearsed"),
    [
        (False, False, []),
        (False, True, [(False, 2)]),
        (True, False, []),
        (True, True, [(False, 12), (None, 12)]),
    ],
)
def test_what_happens_once_happens_before_the_text(run, monkeypatch, kernels, compare, rehearsed):
    """On kernels the whole request is rehearsed: whatever plan it comes to has to be captured."""
    calls, complete, stream = [], Engine.complete, Engine.stream

    def spy(self, prompt, **kwargs):
        calls.append((kwargs["speculative_decoding"], kwargs["max_new_tokens"]))
        return complete(self, prompt, **kwargs)

    monkeypatch.setattr(Engine, "has_kernels", kernels)
    monkeypatch.setattr(Engine, "complete", spy)
    monkeypatch.setattr(Engine, "stream", lambda self, *args, **kw: calls.append("text") or stream(self, *args, **kw))
    run("hello", "--max-new-tokens", "12", *(["--compare"] if compare else []))
    assert calls[: calls.index("text")] == rehearsed


# Tokens by their origin

DRAFTING = {"speculative_decoding": "force", "exit_layer": 3, "plan": "tree:3,2"}
FORCED = ("--max-new-tokens", "24", "--speculative", "force", "--exit-layer", "3", "--plan", "tree:3,2")
CODES = {"drafted": "32", "decoded": "1", "plain": "36"}  # of the terminal: green, bold, cyan


@pytest.fixture
def colours(monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def painted(text: str) -> list[tuple[str, str]]:
    """The characters that a terminal shows, each with the code of its style; ends of lines have none."""
    pieces = re.findall(r"\x1b\[(\d+)m(.*?)\x1b\[0m", text, re.DOTALL)
    return [(code, character) for code, piece in pieces for character in piece]


@pytest.mark.parametrize("arguments", [FORCED, FORCED[:2]], ids=["drafted", "plain"])
def test_show_colours_every_token_by_its_origin(run, engine, colours, arguments):
    chat, forced = [{"role": "user", "content": "hello"}], DRAFTING if "force" in arguments else {}
    pieces = list(engine.stream(chat, max_new_tokens=24, **forced).marked())
    assert {origin for _, origin in pieces} >= ({"drafted", "decoded"} if forced else {"plain"})
    text, legend = run("hello", "--show", *arguments)
    expected = [(CODES[origin], char) for piece, origin in pieces for char in piece if char != "\n"]
    assert painted(text) == expected
    assert re.sub(r"\x1b\[\d+m", "", text) == answer(engine, "hello", max_new_tokens=24) + "\n"
    for origin, meaning in (("drafted", "drafted"), ("decoded", "decoded after drafts"), ("plain", "decoded plainly")):
        assert f"\x1b[{CODES[origin]}m{meaning}" in legend


@pytest.mark.parametrize("colourless", ["no terminal", "NO_COLOR", "dumb"])
def test_without_colours_show_marks_nothing(run, engine, colours, monkeypatch, colourless):
    if colourless == "no terminal":
        monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv(*{"NO_COLOR": ("NO_COLOR", "1"), "dumb": ("TERM", "dumb")}.get(colourless, ("TERM", "xterm")))
    text, told = run("hello", "--show", *FORCED)
    assert text == answer(engine, "hello", max_new_tokens=24) + "\n"
    assert "decoded plainly" not in told and "decoded after drafts" not in told
    assert "tokens were drafted" in told


def test_without_show_there_are_no_colours(run, engine, colours):
    text, told = run("hello", *FORCED)
    assert text == answer(engine, "hello", max_new_tokens=24) + "\n"
    assert "drafted" not in told


def test_a_bad_option_is_told_without_a_legend(run, colours):
    _, told = run("hello", "--show", "--plan", "chain:x", code=2)
    assert "malformed" in told and "drafted" not in told


def test_show_counts_drafted_tokens(run, engine):
    chat = [{"role": "user", "content": "hello"}]
    drafted = engine.complete(chat, max_new_tokens=24, **DRAFTING).origins.count("drafted")
    assert drafted
    _, told = run("hello", "--show", *FORCED)
    assert f"{drafted} of 24 tokens were drafted ({drafted / 24:.0%})" in told
    assert "ood" not in told


def test_every_origin_has_a_style_of_its_own():
    assert len(set(STYLES.values())) == len(STYLES) == 3


# Runs whose plan changed on the way


def completed(
    origins: str, *changes: Change, plan: str = "tree:4", ood: bool = False, disabled_reason: str | None = None
) -> Completion:
    """Of tokens with these origins: d for drafted, e for decoded, p for plain."""
    names = [{"d": "drafted", "e": "decoded", "p": "plain"}[letter] for letter in origins]
    cycles = len(origins) - origins.count("d")
    stats = Stats(
        new_tokens=len(origins),
        cycles=cycles,
        drafted=4 * origins.count("e"),
        accepted=origins.count("d"),
        accept_rate=0.4,
        tokens_per_cycle=len(origins) / cycles,
        plan=plan,
        exit_layer=3,
        disabled_reason=disabled_reason,
        finish_reason="length",
        elapsed_s=2.0,
        changes=list(changes),
        ood=ood,
        accepted_by_depth=[],
        reached_by_depth=[],
    )
    return Completion("text", [5] * len(origins), "length", stats, names)


FROM_THE_START = Change(0, 0, "tree:4", None)
OFF = Change(3, 6, "none", "goodput")
BACK = Change(11, 14, "nodes:0.0,0.1,0.2,1.0", None)
DRAFTED = completed("de" * 5, FROM_THE_START)
SWITCHED_OFF = completed("de" * 3 + "p" * 8, FROM_THE_START, OFF, plan="none")
CAME_BACK = completed("de" * 3 + "p" * 8 + "de" * 8, FROM_THE_START, OFF, BACK)
TWO_PLANS = completed("de" * 5, FROM_THE_START, Change(2, 4, "chain:5", None))
PLAIN = completed("p" * 10, Change(0, 0, "none", "goodput"), plan="none", disabled_reason="goodput")


def printed(tell: Any, completion: Completion) -> list[str]:
    console = Console(file=io.StringIO(), width=300)
    tell(console, completion)
    return console.file.getvalue().strip().split("\n")  # type: ignore[attr-defined]


def test_every_change_of_plan_is_told():
    assert printed(recount, CAME_BACK) == [
        "11 of 30 tokens were drafted (37%)",
        "from the start: tree:4",
        "after token 6: tree:4 -> none (goodput)",
        "after token 14: none -> tree of 4 nodes",
    ]


def test_strange_text_is_told():
    start = Change(0, 0, "none", "ood")
    told = printed(recount, completed("ppp", start, ood=True))
    assert told[:2] == ["0 of 3 tokens were drafted (0%)", "from the start: none (ood)"]
    assert told[2].startswith("ood: ") and len(told) == 3


@pytest.mark.parametrize(
    ("completion", "manner"),
    [
        (DRAFTED, "plan tree:4 after layer 3: 2.00 tokens per cycle, 40% of reached depths accepted"),
        (TWO_PLANS, "mostly plan tree:4 after layer 3: 2.00 tokens per cycle, 40% of reached depths accepted"),
        (
            SWITCHED_OFF,
            "drafting at times after layer 3: 1.27 tokens per cycle, 40% of reached depths accepted; "
            "8 of 14 tokens decoded plainly (goodput)",
        ),
        (
            CAME_BACK,
            "mostly plan tree:4 after layer 3: 1.58 tokens per cycle, 40% of reached depths accepted; "
            "8 of 30 tokens decoded plainly (goodput)",
        ),
        (
            PLAIN,
            "plain decoding (goodput): drafting is not expected to pay here; "
            "--speculative force --plan chain:2 tries it",
        ),
    ],
    ids=["drafted", "two plans", "switched off", "came back", "plain"],
)
def test_the_statistics_of_a_run_that_was_governed(completion, manner):
    (line,) = printed(report, completion)
    count = len(completion.tokens)
    assert line == f"{count} tokens in 2.0 s ({count / 2:.1f} tokens/s), {manner}"


def test_several_reasons_are_each_told_once():
    measuring, strange = Change(0, 0, "none", "measuring"), Change(9, 9, "none", "ood")
    started = Change(2, 2, "tree:4", None)
    told = completed("ppdepdep", measuring, started, OFF, started, strange, OFF, disabled_reason="goodput")
    (line,) = printed(report, told)
    assert line.endswith("; 4 of 8 tokens decoded plainly (measuring, goodput, ood)")
    still_plain = completed("pppp", measuring, plan="none", disabled_reason="goodput")
    assert ", plain decoding (measuring, goodput): drafting is not expected" in printed(report, still_plain)[0]


@pytest.mark.parametrize(
    ("completion", "ratio", "told"),
    [
        (DRAFTED, 1.5, "speculation made this 1.50x as fast"),
        (CAME_BACK, 1.25, "speculation made this 1.25x as fast; 8 of 30 tokens decoded plainly (goodput)"),
        (SWITCHED_OFF, 1.0, "speculation made this 1.00x as fast; 8 of 14 tokens decoded plainly (goodput)"),
        (
            SWITCHED_OFF,
            0.8,
            "speculation made this 1.25x slower; 8 of 14 tokens decoded plainly (goodput). That is what it took to "
            "find out where drafting does not pay, or noise.",
        ),
        (PLAIN, 0.98, "nothing was drafted (goodput): both runs decoded plainly"),
    ],
    ids=["drafted", "came back", "switched off", "slower", "plain"],
)
def test_the_verdict_on_a_run_that_was_governed(engine, completion, ratio, told):
    assert verdict(ratio, engine, completion) == told


def test_the_verdict_on_drafting_at_a_loss_says_why():
    on_gpu: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda")), profile="some")
    on_cpu: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")), profile=None)
    assert verdict(0.5, on_gpu, DRAFTED).startswith("speculation made this 2.00x slower. That is expected here: ")
    assert "CPU" not in verdict(0.5, on_gpu, DRAFTED) and "untrained" not in verdict(0.5, on_gpu, DRAFTED)
    assert "CPU" in verdict(0.5, on_cpu, DRAFTED) and "untrained" in verdict(0.5, on_cpu, DRAFTED)


def test_a_run_switched_off_half_way_is_shown_and_compared(run, engine, monkeypatch):
    def choose_plan(batch: Batch, before: Step | None) -> tuple[Plan, str | None]:
        drafts = batch.exit is not None and batch.running[0].steps < 3
        return (Plan.parse("tree:3,2"), None) if drafts else (NONE, "goodput")

    monkeypatch.setattr(Batch, "_choose_plan", choose_plan)
    text, told = run("hello", "--show", "--compare", "--max-new-tokens", "24", "--exit-layer", "3")
    assert text == answer(engine, "hello", max_new_tokens=24) + "\n"
    token = int(re.findall(r"after token (\d+): tree:3,2 -> none \(goodput\)", told)[0])
    assert 3 <= token <= 9
    assert "from the start: tree:3,2\n" in told and "drafting at times after layer 3" in told
    assert f"{token - 3} of 24 tokens were drafted" in told
    assert told.count(f"; {24 - token} of 24 tokens decoded plainly (goodput)") == 2, "in report and verdict"
    assert "tokens: identical" in told


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


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_not_utf_8_is_an_error_of_one_line(run, monkeypatch, errors):
    """Python reads it strictly, or in some locales with stand-ins for what it could not read."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors))
    text, report = run("-", code=2)
    assert text == "" and report.count("\n") == 1
    assert "error: the prompt is not UTF-8" in report and "iconv" in report


def test_brackets_in_a_prompt_are_text(run, engine):
    text, _ = run("a [/x] b", "--max-new-tokens", "12", "--show", "--compare")
    assert text == answer(engine, "a [/x] b") + "\n"


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


@pytest.mark.parametrize("name", ["nowhere", "empty", "odd[bold]name", "odd[/]name", "odd[/x]name"])
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
    for option in (
        "--model",
        "--speculative",
        "--plan",
        "--exit-layer",
        "--compare",
        "--show",
        "--temperature",
        "demo model",
    ):
        assert option in done.stdout
