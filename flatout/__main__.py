"""The command line's entry: `flatout` and `python -m flatout`."""

from __future__ import annotations

import os
import signal
import sys

from flatout.cli.main import run


def main() -> None:
    """Run the command and leave with its exit code."""
    if (lifeline := os.environ.pop("FLATOUT_LIFELINE", None)) is not None:
        from flatout.executors.workers import die_with

        die_with(int(lifeline))
    code = run(sys.argv[1:])
    # Everything is saved; an impatient Ctrl-C must not keep processes from being closed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    main()
