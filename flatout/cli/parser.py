"""Argument parsing: flags from the config's fields, and errors of one line that name the nearest valid choice."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args

from flatout.algorithms import base as algorithms
from flatout.config.fields import Field, all_fields
from flatout.config.run_config import RunConfig, read_algorithm, resolve
from flatout.device.machine import usable_cores
from flatout.envs.make import env_factory
from flatout.errors import FlatoutError, did_you_mean

THE_RUN, EVERY_ALGORITHM = "the run", "every algorithm"
RESUMABLE = (
    "timesteps",
    "target_return",
    "eval_every",
    "eval_episodes",
    "eval_max_steps",
    "checkpoint_every",
    "log",
)
"""Settings that may change when a run is resumed."""


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


def parse_settings(
    parser: Parser, argv: Sequence[str]
) -> tuple[argparse.Namespace, RunConfig, dict[str, Any]]:
    """The arguments, the config for ENV, and the settings given; refuses mistakes before torch costs two seconds."""
    add_settings(parser, argv)
    args = parser.parse(argv)
    given = settings(args)
    if getattr(args, "ray", False):
        given.pop("ray_address", None)  # the cluster is that of the trials
    cores = usable_cores()
    config = resolve(args.env, given, device="cpu", n_cores=cores, file=args.config, trust=args.trust)
    env_factory(config.env)
    return args, config, given


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
    """Refuse a checkpoint that is not there, before torch is loaded."""
    if not path.exists():
        raise FlatoutError(f"checkpoint {str(path)!r} does not exist")


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
    first = Parser("", add_help=False)
    first.add_argument("--algo")
    first.add_argument("--config", type=Path)
    first.add_argument("--trust", action="store_true")
    args, _ = first.parse_known_args(argv)
    if args.algo is not None:
        algorithms.get(args.algo)
    elif args.config is not None:
        read_algorithm(args.config, args.trust)


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
    value: dict[str, Any] = {"metavar": _metavar(field)}
    if bool in (field.type, *get_args(field.type)):
        value = {"action": argparse.BooleanOptionalAction}
    group.add_argument(field.flag, default=argparse.SUPPRESS, help=field.help.replace("%", "%%"), **value)


def _metavar(field: Field) -> str:
    special = {
        "batch_size": "N|auto",
        "buffer_size": "N|50GB",
        "memory": "lstm:N|gru:N",
        "log": "wandb,mlflow",
    }
    if field.name in special:
        return special[field.name]
    if field.name == "algo":
        return "|".join([*algorithms.names(), "FILE.py:NAME"])
    if field.choices or field.names_code:
        return "|".join([*field.choices, *(["FILE.py:NAME"] if field.names_code else [])])
    text = str(field.type)
    if "tuple" in text:
        return "N,N,…"
    return "JSON" if "dict" in text else "TEXT" if field.type is str else "N" if "int" in text else "X"
