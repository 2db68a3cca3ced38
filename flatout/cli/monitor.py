"""`flatout monitor [RUN ... | DIR]`."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console, ConsoleDimensions
from rich.live import Live

from flatout.cli.parser import Parser, add_runs_dir, run_path
from flatout.errors import FlatoutError
from flatout.runlog.folder import LOCK_FILE, RunFolder
from flatout.views.monitor import Monitor
from flatout.views.screen import cells_for, screen
from flatout.views.stream import SafeStream


def monitor(argv: Sequence[str]) -> int:
    """Show the machine and its runs until they end or Ctrl-C; returns the exit code."""
    parser = Parser(
        "monitor",
        "Show this machine, its NVIDIA cards and the runs on it, live in the terminal. Ctrl-C ends the monitor, not the runs.",
    )
    text = "runs to show, also ended ones, or a folder: a table of all its runs (all that are running, in detail)"
    parser.flag("runs", text, nargs="*", metavar="RUN|DIR")
    add_runs_dir(parser)
    text = "time between updates of the screen (0.5); cards are sampled 5 times a second"
    parser.flag("--interval", text, type=float, default=0.5, metavar="SECONDS")
    parser.flag("--once", "print one screen and exit; the default without a terminal")
    parser.flag("--json", "print the figures of one screen as JSON")
    args = parser.parse(argv)
    if not 0.05 <= args.interval <= 3600:
        raise FlatoutError(f"--interval is {args.interval:g}; it must be from 0.05 to 3600 seconds")
    paths = [run_path(name, args.runs_dir) for name in args.runs]
    folder = next((path for path in paths if _holds_runs(path)), None)
    if folder is not None and len(paths) > 1:
        raise FlatoutError(f"{folder} is a folder of runs; name it alone, or name runs")
    named = [path if path.is_dir() else RunFolder.open(path).path for path in paths if path != folder]
    stream = SafeStream(sys.stdout)
    watched = Monitor(args.runs_dir, named, folder)
    if args.json:
        print(json.dumps(asdict(watched.read())))
    elif args.once or not stream.isatty():
        console = _console(stream)
        console.print(screen(watched.read(cells_for(console.width)), console.width))
    else:
        _watch(watched, stream, args.interval)
    watched.close()
    return 0


def _holds_runs(path: Path) -> bool:
    """Whether a folder is not a run, begun or about to begin, but may contain some."""
    return path.is_dir() and not any(
        (path / name).exists() for name in ("config.json", "progress.json", LOCK_FILE)
    )


def _watch(monitor: Monitor, stream: SafeStream, interval: float) -> None:
    """Redraw until the named runs have ended; their last state stays on the terminal."""
    console = _console(stream)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        # The alternate screen: the terminal's earlier content comes back afterwards.
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                console.size = ConsoleDimensions(*stream.columns_and_lines())
                state = monitor.read(cells_for(console.width))
                if monitor.has_ended(state):
                    break
                live.update(screen(state, console.width, console.height, waits=True), refresh=True)
                time.sleep(interval)
        console.print(screen(state, console.width))
    except KeyboardInterrupt:
        pass


def _console(stream: SafeStream) -> Console:
    # The size of our own stream: rich asks the standard ones, of which another may be a terminal.
    console = Console(file=cast(TextIO, stream), force_jupyter=False, highlight=False)
    console.size = ConsoleDimensions(*stream.columns_and_lines())
    return console
