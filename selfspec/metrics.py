"""What an engine has done so far: totals over all its requests, and how they read.

Sessions tell it of every request, cycle and change of plan, for a few microseconds each and in bounded memory. It
decides nothing and measures no time itself; what happened to one sequence is in that sequence's `Stats`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from types import SimpleNamespace

from selfspec.speculation.plan import NONE, Plan

WINDOW = 8192  # cycles that percentiles look back on
MAX_PLANS = 256  # told apart; requests may bring any number of their own
OTHERS = "others"  # the plans beyond
_LISTED = 6  # plans in the table


@dataclass(frozen=True)
class Percentiles:
    """Of times in seconds; all zero where there was none."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, weighted: Iterable[tuple[float, int]]) -> Percentiles:
        """Of values that count so many times each: the smallest with at least that share at or below it."""
        ordered = sorted(weighted)
        total = sum(count for _, count in ordered)
        values, value, passed = iter(ordered), 0.0, 0
        found = []
        for percent in (50, 95, 99):
            while 100 * passed < percent * total:
                value, count = next(values)
                passed += count
            found.append(value)
        return cls(*found)

    def __str__(self) -> str:
        return f"{1e3 * self.p50:.2f} / {1e3 * self.p95:.2f} / {1e3 * self.p99:.2f} ms (p50 / p95 / p99)"


@dataclass(frozen=True)
class Summary:
    """Totals of an engine at one moment. `str()` makes a small table of it, `prometheus()` what Prometheus reads."""

    requests: int
    tokens: int
    cycles: int
    emissions: int  # cycles, each counted for every sequence in it
    seconds: float  # in cycles; reading prompts is not in it
    seconds_by_plan: dict[str, float]  # the longest first
    cycles_by_plan: dict[str, int]
    accepted_by_depth: list[int]
    reached_by_depth: list[int]
    time_per_token: Percentiles  # of recent tokens: their cycle's time over the tokens their sequence got in it
    gap: Percentiles  # between recent emissions of a sequence: their cycle's time
    speedup: float | None  # over plain decoding while its step's time was known; None where it never was
    mode_changes: int  # of the plan of a session, its first one included
    changes_by_reason: dict[str, int]  # of those to plain decoding

    @property
    def accept_rate(self) -> float:
        """The chance that a reached depth held the target's token; 0 where nothing was drafted."""
        return _share(sum(self.accepted_by_depth), sum(self.reached_by_depth))

    @property
    def accept_rate_by_depth(self) -> list[float]:
        return [_share(*counts) for counts in zip(self.accepted_by_depth, self.reached_by_depth, strict=True)]

    @property
    def tokens_per_cycle(self) -> float:
        """Of one sequence."""
        return _share(self.tokens, self.emissions)

    @property
    def time_share_by_plan(self) -> dict[str, float]:
        return {plan: _share(seconds, self.seconds) for plan, seconds in self.seconds_by_plan.items()}

    @property
    def plain_time_share(self) -> float:
        return _share(self.seconds_by_plan.get(str(NONE), 0.0), self.seconds)

    @property
    def plain_cycle_share(self) -> float:
        return _share(self.cycles_by_plan.get(str(NONE), 0), self.cycles)

    def __str__(self) -> str:
        return "\n".join(f"{name:<23}{told}" for name, told in self._lines())

    def prometheus(self) -> str:
        """Prometheus' text format, for an endpoint or a file. What only grows is a counter, the rest are gauges."""
        try:
            from prometheus_client import Metric, generate_latest
        except ImportError as error:
            raise ImportError("Prometheus' format needs its client: pip install selfspec[prometheus]") from error
        families = []
        for name, meaning, label, values in self._series():
            family = Metric(name.removesuffix("_total"), meaning, "counter" if name.endswith("_total") else "gauge")
            for key, value in values.items():
                family.add_sample(name, {label: str(key)} if label else {}, value)
            families.append(family)
        return generate_latest(SimpleNamespace(collect=lambda: families)).decode()  # type: ignore[arg-type]

    def _lines(self) -> Iterator[tuple[str, str]]:
        """The table."""
        yield "requests", f"{self.requests}"
        yield "tokens", f"{self.tokens} in {self.seconds:.1f} s"
        yield "tokens per cycle", f"{self.tokens_per_cycle:.2f}"
        by_depth = " ".join(f"{rate:.0%}" for rate in self.accept_rate_by_depth)
        yield "drafts accepted", f"{self.accept_rate:.0%} (by depth: {by_depth})" if by_depth else "nothing drafted"
        yield "time per token", f"{self.time_per_token}"
        yield "gap between emissions", f"{self.gap}"
        yield "speed against plain", "unknown" if self.speedup is None else f"{self.speedup:.2f}x"
        for plan, share in islice(self.time_share_by_plan.items(), _LISTED):
            cycles = _share(self.cycles_by_plan[plan], self.cycles)
            yield f"  {short(plan)}", f"{share:.1%} of the time, {cycles:.1%} of the cycles"
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.changes_by_reason.items())
        yield "mode changes", f"{self.mode_changes}" + (f" (to plain: {reasons})" if reasons else "")

    def _series(self) -> Iterator[tuple[str, str, str, Mapping]]:
        """For Prometheus: name, meaning, the label's name or nothing, and values by label."""
        accepted, reached = (dict(enumerate(of, start=1)) for of in (self.accepted_by_depth, self.reached_by_depth))
        yield "selfspec_requests_total", "Requests begun", "", {"": self.requests}
        yield "selfspec_tokens_total", "Tokens generated", "", {"": self.tokens}
        yield "selfspec_emissions_total", "Cycles, counted for every sequence in them", "", {"": self.emissions}
        yield "selfspec_cycles_total", "Cycles by plan", "plan", self.cycles_by_plan
        yield "selfspec_cycle_seconds_total", "Time in cycles by plan", "plan", self.seconds_by_plan
        yield "selfspec_accepted_total", "Drafted tokens that were right, by depth", "depth", accepted
        yield "selfspec_reached_total", "How often a depth was reached", "depth", reached
        yield "selfspec_mode_changes_total", "Changes of plan", "", {"": self.mode_changes}
        yield "selfspec_switched_off_total", "Changes to plain decoding", "reason", self.changes_by_reason
        for name, meaning, of in (
            ("time_per_token", "Time per token", self.time_per_token),
            ("emission_gap", "Time between emissions of a sequence", self.gap),
        ):
            quantiles = {"0.5": of.p50, "0.95": of.p95, "0.99": of.p99}
            yield f"selfspec_{name}_seconds", f"{meaning}, of the last {WINDOW} cycles", "quantile", quantiles
        if self.speedup is not None:
            yield "selfspec_speedup", "Speed over that of plain decoding", "", {"": self.speedup}


@dataclass
class _Spent:
    seconds: float = 0.0
    cycles: int = 0


class Metrics:
    """Collects while an engine works; other threads may ask for a summary meanwhile."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._requests = self._tokens = self._emissions = 0
        self._spent: dict[Plan | str, _Spent] = {}
        self._compared = 0.0  # seconds of the cycles for which a plain step's time was known
        self._plainly = 0.0  # seconds that plain decoding would have taken for their tokens
        self._accepted: list[int] = []
        self._reached: list[int] = []
        self._changes: Counter[str | None] = Counter()
        self._recent: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=WINDOW)

    def request(self) -> None:
        """A request begins."""
        with self._lock:
            self._requests += 1

    def cycle(self, plan: Plan, seconds: float, tokens: Sequence[int], plain_seconds: float | None) -> None:
        """A cycle is over: the tokens that each sequence got, and the time of a plain step of as many, where known."""
        emitted, rows = sum(tokens), len(tokens)
        with self._lock:
            spent = self._spent.get(plan) or self._first_spent(plan)
            spent.seconds += seconds
            spent.cycles += 1
            self._tokens += emitted
            self._emissions += rows
            self._recent.append((seconds, tuple(tokens)))
            if plain_seconds is not None and rows:
                self._compared += seconds
                self._plainly += plain_seconds * emitted / rows

    def accepted(self, accepted_by_depth: Sequence[int], reached_by_depth: Sequence[int]) -> None:
        """Adds drafted tokens that were right, and how often each depth was reached, from the first depth on."""
        if len(accepted_by_depth) != len(reached_by_depth):
            raise ValueError(f"{len(accepted_by_depth)} depths accepted but {len(reached_by_depth)} reached")
        with self._lock:
            _add(self._accepted, accepted_by_depth)
            _add(self._reached, reached_by_depth)

    def change(self, reason: str | None) -> None:
        """A session begins, or goes on, with another plan; the reason where that is to draft nothing."""
        with self._lock:
            self._changes[reason] += 1

    @property
    def seconds(self) -> float:
        """In cycles, as a summary tells it, without the work of making one."""
        with self._lock:
            return sum(of.seconds for of in self._spent.values())

    def summary(self) -> Summary:
        with self._lock:
            recent = list(self._recent)
        # Sorted without the lock: a cycle must not wait for that.
        time_per_token = Percentiles.of((time / count, count) for time, tokens in recent for count in tokens if count)
        gap = Percentiles.of((time, len(tokens)) for time, tokens in recent)
        with self._lock:
            spent = {str(plan): spent for plan, spent in self._spent.items()}
            longest_first = sorted(spent, key=lambda plan: -spent[plan].seconds)
            return Summary(
                requests=self._requests,
                tokens=self._tokens,
                cycles=sum(of.cycles for of in spent.values()),
                emissions=self._emissions,
                seconds=sum(of.seconds for of in spent.values()),
                seconds_by_plan={plan: spent[plan].seconds for plan in longest_first},
                cycles_by_plan={plan: spent[plan].cycles for plan in longest_first},
                accepted_by_depth=list(self._accepted),
                reached_by_depth=list(self._reached),
                time_per_token=time_per_token,
                gap=gap,
                speedup=self._plainly / self._compared if self._compared else None,
                mode_changes=self._changes.total(),
                changes_by_reason={reason: count for reason, count in self._changes.most_common() if reason},
            )

    def _first_spent(self, plan: Plan) -> _Spent:
        return self._spent.setdefault(plan if len(self._spent) < MAX_PLANS else OTHERS, _Spent())


def short(plan: str) -> str:
    """A plan's name for a line of text: that of an irregular one lists all its nodes."""
    kind, _, nodes = plan.partition(":")
    return f"tree of {nodes.count(',') + 1} nodes" if kind == "nodes" else plan


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _add(totals: list[int], counts: Sequence[int]) -> None:
    totals += [0] * (len(counts) - len(totals))
    for depth, count in enumerate(counts):
        totals[depth] += count
