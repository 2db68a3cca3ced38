"""Runs the verb that the command line names; a user's error becomes one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword

from flatout.cli.devices import is_rank
from flatout.errors import FlatoutError, did_you_mean

VERBS = {
    "train": ("train", "train an agent"),
    "resume": ("train", "continue a run from its newest checkpoint"),
    "evaluate": ("train", "mean return of a trained agent over whole episodes"),
    "play": ("play", "a GIF or MP4 of a trained agent"),
    "doctor": ("advise", "measure an env: where the time would go and what to change"),
    "tune": ("advise", "find and save the fastest settings for an env on this machine"),
    "runs": ("runs", "the runs of a folder: status, steps, return, speed"),
    "compare": ("compare", "learning curves of several runs, and what seeds say about their returns"),
    "report": ("report", "what a run learned and where its time went, as a page and as text"),
    "trace": ("report", "timeline of a run as a Perfetto/Chrome trace"),
    "sweep": ("sweep", "search for the best settings of an env with Optuna"),
    "jobs": ("jobs", "a queue of trainings, as many side by side as pay"),
    "export": ("exchange", "a trained policy for other programs: safetensors, ONNX, torch, NumPy"),
    "import": ("exchange", "a model of Stable-Baselines3 as an agent"),
    "init": ("start", "write an env of your own with a test, and train it"),
    "list": ("start", "envs, algorithms, recipes and presets"),
    "completion": ("start", "shell completion for bash, zsh or fish"),
    "dashboard": ("dashboard", "the runs of a folder in a browser, live"),
    "monitor": ("monitor", "the machine and the runs on it, live in the terminal"),
}
"""The module of this package that has the verb's function, and what the verb does."""

LOADING = {
    "train": "starting",
    "resume": "resuming",
    "evaluate": "loading",
    "play": "loading",
    "export": "loading",
    "import": "importing from",
    "doctor": "measuring",
    "tune": "tuning",
    "sweep": "searching for settings of",
    "runs": "reading",
    "compare": "comparing",
    "report": "reading",
    "trace": "reading",
    "list": "listing",
    "init": "writing",
    "dashboard": "reading",
    "monitor": "looking at",
    "jobs": "jobs:",
}
"""What verbs that need a moment say first, about their first argument."""
WITHOUT = {
    "runs": "runs/",
    "dashboard": "runs/",
    "monitor": "this machine",
    "list": "envs, algorithms, recipes and presets",
}
"""What it is about where there is no argument."""

LATER = ("bench",)
"""Verbs of later versions."""


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
        # The reader has gone, as in `flatout ... | head`.
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
    module, _ = VERBS[verb]
    if verb in LOADING:
        _say_first(LOADING[verb], rest, WITHOUT.get(verb))
    function = f"{verb}_" if iskeyword(verb) else verb
    exit_code: int = getattr(import_module(f"flatout.cli.{module}"), function)(rest)
    return exit_code


def _say_first(word: str, argv: list[str], otherwise: str | None) -> None:
    """On a terminal, `starting CartPole-v1 …` before anything is loaded; elsewhere a refusal is one line."""
    silent = {"-h", "--help", "--quiet", "--json"}
    what = argv[0] if argv and not argv[0].startswith("-") else otherwise
    if what and silent.isdisjoint(argv) and sys.stderr.isatty() and not is_rank():
        print(f"{word} {what} …", file=sys.stderr, flush=True)


def help_text() -> str:
    """What `flatout --help` prints."""
    rows = "\n".join(f"  flatout {verb:<10} {text}" for verb, (_, text) in VERBS.items())
    return (
        "flatout: reinforcement learning with the accelerator flat out.\n\n"
        f"{rows}\n\n"
        "  flatout train CartPole-v1        a first example\n"
        "  flatout VERB --help              the flags of a command\n"
        "  --debug                          with any command: print full tracebacks\n"
        "  --version                        print the version"
    )
