"""`python -m bench.exactness`: counts tokens that differ from the same request alone, decoded plainly.

`plans` decodes fixed plans in batches of 1, 4 and 16; `arrivals` sends requests with random options, plans and lengths
at random times, so that they join and leave shared batches, and reuse KV pages of prompts that begin as theirs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import mean
from typing import Any

import torch

from bench import machine, tables
from bench.modes import Batch, Task, ours
from bench.requests import GREEDY, Options, Target, TimedRequest, add_arguments, built_in_options, open_target
from bench.timing import Limit
from selfspec import Engine

BATCHES = (1, 4, 16)
TEMPERATURES = (0.0, 0.7)
PLANS = ("none", "chain:2", "chain:5", "tree:4,2,2,1", "tree:16,2")
ARRIVALS = 32  # requests of a round of random arrivals
AT_ONCE = 8  # of them that decode together on average
PREFIX = 90  # tokens at most that are put before a prompt, so that every round has other texts
_STOPS = 4  # stop tokens of a request that has some

# (prompts, a seed for each, temperature, plan) -> new tokens of each
Write = Callable[[Sequence[Sequence[int]], Sequence[int], float, str], list[list[int]]]


@dataclass
class Tally:
    """Comparisons under one condition."""

    compared: int = 0  # tokens, up to the first difference of each sequence
    differing: int = 0  # sequences
    first: str = ""  # place of the first difference

    def add(self, number: int, expected: list[int], found: list[int]) -> None:
        place = first_difference(expected, found)
        self.compared += max(len(expected), len(found)) if place is None else place + 1
        if place is not None:
            self.differing += 1
            self.first = self.first or f"sequence {number}, token {place}"


Tallies = dict[str, Tally]  # by condition


def first_difference(expected: list[int], found: list[int]) -> int | None:
    """Index of the first differing token, the end of the shorter sequence included; None if they are equal."""
    if expected == found:
        return None
    pairs = enumerate(zip(expected, found, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(expected), len(found)))


def summary(tallies: Tallies) -> dict[str, Any]:
    """Sums over all conditions, and each of them, JSON-ready."""
    return {
        "compared": sum(tally.compared for tally in tallies.values()),
        "differing": sum(tally.differing for tally in tallies.values()),
        "first": next((f"{name}: {tally.first}" for name, tally in tallies.items() if tally.first), ""),
        "by_condition": {name: asdict(tally) for name, tally in tallies.items()},
    }


def compared(tallies: Tallies) -> int:
    return sum(tally.compared for tally in tallies.values())


def check_plans(
    write: Write,
    prompts: Sequence[Sequence[int]],
    wanted: int,
    limit: Limit,
    plans: Sequence[str] = PLANS,
    batches: Sequence[int] = BATCHES,
    temperatures: Sequence[float] = TEMPERATURES,
) -> Tallies:
    """Rounds of all plans, batch sizes and temperatures, each with other prompts, until `wanted` tokens are compared
    or the budget is spent."""
    tallies: Tallies = {}
    number, count = 0, max(batches)
    while compared(tallies) < wanted and not limit.is_spent:
        texts = varied(prompts, number, count)
        seeds = [number * count + index for index in range(count)]
        for temperature in limit.over(temperatures):
            expected = [write([p], [s], temperature, "none")[0] for p, s in zip(texts, seeds, strict=True)]
            for batch, plan in limit.over(product(batches, plans)):
                if (plan, batch) == ("none", 1):
                    continue
                tally = tallies.setdefault(f"{plan}, batch {batch}, temperature {temperature:g}", Tally())
                for start in range(0, count, batch):
                    part = slice(start, start + batch)
                    found = write(texts[part], seeds[part], temperature, plan)
                    for seed, a, b in zip(seeds[part], expected[part], found, strict=True):
                        tally.add(seed, a, b)
        number += 1
    return tallies


def varied(prompts: Sequence[Sequence[int]], number: int, count: int) -> list[list[int]]:
    """The `count` prompts of a round; after the first round, with up to PREFIX tokens of other prompts before each, so
    that text and position in the pages change."""
    generator = random.Random(number)
    vocabulary = [token for prompt in prompts for token in prompt]
    chosen = [prompts[(number * count + index) % len(prompts)] for index in range(count)]
    return [generator.choices(vocabulary, k=generator.randint(1, PREFIX) * bool(number)) + list(p) for p in chosen]


def writer(engine: Engine, max_new_tokens: int, exit_layer: int | None) -> Write:
    def write(prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float, plan: str) -> list[list[int]]:
        settings: dict[str, Any] = {"speculative_decoding": False}
        if plan != "none":
            settings = {"speculative_decoding": "force", "plan": plan, "exit_layer": exit_layer}
        way = ours(engine, **settings)
        return way(Batch(prompts, seeds, engine.model.device), Task(max_new_tokens, temperature)).tokens

    return write


def check_arrivals(
    target: Target, wanted: int, new_tokens: int, limit: Limit, seed: int = 0, count: int = ARRIVALS
) -> Tallies:
    """Rounds of `count` random arrivals until `wanted` tokens are compared or the budget is spent."""
    tallies: Tallies = {}
    scheduler, number = target.engine.scheduler, 0
    before = scheduler.prompt_pages.prefix_reuse
    while compared(tallies) < wanted and not limit.is_spent:
        drawn = random.Random(f"{seed} {number}")
        asked = [draw_request(target, drawn, new_tokens) for _ in range(count)]
        alone = [
            TimedRequest(target.engine, *drawn_request.text, {**drawn_request.options, "speculative_decoding": False})
            for drawn_request in asked
        ]
        scheduler.prompt_pages.prefix_reuse = False
        for request in alone:
            request.submit()
            request.wait()
        gap = mean(request.ended_at - request.submitted_at for request in alone) / AT_ONCE
        together = [
            TimedRequest(target.engine, *drawn_request.text, {**drawn_request.options, **drawn_request.speculation})
            for drawn_request in asked
        ]
        scheduler.prompt_pages.prefix_reuse = True
        arrive(together, gap, drawn)
        for index, (drawn_request, expected, found) in enumerate(zip(asked, alone, together, strict=True)):
            tally = tallies.setdefault(drawn_request.name, Tally())
            tally.add(number * count + index, expected.tokens, found.tokens)
        number += 1
    scheduler.prompt_pages.prefix_reuse = before
    return tallies


@dataclass(frozen=True)
class Asked:
    """A request as it was drawn."""

    text: tuple[list[int], int, int]  # prompt, seed, new tokens
    name: str  # of its options
    options: Options
    speculation: Options


def draw_request(target: Target, drawn: random.Random, new_tokens: int) -> Asked:
    """Draws a prompt with tokens of others before or after it, options, a length of up to `new_tokens`, and a plan or
    none."""
    offered = arriving_options(target)
    name = drawn.choice(list(offered))
    vocabulary = [token for prompt in target.prompts for token in prompt]
    parts = [drawn.choices(vocabulary, k=drawn.randint(0, PREFIX)), drawn.choice(target.prompts)]
    prompt = [token for part in (parts if drawn.random() < 0.5 else reversed(parts)) for token in part]
    text = prompt, drawn.getrandbits(63), drawn.randint(max(1, new_tokens // 4), new_tokens)
    return Asked(text, name, offered[name], drawn.choice(speculations(target)))


def arrive(requests: Sequence[TimedRequest], gap: float, drawn: random.Random) -> None:
    """Submits the requests after random pauses of `gap` seconds on average, and waits for all."""
    for request in requests:
        time.sleep(drawn.expovariate(1 / gap))
        request.submit()
    for request in requests:
        request.wait()


def arriving_options(target: Target) -> dict[str, Options]:
    """Options to draw from. Stop tokens are frequent tokens of the prompts, so that some sequences end early."""
    counts = Counter(token for prompt in target.prompts for token in prompt)
    stops = [token for token, _ in counts.most_common(_STOPS)]
    built_in = built_in_options(target.prompts, stops, target.engine.model.config.vocab_size)
    return {**built_in, "processor": {**GREEDY, "logits_processor": [lower_even_tokens]}}


def lower_even_tokens(prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that depends on the text: makes even ids less likely after an odd number of tokens."""
    lowered = logits.clone()
    lowered[:, ::2] -= prefix.shape[1] % 2
    return lowered


def speculations(target: Target) -> list[Options]:
    """Speculation arguments to draw from: the default, a forced plan, or none."""
    layer = target.speculation.get("exit_layer")
    forced = [{"speculative_decoding": "force", "plan": plan, "exit_layer": layer} for plan in PLANS if plan != "none"]
    return [target.speculation, target.speculation, *forced, {"speculative_decoding": False}]


def measure(
    target: Target,
    checks: Sequence[str],
    wanted: int,
    new_tokens: int,
    seconds: float,
    seed: int = 0,
    batches: Sequence[int] = BATCHES,
    arrivals: int = ARRIVALS,
) -> dict[str, Any]:
    """The checks by name; each gets an equal part of the time that is left."""
    found: dict[str, Any] = {}
    budget = Limit(seconds)
    for number, check in enumerate(checks):
        limit = budget.part(1 / (len(checks) - number))
        if check == "plans":
            write = writer(target.engine, new_tokens, target.speculation.get("exit_layer"))
            tallies = check_plans(write, target.prompts, wanted, limit, batches=batches)
        else:
            tallies = check_arrivals(target, wanted, new_tokens, limit, seed, arrivals)
        found[check] = summary(tallies)
    return found


CHECKS = ("plans", "arrivals")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.exactness", description=__doc__)
    add_arguments(parser, new_tokens=96, prompts=4)
    parser.add_argument("--checks", nargs="+", default=CHECKS, choices=CHECKS, help="(default: plans arrivals)")
    parser.add_argument("--tokens", type=int, default=50_000, help="to compare in each check (default: 50000)")
    parser.add_argument("--decoding", type=int, default=16, help="sequences that decode together (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="of the random arrivals (default: 0)")
    args = parser.parse_args(arguments)
    target = open_target(args, max_batch=args.decoding)
    setup = machine.describe(target.engine, target.name, target.synthetic)
    print(*tables.setup(setup), "", sep="\n")
    found = measure(target, args.checks, args.tokens, args.max_new_tokens, args.seconds, args.seed)
    print(*tables.exactness_conditions(found), "", *tables.exactness(found), sep="\n")
    print(json.dumps({"benchmark": "exactness", "setup": setup, **found}))
    return int(any(check["differing"] for check in found.values()))


if __name__ == "__main__":
    sys.exit(main())
