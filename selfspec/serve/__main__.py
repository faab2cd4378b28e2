"""`python -m selfspec.serve` is `selfspec serve`."""

from __future__ import annotations

import sys

from selfspec.commands.serve import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m selfspec.serve"))
