"""`selfspec generate` on a tiny saved model: what it prints where, and how it fails."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from selfspec import Engine
from selfspec.batch import Batch
from selfspec.generate import PROMPT, main, parse, read_file, read_prompts
from selfspec.speculation.plan import NONE, Plan
from tests.commanding import answer, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder) -> Engine:
    return Engine.from_pretrained(folder, device="cpu", profile=None)


@pytest.fixture(autouse=True)
def no_profiles(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def run(folder, capsys):
    """Runs the command on the tiny model; returns its standard output and standard error."""

    def call(*arguments: str, code: int = 0) -> tuple[str, str]:
        assert main([*arguments, "--model", str(folder), "--device", "cpu"]) == code
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


def test_it_prints_the_answer_and_nothing_else_on_standard_output(run, engine):
    text, _ = run("hello", "--max-new-tokens", "12")
    assert text == answer(engine, "hello") + "\n"


def test_weights_are_rounded_on_request(folder, run):
    rounded = Engine.from_pretrained(folder, device="cpu", profile=None, quantize="int8")
    assert rounded.model.is_quantized
    text, about = run("hello", "--max-new-tokens", "12", "--quantize", "int8")
    assert text == answer(rounded, "hello") + "\n"
    assert "selfspec calibrate --model ..., with --quantize if that rounded the weights" in about
    assert "--quantize" not in run("hello", "--max-new-tokens", "12")[1]


def test_a_malformed_plan_is_refused_before_weights_are_read(run, monkeypatch):
    monkeypatch.setattr(Engine, "from_pretrained", None)
    assert "'tre:4' is malformed" in run("hello", "--plan", "tre:4", code=2)[1]


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


def test_a_base_model_continues_the_text_and_says_so(tmp_path, capsys, engine):
    model = save_model(tmp_path / "base", chat_template=None)
    for arguments, said in (([], 1), (["--raw"], 0)):
        assert main(["hello", "--model", str(model), "--device", "cpu", "--max-new-tokens", "12", *arguments]) == 0
        text, about = capsys.readouterr()
        assert text == engine.complete("hello", max_new_tokens=12, speculative_decoding=False).text + "\n"
        assert about.count("selfspec: this model has no chat template: it continues the text") == said


def test_without_a_profile_a_warning_of_one_line_names_what_every_command_can_do(run):
    _, about = run("hello", "--max-new-tokens", "2")
    (line,) = (line for line in about.splitlines() if "profile" in line and line.startswith("selfspec: "))
    assert "selfspec calibrate --model" in line and "--exit-layer" not in line, "`selfspec serve` has no such option"
    assert ".py" not in about and "exit_layer=" not in about


def test_the_statistics_of_plain_decoding(run):
    _, about = run("x", "--max-new-tokens", "12")  # none of its tokens repeats what followed an earlier one
    assert re.search(r"12 tokens in [\d.]+ s \([\d.]+ tokens/s\), plain decoding \(measuring, no_profile\)", about)


def test_the_statistics_of_speculation(run, engine):
    drafting = ("--speculative", "force", "--exit-layer", "3", "--plan", "tree:3,2")
    _, about = run("hello", "--max-new-tokens", "12", *drafting)
    chat = [{"role": "user", "content": "hello"}]
    stats = engine.complete(chat, max_new_tokens=12, speculative_decoding="force", exit_layer=3, plan="tree:3,2").stats
    assert "12 tokens in" in about
    assert f"plan tree:3,2 after 3 layers: {stats.tokens_per_cycle:.2f} tokens per step" in about
    assert f"{stats.accept_rate:.0%} of reached depths accepted" in about


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--speculative", "off", "--exit-layer", "2"], "plain decoding (request)"),
        (["--speculative", "auto", "--plan", "none"], "plain decoding (request)"),
        (["--speculative", "auto", "--exit-layer", "2"], "plan tree:4,2,2,1 after 2 layers"),
        (["--speculative", "auto", "--plan", "chain:2"], "plan chain:2 after 1 layer"),
        (["--speculative", "force"], "plan tree:4,2,2,1 after 1 layer"),
        (["--speculative", "auto", "--exit-layer", "2", "--temperature", "1.6"], "plain decoding (temperature)"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_speculation_follows_the_options_and_the_text_does_not(run, arguments, printed):
    text, about = run("hello", "--max-new-tokens", "24", *arguments)
    assert printed in about
    sampling = ["--temperature", "1.6"] if "--temperature" in arguments else []
    assert text == run("hello", "--max-new-tokens", "24", "--speculative", "off", *sampling)[0]


# Prompts


def test_several_prompts_are_completed_in_order(run, engine, tmp_path):
    (tmp_path / "prompt.txt").write_text("one\ntwo", encoding="utf-8")
    text, about = run("hello", "you", "--file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "12")
    assert text == "".join(answer(engine, prompt) + "\n" for prompt in ("hello", "you", "one\ntwo"))
    assert "> hello" in about and "> one\n" in about
    assert re.search(r"36 tokens in [\d.]+ s \([\d.]+ tokens/s\), one batch of 3", about)


def test_each_of_several_prompts_has_its_statistics(run):
    forced = ("--speculative", "force", "--exit-layer", "1", "--plan", "chain:2")
    _, about = run("hello", "you", "--max-new-tokens", "12", *forced)
    figures = r"12 tokens in [\d.]+ s \([\d.]+ tokens/s\), plan chain:2 after 1 layer: [\d.]+ tokens per step, \d+% of"
    assert [len(re.findall(figures, part)) for part in about.split("> ")[1:]] == [1, 1]


def test_the_byte_order_mark_of_a_file_is_no_part_of_the_prompt(tmp_path):
    (tmp_path / "prompt.txt").write_text("hello", encoding="utf-8-sig")
    assert read_file(str(tmp_path / "prompt.txt")) == "hello"


@pytest.mark.parametrize("arguments", [["-"], ["--file", "-"]], ids=" ".join)
@pytest.mark.parametrize("compare", [[], ["--compare"]], ids=["alone", "compared"])
def test_a_dash_reads_the_prompt_from_standard_input(run, engine, monkeypatch, arguments, compare):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nyou"))
    text, about = run(*arguments, "--max-new-tokens", "12", *compare)
    assert text == answer(engine, "hello\nyou") + "\n"
    assert not compare or "identical" in about


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_not_utf_8_is_an_error_of_one_line(run, monkeypatch, errors):
    """Python reads it strictly, or in some locales with stand-ins for what it could not read."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors))
    text, about = run("-", code=2)
    assert text == "" and about.count("\n") == 1
    assert "error: the prompt is not UTF-8" in about and "iconv" in about


def test_a_file_that_is_not_there_is_named(run, tmp_path):
    _, about = run("--file", str(tmp_path / "nowhere.txt"), code=2)
    assert about.startswith("error: --file ") and "nowhere.txt cannot be read: No such file" in about


def test_without_a_prompt_there_is_one():
    args = parse([])
    assert read_prompts(args) == [PROMPT] and args.model == "demo"


def test_brackets_in_a_prompt_are_text(run, engine):
    text, about = run("a [/x] b", "[bold]", "--max-new-tokens", "12")
    assert text == answer(engine, "a [/x] b") + "\n" + answer(engine, "[bold]") + "\n"
    assert "> a [/x] b" in about and "> [bold]" in about


def test_json_is_one_object_per_completion(run, engine):
    out, about = run("hello", "you", "--json", "--max-new-tokens", "12", "--exit-layer", "3", "--plan", "chain:2")
    entries = [json.loads(line) for line in out.splitlines()]
    assert [entry["text"] for entry in entries] == [answer(engine, prompt) for prompt in ("hello", "you")]
    for entry in entries:
        assert (entry["tokens"], entry["finish_reason"]) == (12, "length")
        assert entry["stats"]["plan"] == "chain:2" and entry["stats"]["drafted"] > 0
        assert entry["stats"]["changes"][0]["plan"] == "chain:2"
    assert about == ""


@pytest.mark.parametrize("arguments", [["--json", "--show"], ["a", "b", "--compare"]], ids=" ".join)
def test_options_that_exclude_each_other_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and "Traceback" not in capsys.readouterr().err


# Tokens by their origin

PLAIN = {"speculative_decoding": False}
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


@pytest.mark.parametrize("arguments", [FORCED, (*FORCED[:2], "--speculative", "off")], ids=["drafted", "plain"])
def test_show_colours_every_token_by_its_origin(run, engine, colours, arguments):
    chat, forced = [{"role": "user", "content": "hello"}], DRAFTING if "force" in arguments else PLAIN
    pieces = list(engine.stream(chat, max_new_tokens=24, **forced).marked())
    assert {origin for _, origin in pieces} >= ({"drafted", "decoded"} if forced is DRAFTING else {"plain"})
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
    text, about = run("hello", "--show", *FORCED)
    assert text == answer(engine, "hello", max_new_tokens=24) + "\n"
    assert "decoded plainly" not in about and "decoded after drafts" not in about
    assert "tokens were drafted" in about


def test_without_show_there_are_no_colours(run, engine, colours):
    text, about = run("hello", *FORCED)
    assert text == answer(engine, "hello", max_new_tokens=24) + "\n"
    assert "drafted" not in about


def test_a_bad_option_prints_no_legend(run, colours):
    _, about = run("hello", "--show", "--plan", "chain:x", code=2)
    assert "malformed" in about and "drafted" not in about


def test_show_counts_drafted_tokens(run, engine):
    chat = [{"role": "user", "content": "hello"}]
    drafted = engine.complete(chat, max_new_tokens=24, **DRAFTING).origins.count("drafted")
    assert drafted
    _, about = run("hello", "--show", *FORCED)
    assert f"{drafted} of 24 tokens were drafted ({drafted / 24:.0%})" in about
    assert "ood" not in about


def test_a_run_switched_off_half_way_is_shown(run, engine, monkeypatch):
    def choose_plan(batch: Batch) -> tuple[Plan, str | None]:
        drafts = batch.exit is not None and batch.running[0].history.steps < 3
        return (Plan.parse("tree:3,2"), None) if drafts else (NONE, "goodput")

    monkeypatch.setattr(Batch, "_choose_plan", choose_plan)
    text, about = run("hello", "--show", "--max-new-tokens", "24", "--exit-layer", "3")
    assert text == answer(engine, "hello", max_new_tokens=24) + "\n"
    token = int(re.findall(r"after token (\d+): tree:3,2 -> plain \(goodput\)", about)[0])
    assert 3 <= token <= 9
    assert "from the start: tree:3,2\n" in about and "drafting at times after 3 layers" in about
    assert f"{token - 3} of 24 tokens were drafted" in about
    assert f"; {24 - token} of 24 tokens decoded plainly (goodput)" in about


# Comparisons


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--seed", "3"]], ids=["greedy", "sampled"])
def test_compare_measures_three_ways_and_says_that_the_tokens_are_identical(run, sampling):
    text, about = run("hello", "--max-new-tokens", "12", "--compare", *sampling)
    for words in ("plain", "governed", "forced chain:2", "tokens/s", "tokens: identical in all runs"):
        assert words in about
    assert re.search("^governed: .", about, re.M), "whether it drafted copies depends on the times of its steps"
    assert text.count("\n") == 1 + text[:-1].count("\n"), "the text is printed once"


def test_compare_would_say_that_the_tokens_differ(run, monkeypatch):
    """A comparison that cannot come out otherwise shows nothing: here forced runs draw with another seed."""
    complete = Engine.complete

    def other_seed(self, prompt, **kwargs):
        seed = {"seed": 7} if kwargs["speculative_decoding"] == "force" else {}
        return complete(self, prompt, **{**kwargs, **seed})

    monkeypatch.setattr(Engine, "complete", other_seed)
    _, about = run("hello", "--max-new-tokens", "12", "--compare", "--temperature", "2")
    assert "DIFFERENT" in about and "identical" not in about


def test_compare_and_show_print_the_text_again_with_drafting_forced(run, engine, colours):
    text, about = run("hello", "--max-new-tokens", "12", "--show", "--compare")
    assert re.sub(r"\x1b\[\d+m", "", text) == 2 * (answer(engine, "hello") + "\n")
    codes = [code for code, _ in painted(text)]
    assert codes[0] == CODES["plain"] and CODES["decoded"] in codes[len(codes) // 2 :]
    assert "The same prompt with drafting forced" in about


# Sampling and errors


def test_temperature_samples_with_the_seed(run, engine):
    arguments = ["hello", "--max-new-tokens", "12", "--temperature", "0.9", "--top-k", "20", "--top-p", "0.95"]
    text, _ = run(*arguments, "--seed", "5")
    sampled = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 5}
    assert text == answer(engine, "hello", **sampled) + "\n"
    assert text != run(*arguments, "--seed", "6")[0]
    assert text != answer(engine, "hello") + "\n"


def test_sampling_options_without_a_temperature_are_noted(run, engine):
    text, about = run("hello", "--max-new-tokens", "12", "--top-p", "0.9")
    assert text == answer(engine, "hello") + "\n"
    assert "selfspec: --top-p has no effect without --temperature: decoding is greedy\n" in about


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plan", "chain:x"], ["'chain:x'", "malformed"]),
        (["--exit-layer", "9"], ["--exit-layer 9", "0 to 3"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens 0", "at least 1"]),
        (["--temperature", "0.5", "--top-p", "7"], ["--top-p 7", "at most 1"]),
        (["--temperature", "-1"], ["temperature"]),
        (["--device", "tpu"], ["--device 'tpu'", "cpu"]),
        (["--dtype", "int4"], ["'int4'", "bfloat16"]),
        (["--profile", "nowhere"], ["nowhere", "profile"]),
        (["--kv-cache-gb", "1e-9"], ["--kv-cache-gb 1e-09", "or more"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_a_bad_option_is_an_error_of_one_line(folder, capsys, arguments, words):
    assert main(["hello", "--model", str(folder), "--device", "cpu", *arguments]) == 2
    text, about = capsys.readouterr()
    assert text == ""
    assert about.startswith("error: ") and about.count("\n") == 1
    assert all(word in about for word in words)


def test_an_empty_prompt_is_an_error(run):
    _, about = run("", "--raw", code=2)
    assert "error: prompt 0 is empty" in about


@pytest.mark.parametrize("name", ["nowhere", "empty", "odd[bold]name", "odd[/]name"])
def test_a_bad_folder_is_named(capsys, tmp_path, name):
    """The name comes back as it was given, brackets too."""
    folder = tmp_path / name
    if name != "nowhere":
        folder.mkdir(parents=True)
    assert main(["hello", "--model", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error:" in captured.err and str(folder) in captured.err
    assert "Traceback" not in captured.err


def test_a_model_without_a_tokenizer_is_refused(capsys, tmp_path):
    folder = save_model(tmp_path / "mute")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert main(["hello", "--model", str(folder), "--device", "cpu"]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err


def test_verbose_prints_what_is_loaded(run):
    _, about = run("hello", "--max-new-tokens", "1", "-v")
    assert "selfspec: model " in about and "selfspec: no profile" in about and "selfspec: KV cache: " in about
    assert "KV cache" not in run("hello", "--max-new-tokens", "1")[1]
