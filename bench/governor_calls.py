"""Calls of an engine, followed step by step, and what the calls of one mode come to beside those of others.

A call's seconds go from the start of its prefill to its last token, with the little that is noted after every step.
Gaps between emissions and times per token are taken on the host, where whoever waits for the tokens would, and leave
the prompt out. Which modes there are and in which order they run is `bench.governor`'s business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import mean, median, median_high
from typing import Any

from selfspec.governor.governor import Change
from selfspec.metrics import Percentiles
from selfspec.scheduler import Scheduler
from selfspec.sequence import Request
from selfspec.speculation.plan import NONE

LOSES = 0.97  # of plain speed: where even the best plan is slower than this, drafting really loses
EARLY = 32  # tokens by which strange text is to be noticed
_LASTING = 8  # tokens: drafting that goes on for as many is more than a probe, whose one cycle brings fewer

Weighted = list[tuple[float, int]]  # seconds, and how often they count


@dataclass(frozen=True)
class Call:
    """One batch, decoded."""

    tokens: list[list[int]]  # new ones, by row
    seconds: float  # from the start of its prefill
    opening_s: float  # before them: reading the request, finding its domain
    cycle_s: float  # in cycles by the engine's own timers, which are the device's where it has kernels
    cycles: int  # added up over rows
    steps: list[tuple[float, list[int]]]  # seconds since the step before, and the new tokens of each row
    flagged: list[int | None]  # how many new tokens each row had when its text was found strange
    changes: list[list[Change]]  # of plan, by row

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def whole_s(self) -> float:
        return self.opening_s + self.seconds

    @property
    def gaps(self) -> Weighted:
        """Between emissions of a row; the first one waited for the prompt."""
        return [(gap, 1) for gap, news in self.steps[1:] for new in news if new]

    @property
    def token_times(self) -> Weighted:
        """Tokens that come together share the time since those before."""
        return [(gap / new, new) for gap, news in self.steps[1:] for new in news if new]

    @property
    def not_hidden(self) -> float:
        """The share of the time between emissions that was not a cycle's: the host's own, with kernels. Cycles are
        taken to be of one length."""
        between, cycles = sum(gap for gap, _ in self.steps[1:]), len(self.steps)
        return 1 - self.cycle_s * (cycles - 1) / cycles / between if between else 0.0

    def pace(self, start: int, stop: float) -> float:
        """Seconds per token of the new tokens from one to another, those of the first step left out."""
        counts = [0] * len(self.tokens)
        seconds, within = 0.0, 0
        for step, (gap, news) in enumerate(self.steps):
            after = [count + new for count, new in zip(counts, news, strict=True)]
            inside = sum(max(0, min(end, stop) - max(count, start)) for count, end in zip(counts, after, strict=True))
            if step:
                seconds += gap * inside / sum(news)
                within += int(inside)
            counts = after
        return seconds / within if within else math.nan


def follow(
    scheduler: Scheduler,
    new_request: Callable[[], Request],
    cycle_seconds: Callable[[], float],  # of the engine so far
    clock: Callable[[], float] = time.perf_counter,
) -> Call:
    """Runs a request to its end on the loop's thread, and notes after every step what its sequences have."""
    return scheduler.call(lambda: _follow(scheduler, new_request, cycle_seconds, clock))


def _follow(
    scheduler: Scheduler, new_request: Callable[[], Request], cycle_seconds: Callable[[], float], clock: Callable
) -> Call:
    before_s, started = cycle_seconds(), clock()
    request = new_request()
    request.prepare()
    opening_s, rows = clock() - started, request.sequences
    stamps, counts = [clock()], [[len(row.prompt) for row in rows]]  # after every step, tokens of each row
    flagged = [0 if row.ood else None for row in rows]
    scheduler.waiting.extend(rows)
    while not request.progress.is_over:
        scheduler.step()
        now, tokens = clock(), [len(row.tokens) for row in rows]  # no more than that: the device may be waiting
        if tokens == counts[-1]:
            continue  # a chunk of a prompt
        stamps.append(now)
        counts.append(tokens)
        for place, row in enumerate(rows):
            if row.ood and flagged[place] is None:
                flagged[place] = row.new_tokens
    if request.error is not None:
        raise request.error
    steps = [
        (after - before, [new - old for new, old in zip(news, olds, strict=True)])
        for (before, after), (olds, news) in zip(pairwise(stamps), pairwise(counts), strict=True)
    ]
    return Call(
        tokens=[row.tokens[len(row.prompt) :] for row in rows],
        seconds=stamps[-1] - stamps[0],
        opening_s=opening_s,
        cycle_s=cycle_seconds() - before_s,
        cycles=sum(row.steps for row in rows),
        steps=steps,
        flagged=flagged,
        changes=[list(row.changes) for row in rows],
    )


@dataclass
class Mode:
    """A way to call the engine, and its calls."""

    name: str
    shown: str
    options: dict[str, Any]  # of a request
    calls: dict[int, list[Call]] = field(default_factory=dict)  # by the batch's number, one for each repetition

    def add(self, number: int, call: Call) -> None:
        self.calls.setdefault(number, []).append(call)

    def typical(self, number: int, what: str = "seconds") -> float:
        """The median over repetitions, per token: texts are the same in all modes up to rounding ties."""
        return median(getattr(call, what) / call.count for call in self.calls[number])

    def total(self, what: str = "seconds") -> float:
        """For all batches."""
        return sum(self.typical(number, what) * calls[0].count for number, calls in self.calls.items())

    @property
    def tokens(self) -> int:
        return sum(calls[0].count for calls in self.calls.values())

    def speed(self, what: str = "seconds") -> float:
        """Tokens per second over all batches."""
        return self.tokens / self.total(what)

    def against(self, other: Mode, what: str = "seconds") -> float:
        return self.speed(what) / other.speed(what)

    def ratios(self, other: Mode) -> dict[int, float]:
        """Of speeds, by the batch's number."""
        return {number: other.typical(number) / self.typical(number) for number in self.calls}

    def pace(self, start: int, stop: float) -> float:
        """Seconds per token of a part of the texts: the median over repetitions, the mean over batches."""
        return mean(median(call.pace(start, stop) for call in calls) for calls in self.calls.values())

    def same_as(self, other: Mode) -> str:
        """How many of the rows have the same tokens: '11/12'."""
        pairs = [
            pair
            for number, calls in self.calls.items()
            for pair in zip(calls[0].tokens, other.calls[number][0].tokens, strict=True)
        ]
        return f"{sum(a == b for a, b in pairs)}/{len(pairs)}"

    def flagged(self, number: int) -> list[float]:
        """When each row of a batch was found strange: the median over repetitions of its new tokens; infinity is
        never."""
        of_calls = [[math.inf if at is None else at for at in call.flagged] for call in self.calls[number]]
        return [median_high(of_row) for of_row in zip(*of_calls, strict=True)]

    def result(self, plain: Mode) -> dict[str, Any]:
        every = [call for calls in self.calls.values() for call in calls]
        gap = Percentiles.of(weighted for call in every for weighted in call.gaps)
        per_token = Percentiles.of(weighted for call in every for weighted in call.token_times)
        return {
            "mode": self.name,
            "shown": self.shown,
            "tokens_per_s": round(self.speed(), 2),
            "against_plain": round(self.against(plain), 4),
            "against_plain_in_cycles": round(self.against(plain, "cycle_s"), 4),
            "against_plain_with_opening": round(self.against(plain, "whole_s"), 4),
            "worst_call": round(min(self.ratios(plain).values()), 4),
            "ms_per_token": _milliseconds(per_token),
            "gap_ms": _milliseconds(gap),
            "not_hidden": round(median(call.not_hidden for call in every), 4),
            "opening_ms": round(1e3 * median(call.opening_s for call in every), 3),
            "tokens_per_cycle": round(sum(call.count for call in every) / sum(call.cycles for call in every), 3),
            "same_tokens_as_plain": self.same_as(plain),
            "seconds": {number: [round(call.seconds, 5) for call in calls] for number, calls in self.calls.items()},
        }


def _milliseconds(of: Percentiles) -> dict[str, float]:
    return {name: round(1e3 * seconds, 4) for name, seconds in asdict(of).items()}


def compare(plain: Mode, fixed: Sequence[Mode], governor: Mode, new_tokens: int) -> dict[str, Any]:
    """What the governor did beside plain decoding and the fixed plans, on the same batches."""
    best = min(fixed, key=lambda mode: mode.total())
    in_cycles = min(fixed, key=lambda mode: mode.total("cycle_s"))
    ratios = governor.ratios(plain)
    whole = [number for number, calls in plain.calls.items() if all(len(row) == new_tokens for row in calls[0].tokens)]
    gaps = [mode.result(plain)["gap_ms"]["p99"] for mode in (governor, plain)]
    return {
        "best_fixed": best.name,
        "best_fixed_shown": best.shown,
        "best_fixed_against_plain": round(best.against(plain), 4),
        "governor_against_plain": round(governor.against(plain), 4),
        "governor_against_plain_with_opening": round(governor.against(plain, "whole_s"), 4),
        "governor_against_best_fixed": round(governor.against(best), 4),
        "governor_against_plain_in_cycles": round(governor.against(plain, "cycle_s"), 4),
        "governor_against_best_fixed_in_cycles": round(governor.against(in_cycles, "cycle_s"), 4),
        "worst_call": round(min(ratios.values()), 4),
        # Short texts are mostly prefill and noise.
        "whole_calls": len(whole),
        "worst_whole_call": round(min(ratios[number] for number in whole), 4) if whole else None,
        "gap_p99_against_plain": round(gaps[0] / gaps[1], 3) if gaps[1] else None,
        "detection": detection(plain, fixed, governor),
        "governor_changes": {
            number: [[asdict(change) for change in row] for row in calls[0].changes]
            for number, calls in governor.calls.items()
        },
    }


def around(turn: int, plain: Mode, fixed: Sequence[Mode], governor: Mode) -> dict[str, Any]:
    """Speeds over plain decoding before and after the text turned, its prompt left out; the best plan is each part's
    own. Where that is under 1, drafting has nothing to come back for."""
    found = {}
    for part, start, stop in (("before", 0, float(turn)), ("after", turn, math.inf)):
        usual = plain.pace(start, stop)
        found[part] = {
            "best_fixed_against_plain": round(max(usual / mode.pace(start, stop) for mode in fixed), 4),
            "governor_against_plain": round(usual / governor.pace(start, stop), 4),
        }
    return found


def detection(plain: Mode, fixed: Sequence[Mode], governor: Mode) -> dict[str, Any]:
    """Rows found strange, and rows of the batches in which every fixed plan really loses."""
    counts = {"rows": 0, "flagged": 0, "losing": 0, "losing_flagged_early": 0}
    flagged_at = []
    for number in plain.calls:
        flags = governor.flagged(number)
        loses = max(mode.ratios(plain)[number] for mode in fixed) < LOSES
        flagged_at += [int(at) for at in flags if at < math.inf]
        counts["rows"] += len(flags)
        counts["losing"] += loses * len(flags)
        counts["losing_flagged_early"] += loses * sum(at < EARLY for at in flags)
    return {**counts, "flagged": len(flagged_at), "flagged_at": flagged_at}


def returns(governor: Mode, turn: int) -> dict[str, Any]:
    """How long it took, after the text turned, until drafting was back."""
    rows = [
        (row, len(tokens))
        for calls in governor.calls.values()
        for call in calls
        for row, tokens in zip(call.changes, call.tokens, strict=True)
    ]
    back = [tokens_until_back(row, turn, end) for row, end in rows]
    known = [tokens for tokens in back if tokens is not None]
    return {
        "texts": len(rows),
        "plain_at_turn": sum(not drafts_at(row, turn) for row, _ in rows),
        "never_back": len(back) - len(known),
        "tokens_median": median(known) if known else None,
        "tokens_most": max(known) if known else None,
    }


def drafts_at(changes: Sequence[Change], token: int) -> bool:
    """Whether the plan in use at a new token drafts anything."""
    plans = [change.plan for change in changes if change.token <= token]
    return bool(plans) and plans[-1] != str(NONE)


def tokens_until_back(changes: Sequence[Change], turn: int, end: int) -> int | None:
    """New tokens after `turn` until the drafting that then lasts; None where there is none before the text's `end`."""
    begun: int | None = None
    for change in (*changes, Change(0, end, str(NONE), None)):
        if change.plan != str(NONE):
            begun = change.token if begun is None else begun
        elif begun is not None:
            if change.token - max(begun, turn) >= _LASTING:
                return max(0, begun - turn)
            begun = None
    return None
