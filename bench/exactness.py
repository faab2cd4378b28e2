"""`python -m bench.exactness`: whether tokens are the same whoever else decodes: random arrivals against each alone.

Requests with settings, plans and lengths drawn at random arrive at random times and share batches; each is compared
with the same request alone, decoded plainly. `bench.decode --exactness` compares plans and batch sizes in the same way.
Counts tokens that were compared and texts that parted; how fast anything is does not matter here.
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
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.modes import Batch, Task, ours
from bench.requests import GREEDY, Options, Stamped, Target, add_arguments, built_in_options, open_target
from selfspec import Engine

BATCHES = (1, 4, 16)
TEMPERATURES = (0.0, 0.7)
PLANS = ("none", "chain:2", "chain:5", "tree:4,2,2,1", "tree:16,2")
TEXTS = max(BATCHES)  # of each round
ARRIVALS = 32  # requests of each round of random arrivals
AT_ONCE = 8  # of them that decode together on average
_STOPS = 4  # tokens that end texts, where a request has stop tokens

# (prompts, a seed for each, temperature, plan) -> new tokens of each
Write = Callable[[Sequence[Sequence[int]], Sequence[int], float, str], list[list[int]]]


@dataclass
class Tally:
    """Texts against plain decoding of single prompts."""

    compared: int = 0  # tokens, up to where two texts part
    differences: int = 0  # texts that parted
    first: str = ""  # where the first one did

    def add(self, number: int, expected: list[int], found: list[int]) -> None:
        parted = parting(expected, found)
        self.compared += max(len(expected), len(found)) if parted is None else parted + 1
        if parted is not None:
            self.differences += 1
            self.first = self.first or f"text {number}, token {parted}"


@dataclass(kw_only=True)
class Comparison(Tally):
    """One plan, batch and temperature."""

    plan: str
    batch: int
    temperature: float


def parting(expected: list[int], found: list[int]) -> int | None:
    """The first place where two texts differ, the end of one of them included."""
    if expected == found:
        return None
    pairs = enumerate(zip(expected, found, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(expected), len(found)))


def check(
    write: Write,
    prompts: Sequence[Sequence[int]],
    wanted: int,
    plans: Sequence[str] = PLANS,
    batches: Sequence[int] = BATCHES,
    temperatures: Sequence[float] = TEMPERATURES,
    progress: Callable[[list[Comparison]], None] = lambda so_far: None,
) -> list[Comparison]:
    """Rounds of all combinations until at least `wanted` tokens were compared; every round has other prompts."""
    cells = product(temperatures, batches, plans)
    every = [
        Comparison(plan=plan, batch=batch, temperature=t) for t, batch, plan in cells if (plan, batch) != ("none", 1)
    ]
    rounds = 0
    while not rounds or sum(one.compared for one in every) < wanted:
        texts = varied(prompts, rounds)
        seeds = [rounds * TEXTS + index for index in range(TEXTS)]
        for temperature in temperatures:
            expected = [write([p], [s], temperature, "none")[0] for p, s in zip(texts, seeds, strict=True)]
            for one in (one for one in every if one.temperature == temperature):
                found: list[list[int]] = []
                for start in range(0, TEXTS, one.batch):
                    part = slice(start, start + one.batch)
                    found += write(texts[part], seeds[part], temperature, one.plan)
                for seed, a, b in zip(seeds, expected, found, strict=True):
                    one.add(seed, a, b)
                progress(every)
        rounds += 1
    return every


def varied(prompts: Sequence[Sequence[int]], number: int) -> list[list[int]]:
    """The prompts of a round: after the first, some tokens of other prompts come before each, so that the text and
    where it lies in its pages are new."""
    generator = random.Random(number)
    vocabulary = [token for prompt in prompts for token in prompt]
    chosen = [prompts[(number * TEXTS + index) % len(prompts)] for index in range(TEXTS)]
    return [generator.choices(vocabulary, k=generator.randint(1, 90) * bool(number)) + list(p) for p in chosen]


def writer(engine: Engine, max_new_tokens: int, exit_layer: int | None) -> Write:
    def write(prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float, plan: str) -> list[list[int]]:
        settings: dict[str, Any] = {"speculative_decoding": False}
        if plan != "none":
            settings = {"speculative_decoding": "force", "plan": plan, "exit_layer": exit_layer}
        way = ours(engine, **settings)
        return way(Batch(prompts, seeds, engine.model.device), Task(max_new_tokens, temperature)).tokens

    return write


def show(console: Console, comparisons: list[Comparison]) -> None:
    table = Table()
    for heading in ("temperature", "batch", "plan", "tokens compared", "texts that differ", "first"):
        table.add_column(heading, justify="left" if heading in ("plan", "first") else "right")
    for one in comparisons:
        table.add_row(
            f"{one.temperature:g}", str(one.batch), one.plan, f"{one.compared:,}", str(one.differences), one.first
        )
    console.print(table)
    total, differences = summary(comparisons).values()
    console.print(f"{total:,} tokens compared with plain decoding, {differences} texts differ", soft_wrap=True)


def summary(comparisons: Sequence[Tally]) -> dict[str, int]:
    return {
        "compared": sum(one.compared for one in comparisons),
        "differences": sum(one.differences for one in comparisons),
    }


def as_json(comparisons: list[Comparison]) -> dict[str, Any]:
    return {**summary(comparisons), "comparisons": [asdict(one) for one in comparisons]}


def check_arrivals(
    target: Target, wanted: int, new_tokens: int, seed: int = 0, progress: Callable[[int], None] = lambda compared: None
) -> dict[str, Tally]:
    """Rounds of random arrivals until at least `wanted` tokens were compared; tallies by the name of the settings."""
    tallies: dict[str, Tally] = {}
    compared = rounds = 0
    while not rounds or compared < wanted:
        drawn = random.Random(f"{seed} {rounds}")
        asked = [draw_request(target, drawn, new_tokens) for _ in range(ARRIVALS)]
        alone = [Stamped(target.engine, *of.text, {**of.options, "speculative_decoding": False}) for of in asked]
        for request in alone:
            request.submit()
            request.wait()
        gap = mean(request.ended_at - request.submitted_at for request in alone) / AT_ONCE
        together = [Stamped(target.engine, *of.text, {**of.options, **of.speculation}) for of in asked]
        arrive(together, gap, drawn)
        for number, (of, expected, found) in enumerate(zip(asked, alone, together, strict=True)):
            tally = tallies.setdefault(of.settings, Tally())
            tally.add(rounds * ARRIVALS + number, expected.tokens, found.tokens)
        compared, rounds = summary(list(tallies.values()))["compared"], rounds + 1
        progress(compared)
    return tallies


@dataclass(frozen=True)
class Asked:
    """A request as it was drawn."""

    text: tuple[list[int], int, int]  # prompt, seed, new tokens
    settings: str  # their name
    options: Options
    speculation: Options


def draw_request(target: Target, drawn: random.Random, new_tokens: int) -> Asked:
    """A prompt with tokens of others before it, settings, a length of up to `new_tokens`, and a way to draft."""
    offered = arriving_options(target)
    name = drawn.choice(list(offered))
    vocabulary = [token for prompt in target.prompts for token in prompt]
    prompt = drawn.choices(vocabulary, k=drawn.randint(0, 90)) + drawn.choice(target.prompts)
    text = prompt, drawn.getrandbits(63), drawn.randint(max(1, new_tokens // 4), new_tokens)
    return Asked(text, name, offered[name], drawn.choice(speculations(target)))


def arrive(requests: Sequence[Stamped], gap: float, drawn: random.Random) -> None:
    """Submits the requests after random pauses of `gap` seconds on average, and waits for all."""
    for request in requests:
        time.sleep(drawn.expovariate(1 / gap))
        request.submit()
    for request in requests:
        request.wait()


def arriving_options(target: Target) -> dict[str, Options]:
    """Settings that are drawn from. Stop tokens are ones that the prompts use often, so that some texts end early."""
    counts = Counter(token for prompt in target.prompts for token in prompt)
    stops = [token for token, _ in counts.most_common(_STOPS)]
    built_in = built_in_options(target.prompts, stops, target.engine.model.config.vocab_size)
    return {**built_in, "processor": {**GREEDY, "logits_processor": [lower_even_tokens]}}


def lower_even_tokens(prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A processor that depends on the text: every second token makes even ids less likely."""
    lowered = logits.clone()
    lowered[:, ::2] -= prefix.shape[1] % 2
    return lowered


def speculations(target: Target) -> list[Options]:
    """What requests say about speculation: nothing, a plan of their own, or no."""
    layer = target.speculation.get("exit_layer")
    forced = [{"speculative_decoding": "force", "plan": plan, "exit_layer": layer} for plan in PLANS if plan != "none"]
    return [target.speculation, target.speculation, *forced, {"speculative_decoding": False}]


def show_arrivals(console: Console, tallies: dict[str, Tally]) -> None:
    table = Table()
    for heading in ("settings", "tokens compared", "texts that differ", "first"):
        table.add_column(heading, justify="left" if heading in ("settings", "first") else "right")
    for name, tally in tallies.items():
        table.add_row(name, f"{tally.compared:,}", str(tally.differences), tally.first)
    console.print(table)
    total, differences = summary(list(tallies.values())).values()
    console.print(f"{total:,} tokens under random arrivals, {differences} texts differ", soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.exactness", description=__doc__)
    add_arguments(parser, new_tokens=96)
    parser.add_argument("--arrivals", type=int, default=50_000, help="tokens to compare at least (default: 50000)")
    parser.add_argument("--decoding", type=int, default=16, help="sequences that decode together (default: 16)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    target = open_target(args, longest=1024 + args.max_new_tokens, max_batch=args.decoding)
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        bar = progress.add_task("tokens compared", total=args.arrivals)
        tell = lambda compared: progress.update(bar, completed=compared, refresh=True)  # noqa: E731
        tallies = check_arrivals(target, args.arrivals, args.max_new_tokens, args.seed, tell)
    show_arrivals(Console(highlight=False), tallies)
    found = summary(list(tallies.values()))
    told = {name: asdict(tally) for name, tally in tallies.items()}
    print(json.dumps({"benchmark": "exactness", "model": target.name, **found, "settings": told}))
    return int(found["differences"] > 0)


if __name__ == "__main__":
    sys.exit(main())
