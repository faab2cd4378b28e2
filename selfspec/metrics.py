"""Totals over all requests of an engine, and their summary as a table and in Prometheus' text format.

The scheduler adds every request, and a batch every step and change of plan; an addition takes a few microseconds, and
the memory is bounded. Measures no time itself and decides nothing; a sequence's own statistics are its `Stats`. Public
names say cycle for a step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import Lock

from selfspec.speculation.plan import Plan

WINDOW = 8192  # most recent steps, of which percentiles are computed: bounds their memory
MAX_PLANS = 256  # plans with totals of their own: requests may pass any number of plans, and memory is bounded
OTHERS = "others"  # the name under which the totals of all other plans are added up
_LISTED = 6  # plans in the table: it must fit a screen


@dataclass(frozen=True)
class Percentiles:
    """The 50th, 95th and 99th percentile of times in seconds; 0 if there are no times."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, weighted: Iterable[tuple[float, int]]) -> Percentiles:
        """Computes the percentiles of (value, count) pairs, each value occurring `count` times: percentile p is the
        smallest value that at least p% of all values do not exceed."""
        ordered = sorted(weighted)
        total = sum(count for _, count in ordered)
        pairs, value, at_or_below = iter(ordered), 0.0, 0
        percentiles = []
        for percent in (50, 95, 99):
            while 100 * at_or_below < percent * total:
                value, count = next(pairs)
                at_or_below += count
            percentiles.append(value)
        return cls(*percentiles)

    def __str__(self) -> str:
        return f"{1e3 * self.p50:.2f} / {1e3 * self.p95:.2f} / {1e3 * self.p99:.2f} ms (p50 / p95 / p99)"


@dataclass(frozen=True)
class Summary:
    """Totals of an engine at one moment. `str()` returns a table, `prometheus()` Prometheus' text format."""

    requests: int
    tokens: int  # new tokens
    cycles: int  # steps
    emissions: int  # steps, each counted once for every sequence in it: how often a sequence got tokens
    seconds: float  # spent in steps; prefill is not included
    seconds_by_plan: dict[str, float]  # in descending order
    cycles_by_plan: dict[str, int]  # in the order of seconds_by_plan
    accepted_by_depth: list[int]  # drafted nodes that were accepted, from depth 1 on
    reached_by_depth: list[int]  # times that a node of the depth was accepted, or all of them were rejected
    time_per_token: Percentiles  # of recent tokens: seconds of the step over the tokens that the sequence got in it
    gap: Percentiles  # seconds of recent steps, each counted once for every sequence in it
    speedup: float | None  # over plain decoding, in steps for which a plain step's time was known; None without any
    mode_changes: int  # changes of plan of all batches; the first plan of a batch counts as one
    changes_by_reason: dict[str, int]  # those to the plan `none`, by the reason for plain decoding
    drafted: int = 0  # tokens, of ended sequences
    prefix_cache_queries: int = 0  # prompt tokens of prefilled sequences
    prefix_cache_hits: int = 0  # those of them whose KV pages were reused

    @property
    def accept_rate(self) -> float:
        """Accepted nodes divided by reached depths; 0 if nothing was drafted."""
        return _share(sum(self.accepted_by_depth), sum(self.reached_by_depth))

    @property
    def accept_rate_by_depth(self) -> list[float]:
        return [_share(*counts) for counts in zip(self.accepted_by_depth, self.reached_by_depth, strict=True)]

    @property
    def tokens_per_cycle(self) -> float:
        """Mean number of tokens that a sequence gets in a step."""
        return _share(self.tokens, self.emissions)

    @property
    def time_share_by_plan(self) -> dict[str, float]:
        return {plan: _share(seconds, self.seconds) for plan, seconds in self.seconds_by_plan.items()}

    def __str__(self) -> str:
        return "\n".join(f"{name:<23}{value}" for name, value in self._lines())

    def prometheus(self) -> str:
        """Returns Prometheus' text format, for an endpoint or a file."""
        return "\n".join([*prometheus_lines(self._series(), "selfspec_"), ""])

    def _lines(self) -> Iterator[tuple[str, str]]:
        """Yields the name and value of each line of the table."""
        yield "requests", f"{self.requests}"
        yield "tokens", f"{self.tokens} in {self.seconds:.1f} s"
        yield "tokens per step", f"{self.tokens_per_cycle:.2f}"
        by_depth = " ".join(f"{rate:.0%}" for rate in self.accept_rate_by_depth)
        yield "drafts accepted", f"{self.accept_rate:.0%} (by depth: {by_depth})" if by_depth else "nothing drafted"
        yield "time per token", f"{self.time_per_token}"
        yield "time of a step", f"{self.gap}"
        yield "speed against plain", "unknown" if self.speedup is None else f"{self.speedup:.2f}x"
        for plan, share in islice(self.time_share_by_plan.items(), _LISTED):
            steps = _share(self.cycles_by_plan[plan], self.cycles)
            yield f"  {short_plan_name(plan)}", f"{share:.1%} of the time, {steps:.1%} of the steps"
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.changes_by_reason.items())
        hits = _share(self.prefix_cache_hits, self.prefix_cache_queries)
        yield "prompt tokens", f"{self.prefix_cache_queries}, {hits:.1%} of them reused"
        yield "plan changes", f"{self.mode_changes}" + (f" (to plain: {reasons})" if reasons else "")

    def _series(self) -> Iterator[tuple[str, str, str, Mapping]]:
        """Yields the name, help text, label name ("": no label) and values by label of each Prometheus metric."""
        accepted, reached = (
            dict(enumerate(counts, start=1)) for counts in (self.accepted_by_depth, self.reached_by_depth)
        )
        yield "requests_total", "Requests submitted", "", {"": self.requests}
        yield "tokens_total", "Tokens generated", "", {"": self.tokens}
        yield "emissions_total", "Steps, each counted once for every sequence in it", "", {"": self.emissions}
        yield "cycles_total", "Steps by plan", "plan", self.cycles_by_plan
        yield "cycle_seconds_total", "Seconds in steps by plan", "plan", self.seconds_by_plan
        yield "accepted_total", "Accepted nodes by depth, from 1", "depth", accepted
        yield (
            "reached_total",
            "Steps that accepted a node of the depth or rejected all, once per sequence",
            "depth",
            reached,
        )
        yield "mode_changes_total", "Changes of a batch's plan, its first plan included", "", {"": self.mode_changes}
        yield "switched_off_total", "Changes of a batch to plain decoding, by reason", "reason", self.changes_by_reason
        queries, hits = self.prefix_cache_queries, self.prefix_cache_hits
        yield "prefix_cache_queries_total", "Prompt tokens of prefilled sequences", "", {"": queries}
        yield "prefix_cache_hits_total", "Prompt tokens whose KV pages were reused", "", {"": hits}
        for name, meaning, times in (
            ("time_per_token", "Seconds per token", self.time_per_token),
            ("emission_gap", "Seconds of a step, counted once for every sequence in it", self.gap),
        ):
            quantiles = {"0.5": times.p50, "0.95": times.p95, "0.99": times.p99}
            yield f"{name}_seconds", f"{meaning}, of the last {WINDOW} steps", "quantile", quantiles
        if self.speedup is not None:
            yield "speedup", "Speed over that of plain decoding", "", {"": self.speedup}


class Metrics:
    """Adds up totals while an engine runs; any thread may call `summary` at any time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._requests = self._tokens = self._emissions = 0
        self._prompt_tokens = self._cached_tokens = self._drafted = 0
        self._seconds: dict[Plan | str, float] = {}  # of the steps of each plan
        self._steps: Counter[Plan | str] = Counter()  # of each plan
        self._compared = 0.0  # seconds of the steps for which the time of a plain step was known
        self._plainly = 0.0  # seconds that plain decoding would have taken for the tokens of these steps
        self._accepted: list[int] = []
        self._reached: list[int] = []
        self._changes: Counter[str | None] = Counter()
        self._recent: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=WINDOW)  # seconds, tokens of each sequence

    def add_request(self) -> None:
        """Counts a request that has started."""
        with self._lock:
            self._requests += 1

    def add_prompt(self, tokens: int, cached: int) -> None:
        """Adds a prefilled prompt, and how many of its tokens reused KV pages."""
        with self._lock:
            self._prompt_tokens += tokens
            self._cached_tokens += cached

    def add_step(self, plan: Plan, seconds: float, tokens: Sequence[int], plain_seconds: float | None) -> None:
        """Adds a finished step: the tokens that each of its sequences got, and the expected time of a plain step of the
        same sequences (None: unknown)."""
        emitted, sequences = sum(tokens), len(tokens)
        with self._lock:
            name = plan if plan in self._seconds or len(self._seconds) < MAX_PLANS else OTHERS
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self._steps[name] += 1
            self._tokens += emitted
            self._emissions += sequences
            self._recent.append((seconds, tuple(tokens)))
            if plain_seconds is not None and sequences:
                self._compared += seconds
                self._plainly += plain_seconds * emitted / sequences

    def add_acceptance(
        self, accepted_by_depth: Sequence[int], reached_by_depth: Sequence[int], drafted: int = 0
    ) -> None:
        """Adds a finished sequence's accepted nodes and reached depths, from depth 1 on, and its drafted tokens."""
        with self._lock:
            self._drafted += drafted
            _add(self._accepted, accepted_by_depth)
            _add(self._reached, reached_by_depth)

    def add_plan_change(self, reason: str | None) -> None:
        """Counts a batch's change of plan; `reason` is that of a change to plain decoding, else None."""
        with self._lock:
            self._changes[reason] += 1

    def summary(self) -> Summary:
        with self._lock:
            recent = list(self._recent)
        # Sorts without the lock: the loop must not wait for it.
        time_per_token = Percentiles.of((time / count, count) for time, tokens in recent for count in tokens if count)
        gap = Percentiles.of((time, len(tokens)) for time, tokens in recent)
        with self._lock:
            longest_first = sorted(self._seconds, key=lambda plan: -self._seconds[plan])
            return Summary(
                requests=self._requests,
                tokens=self._tokens,
                cycles=self._steps.total(),
                emissions=self._emissions,
                seconds=sum(self._seconds.values()),
                seconds_by_plan={str(plan): self._seconds[plan] for plan in longest_first},
                cycles_by_plan={str(plan): self._steps[plan] for plan in longest_first},
                accepted_by_depth=list(self._accepted),
                reached_by_depth=list(self._reached),
                time_per_token=time_per_token,
                gap=gap,
                speedup=self._plainly / self._compared if self._compared else None,
                mode_changes=self._changes.total(),
                changes_by_reason={reason: count for reason, count in self._changes.most_common() if reason},
                drafted=self._drafted,
                prefix_cache_queries=self._prompt_tokens,
                prefix_cache_hits=self._cached_tokens,
            )


def prometheus_lines(series: Iterable[tuple[str, str, str, Mapping]], prefix: str) -> Iterator[str]:
    """Yields the lines of Prometheus' text format, of each metric's name, help text, label name ("": no label) and
    values by label. Names begin with `prefix`; those that end in _total are counters, the others gauges."""
    for suffix, meaning, label, values in series:
        name = prefix + suffix
        yield f"# HELP {name} {meaning}"
        yield f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"
        for key, value in values.items():
            escaped = str(key).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            yield f'{name}{{{label}="{escaped}"}} {value}' if label else f"{name} {value}"


def short_plan_name(plan: str) -> str:
    """Returns a plan's name for one line of text: an irregular plan's own name lists all its nodes."""
    kind, _, nodes = plan.partition(":")
    drafted, *copied = nodes.split("+")
    return "+".join([f"tree of {drafted.count(',') + 1} nodes", *copied]) if kind == "nodes" else plan


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _add(totals: list[int], counts: Sequence[int]) -> None:
    totals += [0] * (len(counts) - len(totals))
    for depth, count in enumerate(counts):
        totals[depth] += count
