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

from selfspec.cache.kv_cache import Cache
from selfspec.cache.layout import Rows
from selfspec.models.decoder import Decoder

_COUNTS = (1, 2, 3, 4, 6, 8, 16)  # rows of the passes that are timed
_TIMES = 2  # that each is, with another part of the model: weights shall come from memory as they will
_SHARE = 10  # of the model that a pass goes through is one of so many parts


@dataclass(frozen=True)
class RowTimes:
    """Seconds of passes over some numbers of rows, the first of them one."""

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, rows: int) -> float:
        """What a pass over so many rows takes, in passes over one: between the measured numbers on a straight line, and
        after the last as much more for each row as on the mean before it. One of more rows is never the shorter one."""
        seconds = np.maximum.accumulate(self.seconds)
        of_row = (seconds[-1] - seconds[0]) / (self.counts[-1] - self.counts[0])
        further = max(0, rows - self.counts[-1]) * of_row
        return float((np.interp(rows, self.counts, seconds) + further) / seconds[0])


@torch.inference_mode()
def time_rows(model: Decoder, cache: Cache, clock: Callable[[], float] = time.perf_counter) -> RowTimes:
    """Of each number of rows the fastest pass through some layers and as large a part of the head; the cache has its
    pages back."""
    layers, sequence = model.config.num_layers, cache.open()
    size, seconds = max(1, layers // _SHARE), dict.fromkeys(_COUNTS, float("inf"))
    of_head = len(model.head) // layers
    tokens = torch.arange(_COUNTS[-1], device=model.device)[None] % model.config.vocab_size
    try:
        cache.reserve(sequence, _COUNTS[-1])
        at = {count: Rows.causal([sequence], count, model.device) for count in _COUNTS}
        model.logits(model.run(model.embed(tokens[:, :1]), 0, layers, at[1], cache))  # weights may still be on a disk
        for count in _COUNTS[1:]:  # what is made once for such rows
            model.run(model.embed(tokens[:, :count]), 0, 1, at[count], cache)
        for number, count in enumerate(_COUNTS * _TIMES):
            first = number * size % (layers - size + 1)
            head, hidden = model.head[first * of_head : (first + size) * of_head], model.embed(tokens[:, :count])
            started = clock()
            hidden = model.run(hidden, first, first + size, at[count], cache)
            model.project(model.read(hidden), head).sum().item()  # which waits for a device
            seconds[count] = min(seconds[count], clock() - started)
    finally:
        cache.close(sequence)
    return RowTimes(_COUNTS, tuple(seconds.values()))
