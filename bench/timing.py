"""Time budgets, turns and statistics of repeated measurements, shared by the benchmarks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import TypeVar

T = TypeVar("T")


class Limit:
    """A time budget of `seconds` that starts when it is made."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def is_spent(self) -> bool:
        return time.perf_counter() >= self._end

    def part(self, share: float) -> Limit:
        """A budget of this share of the time that is left."""
        return Limit(share * max(0.0, self._end - time.perf_counter()))

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Yields items until the budget is spent; an item that was begun is completed."""
        for item in items:
            if self.is_spent:
                return
            yield item


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items in order, starting with another one in every turn."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float], digits: int) -> dict[str, float]:
    """Median, least and greatest value, rounded."""
    found = {"median": median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}
