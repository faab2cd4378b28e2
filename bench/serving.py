"""`python -m bench.serving`: many requests to one engine, plainly and with speculation.

Measures throughput of requests submitted at once, latency with Poisson arrivals at shares of that throughput, the gap
that a long joining prompt causes, batches of sequences with different sampling parameters, and the time to the first
token of a chat's second turn with and without prefix reuse.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import harmonic_mean, median
from typing import Any

from bench import machine, tables
from bench.requests import (
    GREEDY,
    LONGEST_PROMPT,
    QWEN,
    Options,
    Target,
    TimedRequest,
    add_arguments,
    built_in_options,
    open_target,
    run_together,
)
from bench.timing import Limit, percentile
from selfspec import Engine
from selfspec.backends.torch_backend import PREFILL_CHUNK
from selfspec.cache.kv_cache import PAGE_SIZE, Cache

_STEADY = 16  # tokens that running sequences have before the long prompt joins, and get after it
_JOINED = 8  # new tokens of the long prompt's sequence
_DIFFERENT, _ONE_EACH = "different", "equal, one batch per setting"  # in the part `settings`
_ANSWER, _QUESTION = 100, 40  # tokens: the answer to a chat's first turn, and the message of its second

Result = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """How many requests of which size are sent."""

    new_tokens: int = 128  # of each request
    requests: int = 64  # submitted at once, and at each arrival rate
    decoding: int = 16  # sequences that decode together at most
    shares: tuple[float, ...] = (0.5, 0.9)  # arrival rates, of the plain throughput
    long_prompt: int = 4000  # tokens of the prompt that joins
    running: int = 8  # sequences that it joins; also sequences with different sampling parameters
    running_tokens: int = 2048  # new tokens of those sequences at most
    chat: int = 2000  # tokens of a chat's first prompt
    repeat: int = 3  # runs of which the median counts
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt included."""
        of_chat = self.chat + _ANSWER + _QUESTION + _JOINED
        prompts = LONGEST_PROMPT + max(self.running_tokens, self.new_tokens)
        return max(self.long_prompt + _JOINED, prompts, of_chat)

    @property
    def max_batch(self) -> int:
        return max(self.decoding, self.running + 1)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    load = Load(
        args.max_new_tokens, args.requests, args.decoding, tuple(args.shares), args.long_prompt, args.running,
        args.running_tokens, args.chat, args.repeat, args.seed,
    )  # fmt: skip
    target = open_target(args, load.max_batch, load.longest)
    if args.kernel_prompts and target.engine._graphs is not None:
        target.engine._graphs.max_kernel_prompt = args.kernel_prompts
    setup = machine.describe(target.engine, target.name, target.synthetic)
    print(*tables.setup(setup), "", sep="\n")
    found = measure(target, load, args.parts, Limit(args.seconds))
    print(*tables.serving(found), sep="\n")
    print(json.dumps({"benchmark": "serving", "setup": setup, **found}))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__)
    add_arguments(parser, new_tokens=128, prompts=8)
    add, default = parser.add_argument, Load()
    add("--parts", nargs="+", default=list(PARTS), choices=PARTS, help=f"(default: {' '.join(PARTS)})")
    add("--requests", type=int, default=default.requests, help="at once, and per arrival rate (default: 64)")
    add("--decoding", type=int, default=default.decoding, help="sequences that decode together (default: 16)")
    add("--shares", type=float, nargs="+", default=default.shares, help="of the throughput (default: 0.5 0.9)")
    add("--long-prompt", type=int, default=default.long_prompt, help="tokens of the joining prompt (default: 4000)")
    add("--running", type=int, default=default.running, help="sequences that it joins (default: 8)")
    add("--running-tokens", type=int, default=default.running_tokens, help="their new tokens (default: 2048)")
    add("--chat", type=int, default=default.chat, help="tokens of a chat's first prompt (default: 2000)")
    add("--kernel-prompts", type=int, help="tokens up to which the decode kernels prefill (default: by size)")
    add("--repeat", type=int, default=default.repeat, help="runs of which the median counts (default: 3)")
    add("--seed", type=int, default=default.seed, help="of the random arrivals (default: 0)")
    return parser.parse_args(arguments)


def measure(target: Target, load: Load, parts: Sequence[str], limit: Limit) -> dict[str, list[Result]]:
    """Runs the parts in order until the budget is spent. With kernels the engine is warmed up as for a server, and each
    part runs once before; `captured` counts the graphs that are still captured while a part is measured."""
    found: dict[str, list[Result]] = {part: [] for part in (*parts, "captured")}  # empty: not reached
    scheduler = target.engine.scheduler
    max_decoding = scheduler.max_decoding
    target.engine.warmup(load.max_batch, max_length=load.longest)
    try:
        for part in limit.over(parts):
            bench = Bench(target, load, found.get("throughput", []))
            if target.engine.has_kernels:
                PARTS[part](bench)
            before, _ = _captured(target)
            found[part] = PARTS[part](bench)
            graphs, fastest_s = _captured(target)
            found["captured"].append({"part": part, "graphs": graphs - before, "fastest_ms": 1e3 * fastest_s})
    finally:
        scheduler.max_decoding = max_decoding
    return found


def _captured(target: Target) -> tuple[int, float]:
    """The number of captured graphs, and the seconds of the fastest capture of a step; 0 without a GPU."""
    graphs = target.engine._graphs
    return (0, 0.0) if graphs is None else (len(graphs.captured.entries), graphs.captured.shortest_s)


@dataclass(frozen=True)
class Bench:
    """A model, the load, and the throughput if it was measured."""

    target: Target
    load: Load
    throughput: list[Result]

    def requests(self, count: int, options: Sequence[Options], new_tokens: int | None = None) -> list[TimedRequest]:
        """Requests with the target's prompts and these options in turn."""
        parts = zip(range(count), cycle(self.target.prompts), cycle(options))  # noqa: B905  # both repeat
        limit = new_tokens or self.load.new_tokens
        return [TimedRequest(self.target.engine, prompt, seed, limit, option) for seed, prompt, option in parts]

    def speeds(self, count: int, cases: dict[str, list[Options]]) -> dict[str, float]:
        """Tokens per second of `count` requests submitted at once, for every case: medians of runs in turn."""
        found: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(self.load.repeat):
            for name, options in cases.items():
                found[name].append(run_together(self.requests(count, options)))
        return {name: median(values) for name, values in found.items()}


def throughput(bench: Bench) -> list[Result]:
    """Tokens per second of requests submitted at once."""
    count, limit = bench.load.requests, bench.load.decoding
    bench.target.engine.scheduler.max_decoding = limit
    speeds = bench.speeds(count, {mode: [{**GREEDY, **options}] for mode, options in bench.target.modes.items()})
    return [
        {"mode": mode, "requests": count, "decoding": limit, "tokens_per_s": round(speed, 1)}
        for mode, speed in speeds.items()
    ]


def latency(bench: Bench) -> list[Result]:
    """Milliseconds to the first token and per further token of requests that arrive at random."""
    bench.target.engine.scheduler.max_decoding = bench.load.decoding
    measured = {result["mode"]: result["tokens_per_s"] for result in bench.throughput or throughput(bench)}
    capacity = measured["plain"] / bench.load.new_tokens  # requests per second
    return [
        arrivals(bench, mode, {**GREEDY, **options}, share, share * capacity)
        for share in bench.load.shares
        for mode, options in bench.target.modes.items()
    ]


def arrivals(bench: Bench, mode: str, options: Options, share: float, rate: float) -> Result:
    """Poisson arrivals at `rate` requests per second."""
    drawn = random.Random(bench.load.seed)
    requests = bench.requests(bench.load.requests, [options])
    at = time.perf_counter()
    for request in requests:
        at += drawn.expovariate(rate)
        time.sleep(max(0.0, at - time.perf_counter()))
        request.submit()
    for request in requests:
        request.wait()
    firsts = [request.first_token_s for request in requests]
    others = [seconds for request in requests if (seconds := request.per_token_s) is not None] or [math.nan]
    result: Result = {"mode": mode, "load": f"{share:.0%}", "requests_per_s": round(rate, 3)}
    for name, values in (("first_token_ms", firsts), ("per_token_ms", others)):
        result |= {f"{name}_p{100 * part:.0f}": round(1e3 * percentile(values, part), 3) for part in (0.5, 0.99)}
    return result


def joining(bench: Bench) -> list[Result]:
    """A long prompt is submitted while other sequences decode."""
    return [join(bench, mode, {**GREEDY, **options}) for mode, options in bench.target.modes.items()]


def join(bench: Bench, mode: str, options: Options) -> Result:
    """The longest gap between tokens of running sequences, beside its bound: the longest prefill chunk, which is the
    last, and two steps."""
    load, engine = bench.load, bench.target.engine
    engine.scheduler.max_decoding = load.running + 1
    length = min(load.long_prompt, engine.context - _JOINED)
    tokens = _long_prompt(bench, length)
    per_chunk = _chunk_tokens(engine, len(tokens))
    chunks = max(1, -(-(len(tokens) - 1) // per_chunk))
    alone = _first_token_s(bench, tokens, options)
    without_last = _first_token_s(bench, tokens[:-per_chunk], options) if chunks > 1 else 0.0
    chunk = max(alone - without_last, alone / chunks)  # the last chunk takes longest, so longer than the mean
    longest = engine.context - max(map(len, bench.target.prompts))
    running = bench.requests(load.running, [options], min(load.running_tokens, longest))
    for request in running:
        request.submit()
    _wait_for_tokens(running, _STEADY)
    joined = TimedRequest(engine, tokens, 0, _JOINED, options)
    joined.submit()
    joined.wait()
    _wait_for_tokens(running, max(len(request.tokens) for request in running) + _STEADY)
    for request in running:
        request.cancel()
    first_at = joined.submitted_at + joined.first_token_s
    during = [gap for request in running for gap in request.gaps(joined.submitted_at, first_at)]
    before = [gap for request in running for gap in request.gaps(request.submitted_at, joined.submitted_at)]
    step = median(before or [math.nan])
    return {
        "mode": mode,
        "running": load.running,
        "prompt_tokens": len(tokens),
        "chunks": chunks,
        "step_ms": round(1e3 * step, 3),
        "chunk_ms": round(1e3 * chunk, 3),
        "bound_ms": round(1e3 * (chunk + 2 * step), 3),
        "longest_gap_ms": round(1e3 * max(during, default=math.nan), 3),
        "first_token_ms": round(1e3 * joined.first_token_s, 3),
        "first_token_alone_ms": round(1e3 * alone, 3),
    }


def _long_prompt(bench: Bench, length: int) -> list[int]:
    return list(islice(cycle(token for prompt in bench.target.prompts for token in prompt), length))


def _chunk_tokens(engine: Engine, prompt: int) -> int:
    """Tokens that one pass prefills of a prompt of so many tokens, alone."""
    if engine._graphs is None or prompt - 1 > engine._graphs.max_kernel_prompt:
        return PREFILL_CHUNK
    from selfspec.backends.cuda.kernel_prefill import MAX_TOKENS  # imports Triton

    return MAX_TOKENS


def _first_token_s(bench: Bench, tokens: list[int], options: Options) -> float:
    """Seconds to the first token of a request alone: the median of the load's repeats."""
    requests = [TimedRequest(bench.target.engine, tokens, 0, _JOINED, options) for _ in range(bench.load.repeat)]
    for request in requests:
        run_together([request])
    return median(request.first_token_s for request in requests)


def _wait_for_tokens(requests: Sequence[TimedRequest], count: int) -> None:
    """Blocks until every sequence has so many new tokens or has ended."""
    while any(len(request.tokens) < count and not request.times.is_over for request in requests):
        time.sleep(1e-3)


def settings(bench: Bench) -> list[Result]:
    """Tokens per second of a batch with different settings against the harmonic mean of batches with equal ones, one
    batch per setting; and of batches with equal settings against greedy ones."""
    size, engine = bench.load.running, bench.target.engine
    engine.scheduler.max_decoding = max(size, 1)
    vocabulary = engine.model.config.vocab_size
    mixed = list(built_in_options(bench.target.prompts, [vocabulary - 1], vocabulary).values())[:size]
    cases = {"equal, greedy": [GREEDY], "equal, Qwen's settings": [QWEN], _DIFFERENT: mixed}
    each = {f"equal {number}": [options] for number, options in enumerate(mixed)}
    results: list[Result] = []
    for mode, options in bench.target.modes.items():
        in_mode = {name: [{**of, **options} for of in case] for name, case in (cases | each).items()}
        speeds = bench.speeds(size, in_mode)
        speeds[_ONE_EACH] = harmonic_mean([speeds.pop(name) for name in each])  # every batch has as many tokens
        for name in (*cases, _ONE_EACH):
            baseline = speeds[_ONE_EACH if name == _DIFFERENT else "equal, greedy"]
            values = {"tokens_per_s": round(speeds[name], 1), "against_equal": round(speeds[name] / baseline, 3)}
            results.append({"mode": mode, "settings": name, "sequences": size, **values})
    return results


def second_turn(bench: Bench) -> list[Result]:
    """Milliseconds to the first token of a chat's second turn, one request at a time."""
    engine = bench.target.engine
    before = engine.scheduler.prompt_pages.prefix_reuse
    try:
        return [turn(bench, mode, {**GREEDY, **options}) for mode, options in bench.target.modes.items()]
    finally:
        engine.scheduler.prompt_pages.prefix_reuse = before


def turn(bench: Bench, mode: str, options: Options) -> Result:
    """Medians with prefix reuse, after the first turn on an empty cache, and without."""
    engine, reused = bench.target.engine, 0
    seconds: dict[bool, list[float]] = {True: [], False: []}
    question, length = bench.target.prompts[-1], min(bench.load.chat, engine.context - _ANSWER - _QUESTION - _JOINED)
    for _ in range(bench.load.repeat):
        for reuse in (True, False):
            engine.scheduler.prompt_pages.prefix_reuse = reuse
            engine.scheduler.call(partial(_take_back_pages, engine.cache))
            first = TimedRequest(engine, _long_prompt(bench, length), 0, _ANSWER, options)
            run_together([first])
            (chat,) = first.request.sequences
            second = TimedRequest(engine, [*chat.tokens, *islice(cycle(question), _QUESTION)], 0, _JOINED, options)
            run_together([second])
            seconds[reuse].append(second.first_token_s)
            reused = max(reused, second.request.sequences[0].cached_tokens)
    with_reuse, without = (median(seconds[reuse]) for reuse in (True, False))
    return {
        "mode": mode,
        "prompt_tokens": length + _ANSWER + _QUESTION,
        "reused_tokens": reused,
        "first_token_ms": round(1e3 * with_reuse, 3),
        "without_reuse_ms": round(1e3 * without, 3),
        "ratio": round(with_reuse / without, 3),
    }


def _take_back_pages(cache: Cache) -> None:
    """Makes all pages of an idle cache free of reusable prefixes."""
    kv = cache.open()
    cache.reserve(kv, cache.free_pages * PAGE_SIZE)
    cache.close(kv)


PARTS: dict[str, Callable[[Bench], list[Result]]] = {
    "throughput": throughput,
    "latency": latency,
    "joining": joining,
    "settings": settings,
    "second_turn": second_turn,
}


if __name__ == "__main__":
    sys.exit(main())
