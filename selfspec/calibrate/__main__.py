"""`python -m selfspec.calibrate`: trains exits for a model on this machine and chooses what to draft with.

Imports torch only after the arguments are parsed: importing it takes seconds.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from selfspec.calibrate.arguments import parse
from selfspec.calibrate.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

FAILED, INTERRUPTED = 2, 130  # exit codes
_WIDTH = 120  # columns of output that does not go to a terminal


def main(arguments: list[str] | None = None, prog: str = "python -m selfspec.calibrate") -> int:
    args = parse(arguments, prog)
    try:
        return calibrate(args)
    except KeyboardInterrupt:
        print("\nstopped: the same command with --resume continues the calibration", file=sys.stderr)
        return INTERRUPTED


def calibrate(args: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from selfspec.cache.kv_cache import CacheFull
    from selfspec.calibrate import run
    from selfspec.calibrate.display import Display
    from selfspec.calibrate.tables import show
    from selfspec.commands.running import one_line_warnings

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    display = Display(console)
    try:
        with one_line_warnings():
            profile = run.Calibration(settings_of(args), display).run()
    except torch.OutOfMemoryError:
        return _fail(console, "the GPU ran out of memory: free some, or bound what is used with --memory-gb")
    except (ValueError, OSError, CacheFull) as error:
        return _fail(console, str(error))
    show(profile, console, args.model)
    console.print(f"took {display.elapsed / 60:.1f} minutes")
    return 0


def _fail(console: Console, message: str) -> int:
    from rich.markup import escape

    console.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    return FAILED


def settings_of(args: argparse.Namespace) -> Settings:
    given: dict[str, Any] = {name: tuple(of) if isinstance(of, list) else of for name, of in vars(args).items()}
    try:
        given["exits"] = tuple(int(layer) for layer in args.exits.split(",") if layer.strip())
    except ValueError:
        raise ValueError(f"--exits {args.exits!r} must be layer numbers like 1,2,3") from None
    return Settings(**given)


if __name__ == "__main__":
    sys.exit(main())
