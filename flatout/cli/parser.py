"""Argument parsing that many commands share: errors of one line that name the nearest valid choice."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from flatout.errors import FlatoutError, did_you_mean


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises FlatoutError with one line instead of printing its usage."""

    def __init__(self, verb: str, description: str | None = None, **kwargs: Any) -> None:
        wide = partial(argparse.HelpFormatter, max_help_position=34, width=100)
        prog = f"flatout {verb}"
        super().__init__(prog, description=description, allow_abbrev=False, formatter_class=wide, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise FlatoutError(message)

    def flag(self, name: str, text: str, **kwargs: Any) -> None:
        """Add a flag with its help text; a switch unless `kwargs` describe its value."""
        self.add_argument(name, help=text, **(kwargs or {"action": "store_true"}))

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The parsed arguments; an unknown flag is refused with the nearest one."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            word = unknown[0].split("=")[0]
            if word.startswith("-"):
                raise FlatoutError(f"unknown flag {word}{did_you_mean(word, self._option_string_actions)}")
            raise FlatoutError(f"unexpected argument {word!r}")
        return args


def env_parser(verb: str, description: str) -> Parser:
    """A parser with ENV and --config."""
    parser = Parser(verb, description, usage=f"flatout {verb} ENV [flags]")
    parser.flag("env", "Gymnasium id, module:Id, or path/to/file.py:factory", nargs="?", metavar="ENV")
    parser.flag("--config", "read settings from a config.json", type=Path, metavar="FILE.json")
    add_trust(parser)
    return parser


def run_parser(
    verb: str, description: str, text: str = "a run's folder, or its name in --runs-dir"
) -> Parser:
    """A parser with RUN and --runs-dir."""
    parser = Parser(verb, description)
    parser.flag("run", text, metavar="RUN")
    add_runs_dir(parser)
    return parser


def add_trust(parser: Parser) -> None:
    """--trust."""
    parser.flag(
        "--trust", "run code that a file names, such as its env, though no run of yours wrote the file"
    )


def add_runs_dir(parser: Parser) -> None:
    """--runs-dir."""
    parser.flag(
        "--runs-dir", "folder that contains the runs (runs)", type=Path, default=Path("runs"), metavar="DIR"
    )


def run_path(run: str, runs_dir: Path) -> Path:
    """The folder of a run given by path or by name, such as `first` or `group/seed-1`."""
    path, named = Path(run), runs_dir / run
    return path if path.exists() or (len(path.parts) > 1 and not named.exists()) else named


def check_exists(path: Path) -> None:
    """Refuse a run or a checkpoint that is not there, before torch is loaded."""
    if path.suffix == ".flatout" and not path.exists():
        raise FlatoutError(f"checkpoint {str(path)!r} does not exist")
    if not path.is_file() and not (path / "checkpoints").exists():
        from flatout.runlog.folder import RunFolder

        RunFolder.open(path)
