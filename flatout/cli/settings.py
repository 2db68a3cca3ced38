"""The settings of a run on the command line: a flag for each field of its config."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, get_args

from flatout.algorithms import base as algorithms
from flatout.cli.parser import Parser
from flatout.config.fields import Field, all_fields
from flatout.config.run_config import RunConfig, read_algorithm, resolve
from flatout.device.machine import usable_cores
from flatout.envs.make import env_factory
from flatout.errors import FlatoutError

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


def parse_settings(
    parser: Parser, argv: Sequence[str]
) -> tuple[argparse.Namespace, RunConfig, dict[str, Any]]:
    """The arguments, the config for ENV, and the settings given; refuses mistakes before torch costs two seconds."""
    add_settings(parser, argv)
    args = parser.parse(argv)
    given = given_settings(args)
    if getattr(args, "ray", False):
        given.pop("ray_address", None)  # the cluster is that of the trials
    cores = usable_cores()
    config = resolve(args.env, given, device="cpu", n_cores=cores, file=args.config, trust=args.trust)
    env_factory(config.env)
    return args, config, given


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


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
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
