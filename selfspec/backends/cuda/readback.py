"""Small results on their way from the device to the host, with timers on the device around what made them."""

from __future__ import annotations

import time
from typing import Any

import torch


class Readback:
    """A pinned copy of one result, and the events that tell when it arrived and how long its work took."""

    def __init__(self, like: torch.Tensor) -> None:
        on_gpu = like.device.type == "cuda"
        self.like = like.shape, like.dtype
        self._copy = torch.empty(like.shape, dtype=like.dtype, pin_memory=on_gpu)
        self._own_start, self._event = (torch.cuda.Event(enable_timing=True) if on_gpu else None for _ in range(2))
        self._began = self._own_start
        self._clock = [0.0, 0.0]

    def start(self, after: Readback | None = None) -> None:
        """The work begins now; with `after`, when that one's has ended, since the device is still busy with it."""
        self._clock[0] = time.perf_counter()
        self._began = self._own_start if after is None else after._event
        if self._own_start is not None and after is None:
            self._own_start.record()

    def send(self, result: torch.Tensor) -> None:
        """Copies the result once the work launched before is done."""
        self._copy.copy_(result, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._clock[1] = time.perf_counter()

    @property
    def is_done(self) -> bool:
        """Whether the result has arrived, so that reading it does not wait."""
        return self._event is None or self._event.query()

    def read(self) -> list[Any]:
        """Waits for the result."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()

    @property
    def seconds(self) -> float:
        """How long the work took on the device, once read."""
        if self._began is None or self._event is None:
            return self._clock[1] - self._clock[0]
        return self._began.elapsed_time(self._event) / 1e3

    def seconds_since(self, before: Readback) -> float:
        """From another result's arrival to this one's, where both were read."""
        if before._event is None or self._event is None:
            return self._clock[1] - before._clock[1]
        return before._event.elapsed_time(self._event) / 1e3


class Readbacks:
    """Free ones, kept for use again: pinned memory is slow to get."""

    def __init__(self) -> None:
        self._free: dict[tuple, list[Readback]] = {}

    def take(self, like: torch.Tensor) -> Readback:
        free = self._free.get((like.shape, like.dtype))
        return free.pop() if free else Readback(like)

    def give_back(self, *readbacks: Readback | None) -> None:
        for readback in readbacks:
            if readback is not None:
                self._free.setdefault(readback.like, []).append(readback)
