"""Which verb: looks it up, runs it, and turns user errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from flatout.errors import FlatoutError, did_you_mean

VERBS = {
    "train": "train an agent",
    "resume": "go on from a run's newest checkpoint",
    "evaluate": "mean return over whole episodes",
    "doctor": "where would the time go, and what to change",
    "tune": "measure, pick and save the fastest settings",
    "report": "where the time went and what it learned, as a page and as text",
    "trace": "what every part of a run did when, as a Perfetto/Chrome trace",
    "monitor": "the machine and the runs on it, live in the terminal",
}
"""Each is a module of this package with `run(argv) -> exit code`."""

LATER = (
    "sweep",
    "play",
    "export",
    "jobs",
    "dashboard",
    "bench",
)
"""Verbs of versions to come: refused by name."""


def run(argv: Sequence[str]) -> int:
    """Run the command line `argv`; returns the exit code."""
    debug = "--debug" in argv
    try:
        return _dispatch([word for word in argv if word != "--debug"])
    except FlatoutError as error:
        if debug:
            raise
        print(f"flatout: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left, as in `flatout ... | head`; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if argv else 2
    if argv[0] == "--version":
        from flatout import __version__

        print(f"flatout {__version__}")
        return 0
    verb, rest = argv[0], argv[1:]
    if verb in LATER:
        raise FlatoutError(f"'flatout {verb}' is not in this version yet; there are {', '.join(VERBS)}")
    if verb not in VERBS:
        raise FlatoutError(f"unknown command {verb!r}{did_you_mean(verb, VERBS)}")
    exit_code: int = import_module(f"flatout.cli.{verb}").run(rest)
    return exit_code


def help_text() -> str:
    """What `flatout --help` prints."""
    rows = "\n".join(f"  flatout {verb:<10} {text}" for verb, text in VERBS.items())
    return (
        "flatout: reinforcement learning with the accelerator flat out.\n\n"
        f"{rows}\n\n"
        "  flatout train CartPole-v1        the first thing to try\n"
        "  flatout VERB --help              the flags of one command\n"
        "  --debug                          with any command: full tracebacks\n"
        "  --version                        which version this is"
    )
