"""Every example runs from beginning to end, on a tiny model and with few tokens."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from selfspec.calibrate import setup, timing, trial
from selfspec.calibrate.training import Recipe
from tests.commanding import save_model

EXAMPLES = Path(__file__).parents[1] / "examples"
SHORT = ("--max-new-tokens", "6")

pytestmark = pytest.mark.filterwarnings("ignore:drafting only")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model, tmp_path, monkeypatch, capsys):
    """Runs an example as a script; returns what it printed."""
    monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path / "home"))

    def call(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, "--model", str(model), *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_there_are_five_scripts_and_a_notebook():
    assert len(list(EXAMPLES.glob("*.py"))) == 5 and len(list(EXAMPLES.glob("*.ipynb"))) == 1


def test_switching_from_transformers_gives_the_same_tokens(run):
    out = run("switch_from_transformers.py", *SHORT)
    assert "same tokens: True" in out and "Stats(new_tokens=6" in out


def test_streaming_prints_an_answer_and_its_speed(run):
    assert "6 tokens, " in run("stream_to_terminal.py", "hello", *SHORT)


def test_metrics_are_printed(run):
    out = run("read_metrics.py", *SHORT)
    assert "accepted by depth: ['" in out and "{'measuring': " in out
    assert "weights " in out and "for Prometheus:" in out


def test_calibrating_writes_a_profile_that_drafts(run, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "_MEASURED_WITHOUT_GPU", (2, 16))  # prompts, and tokens of an answer
    monkeypatch.setattr(timing, "_TIMED", 1)  # steps of each plan
    monkeypatch.setattr(trial, "_LONGEST", 16)  # tokens of an answer with a chosen plan
    recipe = Recipe.for_device
    monkeypatch.setattr(Recipe, "for_device", lambda *arguments: replace(recipe(*arguments), documents=4, length=64))
    amounts = ("--tokens", "100", "--steps", "2")
    out = run("calibrate_for_my_prompts.py", "--out", str(tmp_path / "mine"), *amounts, *SHORT)
    assert (tmp_path / "mine" / "profile.json").is_file()
    assert "same tokens as plain decoding: True" in out


@pytest.mark.skipif(importlib.util.find_spec("langchain_core") is None, reason="langchain-core is not installed")
def test_a_langchain_llm_answers_in_a_chain(run):
    assert run("langchain_llm.py", *SHORT).strip()


def test_without_langchain_the_example_says_how_to_install_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "langchain_core.language_models.llms", None)
    with pytest.raises(SystemExit, match="pip install langchain-core"):
        run("langchain_llm.py")


def test_the_notebook_runs_and_stores_no_output(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path))
    monkeypatch.setenv("SELFSPEC_MODEL", str(model))
    monkeypatch.setenv("SELFSPEC_TOKENS", "6")
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    for cell in codes:
        assert cell["outputs"] == [] and cell["execution_count"] is None
        exec(compile("".join(cell["source"]), "tour.ipynb", "exec"), names)
    out = capsys.readouterr().out
    assert "tokens per step" in out and "requests" in out
