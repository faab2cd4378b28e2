"""Times passes over 1 to 16 rows when an engine is loaded on a device that the profile has no step costs for.

The cost of further rows differs between CPU libraries: a second row may be free or take twice as long as the first.
Without these times the governor would first try plans that cost several plain steps.
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
_TIMES = 2  # passes over each number of rows, each with another part of the model, whose weights are not cached
_SHARE = 10  # a pass runs one of so many parts of the model


@dataclass(frozen=True)
class RowTimes:
    """Seconds of passes over some numbers of rows, of which the first is 1."""

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, rows: int) -> float:
        """What a pass over so many rows takes, in passes over one: on straight lines between timed numbers, past the
        last with the mean slope before it. A pass over more rows is never shorter."""
        seconds = np.maximum.accumulate(self.seconds)
        of_row = (seconds[-1] - seconds[0]) / (self.counts[-1] - self.counts[0])
        further = max(0, rows - self.counts[-1]) * of_row
        return float((np.interp(rows, self.counts, seconds) + further) / seconds[0])


@torch.inference_mode()
def time_rows(model: Decoder, cache: Cache, clock: Callable[[], float] = time.perf_counter) -> RowTimes:
    """Times the fastest of _TIMES passes over each number of rows, through a tenth of layers and head. Returns its
    pages to the cache."""
    layers, sequence = model.config.num_layers, cache.open()
    size, seconds = max(1, layers // _SHARE), dict.fromkeys(_COUNTS, float("inf"))
    of_head = model.config.vocab_size // layers
    tokens = torch.arange(_COUNTS[-1], device=model.device)[None] % model.config.vocab_size
    try:
        cache.reserve(sequence, _COUNTS[-1])
        at = {count: Rows.causal([sequence], count, model.device) for count in _COUNTS}
        model.logits(model.run(model.embed(tokens[:, :1]), 0, layers, at[1], cache))  # reads weights from disk
        for count in _COUNTS[1:]:  # allocates buffers for such rows
            model.run(model.embed(tokens[:, :count]), 0, 1, at[count], cache)
        for number, count in enumerate(_COUNTS * _TIMES):
            first = number * size % (layers - size + 1)
            head = model.head.part(slice(first * of_head, (first + size) * of_head))
            hidden = model.embed(tokens[:, :count])
            started = clock()
            hidden = model.run(hidden, first, first + size, at[count], cache)
            model.project(model.head_input(hidden), head).sum().item()  # waits for the device
            seconds[count] = min(seconds[count], clock() - started)
    finally:
        cache.close(sequence)
    return RowTimes(_COUNTS, tuple(seconds.values()))
