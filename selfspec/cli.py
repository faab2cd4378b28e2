"""The `selfspec` command: `generate`, `chat`, `serve`, `calibrate`, `bench`. Each module parses its own arguments."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from selfspec import __version__

COMMANDS = {  # name: (module with `main(arguments, prog)`, one line of help)
    "generate": ("selfspec.generate", "complete one prompt or several"),
    "chat": ("selfspec.commands.chat", "talk with a model"),
    "serve": ("selfspec.commands.serve", "serve a model over HTTP with OpenAI's API"),
    "calibrate": ("selfspec.calibrate.__main__", "train exits for a model and choose its plans"),
    "bench": ("selfspec.commands.bench", "measure plain, governed and forced decoding of a model"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="selfspec",
        description="Faster generation from one causal LM that drafts and verifies with itself.",
        epilog="commands:\n" + "\n".join(f"  {name:<11}{about}" for name, (_, about) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"selfspec {__version__}")
    parser.add_argument(
        "command", nargs="?", choices=list(COMMANDS), metavar="command", help="see below; each one has --help"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    module = import_module(COMMANDS[args.command][0])
    return module.main(args.arguments, prog=f"selfspec {args.command}")


if __name__ == "__main__":
    sys.exit(main())
