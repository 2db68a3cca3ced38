"""Argument parsing: flags from the config's fields, and errors of one line that name the nearest valid choice."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flatout.algorithms import base as algorithms
from flatout.config.fields import Field, all_fields
from flatout.config.run_config import RunConfig, read_file
from flatout.errors import FlatoutError, did_you_mean

THE_RUN, EVERY_ALGORITHM = "the run", "every algorithm"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises FlatoutError with one line instead of printing its usage."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise FlatoutError(message)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The parsed arguments; an unknown flag is refused with the nearest one."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            word = unknown[0].split("=")[0]
            if word.startswith("-"):
                raise FlatoutError(f"unknown flag {word}{did_you_mean(word, self._option_string_actions)}")
            raise FlatoutError(f"unexpected argument {word!r}")
        return args


class _Formatter(argparse.HelpFormatter):
    """Help in one column layout, wide enough for the longest flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)


def add_env(parser: Parser) -> None:
    """ENV and --config."""
    text = "Gymnasium id, module:Id, or path/to/file.py:factory"
    parser.add_argument("env", nargs="?", metavar="ENV", help=text)
    parser.add_argument("--config", type=Path, metavar="FILE.json", help="read settings from a config.json")


def add_run(parser: Parser, text: str = "a run's folder, or its name in --runs-dir") -> None:
    """RUN and --runs-dir."""
    parser.add_argument("run", metavar="RUN", help=text)
    add_runs_dir(parser)


def add_runs_dir(parser: Parser) -> None:
    """--runs-dir."""
    text = "folder that contains the runs (runs)"
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help=text)


def run_path(run: str, runs_dir: Path) -> Path:
    """The folder of a run given by path or by name."""
    path = Path(run)
    return path if path.exists() or len(path.parts) > 1 else runs_dir / run


def add_settings(parser: Parser, argv: Sequence[str], only: Collection[str] | None = None) -> None:
    """A flag for every setting of a run, or for some, with its docstring as help; flags not given stay unset.

    An algorithm of the user's own that `argv` names is loaded first, so that its settings have flags too.
    """
    _load_algorithm(argv)
    having: dict[str, list[Field]] = {}
    for field in all_fields(RunConfig):
        if field.name != "env" and (only is None or field.name in only):
            having.setdefault(field.name, []).append(field)
    titles = {name: _group_title([field.section for field in fields]) for name, fields in having.items()}
    of_all = [title for title in (THE_RUN, EVERY_ALGORITHM) if title in titles.values()]
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys([*of_all, *titles.values()])}
    for name, fields in having.items():
        _add_flag(groups[titles[name]], fields[0])


def _load_algorithm(argv: Sequence[str]) -> None:
    first = Parser(add_help=False)
    first.add_argument("--algo")
    first.add_argument("--config", type=Path)
    args, _ = first.parse_known_args(argv)
    if args.algo is not None:
        algorithms.get(args.algo)
    elif args.config is not None:
        read_file(args.config)


def _group_title(sections: list[str | None]) -> str:
    """The heading for a setting that these sections have: the run itself, the network, or some algorithms."""
    if sections[0] in (None, "network"):
        return THE_RUN if sections[0] is None else "the network"
    if len(sections) == len(algorithms.names()) > 1:
        return EVERY_ALGORITHM
    return " and ".join(algorithms.get(str(section)).title for section in sections)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings given on the command line, by name; values are still text."""
    names = [field.name for field in all_fields(RunConfig) if field.name != "env"]
    given = {name: getattr(args, name) for name in names if name in args}
    if isinstance(given.get("env_kwargs"), str):
        try:
            given["env_kwargs"] = json.loads(given["env_kwargs"])
        except ValueError as error:
            raise FlatoutError(f"--env-kwargs is not JSON: {error}") from error
        if not isinstance(given["env_kwargs"], dict):
            raise FlatoutError(f"--env-kwargs is {json.dumps(given['env_kwargs'])}; it must be a JSON object")
    return given


def _add_flag(group: argparse._ArgumentGroup, field: Field) -> None:
    text = field.help.replace("%", "%%")
    if field.type is bool:
        group.add_argument(
            field.flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
        return
    group.add_argument(field.flag, metavar=_metavar(field), default=argparse.SUPPRESS, help=text)


def _metavar(field: Field) -> str:
    if field.name == "batch_size":
        return "N|auto"
    if field.name == "algo":
        return "|".join([*algorithms.names(), "FILE.py:NAME"])
    if field.name == "buffer_size":
        return "N|50GB"
    if field.choices:
        return "|".join(field.choices)
    text = str(field.type)
    if "tuple" in text:
        return "N,N,…"
    return "JSON" if "dict" in text else "TEXT" if field.type is str else "N" if "int" in text else "X"
