"""`python -m simcard [--timed CARD] train …` runs flatout, `python -m simcard [--timed CARD] file.py …` a script, on the card."""

from __future__ import annotations

import argparse
import runpy
import sys

import simcard


def main() -> None:
    """Installs the card, runs the rest of the command line, and prints what the card did."""
    parser = argparse.ArgumentParser(prog="python -m simcard", description=__doc__)
    parser.add_argument(
        "--timed", metavar="CARD", choices=sorted(simcard.CARDS), help="timed mode, as this card"
    )
    parser.add_argument("--devices", type=int, default=2, help="how many devices (default: 2)")
    parser.add_argument(
        "--counters", action="store_true", help="print the counters of each device at the end"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a command of flatout, or a script")
    args = parser.parse_args()
    if not args.command:
        parser.error("a command of flatout or a script is missing")
    simcard.install("timed" if args.timed else "exact", args.timed or "rtx4070", args.devices)
    try:
        run(args.command)
    finally:
        if args.counters:
            for device in range(args.devices):
                print(f"sim:{device}: {simcard.counters(device)}", file=sys.stderr)


def run(command: list[str]) -> None:
    """Runs a script, or flatout's command line."""
    if command[0].endswith(".py"):
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
        return
    from flatout.__main__ import main as flatout_main

    sys.argv = ["flatout", *command]
    flatout_main()


if __name__ == "__main__":
    main()
