"""Costs of plans, in plain steps: by a calibrated or estimated cost model, and by measurement once a plan has run.

An engine keeps one `Costs` per kind of batch for all its requests. `acceptance` models how many tokens a step emits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import cache, partial
from math import inf
from statistics import median_low
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field, field_validator
from pydantic import dataclasses as checked

from selfspec.speculation.plan import MAX_NODES, NONE, Plan

CostModel = Callable[[int, int], float]  # (depth, nodes) -> plain steps that a step of such a plan takes
RowCost = Callable[[int], float]  # (rows) -> time of a pass over these rows, in passes over 1 row

_ROW_COST = 0.008  # of each further row on a GPU, in passes over one row: most of a pass reads weights
_SHORT_BITS = 8  # texts up to 256 tokens share a bucket; the next buckets end at 1024, 4096, ... tokens
SAMPLES = 24  # newest times of a plan, whose median counts
# Times of plain steps before drafting starts, and of a plan before it corrects others. While a plan has no more times,
# the least counts: its first steps may have waited for something else.
LEAST_SAMPLES = 3
FORGET_AFTER = 512  # steps of a bucket: a plan that did not run meanwhile counts as not measured


Seconds = Annotated[float, Field(ge=0, lt=1e6)]  # of one step: less than 12 days
NodeCount = Annotated[int, Field(ge=1, le=MAX_NODES)]


@checked.dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class StepCost:
    """Seconds of a step for one batch size on the profile's device, by its parts. A profile stores it."""

    plain: Annotated[Seconds, Field(gt=0)]  # a plain step
    depth: Seconds  # each depth of a draft: the layers below the exit and the exit itself
    # (nodes, seconds): a step that drafts, less its depths, for some numbers of nodes, ascending.
    drafting: Annotated[tuple[tuple[NodeCount, Seconds], ...], Field(min_length=1)]
    # Seconds of each row of the draft head at each depth; `depth` includes those of `head_rows` rows.
    head_row: Annotated[float, Field(gt=-1e6, lt=1e6)] = 0.0
    head_rows: Annotated[int, Field(ge=0, lt=2**31)] = 0  # rows of the head that `depth` was measured with

    @field_validator("drafting")
    @classmethod
    def _ascending(cls, drafting: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        nodes = [count for count, _ in drafting]
        if nodes != sorted(set(nodes)):
            raise ValueError("numbers of nodes must ascend")
        return drafting

    def seconds(self, depth: int, nodes: int, head_rows: int | None = None) -> float:
        """Seconds of a step that drafts `nodes` nodes: linear between the measured numbers of nodes; beyond them each
        node adds the mean of the measured range. `head_rows`: rows of the draft head; None: as measured. A depth takes
        at least 0 s."""
        if not nodes:
            return self.plain
        rows = 0 if head_rows is None else head_rows - self.head_rows
        numbers, seconds = zip(*self.drafting, strict=True)
        rest = float(np.interp(nodes, numbers, seconds))
        if nodes > numbers[-1] and len(numbers) > 1:
            rest += (nodes - numbers[-1]) * (seconds[-1] - seconds[0]) / (numbers[-1] - numbers[0])
        return rest + depth * max(0.0, self.depth + rows * self.head_row)


def calibrated_cost(cost: StepCost, head_rows: int | None = None) -> CostModel:
    """The cost model of a calibrated device."""
    return cache(lambda depth, nodes: max(1.0, cost.seconds(depth, nodes, head_rows) / cost.plain))


def gpu_rows(rows: int) -> float:
    """Time of a pass over these rows on a GPU, in passes over 1 row."""
    return 1 + (rows - 1) * _ROW_COST


def estimated_cost(exit_layer: int, num_layers: int, batch: int = 1, row_cost: RowCost = gpu_rows) -> CostModel:
    """The cost model of a device that was not calibrated: a depth takes the layers below the exit, its block and head
    (two layers); a node is one more row per sequence in the verify pass."""
    depth_cost, pass_cost = (exit_layer + 2) / num_layers, cache(row_cost)
    return lambda depth, nodes: pass_cost(batch * (nodes + 1)) / pass_cost(batch) + depth * depth_cost


class Median:
    """The lower median of the newest SAMPLES samples, which single stalls do not change; of the first `few` samples the
    least."""

    def __init__(self, value: float, few: int = 0) -> None:
        self.value, self._few = value, few  # before the first sample
        self._samples: deque[float] = deque(maxlen=SAMPLES)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: float) -> None:
        self._samples.append(sample)
        self.value = min(self._samples) if len(self) <= self._few else median_low(self._samples)


class CostBucket:
    """Device times of the steps in one bucket of batch sizes and lengths. Those of a plan are forgotten once
    FORGET_AFTER steps have run without it: a plan that stalls made look slow is tried again, and plain steps are
    measured again."""

    def __init__(self, correction: Median) -> None:
        self.correction = correction  # of measured over modelled cost, of all plans that draft, in all buckets
        self.savings: dict[Plan, float] = defaultdict(float)  # seconds, of plans not captured; see `Governor`
        self.plain: float | None = None  # seconds of a plain step; None while LEAST_SAMPLES of them are not measured
        # By plan: the seconds of its steps, and the number of the newest among the steps of this bucket.
        self._times: dict[Plan, tuple[Median, int]] = {}
        self._steps = 0  # that were observed in this bucket

    def times(self, plan: Plan) -> Median:
        """Seconds of the plan's steps, without samples if none of the last FORGET_AFTER steps had this plan."""
        times, newest = self._times.get(plan, (None, 0))
        return Median(inf, LEAST_SAMPLES) if times is None or self._steps - newest >= FORGET_AFTER else times

    def observe(self, plan: Plan, seconds: float, modelled: float) -> None:
        """Adds the device time of a step; `modelled` is its cost by the cost model."""
        times = self.times(plan)
        times.add(max(seconds, 1e-9))  # timers can return 0
        if len(plan) and self.plain is not None and len(times) >= LEAST_SAMPLES:
            self.correction.add(times.value / self.plain / modelled)
        self._steps += 1
        self._times[plan] = times, self._steps
        plain = self.times(NONE)
        self.plain = plain.value if len(plain) >= LEAST_SAMPLES else None

    def cost(self, plan: Plan, modelled: float) -> float:
        """Cost of a plan in plain steps: measured if it has run and plain steps are measured in this bucket, else the
        modelled cost times the correction; at least 1."""
        times, newest = self._times.get(plan, (None, 0))
        if times is None or self.plain is None or self._steps - newest >= FORGET_AFTER:
            return max(1.0, self.correction.value * modelled)
        return max(1.0, times.value / self.plain)


class Costs:
    """Measured costs of the steps of an engine, for batches of one kind."""

    def __init__(self) -> None:
        self.correction = Median(1.0)  # see `CostBucket`
        self._buckets: dict[tuple[int, int], CostBucket] = defaultdict(partial(CostBucket, self.correction))

    def bucket(self, batch: int, context: int) -> CostBucket:
        """The bucket of a batch size, up to the next power of two, and of the longest sequence's tokens, `context`."""
        return self._buckets[(batch - 1).bit_length(), (((context - 1) >> _SHORT_BITS).bit_length() + 1) // 2]
