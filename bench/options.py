"""`python -m bench.options`: what each option of a request costs, plainly and with speculation, one text at a time.

All options take turns on every prompt; speeds are medians of tokens per second, prompt included, and stand beside plain
greedy decoding. For every option the tokens with speculation are compared with the plain ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import decode, report
from bench.modes import Memory
from bench.requests import (
    GREEDY,
    NAMED_TOKENS,
    Options,
    Stamped,
    Target,
    add_arguments,
    built_in_options,
    open_target,
    run_together,
)

_SLEEP_S = 100e-6


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.options", description=__doc__)
    add_arguments(parser, new_tokens=128)
    parser.add_argument("--options", nargs="+", help="only options whose name holds one of these words, and greedy")
    parser.add_argument("--repeat", type=int, default=1, help="runs on every prompt (default: 1)")
    args = parser.parse_args(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    target = open_target(args, longest=1024 + args.max_new_tokens, max_batch=1)
    subject = decode.Subject(target.name, target.engine, [], Memory(target.engine.model.device), exit_layer=None)
    setup = asdict(decode.describe(args, subject)) | {"synthetic": target.synthetic, "speculation": target.speculation}
    report.describe(console, setup)
    every = options_of(target)
    words = args.options or [""]
    chosen = {name: of for name, of in every.items() if name == "greedy" or any(word in name for word in words)}
    results = measure(target, chosen, args.max_new_tokens, args.repeat)
    show(console, results)
    same = all(row["same_tokens"] == row["texts"] for row in results)
    print(json.dumps({"benchmark": "options", "setup": setup, "all_tokens_same": same, "results": results}))
    return int(target.engine.has_kernels and not same)


def options_of(target: Target) -> dict[str, Options]:
    """Every option that is measured, greedy first. The tokens that stop a text are ones that models hardly write."""
    vocabulary = target.engine.model.config.vocab_size
    stops = range(vocabulary - NAMED_TOKENS, vocabulary)
    return {
        **built_in_options(target.prompts, stops, vocabulary),
        "processor that does nothing": {**GREEDY, "logits_processor": [do_nothing]},
        "processor that sleeps 100 us": {**GREEDY, "logits_processor": [sleep]},
    }


def do_nothing(prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits


def sleep(prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    time.sleep(_SLEEP_S)
    return logits


def measure(target: Target, options: dict[str, Options], new_tokens: int, repeat: int) -> list[dict[str, Any]]:
    """All options and modes take turns; which goes first changes with every turn. The first prompt is decoded once
    before, so that steps are captured and the governor knows what they cost."""
    ways = [(name, mode) for name in options for mode in target.modes]
    speeds: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    texts: dict[tuple[str, str], list[list[int]]] = {way: [] for way in ways}
    rehearsed = [0, *(place for _ in range(repeat) for place in range(len(target.prompts)))]
    for turn, place in enumerate(track(rehearsed, console=Console(stderr=True), auto_refresh=False)):
        for name, mode in _turned(ways, turn):
            wishes = {**options[name], **target.modes[mode]}
            request = Stamped(target.engine, target.prompts[place], place, new_tokens, wishes)
            speed = run_together([request])
            if turn:
                speeds[name, mode].append(speed)
                texts[name, mode].append(request.tokens)
    usual = median(speeds["greedy", "plain"])
    results = []
    for name in options:
        plain, drafted = (median(speeds[name, mode]) for mode in target.modes)
        pairs = list(zip(*(texts[name, mode] for mode in target.modes), strict=True))
        results.append(
            {
                "option": name,
                "plain_tokens_per_s": round(plain, 2),
                "tokens_per_s": round(drafted, 2),
                "plain_against_greedy": round(plain / usual, 4),
                "against_greedy_plain": round(drafted / usual, 4),
                "same_tokens": sum(a == b for a, b in pairs),
                "texts": len(pairs),
            }
        )
    return results


def _turned(ways: list[tuple[str, str]], turn: int) -> Iterator[tuple[str, str]]:
    for offset in range(len(ways)):
        yield ways[(turn + offset) % len(ways)]


def show(console: Console, results: list[dict[str, Any]]) -> None:
    table = Table()
    for heading in ("option", "plain tok/s", "of greedy plain", "speculation tok/s", "of greedy plain", "same tokens"):
        table.add_column(heading, justify="left" if heading == "option" else "right", no_wrap=heading == "option")
    for row in results:
        table.add_row(
            row["option"], f"{row['plain_tokens_per_s']:.1f}", f"{row['plain_against_greedy']:.2f}x",
            f"{row['tokens_per_s']:.1f}", f"{row['against_greedy_plain']:.2f}x", f"{row['same_tokens']}/{row['texts']}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
