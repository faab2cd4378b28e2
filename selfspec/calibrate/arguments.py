"""The arguments of `selfspec calibrate`. Imports no torch, so that --help and wrong options are answered at once."""

from __future__ import annotations

import argparse
from pathlib import Path

from selfspec.calibrate.settings import DEFAULT_MINUTES, OBJECTIVES


def parse(arguments: list[str] | None, prog: str = "python -m selfspec.calibrate") -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Train exits for a model on text that the model writes, measure them on this machine, and choose "
        "exit layer and plans for each domain. The model's weights do not change.",
    )
    add = parser.add_argument
    add("--model", default="demo", help="folder, .gguf file, hub name, or 'demo' (default)")
    domain = "prompts of one domain, as JSON lines with 'prompt' or 'messages'; repeatable (default: six that ship)"
    add("--domain", dest="domains", action="append", default=[], metavar="NAME=PROMPTS.jsonl", help=domain)
    add("--out", type=Path, help="folder of the profile (default: the folder that profile='auto' searches)")
    add("--exits", default="", metavar="1,2,3", help="layers after which exits are trained (default: three)")
    minutes = "time for the whole run (default: %(default)g); on a slow machine it takes longer, and says so"
    add("--minutes", type=float, default=DEFAULT_MINUTES, help=minutes)
    objective = "choose the exit with the most tokens per second (default) or the highest accept rate"
    add("--objective", choices=OBJECTIVES, default="throughput", help=objective)
    without = "measure and choose only, with the exits of the model's profile"
    add("--no-train", dest="train", action="store_false", help=without)
    add("--resume", action="store_true", help="continue the stopped run in the profile's folder")
    add("--restart", action="store_true", help="drop the stopped run in the profile's folder and start again")
    add("--text", action="append", default=[], type=Path, metavar="FILE", help="also train on this text; repeatable")
    exact = parser.add_argument_group("exact amounts, for runs that give the same exits each time")
    exact.add_argument("--tokens", type=int, help="tokens of text to write, instead of a share of --minutes")
    exact.add_argument("--steps", type=int, help="training steps, instead of a share of --minutes")
    exact.add_argument("--seed", type=int, default=0, help="(default: 0)")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default="auto", help="cpu or cuda (default: the best there is)")
    machine.add_argument("--dtype", default="auto", help="float32, bfloat16 or float16 (default: by device)")
    machine.add_argument("--memory-gb", type=float, help="the most GPU memory to use, in GB")
    return parser.parse_args(arguments)
