"""`python -m selfspec.calibrate`: trains exits for a model on this machine and chooses what to draft with.

Imports torch only after the arguments are parsed: importing it takes seconds.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from selfspec.calibrate.settings import DEFAULT_MINUTES, OBJECTIVES, CalibrationSettings
from selfspec.commands.running import note, run
from selfspec.models.names import check_path

_WIDTH = 120  # columns of output that does not go to a terminal


def main(arguments: list[str] | None = None, prog: str = "python -m selfspec.calibrate") -> int:
    return run(partial(calibrate, parse(arguments, prog)))


def parse(arguments: list[str] | None, prog: str = "python -m selfspec.calibrate") -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Train exits for a model on text that the model writes, measure them on this machine, and choose "
        "exit layer and plans for each domain. The model's weights do not change.",
    )
    add = parser.add_argument
    add("--model", default="demo", help="folder, .gguf file, hub name, or 'demo' (default)")
    domain = "prompts of one domain, as JSON lines with 'prompt' or 'messages'; repeatable (default: eight that ship)"
    add("--domain", dest="domains", action="append", default=[], metavar="NAME=PROMPTS.jsonl", help=domain)
    add("--out", type=_path, help="folder of the profile (default: the folder that profile='auto' searches)")
    add("--exits", default="", metavar="1,2,3", help="number of layers below each exit to train (default: 1)")
    minutes = "time for the whole run (default: %(default)g); too short for this machine: refused, with the least"
    add("--minutes", type=float, default=DEFAULT_MINUTES, help=minutes)
    objective = "choose the exit with the most tokens per second (default) or the highest accept rate"
    add("--objective", choices=OBJECTIVES, default="throughput", help=objective)
    without = "measure and choose only, with the exits of the model's profile"
    add("--no-train", dest="train", action="store_false", help=without)
    add("--resume", action="store_true", help="continue the stopped run in the profile's folder")
    add("--restart", action="store_true", help="drop the stopped run in the profile's folder and start again")
    add("--text", action="append", default=[], type=_path, metavar="FILE", help="also train on this text; repeatable")
    exact = parser.add_argument_group("exact amounts, for runs that give the same exits each time")
    exact.add_argument("--tokens", type=int, help="tokens of text to write, instead of a share of --minutes")
    exact.add_argument("--steps", type=int, help="training steps, instead of a share of --minutes")
    exact.add_argument("--seed", type=int, default=0, help="(default: 0)")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default="auto", help="cpu or cuda (default: the best there is)")
    dtypes = "float32, bfloat16, float16; native: a GGUF file's own (default: by device)"
    machine.add_argument("--dtype", default="auto", help=dtypes)
    rounded = "round 16-bit weights while loading; load the model with the same value to use the profile"
    machine.add_argument("--quantize", choices=("int8", "int4"), help=rounded)
    machine.add_argument("--memory-gb", type=float, help="the most GPU memory to use, in GB")
    return parser.parse_args(arguments)


def _path(text: str) -> Path:
    return Path(text).expanduser()  # a shell leaves the ~ of --out=~/profile


def calibrate(args: argparse.Namespace) -> int:
    check_path(args.model)  # before torch is imported, which takes seconds
    import torch
    from rich.console import Console

    from selfspec.calibrate.display import CalibrationDisplay, show
    from selfspec.calibrate.run import Calibration

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    display, settings = CalibrationDisplay(console), settings_of(args)
    try:
        profile = Calibration(settings, display).run()
    except torch.OutOfMemoryError as error:
        raise ValueError("the GPU ran out of memory: free some, or bound what is used with --memory-gb") from error
    except KeyboardInterrupt:
        note("the same command with --resume continues the calibration")
        raise
    show(profile, console, args.model, settings.loading)
    console.print(f"took {display.elapsed / 60:.1f} minutes")
    return 0


def settings_of(args: argparse.Namespace) -> CalibrationSettings:
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()
    }
    try:
        given["exits"] = tuple(int(layer) for layer in args.exits.split(",") if layer.strip())
    except ValueError:
        raise ValueError(f"--exits {args.exits!r} must be numbers of layers like 1,2,3") from None
    return CalibrationSettings(**given)


if __name__ == "__main__":
    sys.exit(main())
