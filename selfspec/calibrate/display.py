"""Prints the progress of a calibration, a live line for the running stage and one line for each finished stage, and its
outcome: tables, the verdict, and the line of Python that uses the profile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from selfspec.calibrate.report import verdict
from selfspec.calibrate.trial import COMPARED_CHAIN
from selfspec.governor.rules import DEFAULT_TREE
from selfspec.profiles.paths import profiles_dir
from selfspec.profiles.profile import Profile
from selfspec.speculation.plan import Plan

_GREEDY, _ONE = "0", "1"  # names of a temperature and a batch


class Stage:
    """A running stage. Its total may be set later."""

    def __init__(self, progress: Progress, task: TaskID, timed: bool) -> None:
        self._progress, self._task, self._timed = progress, task, timed
        self.note = ""

    def total(self, total: float) -> None:
        self._progress.update(self._task, total=total)

    def advance(self, count: float, note: str | None = None) -> None:
        self.note = self.note if note is None else note
        self._progress.update(self._task, advance=count, note=self.note, refresh=self._timed)


class CalibrationDisplay:
    """Prints to a console; live lines only on a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started = time.perf_counter()

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    @contextmanager
    def stage(self, name: str, total: float | None = None, timed: bool = False) -> Iterator[Stage]:
        """A stage with this name. With `timed`, its line is drawn only when it advances: a drawing thread would make
        measured times longer."""
        columns = (
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        began = time.perf_counter()
        live = self.console.is_terminal
        with Progress(
            *columns, console=self.console, auto_refresh=not timed, transient=True, disable=not live
        ) as progress:
            stage = Stage(progress, progress.add_task(name, total=total, note=""), timed)
            yield stage
        took = time.perf_counter() - began
        self.say(f"{name:<9} {took:6.1f} s   {stage.note}")

    @property
    def elapsed(self) -> float:
        """Seconds since the display was made."""
        return time.perf_counter() - self.started


def show(profile: Profile, console: Console, model: str, loading: str = "") -> None:
    """Prints the tables, the verdict, and how to use the profile where it drafts; `loading`: that of
    `CalibrationSettings`."""
    for title, table in (_rates_table(profile), _choice_table(profile), _compared_table(profile)):
        console.print(f"\n{title}", soft_wrap=True, highlight=False)
        console.print(table)
    lines = [verdict(profile), f"profile.json, exits.safetensors and report.html are in {profile.folder}"]
    if profile.drafts:
        is_found = profile.folder is not None and profile.folder.parent == profiles_dir()
        place = "" if is_found else f', profile="{profile.folder}"'
        lines.append(f'use it:  Engine.from_pretrained("{model}"{loading}{place})')
    else:
        lines.append('profile="auto" prefers any other profile of this model that drafts')
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)


def _rates_table(profile: Profile) -> tuple[str, Table]:
    layers = sorted({layer for choice in profile.domains.values() for layer in choice.exits})
    title = f"Accept rate of {DEFAULT_TREE} by exit, after N layers (* chosen for {profile.objective}, + highest)"
    table = Table()
    table.add_column("domain")
    for layer in layers:
        table.add_column(f"N = {layer}", justify="right")
    for name, choice in profile.domains.items():
        cells = []
        for layer in layers:
            marks = "*" * (layer == choice.exit_layer) + "+" * (layer == choice.most_accepting_exit)
            cells.append(f"{choice.exits[layer].accept_rate:.1%} {marks:<2}" if layer in choice.exits else "")
        table.add_row(escape(name), *cells)
    return title, table


def _choice_table(profile: Profile) -> tuple[str, Table]:
    table = Table()
    table.add_column("domain")
    for heading in ("exit", "head", "plan", "top-1", "top-4", "tokens/step", "expected", "measured", "tokens/s"):
        table.add_column(heading, justify="right")
    for name, choice in profile.domains.items():
        planned = choice.plans[_GREEDY][_ONE]
        run, rates = planned.measured, choice.exits[choice.exit_layer]
        plan = Plan.parse(run.plan if run else planned.plan)
        shape = f"{len(plan)} nodes, depth {plan.depth}" if len(plan) else "none"
        shape += " (slower)" if run and planned.plan == "none" else ""
        table.add_row(
            escape(name),
            str(choice.exit_layer),
            str(choice.head_rows or "all"),
            shape,
            f"{rates.top1:.2f}",
            f"{rates.top4:.2f}",
            f"{run.tokens_per_cycle:.2f}" if run else "",
            f"{planned.expected.speedup:.2f}x" if planned.expected else "",
            f"{run.speedup:.2f}x" if run else "",
            f"{run.plain_tokens_per_second:.0f} -> {run.tokens_per_second:.0f}" if run else "",
        )
    return "Chosen for one greedy sequence", table


def _compared_table(profile: Profile) -> tuple[str, Table]:
    table = Table()
    for heading in ("domain", "accept rate", "tokens/step", "speed-up"):
        table.add_column(heading, justify="left" if heading == "domain" else "right")
    for name, choice in profile.domains.items():
        pair = (choice.chain, choice.plans[_GREEDY][_ONE].measured)
        cells = [
            (f"{run.accept_rate:.1%}", f"{run.tokens_per_cycle:.2f}", f"{run.speedup:.2f}") if run else ("-",) * 3
            for run in pair
        ]
        table.add_row(escape(name), *(f"{chain} | {tree}" for chain, tree in zip(*cells, strict=True)))
    return f"{COMPARED_CHAIN} | the chosen plan, one greedy sequence", table
