"""Which code a file may name: what this user's runs wrote into it, what the user typed, or what the user trusts.

A config or checkpoint names an env, an algorithm, an executor, and perhaps a network, an optimizer and schedules, some of
them as `module:NAME` or `file.py:NAME`. What flatout writes is signed with a key that only this user can read.
"""

from __future__ import annotations

import hmac
import importlib.util
import json
import os
import re
import stat
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatout.device.machine import cache_folder
from flatout.envs.loader import absolute, importable, is_file
from flatout.errors import FlatoutError

CODE = ("env", "algo", "executor")
"""Settings of a run that may name code; in the network's and the algorithm's sections every name with a colon does."""
MEMORY = ("recurrent-ppo", "memory")
"""Section and name of a setting such as lstm:128, which is no code."""
SIGNATURE = "signature"
KEY_BYTES = 32
READ_PRIVATE = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def signed(values: dict[str, Any]) -> dict[str, Any]:
    """Settings that name code, with a signature if there is a key."""
    signature = _signature(values)
    return values if signature is None else values | {SIGNATURE: signature}


def require_trust(
    values: Any,
    source: str,
    *,
    trust: bool,
    typed: Collection[Any] = (),
    names: Collection[str] | None = None,
) -> None:
    """Raise unless all code that a file's settings name was written by this user's runs, typed, or is trusted.

    `names`: the settings in question; None: all.
    """
    if trust or not isinstance(values, dict):
        return
    named = {name: value for name, value in code_in(values).items() if names is None or name in names}
    typed = [*typed, *(absolute(it) for it in typed if _is_code(it))]
    doubts = [name for name, value in named.items() if value not in typed]
    given = values.get(SIGNATURE)
    if not doubts or (isinstance(given, str) and hmac.compare_digest(given, _signature(values) or "")):
        return
    code = named[doubts[0]]
    if is_file(code) and not Path(absolute(code).rpartition(":")[0]).exists():
        raise FlatoutError(
            f"{source}: the {doubts[0]} '{code}' is not there, seen from this folder; go to the folder where the run was "
            "begun"
        )
    raise FlatoutError(
        f"{source}: the {doubts[0]} '{code}' is code, and no run of yours wrote this file; "
        "pass --trust (in Python trust=True) if you trust it"
    )


def code_in(values: Mapping[str, Any]) -> dict[str, str]:
    """The settings in nested JSON that name code."""
    sections = {key: part for key, part in values.items() if isinstance(part, dict) and key != "env_kwargs"}
    nested = {
        name: value
        for section, part in sections.items()
        for name, value in part.items()
        if not ((section, name) == MEMORY and re.fullmatch(r"(lstm|gru):[0-9]+", str(value)))
    }
    found = nested | {name: values.get(name) for name in CODE}
    return {name: value for name, value in found.items() if _is_code(value)}


def _is_code(name: object) -> bool:
    return isinstance(name, str) and ":" in name


def _signature(values: Mapping[str, Any]) -> str | None:
    """HMAC of the names, of what the env is called with, and of where their code is; None without a key."""
    key = _key()
    if key is None:
        return None
    named = code_in(values)
    nested = sorted(name for name in named if name not in CODE)
    facts = {name: values.get(name) for name in (*CODE, "env_kwargs")} | {
        name: named[name] for name in nested
    }
    facts["places"] = [_place(named[name]) for name in (*CODE, *nested) if name in named]
    return hmac.new(key, json.dumps(facts, sort_keys=True, default=str).encode(), "sha256").hexdigest()


def _place(name: str) -> str:
    """The file or package of `file.py:NAME` or `module:NAME`; nothing is imported."""
    if is_file(name):
        return absolute(name)
    with importable(name), suppress(ImportError, ValueError):  # ValueError: __main__
        spec = importlib.util.find_spec(name.partition(":")[0].partition(".")[0])
        return str(spec.origin) if spec else ""
    return ""


def _key() -> bytes | None:
    """This user's key, made on first use; None if there is no private place for it."""
    path = cache_folder() / "signing.key"
    with suppress(OSError):
        if not path.exists():
            _make_key(path)
        with os.fdopen(os.open(path, READ_PRIVATE), "rb") as file:
            about = os.fstat(file.fileno())
            key = file.read()
        private = stat.S_ISREG(about.st_mode)
        if hasattr(os, "getuid"):  # elsewhere the user's folder is private by itself
            private = private and about.st_uid == os.getuid() and not about.st_mode & 0o077
        return key if private and len(key) == KEY_BYTES else None
    return None


def _make_key(path: Path) -> None:
    """Write a new key that only this user can read; of two processes that do, one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, part = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(os.urandom(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(part, path)
    finally:
        os.unlink(part)
