"""The `selfspec` command: help without torch, interrupts, messages, chats and measurements."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import selfspec
from selfspec import Engine, cli
from selfspec.commands import chat as chat_command
from selfspec.commands import serve
from selfspec.commands.running import for_command, one_line_warnings, run
from selfspec.commands.serve import listen, read_key
from tests.commanding import answer, interruptible, save_model
from tests.serving import eventually

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder) -> Engine:
    return Engine.from_pretrained(folder, device="cpu", profile=None)


@pytest.fixture(autouse=True)
def no_profiles(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")


# Parsing

PARSE = """
import sys
sys.argv = {argv!r}
try:
    {call}
except SystemExit as ended:
    assert ended.code == 0, ended.code
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
CALLS = {
    "selfspec --help": "from selfspec.cli import main; main()",
    "selfspec --version": "from selfspec.cli import main; main()",
    **{f"selfspec {name} --help": "from selfspec.cli import main; main()" for name in cli.COMMANDS},
    "selfspec.generate --help": "import runpy; runpy.run_module('selfspec.generate', run_name='__main__')",
    "selfspec.calibrate --help": "import runpy; runpy.run_module('selfspec.calibrate', run_name='__main__')",
}


@pytest.mark.parametrize("command", CALLS)
def test_help_imports_no_torch(command):
    code = PARSE.format(argv=command.split(), call=CALLS[command])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    words = ["selfspec 0."] if "version" in command else ["usage: ", "--help"]
    assert all(word in done.stdout for word in words)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_path_that_does_not_exist_is_refused_without_importing_torch(name):
    code = "import sys; from selfspec.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    for path in ("./missing", "missing.gguf"):
        command = [sys.executable, "-c", code, name, "--model", path]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert done.stdout == "2 False\n", done.stderr
        known = "give a model folder, a .gguf file, or a hub name"
        assert done.stderr == f"error: the path {Path(path)} does not exist; {known}\n"


def test_the_package_imports_classes_when_they_are_used():
    code = "import sys, selfspec; assert 'Engine' in dir(selfspec) and 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    names: dict[str, Any] = {}
    exec("from selfspec import *", names)
    assert names["Engine"] is Engine and names["Rules"].__module__ == "selfspec.governor.rules"
    assert set(selfspec.__all__) <= set(names)
    assert {"Engine", "__version__"} <= set(dir(selfspec))
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        selfspec.Motor  # noqa: B018


def test_without_a_command_the_help_is_printed(capsys):
    assert cli.main([]) == 2
    assert "commands:\n  generate" in capsys.readouterr().err


def test_generate_takes_its_arguments_from_the_command(folder, engine, capsys):
    arguments = ["generate", "hello", "--model", str(folder), "--device", "cpu", "--max-new-tokens", "12"]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == answer(engine, "hello") + "\n"


# Running


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exit_layer=9 is not possible", "--exit-layer 9 is not possible"),
        ("pass exit_layer= and plan=, or kv_cache_gb=.", "pass --exit-layer and --plan, or --kv-cache-gb."),
        ("speculative_decoding='on'", "--speculative 'on'"),
        ("or pass profile=None (python -m selfspec.calibrate)", "or pass --profile none (selfspec calibrate)"),
        ("my_plan=3 and --plan=4", "my_plan=3 and --plan=4"),
        ("for greedy decoding pass do_sample=False", "for greedy decoding pass --temperature 0"),
    ],
)
def test_messages_name_options_instead_of_arguments(text, expected):
    assert for_command(text) == expected


def test_warnings_are_one_line_and_only_within_the_command(capsys):
    shown = warnings.showwarning
    with one_line_warnings():
        warnings.simplefilter("always")
        warnings.warn("top_k=3 has\n  no effect", UserWarning, stacklevel=1)
    assert capsys.readouterr().err == "selfspec: --top-k 3 has no effect\n"
    assert warnings.showwarning is shown


def raising(error: BaseException):
    def command() -> int:
        raise error

    return command


def test_an_interrupt_ends_with_code_130_and_no_traceback(capsys):
    assert run(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "\nselfspec: stopped\n"


def test_errors_that_say_what_to_do_are_one_line_and_faults_keep_their_traceback(capsys):
    assert run(raising(ValueError("plan=x is malformed"))) == 2
    assert capsys.readouterr().err == "error: --plan x is malformed\n"
    with pytest.raises(ZeroDivisionError):
        run(raising(ZeroDivisionError()))


def test_ctrl_c_ends_a_command_whose_import_swallows_it(tmp_path):
    (tmp_path / "careless.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    program = "from selfspec.commands.running import run\nrun(lambda: __import__('careless') and 0)"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, preexec_fn=interruptible)
    assert (ended.returncode, ended.stderr) == (130, b"\nselfspec: stopped\n")


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_interrupts_that_the_caller_handles_or_ignores_stay_so(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        assert run(lambda: signal.raise_signal(signal.SIGINT) or 0) == 0
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def start(*arguments: str, **kwargs) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "selfspec", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment,
        preexec_fn=interruptible, **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("when", ["loading", "generating"])
def test_ctrl_c_ends_a_command_without_a_traceback(folder, when):
    length = ("--max-new-tokens", "400", "--max-length", "500")
    process = start("generate", "hello", "--model", str(folder), "--device", "cpu", *length)
    if when == "generating":
        assert process.stdout.read(1)
    else:
        eventually(lambda: b"libtorch" in Path(f"/proc/{process.pid}/maps").read_bytes(), seconds=60)
    process.send_signal(signal.SIGINT)
    _, about = process.communicate(timeout=60)
    assert process.returncode == 130, about
    assert b"Traceback" not in about and b"selfspec: stopped" in about


def test_a_reader_that_closes_the_pipe_ends_the_command_quietly(folder):
    process = start("generate", "hello", "--model", str(folder), "--device", "cpu", "--max-new-tokens", "400")
    assert process.stdout.read(1)
    process.stdout.close()
    about = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert b"Traceback" not in about and b"Exception ignored" not in about and b"error" not in about


# Chat


def converse(folder: Path, monkeypatch, capsys, *lines: str, arguments: tuple[str, ...] = ()) -> tuple[str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    options = ("--model", str(folder), "--device", "cpu", "--max-new-tokens", "12", *arguments)
    assert cli.main(["chat", *options]) == 0
    return capsys.readouterr()


def replies(engine: Engine, *turns: str, system: str | None = None) -> list[str]:
    """The answers of a conversation, each to all messages before it."""
    messages = [{"role": "system", "content": system}] if system else []
    for text in turns:
        messages.append({"role": "user", "content": text})
        reply = engine.complete(messages, max_new_tokens=12, speculative_decoding=False).text
        messages.append({"role": "assistant", "content": reply})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def test_a_chat_answers_with_all_messages_so_far(folder, engine, monkeypatch, capsys):
    text, about = converse(folder, monkeypatch, capsys, "hello", "", "you")
    expected = replies(engine, "hello", "you")
    assert text == "".join(f"{reply}\n" for reply in expected)
    assert expected[1] != replies(engine, "you")[0]
    assert about.count("12 tokens in") == 2 and "/new starts over" in about


def test_a_chat_starts_over_and_ends_on_demand(folder, engine, monkeypatch, capsys):
    system = ("--system", "be kind")
    lines = ("hello", "/new", "you", "/exit", "never read")
    text, _ = converse(folder, monkeypatch, capsys, *lines, arguments=system)
    expected = replies(engine, "hello", system="be kind") + replies(engine, "you", system="be kind")
    assert text == "".join(f"{reply}\n" for reply in expected)


def test_a_word_that_looks_like_a_command_is_not_sent_to_the_model(folder, engine, monkeypatch, capsys):
    text, about = converse(folder, monkeypatch, capsys, "/help", "hello")
    assert text == replies(engine, "hello")[0] + "\n"
    assert "/help is no command: /new starts over" in about


def test_a_port_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--port", "99999"])
    assert "99999 is not possible: ports are 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("origin", ["localhost:3000", "http://localhost:3000/", "http://", "foo"])
def test_an_origin_that_no_page_has_is_refused(origin, capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--cors-origin", origin])
    assert "must look like http://localhost:3000" in capsys.readouterr().err


def test_origins_are_taken_as_given():
    given = ["http://localhost:3000", "https://a.example", "*"]
    options = [part for origin in given for part in ("--cors-origin", origin)]
    assert serve.parse(options).cors_origin == given


@pytest.mark.parametrize(("given", "stored", "key"), [("a\n", "b", "a"), (None, " b\n", "b"), (None, None, None)])
def test_a_key_is_taken_without_the_space_around_it(given, stored, key, monkeypatch):
    monkeypatch.delenv("SELFSPEC_API_KEY", raising=False)
    if stored is not None:
        monkeypatch.setenv("SELFSPEC_API_KEY", stored)
    assert read_key(given) == key


@pytest.mark.parametrize(("given", "stored"), [("", "b"), (" ", "b"), (None, "")])
def test_an_empty_key_serves_nobody(given, stored, monkeypatch):
    monkeypatch.setenv("SELFSPEC_API_KEY", stored)
    with pytest.raises(ValueError, match="the API key of .* is empty"):
        read_key(given)


def test_a_host_that_does_not_exist_is_named(capsys):
    assert cli.main(["serve", "--host", "no host"]) == 2
    assert "cannot listen on no host port 8000" in capsys.readouterr().err


def test_the_port_of_a_server_that_still_loads_its_model_is_in_use(capsys):
    with listen("127.0.0.1", 0) as listener:
        port = str(listener.getsockname()[1])
        assert cli.main(["serve", "--port", port, "--model", "missing"]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_a_message_that_is_not_unicode_is_dropped_and_the_chat_goes_on(folder, engine, monkeypatch, capsys):
    text, about = converse(folder, monkeypatch, capsys, "caf\udce9", "hello")
    assert text == replies(engine, "hello")[0] + "\n"
    assert "selfspec: the text is not Unicode" in about


def test_a_message_that_does_not_fit_is_dropped_and_the_chat_goes_on(folder, engine, monkeypatch, capsys):
    text, about = converse(folder, monkeypatch, capsys, "a" * 600, "hello")
    assert text == replies(engine, "hello")[0] + "\n"
    assert "selfspec: prompt 0 has" in about and "/new starts over" in about


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(folder, engine, monkeypatch, capsys):
    marked, asked = selfspec.Stream.__next__, []

    def interrupted(stream) -> str:
        asked.append(stream)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return marked(stream)

    monkeypatch.setattr(selfspec.Stream, "__next__", interrupted)
    kept: list[list] = []
    monkeypatch.setattr(
        chat_command.Conversation, "start", lambda self: kept.append([]) or setattr(self, "messages", kept[0])
    )
    answered, conversations = chat_command.Conversation.answer, []
    monkeypatch.setattr(
        chat_command.Conversation, "answer", lambda self, text: conversations.append(self) or answered(self, text)
    )
    text, about = converse(folder, monkeypatch, capsys, "hello", "you")
    first = conversations[0].messages[1]["content"]
    assert first and replies(engine, "hello")[0].startswith(first) and len(first) < len(replies(engine, "hello")[0])
    assert "stopped" in about and text.startswith(first)
    assert [message["role"] for message in conversations[0].messages] == ["user", "assistant"] * 2


def test_a_base_model_does_not_chat_and_says_what_it_does(tmp_path, capsys):
    base = save_model(tmp_path / "base", chat_template=None)
    assert cli.main(["chat", "--model", str(base), "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert "has no chat template" in message and "continues text" in message and "selfspec generate" in message


# Bench


def test_bench_measures_the_shipped_prompts_three_ways(folder, capsys):
    arguments = ["--model", str(folder), "--device", "cpu", "--max-new-tokens", "4", "--max-length", "512", "--json"]
    assert cli.main(["bench", *arguments]) == 0
    out, about = capsys.readouterr()
    figures = json.loads(out)
    assert set(figures["tokens_per_second"]) == {"plain", "governed", "forced"}
    assert all(speed > 0 for speed in figures["tokens_per_second"].values())
    assert figures["tokens_per_step"]["plain"] == 1.0 and figures["drafted"]["plain"] == 0
    assert "tokens: identical in all runs" in about and "forced chain:2" in about
