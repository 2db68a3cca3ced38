"""The command line's entry: `flatout` and `python -m flatout`."""

from __future__ import annotations

import sys

from flatout.cli.main import run


def main() -> None:
    """Run the command and leave with its exit code."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
