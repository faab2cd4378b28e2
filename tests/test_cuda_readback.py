"""Readbacks: the times of their results, and the pool that keeps free ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from selfspec.backends.cuda import callables
from selfspec.backends.cuda.readback import Readback, Readbacks


class Event:
    """A device event that was recorded `at` milliseconds."""

    def __init__(self, at: float) -> None:
        self.at, self.recorded = at, 0

    def record(self) -> None:
        self.recorded += 1

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


def test_a_readbacks_time_begins_at_its_own_start_or_at_the_arrival_of_the_one_before() -> None:
    before, result = Readback(torch.zeros(1)), Readback(torch.zeros(1))
    before._arrival, result._start, result._arrival = Event(2.0), Event(5.0), Event(9.0)  # type: ignore[assignment]
    result.start(after=before)
    assert result.seconds == pytest.approx(7e-3) and not result._start.recorded  # type: ignore[attr-defined]
    result.start()
    assert result.seconds == pytest.approx(4e-3) and result._start.recorded  # type: ignore[attr-defined]


def test_marked_work_is_timed_from_the_start() -> None:
    readback = Readback(torch.zeros(1))
    readback._start, readback._mark = Event(5.0), Event(8.0)  # type: ignore[assignment]
    readback.start()
    readback.mark()
    assert readback.marked_seconds == pytest.approx(3e-3) and readback._mark.recorded  # type: ignore[attr-defined]


@pytest.mark.parametrize(("passes", "first", "waited"), [(0.4, 0.1, 0.0), (0.4, 0.5, 0.2), (0.05, 0.5, 0.5)])
def test_a_step_waits_for_its_first_callables_only_after_the_passes(
    passes: float, first: float, waited: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first callables begin 0.1 s after the passes; later ones take 0.3 s."""
    now = iter([10.0, 10.1 + first])
    monkeypatch.setattr(callables, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    request = SimpleNamespace(callback_s=7.0)
    sequences: Any = [SimpleNamespace(request=request)]
    clock = callables.CallableTime(sequences)
    for seconds in (first, 0.3):
        request.callback_s += seconds
        clock.note_run()
    marked: Any = SimpleNamespace(marked_seconds=passes)
    assert clock.seconds(marked) == pytest.approx(waited + 0.3)


def test_a_free_readback_is_used_again_for_the_same_shape_and_dtype() -> None:
    readbacks = Readbacks()
    first = readbacks.take(torch.zeros(2, 3))
    first.send(torch.ones(2, 3))
    readbacks.give_back(first)
    assert readbacks.take(torch.zeros(3, 2)) is not first
    assert readbacks.take(torch.zeros(2, 3, dtype=torch.int32)) is not first
    again = readbacks.take(torch.zeros(2, 3))
    assert again is first and readbacks.take(torch.zeros(2, 3)) is not first
    again.send(torch.full((2, 3), 4.0))
    assert again.is_done and again.read() == [[4.0] * 3] * 2
