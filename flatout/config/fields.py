"""Nested config dataclasses as flat settings: their names, types and help, and the conversion of values.

Command line text, JSON and Python keywords use the same conversion, so all three give the same errors.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from flatout.algorithms import base as algorithms
from flatout.algorithms.base import AlgorithmConfig
from flatout.envs.loader import Code
from flatout.errors import FlatoutError, did_you_mean

Config = TypeVar("Config")
_UNIONS = (Union, types.UnionType)


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One setting; `section` names the nested config that holds it, if any."""

    name: str
    section: str | None
    type: Any
    help: str

    @property
    def flag(self) -> str:
        """The command line flag."""
        return flag(self.name)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words of a Literal; else empty."""
        kinds = [self.type, *get_args(self.type)]
        return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())

    @property
    def names_code(self) -> bool:
        """Whether it may name code of the user's, or be that code."""
        return Code in (self.type, *get_args(self.type))


def flag(name: str) -> str:
    """`n_envs` → `--n-envs`."""
    return "--" + name.replace("_", "-")


@cache
def _hints(config: type[Any]) -> dict[str, Any]:
    """The types of a config's settings; kept, because the module of a user's config may be gone later."""
    return get_type_hints(config)


def all_fields(config: type[Any], section: str | None = None) -> Iterator[Field]:
    """Every setting of a config dataclass and its nested configs; only different algorithms may share a name."""
    hints = _hints(config)  # type: ignore[arg-type]  # mypy takes classes for unhashable
    helps = _docstrings(config)  # type: ignore[arg-type]  # mypy takes classes for unhashable
    for field in dataclasses.fields(config):
        nested = _sections(field.name, hints[field.name])
        for name, kind in nested.items():
            yield from all_fields(kind, name)
        if not nested:
            yield Field(field.name, section, hints[field.name], helps.get(field.name, ""))


def sections(config: Any) -> dict[str, str]:
    """The attribute of each nested config, by section."""
    found = {}
    for attribute, kind in get_type_hints(type(config)).items():
        for section, part in _sections(attribute, kind).items():
            if isinstance(getattr(config, attribute), part):
                found[section] = attribute
    return found


def _sections(attribute: str, kind: Any) -> dict[str, type[Any]]:
    """The nested configs that an attribute may hold, by section: one, or one for each algorithm; empty for a setting."""
    if kind is AlgorithmConfig:
        return {name: algorithms.get(name).config for name in algorithms.names()}
    return {attribute: kind} if dataclasses.is_dataclass(kind) and isinstance(kind, type) else {}


def replace(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy of `config` with some settings changed; an unknown name is refused with the nearest one."""
    held = sections(config)
    every = list(all_fields(type(config)))
    known = {field.name: field for field in every if field.section is None or field.section in held}
    changes: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in known:
            others = " and ".join(f.section.upper() for f in every if f.name == name and f.section)
            if others:
                here = next(section for section, attribute in held.items() if section != attribute)
                raise FlatoutError(f"{flag(name)} is a setting of {others}, not of {here.upper()}")
            raise FlatoutError(f"unknown setting {name!r}{did_you_mean(name, known)}")
        field = known[name]
        target = changes if field.section is None else nested.setdefault(field.section, {})
        target[name] = convert(field, value)
    for section, part in nested.items():
        changes[held[section]] = dataclasses.replace(getattr(config, held[section]), **part)
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def flatten_json(config: type[Any], data: Any, source: str) -> dict[str, Any]:
    """The settings in nested JSON by name; an unknown key is refused with the nearest one."""
    if not isinstance(data, dict):
        raise FlatoutError(f"{source}: expected a JSON object of settings")
    sections: dict[str | None, list[str]] = {}
    for field in all_fields(config):
        sections.setdefault(field.section, []).append(field.name)
    out: dict[str, Any] = {}
    for key, value in data.items():
        if key in sections[None]:
            out[key] = value
        elif key in sections and isinstance(value, dict):
            for name in value:
                if name not in sections[key]:
                    near = did_you_mean(name, sections[key])
                    raise FlatoutError(f"{source}: unknown key '{key}.{name}'{near}")
            out |= value
        else:
            near = did_you_mean(key, [*sections[None], *(s for s in sections if s)])
            raise FlatoutError(f"{source}: unknown key {key!r}{near}")
    return out


def convert(field: Field, value: Any) -> Any:
    """`value` as the field's type; raises a one-line error that names the flag."""
    with suppress(ValueError, TypeError):
        return _convert(field.type, value)
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
    if field.choices:
        near = did_you_mean(str(value), field.choices)
        words = ", ".join(field.choices) + (", or FILE.py:NAME" if field.names_code else "")
        raise FlatoutError(f"{field.flag} is {text!r}; it must be one of {words}{near}")
    shown = textwrap.shorten(repr(text), 200)  # a dict from Python may hold anything
    raise FlatoutError(f"{field.flag} is {shown}; it must be {_type_text(field.type)}")


def _convert(kind: Any, value: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in _UNIONS:
        for member in sorted(args, key=lambda member: member is not types.NoneType):  # `none` is not a text
            with suppress(ValueError, TypeError):
                return _convert(member, value)
        raise ValueError
    if kind is Code:
        return Code.of(value)
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if isinstance(value, str) and value.lower() == "none":
            items = ()
        return tuple(_convert(args[0], item) for item in items)
    text = value.lower() if isinstance(value, str) else value
    if kind is types.NoneType and text in (None, "none"):
        return None
    if kind is bool and (isinstance(value, bool) or text in ("true", "false")):
        return text in (True, "true")
    if kind is int:
        return _to_int(value)
    if kind is float and not isinstance(value, bool) and math.isfinite(float(value)):
        return float(value)
    if origin is dict and isinstance(value, Mapping):
        return _plain_json(value)
    if (kind is str and isinstance(value, str)) or (origin is Literal and value in args):
        return value
    raise ValueError


def _plain_json(value: Any) -> Any:
    """`value` in JSON's types and tuples, NumPy's scalars and arrays too; nothing else could be saved and read back."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain_json, value))
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real) and math.isfinite(value) and float(value) == value:
        return float(value)
    # A NumPy array or bool; NumPy itself need not be imported.
    if hasattr(value, "tolist") and not isinstance(value, Real):
        return _plain_json(value.tolist())
    raise ValueError


def _to_int(value: Any) -> int:
    """Whole numbers, also written as 1e6 or 100_000."""
    number = value if isinstance(value, int) else float(value)
    if isinstance(value, bool) or not math.isfinite(number) or number != int(number):
        raise ValueError
    return int(number)


def _type_text(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return "whole numbers separated by commas"
    if get_origin(kind) in _UNIONS:
        return " or ".join(map(_type_text, get_args(kind)))
    names: dict[Any, str] = {Code: "FILE.py:NAME, or in Python a class or function"}
    names |= {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return {**names, types.NoneType: "none"}.get(kind, "a JSON object, with finite numbers")


@cache
def _docstrings(config: type[Any]) -> dict[str, str]:
    """The string under each field of a dataclass and its bases, by field name."""
    out: dict[str, str] = {}
    for owner in (kind for kind in reversed(config.__mro__) if dataclasses.is_dataclass(kind)):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                    out[name] = str(text)
    return out
