"""Prints the progress of a calibration: a live line for the running stage, and one line for each finished stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


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


class Display:
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
