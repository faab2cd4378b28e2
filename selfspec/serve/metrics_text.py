"""Counters of the server, and Prometheus' text of these and of the engine's metrics, with vLLM's names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from selfspec.engine import Engine
from selfspec.metrics import prometheus_lines
from selfspec.sequence import Sequence as Sequence_

# Upper limits of histograms in seconds: from a step of a small model on a GPU to a long answer on a CPU.
_TOKEN_LIMITS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_REQUEST_LIMITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """Counts of seconds by upper limit, and their sum."""

    def __init__(self, limits: Sequence[float]) -> None:
        self._limits, self._counts, self._sum = limits, [0] * (len(limits) + 1), 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._limits, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for limit, count in zip((*self._limits, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{limit}"}} {total}'
        yield f"{name}_sum {self._sum!r}"
        yield f"{name}_count {total}"


class ServerCounters:
    """Totals over the requests that the server answered; changed and read on the event loop only."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.finished: Counter[str] = Counter()  # sequences by finish reason
        self.first_token, self.request = Histogram(_REQUEST_LIMITS), Histogram(_REQUEST_LIMITS)
        self.output_token = Histogram(_TOKEN_LIMITS)

    def add(self, sequences: Iterable[Sequence_], prompt_tokens: int, first_s: float, seconds: float) -> None:
        """Adds an answered request: seconds until its first piece and until its last."""
        self.prompt_tokens += prompt_tokens
        self.first_token.add(first_s)
        self.request.add(seconds)
        for sequence in sequences:
            self.finished[sequence.finish_reason or "abort"] += 1
            if sequence.new_tokens > 1:
                self.output_token.add((seconds - first_s) / (sequence.new_tokens - 1))

    def add_abort(self, sequences: int) -> None:
        self.finished["abort"] += sequences


def metrics_text(engine: Engine, counters: ServerCounters) -> str:
    """Returns Prometheus' text format."""
    lines = list(prometheus_lines(_series(engine, counters), "selfspec:"))
    for name, meaning, histogram in (
        ("time_to_first_token_seconds", "Seconds to the first piece of text", counters.first_token),
        ("request_time_per_output_token_seconds", "Seconds per token after the first piece", counters.output_token),
        ("e2e_request_latency_seconds", "Seconds of a request", counters.request),
    ):
        lines += [f"# HELP selfspec:{name} {meaning}", f"# TYPE selfspec:{name} histogram"]
        lines += histogram.lines(f"selfspec:{name}")
    return "\n".join(lines) + "\n"


def _series(engine: Engine, counters: ServerCounters) -> Iterator[tuple[str, str, str, Mapping[Any, Any]]]:
    """Yields name, meaning, label and values by label of each metric."""
    summary, cache = engine.metrics(), engine.cache
    accepted = dict(enumerate(summary.accepted_by_depth))
    used = 1 - cache.free_pages / cache.num_pages
    yield "num_requests_running", "Sequences that prefill or decode", "", {"": engine.scheduler.admitted}
    yield "num_requests_waiting", "Sequences that wait for admission", "", {"": len(engine.scheduler.waiting)}
    yield "kv_cache_usage_perc", "Share of KV pages in use, 1 is all", "", {"": f"{used:.6f}"}
    yield "prompt_tokens_total", "Prompt tokens of answered requests", "", {"": counters.prompt_tokens}
    yield "generation_tokens_total", "New tokens", "", {"": summary.tokens}
    yield "request_success_total", "Ended sequences", "finished_reason", counters.finished
    queries, hits = summary.prefix_cache_queries, summary.prefix_cache_hits
    yield "prefix_cache_queries_total", "Prompt tokens of prefilled sequences", "", {"": queries}
    yield "prefix_cache_hits_total", "Prompt tokens whose KV pages were reused", "", {"": hits}
    drafts = sum(summary.reached_by_depth[:1])
    yield "spec_decode_num_drafts_total", "Drafts, one per sequence and step", "", {"": drafts}
    yield "spec_decode_num_draft_tokens_total", "Drafted tokens", "", {"": summary.drafted}
    yield "spec_decode_num_accepted_tokens_total", "Accepted tokens", "", {"": sum(accepted.values())}
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    yield name, "Accepted tokens by depth, from 0", "position", accepted
    yield "plan_steps_total", "Steps by plan", "plan", summary.cycles_by_plan
    yield "plan_seconds_total", "Seconds in steps by plan", "plan", summary.seconds_by_plan
    yield "switched_off_total", "Changes of a batch to plain decoding, by reason", "reason", summary.changes_by_reason
