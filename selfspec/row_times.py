"""How long passes over more rows take on this machine, next to a pass over one.

Some libraries multiply two rows in the time of one, others take three times as long from the second row on. No table
tells that, so it is timed, with layers of the very model, before anything else is known of a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from selfspec.cache import Cache, Rows
from selfspec.model import Decoder

_COUNTS = (1, 2, 3, 4, 6, 8, 16)  # rows of the passes that are timed
_TIMES = 2  # that each is, with another part of the model: weights shall come from memory as they will
_SHARE = 10  # of the model that a pass goes through is one of so many parts


@dataclass(frozen=True)
class RowTimes:
    """Seconds of passes over some numbers of rows, the first of them one."""

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, rows: int) -> float:
        """What a pass over so many rows takes, in passes over one: between the measured numbers, and after the last, on
        a straight line. One of more rows is never the shorter one."""
        seconds = np.maximum.accumulate(self.seconds)
        further = max(0, rows - self.counts[-1]) * (seconds[-1] - seconds[-2]) / (self.counts[-1] - self.counts[-2])
        return float((np.interp(rows, self.counts, seconds) + further) / seconds[0])


@torch.inference_mode()
def time_rows(model: Decoder, cache: Cache, clock: Callable[[], float] = time.perf_counter) -> RowTimes:
    """Of each number of rows the fastest pass through some layers and as large a part of the head; the cache is left as
    it was."""
    layers, sequence = model.config.num_layers, cache.open()
    size, seconds = max(1, layers // _SHARE), dict.fromkeys(_COUNTS, float("inf"))
    of_head = len(model.head) // layers
    try:
        cache.reserve(sequence, _COUNTS[-1])
        at = {count: Rows.causal([sequence], count, model.device) for count in _COUNTS}
        model.logits(model.run(model.embedding[None, :1], 0, layers, at[1], cache))  # weights may still be on a disk
        for number, count in enumerate(_COUNTS * _TIMES):
            first = number * size % (layers - size + 1)
            head = model.head[first * of_head : (first + size) * of_head]
            started = clock()
            hidden = model.run(model.embedding[None, :count], first, first + size, at[count], cache)
            model.project(model.read(hidden), head)
            seconds[count] = min(seconds[count], clock() - started)
    finally:
        cache.close(sequence)
    return RowTimes(_COUNTS, tuple(seconds.values()))
