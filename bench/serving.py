"""`python -m bench.serving`: many requests to one engine, plainly and with speculation.

(a) Throughput: requests that are submitted at once, of which a limited number decode together. (b) Latency: Poisson
arrivals at shares of that throughput. (c) A long prompt joins running texts: the longest gap between their tokens,
beside one prefill chunk and one step. (d) Sequences with different settings in one batch against sequences alike.
Where there are kernels every part runs once before it is measured, so that its steps are captured.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import cycle, islice
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import decode, report
from bench.modes import Memory, percentile
from bench.requests import (
    GREEDY,
    QWEN,
    Options,
    Stamped,
    Target,
    add_arguments,
    built_in_options,
    open_target,
    run_together,
)
from selfspec.backends.torch_backend import PREFILL_CHUNK

_STEADY = 16  # tokens that running texts have before the long prompt joins, and get after it
_JOINED = 8  # new tokens of the long prompt's text
_LONGEST_PROMPT = 1024  # tokens of any other prompt

Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    longest = max(args.long_prompt + _JOINED, _LONGEST_PROMPT + max(args.running_tokens, args.max_new_tokens))
    target = open_target(args, longest, max(args.decoding, args.running + 1))
    subject = decode.Subject(target.name, target.engine, [], Memory(target.engine.model.device), exit_layer=None)
    setup = asdict(decode.describe(args, subject)) | {"synthetic": target.synthetic, "speculation": target.speculation}
    report.describe(console, setup)
    found: dict[str, list[Row]] = {}
    for part in args.parts:
        bench = Bench(target, args, found.get("throughput", []))
        if target.engine.has_kernels:
            PARTS[part](bench)
        found[part] = PARTS[part](bench)
        show(console, part, found[part])
    print(json.dumps({"benchmark": "serving", "setup": setup, **found}))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__)
    add_arguments(parser, new_tokens=128)
    add = parser.add_argument
    add("--parts", nargs="+", default=list(PARTS), choices=PARTS, help=f"(default: {' '.join(PARTS)})")
    add("--requests", type=int, default=64, help="of (a), and of each rate of (b) (default: 64)")
    add("--decoding", type=int, default=16, help="sequences that decode together (default: 16)")
    add("--rates", type=float, nargs="+", help="requests per second of (b) (default: 50%% and 90%% of (a)'s)")
    add("--long-prompt", type=int, default=4000, help="tokens of the prompt that joins (default: 4000)")
    add("--running", type=int, default=8, help="texts that it joins, and sequences of (d) (default: 8)")
    add("--running-tokens", type=int, default=2048, help="new tokens of those texts at most (default: 2048)")
    add("--repeat", type=int, default=3, help="runs of (a) and (d); medians are told (default: 3)")
    add("--seed", type=int, default=0)
    return parser.parse_args(arguments)


class Bench:
    """A model, and how much is asked of it."""

    def __init__(self, target: Target, args: argparse.Namespace, throughput: list[Row]) -> None:
        self.target, self.args, self.throughput = target, args, throughput

    def requests(self, count: int, options: Sequence[Options], new_tokens: int | None = None) -> list[Stamped]:
        """The target's prompts and these options in turn."""
        parts = zip(range(count), cycle(self.target.prompts), cycle(options))  # noqa: B905  # both go round
        limit = new_tokens or self.args.max_new_tokens
        return [Stamped(self.target.engine, prompt, seed, limit, of) for seed, prompt, of in parts]

    def speeds(self, count: int, kinds: dict[str, list[Options]]) -> dict[str, float]:
        """Tokens per second of `count` requests submitted at once, for every kind: medians of runs that take turns."""
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(self.args.repeat):
            for name, options in kinds.items():
                found[name].append(run_together(self.requests(count, options)))
        return {name: median(values) for name, values in found.items()}


def throughput(bench: Bench) -> list[Row]:
    """Tokens per second of requests submitted at once."""
    count, limit = bench.args.requests, bench.args.decoding
    bench.target.engine.scheduler.max_decoding = limit
    speeds = bench.speeds(count, {mode: [{**GREEDY, **wishes}] for mode, wishes in bench.target.modes.items()})
    return [
        {"mode": mode, "requests": count, "decoding": limit, "tokens_per_s": round(speed, 1)}
        for mode, speed in speeds.items()
    ]


def latency(bench: Bench) -> list[Row]:
    """Seconds to the first token and per further token of requests that arrive at random."""
    bench.target.engine.scheduler.max_decoding = bench.args.decoding
    rates = [(f"{rate:g}/s", rate) for rate in bench.args.rates or ()]
    if not rates:
        measured = {row["mode"]: row["tokens_per_s"] for row in bench.throughput or throughput(bench)}
        capacity = measured["plain"] / bench.args.max_new_tokens
        rates = [(f"{share:.0%} of plain throughput", share * capacity) for share in (0.5, 0.9)]
    return [
        arrivals(bench, mode, {**GREEDY, **wishes}, name, rate)
        for name, rate in rates
        for mode, wishes in bench.target.modes.items()
    ]


def arrivals(bench: Bench, mode: str, options: Options, name: str, rate: float) -> Row:
    """Poisson arrivals at `rate` requests per second."""
    drawn = random.Random(bench.args.seed)
    requests = bench.requests(bench.args.requests, [options])
    at = time.perf_counter()
    for request in requests:
        at += drawn.expovariate(rate)
        time.sleep(max(0.0, at - time.perf_counter()))
        request.submit()
    for request in requests:
        request.wait()
    firsts = [request.first_token_s for request in requests]
    others = [seconds for request in requests if (seconds := request.per_token_s) is not None] or [math.nan]
    row: Row = {"mode": mode, "arrivals": name, "requests_per_s": round(rate, 3)}
    for what, values in (("first_token_ms", firsts), ("per_token_ms", others)):
        row |= {f"{what}_p{100 * share:.0f}": round(1e3 * percentile(values, share), 3) for share in (0.5, 0.99)}
    return row


def joining(bench: Bench) -> list[Row]:
    """A long prompt while other texts are decoded."""
    return [join(bench, mode, {**GREEDY, **wishes}) for mode, wishes in bench.target.modes.items()]


def join(bench: Bench, mode: str, options: Options) -> Row:
    args, engine = bench.args, bench.target.engine
    engine.scheduler.max_decoding = args.running + 1
    tokens = list(islice(cycle(token for prompt in bench.target.prompts for token in prompt), args.long_prompt))
    alone = Stamped(engine, tokens, 0, _JOINED, options)
    run_together([alone])
    running = bench.requests(args.running, [options], args.running_tokens)
    for request in running:
        request.submit()
    _wait_for_tokens(running, _STEADY)
    joined = Stamped(engine, tokens, 0, _JOINED, options)
    joined.submit()
    joined.wait()
    _wait_for_tokens(running, max(len(of.tokens) for of in running) + _STEADY)
    for request in running:
        request.cancel()
    first_at = joined.submitted_at + joined.first_token_s
    during = [gap for of in running for gap in of.gaps(joined.submitted_at, first_at)]
    before = [gap for of in running for gap in of.gaps(of.submitted_at, joined.submitted_at)]
    chunks = max(1, -(-(len(tokens) - 1) // PREFILL_CHUNK))
    return {
        "mode": mode,
        "running": args.running,
        "prompt_tokens": len(tokens),
        "longest_gap_ms": round(1e3 * max(during, default=math.nan), 3),
        "step_ms": round(1e3 * median(before or [math.nan]), 3),
        "chunk_ms": round(1e3 * alone.first_token_s / chunks, 3),
        "chunks": chunks,
        "first_token_ms": round(1e3 * joined.first_token_s, 3),
        "first_token_alone_ms": round(1e3 * alone.first_token_s, 3),
    }


def _wait_for_tokens(requests: Sequence[Stamped], count: int) -> None:
    """Until every text has so many new tokens, or has ended."""
    while any(len(of.tokens) < count and not of.stamps.is_over for of in requests):
        time.sleep(1e-3)


def settings(bench: Bench) -> list[Row]:
    """Sequences with different settings against sequences with the same ones."""
    size, engine = bench.args.running, bench.target.engine
    engine.scheduler.max_decoding = max(size, 1)
    vocabulary = engine.model.config.vocab_size
    offered = built_in_options(bench.target.prompts, [vocabulary - 1], vocabulary)
    mixed = list(islice(cycle(offered.values()), size))
    kinds = {"alike, greedy": [GREEDY], "alike, Qwen's settings": [QWEN], "different": mixed}
    rows: list[Row] = []
    for mode, wishes in bench.target.modes.items():
        speeds = bench.speeds(size, {name: [{**each, **wishes} for each in of] for name, of in kinds.items()})
        for name, speed in speeds.items():
            against = round(speed / speeds["alike, greedy"], 3)
            told = {"sequences": size, "tokens_per_s": round(speed, 1), "against_greedy": against}
            rows.append({"mode": mode, "settings": name, **told})
    return rows


PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    "throughput": throughput,
    "latency": latency,
    "joining": joining,
    "settings": settings,
}


def show(console: Console, title: str, rows: list[Row]) -> None:
    table = Table(title=title, title_justify="left")
    for name, value in rows[0].items():
        table.add_column(name.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
