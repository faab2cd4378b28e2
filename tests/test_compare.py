"""Comparing plain, governed and forced decoding: turns, medians, and verdicts that noise does not decide."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from selfspec.commands.compare import TURNS, Mode, Runs, is_measurable, modes, show, take_turns, verdict
from selfspec.history import Change
from tests.completions import completed

DRAFTING = Change(0, 0, "chain:2", None)
OFF = Change(0, 0, "none", "goodput")


def engine_on(device: str, profile: Any = "some", kernels: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(device=torch.device(device), profile=profile, has_kernels=kernels, dtype=dtype)


def runs(name: str, *speeds: float, drafted: bool = True) -> Runs:
    """Runs of 10 tokens each, at these tokens per second."""
    origins, change = ("de" * 5, DRAFTING) if drafted else ("p" * 10, OFF)
    plan = "chain:2" if drafted else "none"
    turns = [[completed(origins, change, plan=plan, elapsed_s=10 / speed)] for speed in speeds]
    return Runs(Mode(name, {}), turns)


PLAIN = runs("plain", 10, 11, 10.5, drafted=False)


class Recorder:
    """Stands for an engine: records which mode completed which prompt."""

    def __init__(self, kernels: bool) -> None:
        self.has_kernels, self.calls = kernels, []

    def complete(self, prompt: str, **arguments: Any) -> Any:
        self.calls.append((prompt, arguments["speculative_decoding"]))
        return completed("de" * 5, DRAFTING)


@pytest.mark.parametrize("kernels", [False, True])
def test_modes_take_turns_and_on_kernels_run_once_uncounted(kernels):
    engine: Any = Recorder(kernels)
    progress: list[tuple[int, int]] = []
    compared = take_turns(engine, ["a", "b"], modes(engine), {}, lambda *of: progress.append(of))
    turn = [(prompt, mode) for mode in (False, None, "force") for prompt in "ab"]
    assert engine.calls == turn * (TURNS + kernels)
    assert [len(runs.turns) for runs in compared] == [TURNS] * 3
    count = 3 * (TURNS + kernels)
    assert progress == [(index, count) for index in range(count)]


def test_the_forced_plan_is_a_short_chain_without_kernels_and_the_profiles_with():
    assert modes(engine_on("cpu"))[-1].arguments["plan"] == "chain:2"
    assert modes(engine_on("cuda", kernels=True))[-1].arguments["plan"] is None
    assert modes(engine_on("cuda", kernels=True), plan="tree:3")[-1].arguments["plan"] == "tree:3"


@pytest.mark.parametrize(
    ("compared", "words"),
    [
        (runs("governed", 15, 15.5, 16), "governed: 1.48x as fast as plain"),
        (runs("governed", 9, 10.9, 12.5), "governed: no measurable difference from plain"),
        (runs("governed", 10.9, 12.5, 13.5), "governed: no measurable difference from plain"),
        (runs("governed", 14, 15, 18), "governed: 1.43x as fast as plain"),
        (runs("governed", 5, 5.2, 5.3), "governed: 2.02x slower than plain"),
        (
            runs("governed", 13, 13, 13, drafted=False),
            "governed: decoded plainly (goodput): no plan was predicted to be faster here",
        ),
        (runs("forced", 15, 15.5, 16), "forced chain:2: 1.48x as fast as plain"),
    ],
    ids=[
        "faster",
        "overlapping",
        "within the spreads",
        "faster with an outlier",
        "slower",
        "nothing drafted",
        "forced",
    ],
)
def test_verdicts(compared, words):
    assert verdict(engine_on("cpu"), PLAIN, compared) == words


def test_a_verdict_names_each_reason_once():
    plainly = runs("governed", 13, 13, 13, drafted=False)
    plainly.turns[0][0].stats.changes.insert(0, Change(0, 0, "none", "measuring"))
    assert "(measuring, goodput)" in verdict(engine_on("cpu"), PLAIN, plainly)


@pytest.mark.parametrize(
    ("engine", "tip"),
    [
        (engine_on("cpu"), "A CPU needs nearly as much time"),
        (engine_on("cuda", kernels=True), "--plan tries another plan"),
        (engine_on("cuda", profile=None), "selfspec calibrate trains one"),
    ],
    ids=["cpu", "gpu", "untrained"],
)
def test_a_forced_plan_that_loses_gets_the_tip_that_fits_the_machine(engine, tip):
    text = verdict(engine, PLAIN, runs("forced", 5, 5.2, 5.3))
    assert text.startswith("forced chain:2: 2.02x slower than plain. ") and tip in text
    assert ("CPU" in text) == (tip.startswith("A CPU"))


speeds = st.lists(st.floats(1, 1000), min_size=TURNS, max_size=TURNS)


@given(speeds, speeds)
def test_a_measurable_difference_separates_all_runs(first, second):
    a, b = runs("plain", *first), runs("governed", *second)
    if is_measurable(a, b):
        assert max(a.speeds) < min(b.speeds) or max(b.speeds) < min(a.speeds)
    assert not is_measurable(a, a)


@pytest.mark.parametrize("width", [60, 120])
def test_the_table_fits_the_terminal(width):
    console = Console(file=io.StringIO(), width=width)
    show(console, engine_on("cpu"), [PLAIN, runs("governed", 10, 11, 12), runs("forced", 1234, 1300, 1250)])
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    table = printed.split("tokens: ")[0]
    assert all(len(line) <= width for line in table.splitlines())
    for cell in ("plain", "governed", "forced chain:2", "1250", "1234-1300", "10.5", "10.0-11.0", "tok/step", "50%"):
        assert cell in table, cell
    assert "…" not in table


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (engine_on("cuda", kernels=True, dtype=torch.bfloat16), "a fault: please report it"),
        (engine_on("cpu"), "a rounding tie, or a fault"),
        (engine_on("cpu", dtype=torch.bfloat16), "16 bits round often; try --dtype float32"),
    ],
    ids=["kernels", "float32", "bfloat16"],
)
def test_tokens_that_differ_are_explained(engine, why):
    other = runs("governed", 10, 11, 12)
    other.turns[1][0].tokens[3] = 6
    console = Console(file=io.StringIO(), width=200)
    show(console, engine, [PLAIN, other])
    assert f"tokens: DIFFERENT ({why}" in console.file.getvalue()  # type: ignore[attr-defined]
