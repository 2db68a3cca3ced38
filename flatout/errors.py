"""Errors meant for the user: one line that says what is wrong, where, and what to do.

Everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FlatoutError(ValueError):
    """Bad input from the user; the CLI prints the message as one line and exits with 2."""


class EnvError(FlatoutError):
    """The user's environment broke its contract or raised; names the env index and the step."""


def nearest(word: str, choices: Iterable[str], n: int = 3) -> list[str]:
    """The choices most like `word`, best first, compared without regard to case."""
    by_lower = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=n, cutoff=0.5)
    return [by_lower[match] for match in matches]


def did_you_mean(word: str, choices: Iterable[str], n: int = 3) -> str:
    """`; did you mean 'a' or 'b'?`, or the empty string when nothing is near."""
    found = nearest(word, choices, n)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""
