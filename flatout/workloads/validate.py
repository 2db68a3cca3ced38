"""Checks of env settings; a wrong one raises a FlatoutError of one line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from flatout.errors import FlatoutError, did_you_mean

T = TypeVar("T")
Info: TypeAlias = dict[str, Any]
"""What envs return beside observations, and the options of their resets."""


def check_number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    """Refuse anything but a number (with `whole`, an int) from `low` to `high`; NaN is refused too."""
    kinds = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        kind = "whole number" if whole else "number"
        shown = " to ".join(f"{end:,}" if isinstance(end, int) else f"{end:g}" for end in (low, high))
        raise FlatoutError(f"{name} is {value!r}; it must be a {kind} from {shown}")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse a value that is not one of the choices; 1 is not True."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        texts = [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices]
        shown = " or ".join(texts) if len(texts) == 2 else f"one of {', '.join(texts)}"
        raise FlatoutError(f"{name} is {value!r}; it must be {shown}{did_you_mean(str(value), texts)}")


def check_keys(owner: str, keys: Iterable[str], known: Sequence[str]) -> None:
    """Refuse keys that are not known, with the nearest known one."""
    for key in keys:
        if key not in known:
            hint = did_you_mean(str(key), known) or f"; it takes {', '.join(known)}"
            raise FlatoutError(f"{owner} takes no '{key}'{hint}")


def within(default: Any, low: float, high: float) -> Any:
    """A field of a config dataclass that `check_fields` holds between `low` and `high`."""
    return field(default=default, metadata={"range": (low, high)})


def check_fields(config: Any, owner: str = "") -> None:
    """Check the fields made by `within`, whole if their type has int, and those of type bool."""
    for each in fields(config):
        name, value, kind = f"{owner}{each.name}", getattr(config, each.name), str(each.type)
        if kind == "bool":
            check_choice(name, value, (True, False))
        elif "range" in each.metadata and not (value is None and "None" in kind):
            check_number(name, value, *each.metadata["range"], whole="int" in kind)


def from_settings(cls: type[T], settings: Mapping[str, Any], owner: str) -> T:
    """The config dataclass with these fields; unknown ones are refused."""
    check_keys(owner, settings, [field.name for field in fields(cls)])  # type: ignore[arg-type]
    return cls(**settings)


def read_json(file: str | Path, name: str) -> Any:
    """The JSON in a file; errors begin with `name` and the file."""
    try:
        return json.loads(Path(file).expanduser().read_text())
    except OSError as error:
        raise FlatoutError(f"{name} {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FlatoutError(f"{name} {file}: not text, byte {error.start}") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise FlatoutError(f"{name} {file}: not JSON, {place}: {error.msg}") from error
