"""Whether tokens are the same whatever the plan and the batch: every way of drafting against plain decoding, alone.

Counts tokens that were compared and texts that parted; how fast anything is does not matter here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.modes import Batch, Task, ours
from selfspec import Engine

BATCHES = (1, 4, 16)
TEMPERATURES = (0.0, 0.7)
PLANS = ("none", "chain:2", "chain:5", "tree:4,2,2,1", "tree:16,2")
TEXTS = max(BATCHES)  # of each round

# (prompts, a seed for each, temperature, plan) -> new tokens of each
Write = Callable[[Sequence[Sequence[int]], Sequence[int], float, str], list[list[int]]]


@dataclass
class Comparison:
    """One plan, batch and temperature against plain decoding of single prompts."""

    plan: str
    batch: int
    temperature: float
    compared: int = 0  # tokens, up to where two texts part
    differences: int = 0  # texts that parted
    first: str = ""  # where the first one did

    def add(self, number: int, expected: list[int], found: list[int]) -> None:
        parted = parting(expected, found)
        self.compared += max(len(expected), len(found)) if parted is None else parted + 1
        if parted is not None:
            self.differences += 1
            self.first = self.first or f"text {number}, token {parted}"


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
    every = [Comparison(plan, batch, t) for t, batch, plan in cells if (plan, batch) != ("none", 1)]
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


def summary(comparisons: list[Comparison]) -> dict[str, int]:
    return {
        "compared": sum(one.compared for one in comparisons),
        "differences": sum(one.differences for one in comparisons),
    }


def as_json(comparisons: list[Comparison]) -> dict[str, Any]:
    return {**summary(comparisons), "comparisons": [asdict(one) for one in comparisons]}
