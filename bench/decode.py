"""`python -m bench.decode`: tokens per second of whole calls, plainly, with speculation and by transformers' modes.

All modes share one copy of the weights and take turns on every batch, for each domain, batch size and temperature.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench import machine, tables
from bench.modes import TRANSFORMERS, Batch, Task, Way, Written, ours, release, transformers_ways
from bench.requests import Target, add_arguments, open_target
from bench.timing import Limit, rotated, spread
from selfspec.memory import limit_memory
from selfspec.models.loading import pick_device

PLAIN, SPECULATION = "plain", "speculation"


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.memory_gb is not None:
        bound(args.memory_gb, pick_device(args.device))
    target = open_target(args, max(16, *args.batch), with_transformers=bool(set(args.modes) & set(TRANSFORMERS)))
    setup = machine.describe(target.engine, target.name, target.synthetic)
    print(*tables.setup(setup), "", sep="\n")
    ways, cells = ways_of(target, args.modes, args.plans), cells_of(target, args.batch, args.temperature)
    found = measure(target, ways, cells, args.max_new_tokens, args.repeat, Limit(args.seconds))
    add_ceiling(found, setup)
    print(*tables.decode_modes(found), sep="\n")
    print(json.dumps({"benchmark": "decode", "setup": setup, **found}))
    ours_failed = [
        name for cell in found["cells"] for name, result in cell["modes"].items()
        if "failed" in result and not name.startswith("transformers")
    ]  # fmt: skip
    return int(bool(ours_failed))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__)
    add_arguments(parser, new_tokens=128, prompts=4)
    add = parser.add_argument
    modes = (PLAIN, SPECULATION, *TRANSFORMERS)
    add("--modes", nargs="+", default=modes[:2], choices=modes, help="(default: plain speculation)")
    add("--plans", nargs="*", default=[], help="plans to force as further modes, such as chain:2 tree:4,2,2,1")
    add("--batch", type=int, nargs="+", default=[1], help="sequences of a call (default: 1)")
    add("--temperature", type=float, nargs="+", default=[0.0], help="0 is greedy (default: 0)")
    add("--repeat", type=int, default=3, help="timed repeats (default: 3)")
    add("--memory-gb", type=float, help="allocate at most so many 10^9 bytes of GPU memory, weights included")
    return parser.parse_args(arguments)


def bound(gigabytes: float, device: torch.device) -> None:
    """Bounds the process's GPU memory before anything is loaded."""
    try:
        limit_memory(gigabytes, device)
    except ValueError as error:
        raise SystemExit(f"--memory-gb: {error}") from error


def ways_of(target: Target, modes: Sequence[str], plans: Sequence[str]) -> dict[str, Way]:
    """The modes by name, plain decoding first."""
    engine = target.engine
    ways = {name: ours(engine, **options) for name, options in target.modes.items() if name in modes}
    layer = target.speculation.get("exit_layer")
    for plan in plans:
        ways[plan] = ours(engine, speculative_decoding="force", plan=plan, exit_layer=layer)
    if target.hf is not None:
        pad = engine.tokenizer.pad_token_id
        ways |= transformers_ways(target.hf, 0 if pad is None else pad, modes)
    return ways


@dataclass(frozen=True)
class Run:
    """All batches of a cell, decoded once in one mode."""

    written: list[Written]
    seconds: float

    @property
    def tokens(self) -> list[list[int]]:
        return [tokens for one in self.written for tokens in one.tokens]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def tokens_per_step(self) -> float | None:
        steps = [one.steps for one in self.written]
        return None if None in steps else round(sum(map(len, self.tokens)) / sum(filter(None, steps)), 2)


@dataclass
class Cell:
    """One domain, batch size and temperature, and its timed repeats: a run of each mode."""

    domain: str
    temperature: float
    batches: list[Batch]
    repeats: list[dict[str, Run]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # by mode; such a mode is not run again

    @property
    def size(self) -> int:
        return len(self.batches[0].prompts)

    def run(self, ways: dict[str, Way], new_tokens: int, turn: int) -> dict[str, Run]:
        """Every mode decodes every batch; the mode that goes first changes from batch to batch."""
        task = Task(new_tokens, self.temperature)
        written: dict[str, list[Written]] = {name: [] for name in ways}
        seconds = dict.fromkeys(ways, 0.0)
        for number, batch in enumerate(self.batches):
            for name in rotated(list(ways), turn + number):
                if name in self.failures:
                    continue
                start = time.perf_counter()
                try:
                    written[name].append(ways[name](batch, task))
                except Exception as error:  # a mode that fails must not end the others, out of memory included
                    self.failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
                    release()
                seconds[name] += time.perf_counter() - start
        return {name: Run(written[name], seconds[name]) for name in ways if name not in self.failures}

    def result(self, names: Sequence[str]) -> dict[str, Any]:
        """Speeds, and ratios to plain decoding repeat by repeat."""
        plain = [] if PLAIN in self.failures else [repeat[PLAIN] for repeat in self.repeats if PLAIN in repeat]
        modes: dict[str, Any] = {}
        for name in names:
            runs = [repeat[name] for repeat in self.repeats if name in repeat]
            if name in self.failures or not runs:
                modes[name] = {"failed": self.failures.get(name, "not reached within the time budget")}
                continue
            pairs = list(zip(runs, plain, strict=True)) if plain else []
            same = sum(a == b for run, base in pairs[:1] for a, b in zip(run.tokens, base.tokens, strict=True))
            # transformers draws other noise, so that its samples differ in any case.
            compares = pairs and not (self.temperature and name.startswith("transformers"))
            ratios = [run.tokens_per_s / base.tokens_per_s for run, base in pairs]
            modes[name] = {
                "tokens_per_s": spread([run.tokens_per_s for run in runs], 2),
                "against_plain": spread(ratios, 3) if pairs and name != PLAIN else None,
                "tokens_per_step": runs[0].tokens_per_step,
                "same_tokens": [same, len(runs[0].tokens)] if compares and name != PLAIN else None,
            }
        tokens = sum(map(len, plain[0].tokens)) if plain else None
        return {
            "domain": self.domain, "batch": self.size, "temperature": self.temperature, "repeats": len(self.repeats),
            "tokens": tokens, "modes": modes,
        }  # fmt: skip


def cells_of(target: Target, sizes: Sequence[int], temperatures: Sequence[float]) -> list[Cell]:
    return [
        Cell(domain, temperature, batches_of(target, prompts, size))
        for temperature in temperatures
        for size in sizes
        for domain, prompts in target.domains.items()
    ]


def batches_of(target: Target, prompts: Sequence[list[int]], size: int) -> list[Batch]:
    """The prompts in batches of one size; the last batch is completed with the first prompts."""
    device = target.engine.model.device
    groups = [[i % len(prompts) for i in range(start, start + size)] for start in range(0, len(prompts), size)]
    return [Batch([prompts[i] for i in group], group, device) for group in groups]


def measure(
    target: Target, ways: dict[str, Way], cells: Sequence[Cell], new_tokens: int, repeat: int, limit: Limit
) -> dict[str, Any]:
    """Runs all cells `repeat` times; with kernels, after a warm-up and one run that is not timed."""
    longest = max(batch.width for cell in cells for batch in cell.batches) + new_tokens
    for size, temperature in limit.part(1 / 3).over(dict.fromkeys((cell.size, cell.temperature) for cell in cells)):
        target.engine.warmup(size, None, (temperature,), longest)
    for turn in range(-int(target.engine.has_kernels), repeat):
        for cell in limit.over(cells):
            runs = cell.run(ways, new_tokens, turn)
            if turn >= 0:
                cell.repeats.append(runs)
    sequences = max(len(prompts) for prompts in target.domains.values())
    results = [cell.result(list(ways)) for cell in cells]
    return {"new_tokens": new_tokens, "repeat": repeat, "sequences": sequences, "cells": results}


def add_ceiling(found: dict[str, Any], setup: dict[str, Any]) -> None:
    """Adds each mode's share of the ceiling: one token of each sequence per read of the weights."""
    for cell in found["cells"]:
        for result in cell["modes"].values():
            if "failed" not in result:
                ceiling = cell["batch"] * setup["ceiling_tokens_per_s"]
                result["of_ceiling"] = round(result["tokens_per_s"]["median"] / ceiling, 3)


if __name__ == "__main__":
    sys.exit(main())
