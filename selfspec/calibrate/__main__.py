"""`python -m selfspec.calibrate`: trains exits for a model on this machine and chooses what to draft with."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from selfspec.cache.kv_cache import CacheFull
from selfspec.calibrate.display import Display
from selfspec.calibrate.outcome import show
from selfspec.calibrate.run import Calibration
from selfspec.calibrate.settings import DEFAULT_MINUTES, OBJECTIVES, Settings


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)  # a file has room for whole tables
    display = Display(console)
    try:
        profile = Calibration(settings_of(args), display).run()
    except KeyboardInterrupt:
        console.print("stopped; the same command with --resume goes on from here")
        return 130
    except torch.OutOfMemoryError:
        console.print(
            "[bold red]error:[/] the GPU ran out of memory: free some, or say with --memory-gb how much may be used",
            soft_wrap=True,
        )
        return 2
    except (ValueError, OSError, CacheFull) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        return 2
    show(profile, console, args.model)
    console.print(f"took {display.elapsed / 60:.1f} minutes")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m selfspec.calibrate",
        description="Train small exits for a model on text it writes itself, measure them on this device, and choose "
        "exit layer and tree for each domain. The model's weights are not touched.",
    )
    add = parser.add_argument
    add("--model", default="demo", help="folder, .gguf file, hub name, or 'demo' (default)")
    domain = "a kind of text, as lines with 'prompt' or 'messages'; repeatable (default: the shipped six)"
    add("--domain", action="append", default=[], metavar="NAME=PROMPTS.jsonl", help=domain)
    add("--out", type=Path, help="folder of the profile (default: where profile='auto' looks)")
    add("--exits", default="", metavar="1,2,3", help="layers to train exits after (default: three shallow ones)")
    told = "aim for the whole run; measuring may run over (default: %(default)g)"
    add("--minutes", type=float, default=DEFAULT_MINUTES, help=told)
    add("--objective", choices=OBJECTIVES, default="throughput", help="tokens per second (default), or the accept rate")
    add("--no-train", action="store_true", help="measure and choose anew with exits trained before")
    add("--resume", action="store_true", help="continue the stopped run in the profile's folder")
    add("--restart", action="store_true", help="drop the stopped run in the profile's folder and begin anew")
    add("--text", action="append", default=[], type=Path, metavar="FILE", help="also train on this text; repeatable")
    exact = parser.add_argument_group("exact amounts, for runs that can be repeated to the bit")
    exact.add_argument("--tokens", type=int, help="of text to write, instead of a share of --minutes")
    exact.add_argument("--steps", type=int, help="of training, instead of a share of --minutes")
    exact.add_argument("--seed", type=int, default=0)
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default="auto")
    machine.add_argument("--dtype", default="auto")
    machine.add_argument("--memory-gb", type=float, help="use at most this much GPU memory")
    return parser.parse_args(arguments)


def settings_of(args: argparse.Namespace) -> Settings:
    try:
        exits = tuple(int(layer) for layer in args.exits.split(",") if layer.strip())
    except ValueError:
        raise ValueError(f"--exits {args.exits!r} must be layer numbers like 1,2,3") from None
    return Settings(
        model=args.model,
        domains=tuple(args.domain),
        out=args.out,
        exits=exits,
        minutes=args.minutes,
        objective=args.objective,
        train=not args.no_train,
        resume=args.resume,
        restart=args.restart,
        text=tuple(args.text),
        tokens=args.tokens,
        steps=args.steps,
        memory_gb=args.memory_gb,
        device=args.device,
        dtype=args.dtype,
        seed=args.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
