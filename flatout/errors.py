"""Errors meant for the user: one line that says what is wrong, where, and what to do.

Everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path


class FlatoutError(ValueError):
    """Bad input from the user; the CLI prints the message as one line and exits with 2."""


class EnvError(FlatoutError):
    """The user's environment broke its contract or raised; names the env index and the step."""


def did_you_mean(word: str, choices: Iterable[str], n: int = 3) -> str:
    """`; did you mean 'a' or 'b'?`, best first, without regard to case; the empty string when nothing is near."""
    by_lower = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=n, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(by_lower[match]) for match in matches)}?" if matches else ""


def one_line(error: BaseException) -> str:
    """`KeyError: 'x' (file.py:40)`, on one line whatever the message holds; an error for the user as it is."""
    if isinstance(error, FlatoutError):
        return str(error)
    # A SyntaxError's text repeats the file and line that `where` adds.
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = where(error)
    return f"{named} ({place})" if place else named


def where(error: BaseException) -> str:
    """`file.py:40` of the innermost frame in the user's own code, or the innermost one there is."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    frames = [frame for frame in frames if not frame[0].startswith(_import_system())]
    outside = [frame for frame in frames if not is_engine_file(frame[0])]
    own = [frame for frame in outside if not frame[0].startswith(_libraries())]
    best = own or outside or frames
    return f"{Path(best[-1][0]).name}:{best[-1][1]}" if best else ""


def is_engine_file(filename: str) -> bool:
    """Whether a source file belongs to flatout or Gymnasium."""
    return filename.startswith(_engine())


@functools.cache
def _engine() -> tuple[str, ...]:
    gymnasium = importlib.util.find_spec("gymnasium")
    files = [__file__, gymnasium.origin if gymnasium else None]
    return tuple(f"{Path(file).parent}{os.sep}" for file in files if file)


@functools.cache
def _libraries() -> tuple[str, ...]:
    return tuple(sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "purelib", "platlib"))


@functools.cache
def _import_system() -> tuple[str, ...]:
    return ("<frozen", f"{Path(importlib.__file__).parent}{os.sep}")
