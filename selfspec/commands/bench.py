"""`selfspec bench`: tokens per second of plain, governed and forced decoding, on prompts that come with selfspec."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import TYPE_CHECKING

from selfspec.commands import options
from selfspec.commands.running import run
from selfspec.models.names import check_path

if TYPE_CHECKING:
    from selfspec.commands.compare import Runs

DOMAINS = ("chat", "code", "math")  # of the shipped prompts, whose answers differ most in what can be drafted


def main(arguments: list[str] | None = None, prog: str = "selfspec bench") -> int:
    args = parse(arguments, prog)
    return run(partial(bench, args), args.verbose)


def parse(arguments: list[str] | None, prog: str = "selfspec bench") -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog, description="Measure a model on this machine: plain, governed and forced decoding, taking turns."
    )
    parser.add_argument(
        "--prompts", metavar="N", type=int, default=1, help="of each domain: chat, code, math (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object on standard output")
    options.add_model_options(parser)
    options.add_text_options(parser, max_new_tokens=64)
    group = parser.add_argument_group("speculation")
    group.add_argument("--exit-layer", metavar="N", type=int, help="of the forced runs")
    group.add_argument("--plan", help="of the forced runs: chain:4, tree:4,2,2,1, ... as of selfspec generate")
    args = parser.parse_args(arguments)
    if args.prompts < 1:
        parser.error("--prompts must be at least 1")
    return args


def bench(args: argparse.Namespace) -> int:
    check_path(args.model)  # before torch is imported, which takes seconds
    from rich.console import Console

    from selfspec.commands.compare import measure, modes

    engine = options.load_engine(args, prefix_reuse=False)  # every call shall prefill
    prompts = options.as_prompts(engine, shipped_prompts(args.prompts), raw=False)
    console = Console(stderr=True, highlight=False)
    runs = measure(console, engine, prompts, modes(engine, args.exit_layer, args.plan), options.text_arguments(args))
    if args.json:
        print(json.dumps({"model": engine.name, "device": str(engine.device), **figures(runs)}))
    return 0


def shipped_prompts(count: int) -> list[str]:
    """Returns the first `count` texts that calibration keeps for measuring, of each domain."""
    from selfspec.calibrate.prompts import shipped_domains

    texts = []
    for domain in shipped_domains():
        if domain.name in DOMAINS:
            found = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in domain.measuring]
            texts += found[:count]
    return texts


def figures(runs: list[Runs]) -> dict[str, object]:
    return {
        "tokens_per_second": {run.mode.name: round(run.speed, 2) for run in runs},
        "tokens_per_step": {run.mode.name: round(run.tokens_per_step, 3) for run in runs},
        "drafted": {run.mode.name: round(run.drafted, 3) for run in runs},
    }
