"""How long a command takes to say its first line on a terminal.

python -m benchmarks.first_line [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import pty
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

COMMANDS = (
    "--help",
    "list",
    "runs",
    "train CartPole-v1",
    "resume run",
    "evaluate run",
    "play run",
    "doctor CartPole-v1",
    "tune CartPole-v1",
    "sweep CartPole-v1",
    "jobs status",
    "compare run",
    "report run",
    "export run",
    "dashboard --no-browser",
    "monitor",
)


def seconds(command: str, folder: Path) -> float:
    """From the start of the process to its first byte."""
    ours, theirs = pty.openpty()
    began = perf_counter()
    process = subprocess.Popen(
        [Path(sys.executable).with_name("flatout"), *command.split()],
        cwd=folder,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        terminal.read(1)
        took = perf_counter() - began
        process.kill()
        process.wait()
    return took


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print("| command | first line, median | longest |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        words = f"{Path(sys.executable).with_name('flatout')} train CartPole-v1 --timesteps 4096 --run-name run --quiet"
        subprocess.run(words.split(), cwd=folder, check=True)
        for command in COMMANDS:
            took = [seconds(command, Path(folder)) for _ in range(args.rounds)]
            print(f"| {command} | {statistics.median(took):.2f} s | {max(took):.2f} s |", flush=True)


if __name__ == "__main__":
    main()
