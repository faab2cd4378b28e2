"""Copies of results from the device to the host, and the times of the steps that made them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from selfspec.backends.base import Step
from selfspec.governor.governor import MEASURING
from selfspec.sequence import Sequence


class Readback:
    """Host memory for one result (pinned for a GPU), with device events that mark its arrival and measure the time of
    the work that makes it. Used again for other results of the same shape and dtype."""

    def __init__(self, like: torch.Tensor) -> None:
        on_gpu = like.device.type == "cuda"
        self.like = like.shape, like.dtype
        self._copy = torch.empty(like.shape, dtype=like.dtype, pin_memory=on_gpu)
        self._array = self._copy.numpy()  # the same memory: numpy converts it to lists faster than torch
        # Events recorded when the clock starts, and when the result has arrived; None without a GPU.
        self._start, self._arrival = (torch.cuda.Event(enable_timing=True) if on_gpu else None for _ in range(2))
        self._mark: torch.cuda.Event | None = None  # recorded by `mark`
        self._measured_from = self._start  # the event at which the measured time starts
        self._clock = [0.0, 0.0, 0.0]  # start, end and mark by the host's clock, in seconds; used without a GPU

    def start(self, after: Readback | None = None) -> None:
        """Starts the clock: now, or with `after` at the arrival of its result, until which the device runs earlier
        work."""
        self._clock[0] = time.perf_counter()
        self._measured_from = self._start if after is None else after._arrival
        if self._start is not None and after is None:
            self._start.record()

    def send(self, result: torch.Tensor) -> None:
        """Launches the copy of the result to the host; does not wait for it."""
        self._copy.copy_(result, non_blocking=True)
        if self._arrival is not None:
            self._arrival.record()
        self._clock[1] = time.perf_counter()

    def mark(self) -> None:
        """Marks the end of the work launched so far."""
        self._clock[2] = time.perf_counter()
        if self._start is not None:
            self._mark = self._mark or torch.cuda.Event(enable_timing=True)
            self._mark.record()

    @property
    def marked_seconds(self) -> float:
        """Seconds on the device from the clock's start to the mark. Call once the marked work has ended."""
        if self._start is None or self._mark is None:
            return self._clock[2] - self._clock[0]
        return self._start.elapsed_time(self._mark) / 1e3

    @property
    def is_done(self) -> bool:
        """Whether the result has arrived, so that `read` does not wait."""
        return self._arrival is None or self._arrival.query()

    def array(self) -> np.ndarray:
        """Waits for the result and returns it, valid until the readback is used again."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._array

    def read(self) -> list[Any]:
        """Waits for the result and returns it as nested lists."""
        return self.array().tolist()

    @property
    def seconds(self) -> float:
        """Seconds on the device from the clock's start to the arrival of the result. Call after `read`."""
        if self._measured_from is None or self._arrival is None:
            return self._clock[1] - self._clock[0]
        return self._measured_from.elapsed_time(self._arrival) / 1e3


class Readbacks:
    """A pool of readbacks, because allocating pinned memory is slow."""

    def __init__(self) -> None:
        self._free: dict[tuple, list[Readback]] = {}

    def take(self, like: torch.Tensor) -> Readback:
        """Returns a readback for results of this shape and dtype."""
        free = self._free.get((like.shape, like.dtype))
        return free.pop() if free else Readback(like)

    def give_back(self, readback: Readback) -> None:
        self._free.setdefault(readback.like, []).append(readback)


@dataclass(eq=False)
class StepInFlight(Step):
    """A step that was launched and whose report has not been read."""

    slots: list[int] = field(default_factory=list)  # by sequence
    readback: Readback | None = None  # of the report
    callback_s: float = 0.0  # seconds in callables, part of the measured time
    logprobs: Readback | None = None  # packed log probabilities by slot and depth; None: no sequence wants them
    # Last accepted nodes of sequences with callables, whose tokens were appended while the step ran.
    appended: dict[Sequence, int] = field(default_factory=dict)


class StepTimes:
    """Measures the time of each step, and decides whether that time is a sample of the cost of the step's plan."""

    def __init__(self, readbacks: Readbacks) -> None:
        self._readbacks = readbacks
        self._newest: Readback | None = None  # of the step launched last, unless other work was launched after it
        self._excludes_next = False  # the time of the next step is no sample of its plan's cost
        self._last_read: Readback | None = None  # of the step read last: the next step's time may start at its arrival

    def note_other_work(self) -> None:
        """Makes the next step's clock start at its launch, not at the arrival of the newest step's report: other work
        was launched between them."""
        self._newest = None

    def exclude_next_step(self) -> None:
        """Excludes the next step's time from the costs of plans: slots were written, prompts prefilled or the step
        captured."""
        self._newest, self._excludes_next = None, True

    def start(self, step: StepInFlight, readback: Readback, in_flight: Step | None, overlaps: bool) -> None:
        """Starts a step's clock right before its launch; `in_flight` is the step before, if it is not read yet."""
        previous = in_flight.readback if isinstance(in_flight, StepInFlight) else None
        was_idle = previous is not None and previous.is_done and overlaps  # the device, since that step ended
        follows = previous is not None and previous is self._newest and not was_idle
        step.is_cost_sample = self._is_cost_sample(step, previous, overlaps)
        readback.start(previous if follows else None)
        step.readback, self._newest = readback, readback

    def _is_cost_sample(self, step: StepInFlight, previous: Readback | None, overlaps: bool) -> bool:
        """Returns whether the step's time will be the cost of its plan. Requires that a step is in flight, that
        `exclude_next_step` was not called since its launch, and for a plain step that no other pass was launched since.
        A step that drafts may follow another pass, such as one that fills the exit's KV: its clock starts after the
        pass. Returns True without overlap, and for steps with the reason MEASURING, as the governor has no other times
        yet."""
        excluded, self._excludes_next = self._excludes_next, False
        if not overlaps or step.record.reason == MEASURING:
            return True
        return previous is not None and not excluded and (len(step.record.plan) > 0 or previous is self._newest)

    def stop(self, step: StepInFlight) -> None:
        """Sets `seconds` of a step that was read, without the time in callables."""
        readback = step.readback
        assert readback is not None
        step.seconds = max(0.0, readback.seconds - step.callback_s)
        if self._last_read is not None:
            self._readbacks.give_back(self._last_read)
        self._last_read = readback
