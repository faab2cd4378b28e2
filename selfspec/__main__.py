"""`python -m selfspec` is the `selfspec` command."""

import sys

from selfspec.cli import main

if __name__ == "__main__":
    sys.exit(main())
