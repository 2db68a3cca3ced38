"""Search spaces from the registry, by name or from a user's TOML file, and the settings that follow from a trial's values."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from flatout.algorithms.base import Algorithm
from flatout.algorithms.space import DERIVED, NAMED, Choice, Number, Space, bounded, names_in
from flatout.config.fields import all_fields
from flatout.config.run_config import RunConfig, resolve
from flatout.device.machine import usable_cores, usable_memory
from flatout.errors import FlatoutError, did_you_mean

BYTES_PER_TRANSITION = 2_000
"""Of a rollout with its samples, generously: rollouts may take a quarter of the memory."""
KEYS = ("low", "high", "log", "step", "values", "when")


class Suggests(Protocol):
    """The part of an Optuna trial that draws values."""

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A number."""

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """A whole number."""

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """One of some values."""


def space_for(algorithm: Algorithm, name: str | None, given: Mapping[str, Any]) -> Space:
    """The space to search: the algorithm's own, a named one, or that of a file; without settings that the user has given."""
    if name is None:
        space = algorithm.space
        if not space:
            raise FlatoutError(f"{algorithm.title} has no search space; give one with --space FILE.toml")
    elif name in NAMED:
        space = NAMED[name]
    elif name.endswith(".toml"):
        space = read_space(Path(name), algorithm)
    else:
        raise FlatoutError(
            f"--space is '{name}'; it must be FILE.toml or one of {', '.join(NAMED)}{did_you_mean(name, NAMED)}"
        )
    space = bounded(space, most_transitions=usable_memory()[0] // 4 // BYTES_PER_TRANSITION)
    follow = dict(zip(space, names_in(space), strict=True))
    return {key: it for key, it in space.items() if key not in given and follow[key] not in given}


def read_space(path: Path, algorithm: Algorithm) -> Space:
    """The space in a TOML file: a list of values, or a table with low, high, log and step, for each setting."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FlatoutError(f"--space {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FlatoutError(f"--space {path} is not TOML: {error}") from error
    if not data:
        raise FlatoutError(f"--space {path} is empty; name a setting in it, such as gamma = [0.98, 0.99]")
    fields = {it.name for it in all_fields(RunConfig) if it.section in (None, "network", algorithm.name)}
    space: dict[str, Number | Choice] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in fields and name not in DERIVED:
            near = did_you_mean(name, [*fields, *DERIVED])
            raise FlatoutError(f"--space {path}: {algorithm.title} has no setting '{name}'{near}")
        try:
            space[name] = _dimension(value, space)
        except FlatoutError as error:
            raise FlatoutError(f"--space {path}: {name}: {error}") from None
    return space


def _dimension(value: Any, before: Mapping[str, Any]) -> Number | Choice:
    if isinstance(value, list):
        value = {"values": value}
    if not isinstance(value, dict):
        raise FlatoutError("it must be a list of values, or a table with low and high")
    for key in value:
        if key not in KEYS:
            raise FlatoutError(f"unknown key '{key}'{did_you_mean(key, KEYS)}")
    when = value.get("when")
    if when is not None and not (isinstance(when, dict) and len(when) == 1 and next(iter(when)) in before):
        raise FlatoutError(
            "when must name one setting that comes before it, as in when = {prioritized = true}"
        )
    condition = next(iter(when.items())) if when else None
    if "values" in value:
        values = value["values"]
        if not isinstance(values, list) or not all(isinstance(it, bool | int | float | str) for it in values):
            raise FlatoutError("values must be a list of numbers, texts, true or false")
        return Choice(values=tuple(values), when=condition)
    numbers = [value.get(key) for key in ("low", "high")]
    if not all(isinstance(it, int | float) and not isinstance(it, bool) for it in numbers):
        raise FlatoutError("low and high must be numbers")
    return Number(
        low=value["low"],
        high=value["high"],
        log=bool(value.get("log")),
        step=value.get("step"),
        when=condition,
    )


def suggest(trial: Suggests, space: Space) -> dict[str, Any]:
    """Values for every dimension whose condition holds."""
    values: dict[str, Any] = {}
    for name, it in space.items():
        if it.when is not None and values.get(it.when[0]) != it.when[1]:
            continue
        if isinstance(it, Choice):
            values[name] = trial.suggest_categorical(name, it.values)
        elif it.is_whole:
            values[name] = trial.suggest_int(
                name, int(it.low), int(it.high), step=int(it.step or 1), log=it.log
            )
        else:
            values[name] = trial.suggest_float(name, it.low, it.high, step=it.step, log=it.log)
    return values


def settings_of(values: Mapping[str, Any], env: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that follow from a trial's values; the batch size divides the rollout whatever the values are."""
    found = {name: value for name, value in values.items() if name not in (*DERIVED, "batch_size")}
    for name, setting in (("repeat_times", "n_epochs"), ("workers", "n_envs")):
        if name in values:
            found[setting] = values[name]
    config = _resolved(env, given, found)
    if "total_batch" in values:
        found["n_steps"] = max(values["total_batch"] // config.n_envs, 1)
        config = _resolved(env, given, found)
    target = values.get("batch_size")
    if "n_minibatches" in values:
        target = config.total_batch // values["n_minibatches"]
    if target is not None:
        found["batch_size"] = config.algorithm.fit_batch_size(config.total_batch, max(int(target), 1))
    return found


def defaults_in(space: Space, env: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values nearest to what a run without a search would use: the first trial."""
    config = _resolved(env, given, {})
    parts: tuple[Any, ...] = (config, config.network, config.algorithm)
    known = {it.name: getattr(part, it.name) for part in parts for it in dataclasses.fields(part)}
    known |= {
        "n_minibatches": config.total_batch // max(known["batch_size"], 1),
        "total_batch": config.total_batch,
        "repeat_times": known.get("n_epochs"),
        "workers": config.n_envs,
    }
    return {name: value for name, it in space.items() if (value := _nearest(known.get(name), it)) is not None}


def _nearest(value: Any, it: Number | Choice) -> Any:
    """A value of the dimension; None where none is near."""
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(it, Number):
        if not is_number:
            return None
        step = it.step or (1 if it.is_whole else None)
        value = min(max(value, it.low), it.high)
        near = value if step is None else it.low + round((value - it.low) / step) * step
        return int(near) if it.is_whole else float(near)
    if value in it.values:
        return value
    numbers = [v for v in it.values if isinstance(v, int | float) and not isinstance(v, bool)]
    return min(numbers, key=lambda v: abs(v - value)) if is_number and numbers else None


def _resolved(env: str, given: Mapping[str, Any], found: Mapping[str, Any]) -> RunConfig:
    settings = {**given, **found}
    return resolve(env, settings, device="cpu", n_cores=usable_cores())
