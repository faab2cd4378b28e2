"""Runs requests of `bench.governor` step by step, records their times, and compares the modes' speeds.

A call's seconds last from the start of its prefill to its last token; recording the sequences' lengths after every step
is included. Gaps between emissions and times per token are host times and exclude the first step, which waits for the
prefill. `bench.governor` chooses the modes and the order of calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import mean, median, median_high
from typing import Any

from selfspec.history import Change
from selfspec.metrics import Percentiles
from selfspec.scheduler import Scheduler
from selfspec.sequence import Request
from selfspec.speculation.plan import NONE

LOSING = 0.97  # of plain speed: a batch loses if its best fixed plan is slower than this
EARLY = 32  # new tokens: a sequence found out of distribution before as many is found early
_LASTING = 8  # new tokens: drafting over as many is no probe; a probe is one step, which emits fewer

Weighted = list[tuple[float, int]]  # seconds, and how often they count


@dataclass(frozen=True)
class Call:
    """The tokens, times and plans of one decoded batch."""

    tokens: list[list[int]]  # new tokens of each sequence
    seconds: float  # from the start of the prefill to the last token
    prepare_s: float  # before the prefill: reading the request, finding its domain
    step_s: float  # in steps, by the engine's timers: device time where it has kernels
    steps: int  # summed over sequences
    emissions: list[tuple[float, list[int]]]  # of each step: seconds since the previous one, each sequence's new tokens
    ood_at: list[int | None]  # new tokens of each sequence when it was found out of distribution; None: it was not
    changes: list[list[Change]]  # of plan, for each sequence

    @property
    def count(self) -> int:
        """New tokens of all sequences."""
        return sum(map(len, self.tokens))

    @property
    def total_s(self) -> float:
        return self.prepare_s + self.seconds

    @property
    def gaps(self) -> Weighted:
        """Seconds between emissions of a sequence, without the first step, which waits for the prefill."""
        return [(gap, 1) for gap, news in self.emissions[1:] for new in news if new]

    @property
    def token_times(self) -> Weighted:
        """Seconds per token: the tokens of one step share its gap equally."""
        return [(gap / new, new) for gap, news in self.emissions[1:] for new in news if new]

    @property
    def outside_steps(self) -> float:
        """The share of the time between emissions that is not in steps: with kernels, host time during which the device
        is idle. Takes all steps to be equally long, since the first one has no gap without prefill."""
        between, steps = sum(gap for gap, _ in self.emissions[1:]), len(self.emissions)
        return 1 - self.step_s * (steps - 1) / steps / between if between else 0.0

    def seconds_per_token(self, start: int, stop: float) -> float:
        """Of each sequence's new tokens `start` to `stop`, without those of the first step; NaN if there are none."""
        counts = [0] * len(self.tokens)
        seconds, within = 0.0, 0
        for step, (gap, news) in enumerate(self.emissions):
            after = [count + new for count, new in zip(counts, news, strict=True)]
            inside = sum(max(0, min(end, stop) - max(count, start)) for count, end in zip(counts, after, strict=True))
            if step:
                seconds += gap * inside / sum(news)
                within += int(inside)
            counts = after
        return seconds / within if within else math.nan


def run_request(
    scheduler: Scheduler,
    new_request: Callable[[], Request],
    step_seconds: Callable[[], float],  # seconds that the engine has spent in steps so far
    clock: Callable[[], float] = time.perf_counter,
) -> Call:
    """Runs a request to its end on the loop's thread and records its sequences' lengths after every step."""
    return scheduler.call(lambda: _run_request(scheduler, new_request, step_seconds, clock))


def _run_request(
    scheduler: Scheduler, new_request: Callable[[], Request], step_seconds: Callable[[], float], clock: Callable
) -> Call:
    before_s, started = step_seconds(), clock()
    request = new_request()
    request.prepare()
    prepare_s, sequences = clock() - started, request.sequences
    stamps, lengths = [clock()], [[len(sequence.prompt) for sequence in sequences]]  # after every step
    ood_at = [0 if sequence.skill.was_ood else None for sequence in sequences]
    scheduler.waiting.extend(sequences)
    while not request.progress.is_over:
        scheduler.step()
        now, tokens = clock(), [len(sequence.tokens) for sequence in sequences]  # no more: the device may be waiting
        if tokens == lengths[-1]:
            continue  # a chunk of the prefill
        stamps.append(now)
        lengths.append(tokens)
        for index, sequence in enumerate(sequences):
            if sequence.skill.was_ood and ood_at[index] is None:
                ood_at[index] = sequence.new_tokens
    if request.error is not None:
        raise request.error
    emissions = [
        (end - start, [after - before for before, after in zip(shorter, longer, strict=True)])
        for (start, end), (shorter, longer) in zip(pairwise(stamps), pairwise(lengths), strict=True)
    ]
    return Call(
        tokens=[sequence.tokens[len(sequence.prompt) :] for sequence in sequences],
        seconds=stamps[-1] - stamps[0],
        prepare_s=prepare_s,
        step_s=step_seconds() - before_s,
        steps=sum(sequence.history.steps for sequence in sequences),
        emissions=emissions,
        ood_at=ood_at,
        changes=[list(sequence.history.changes) for sequence in sequences],
    )


@dataclass
class Mode:
    """Options of requests (plain decoding, a fixed plan or the governor), and the calls made with them."""

    name: str
    label: str  # the name in tables
    options: dict[str, Any]  # keyword arguments of `generate`
    calls: dict[int, list[Call]] = field(default_factory=dict)  # by the batch's number, one for each repetition

    def add(self, number: int, call: Call) -> None:
        self.calls.setdefault(number, []).append(call)

    def time_per_token(self, number: int, timer: str = "seconds") -> float:
        """Seconds per token of a batch, the median over repetitions. `timer` names a time of Call: seconds, step_s or
        total_s. Per token, since after a rounding tie two modes may write texts of different lengths."""
        return median(getattr(call, timer) / call.count for call in self.calls[number])

    def total(self, timer: str = "seconds") -> float:
        """Seconds of all batches."""
        return sum(self.time_per_token(number, timer) * calls[0].count for number, calls in self.calls.items())

    @property
    def tokens(self) -> int:
        """New tokens of all batches."""
        return sum(calls[0].count for calls in self.calls.values())

    def speed(self, timer: str = "seconds") -> float:
        """Tokens per second over all batches."""
        return self.tokens / self.total(timer)

    def against(self, other: Mode, timer: str = "seconds") -> float:
        """This mode's speed divided by the other's, over all batches."""
        return self.speed(timer) / other.speed(timer)

    def ratios(self, other: Mode) -> dict[int, float]:
        """This mode's speed divided by the other's, by the batch's number."""
        return {number: other.time_per_token(number) / self.time_per_token(number) for number in self.calls}

    def seconds_per_token(self, start: int, stop: float) -> float:
        """Of new tokens `start` to `stop`: the median over repetitions, the mean over batches."""
        return mean(median(call.seconds_per_token(start, stop) for call in calls) for calls in self.calls.values())

    def same_as(self, other: Mode) -> str:
        """How many sequences have the same tokens in both modes: '11/12'."""
        pairs = [
            pair
            for number, calls in self.calls.items()
            for pair in zip(calls[0].tokens, other.calls[number][0].tokens, strict=True)
        ]
        return f"{sum(a == b for a, b in pairs)}/{len(pairs)}"

    def ood_at(self, number: int) -> list[float]:
        """New tokens of each sequence of a batch when it was found out of distribution, the median over repetitions;
        infinity if it was not."""
        of_calls = [[math.inf if at is None else at for at in call.ood_at] for call in self.calls[number]]
        return [median_high(of_sequence) for of_sequence in zip(*of_calls, strict=True)]

    def result(self, plain: Mode) -> dict[str, Any]:
        """The mode's entry in governor.json."""
        every = [call for calls in self.calls.values() for call in calls]
        gap = Percentiles.of(weighted for call in every for weighted in call.gaps)
        per_token = Percentiles.of(weighted for call in every for weighted in call.token_times)
        return {
            "mode": self.name,
            "label": self.label,
            "tokens_per_s": round(self.speed(), 2),
            "against_plain": round(self.against(plain), 4),
            "against_plain_in_steps": round(self.against(plain, "step_s"), 4),
            "against_plain_with_preparation": round(self.against(plain, "total_s"), 4),
            "worst_call": round(min(self.ratios(plain).values()), 4),
            "ms_per_token": _milliseconds(per_token),
            "gap_ms": _milliseconds(gap),
            "outside_steps": round(median(call.outside_steps for call in every), 4),
            "prepare_ms": round(1e3 * median(call.prepare_s for call in every), 3),
            "tokens_per_step": round(sum(call.count for call in every) / sum(call.steps for call in every), 3),
            "same_tokens_as_plain": self.same_as(plain),
            "seconds": {number: [round(call.seconds, 5) for call in calls] for number, calls in self.calls.items()},
        }


def _milliseconds(times: Percentiles) -> dict[str, float]:
    return {name: round(1e3 * seconds, 4) for name, seconds in asdict(times).items()}


def compare(plain: Mode, fixed: Sequence[Mode], governor: Mode, new_tokens: int) -> dict[str, Any]:
    """Compares the governor's speed with plain decoding's and the fixed plans' on the same batches. The best fixed plan
    is the one with the least total time, for ratios in steps the one with the least time in steps. A call has full
    length if all its sequences have `new_tokens`."""
    best = min(fixed, key=lambda mode: mode.total())
    best_in_steps = min(fixed, key=lambda mode: mode.total("step_s"))
    ratios = governor.ratios(plain)
    full = [number for number, calls in plain.calls.items() if all(len(text) == new_tokens for text in calls[0].tokens)]
    gaps = [mode.result(plain)["gap_ms"]["p99"] for mode in (governor, plain)]
    return {
        "best_fixed": best.name,
        "best_fixed_label": best.label,
        "best_fixed_against_plain": round(best.against(plain), 4),
        "governor_against_plain": round(governor.against(plain), 4),
        "governor_against_plain_with_preparation": round(governor.against(plain, "total_s"), 4),
        "governor_against_best_fixed": round(governor.against(best), 4),
        "governor_against_plain_in_steps": round(governor.against(plain, "step_s"), 4),
        "governor_against_best_fixed_in_steps": round(governor.against(best_in_steps, "step_s"), 4),
        "worst_call": round(min(ratios.values()), 4),
        # Prefill and noise are most of a short text's time.
        "full_length_calls": len(full),
        "worst_full_length_call": round(min(ratios[number] for number in full), 4) if full else None,
        "gap_p99_against_plain": round(gaps[0] / gaps[1], 3) if gaps[1] else None,
        "ood": ood_counts(plain, fixed, governor),
        "governor_changes": {
            number: [[asdict(change) for change in of_sequence] for of_sequence in calls[0].changes]
            for number, calls in governor.calls.items()
        },
    }


def around_switch(switch_at: int, plain: Mode, fixed: Sequence[Mode], governor: Mode) -> dict[str, Any]:
    """Speeds divided by plain speed, before and after the new token at which forced texts switch to another text,
    without the first step; each part has its own best fixed plan. Drafting loses in a part whose best fixed plan is
    below 1."""
    found = {}
    for part, start, stop in (("before", 0, float(switch_at)), ("after", switch_at, math.inf)):
        of_plain = plain.seconds_per_token(start, stop)
        found[part] = {
            "best_fixed_against_plain": round(max(of_plain / mode.seconds_per_token(start, stop) for mode in fixed), 4),
            "governor_against_plain": round(of_plain / governor.seconds_per_token(start, stop), 4),
        }
    return found


def ood_counts(plain: Mode, fixed: Sequence[Mode], governor: Mode) -> dict[str, Any]:
    """Counts the sequences that the governor found out of distribution, those of losing batches, and those of losing
    batches that it found early. A batch loses if every fixed plan is below LOSING of plain speed."""
    counts = {"sequences": 0, "found": 0, "losing": 0, "losing_found_early": 0}
    found_at = []
    for number in plain.calls:
        of_batch = governor.ood_at(number)
        loses = max(mode.ratios(plain)[number] for mode in fixed) < LOSING
        found_at += [int(at) for at in of_batch if at < math.inf]
        counts["sequences"] += len(of_batch)
        counts["losing"] += loses * len(of_batch)
        counts["losing_found_early"] += loses * sum(at < EARLY for at in of_batch)
    return {**counts, "found": len(found_at), "found_at": found_at}


def resumption(governor: Mode, switch_at: int) -> dict[str, Any]:
    """New tokens after `switch_at`, where forced texts become in-domain, until the governor drafts lastingly."""
    texts = [
        (changes, len(tokens))
        for calls in governor.calls.values()
        for call in calls
        for changes, tokens in zip(call.changes, call.tokens, strict=True)
    ]
    until = [tokens_until_drafting(changes, switch_at, end) for changes, end in texts]
    resumed = [tokens for tokens in until if tokens is not None]
    return {
        "texts": len(texts),
        "plain_at_switch": sum(not drafts_at(changes, switch_at) for changes, _ in texts),
        "never_resumed": len(until) - len(resumed),
        "tokens_median": median(resumed) if resumed else None,
        "tokens_max": max(resumed) if resumed else None,
    }


def drafts_at(changes: Sequence[Change], token: int) -> bool:
    """Whether the plan in use at a new token drafts anything."""
    plans = [change.plan for change in changes if change.token <= token]
    return bool(plans) and plans[-1] != str(NONE)


def tokens_until_drafting(changes: Sequence[Change], switch_at: int, end: int) -> int | None:
    """New tokens after `switch_at` until drafting begins that goes on for _LASTING of them; 0 if it began before; None
    if it does not begin before the text's `end`."""
    begun: int | None = None
    for change in (*changes, Change(0, end, str(NONE), None)):
        if change.plan != str(NONE):
            begun = change.token if begun is None else begun
        elif begun is not None:
            if change.token - max(begun, switch_at) >= _LASTING:
                return max(0, begun - switch_at)
            begun = None
    return None
