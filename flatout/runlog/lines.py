"""Lines of JSON as a run appends them: headers with the run's clock, then records; the last line may be cut.

In: a path. Out: every record that can be read, its header's offset beside it, and what is wrong in plain words.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Lines:
    """What a file of JSON lines says."""

    parts: list[tuple[float, list[dict[str, Any]]]] = field(default_factory=list)
    """The records of each part of the run, with the seconds that the run had before it."""

    began: float | None = None
    """When the run began, in unix seconds, as its first header tells."""

    problems: list[str] = field(default_factory=list)


def read_lines(path: Path) -> Lines:
    """All that can be read of the file; never raises for what is in it, or not there."""
    lines = Lines()
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        lines.problems.append(f"{path.name} is {'missing' if missing else f'not readable: {error.strerror}'}")
        return lines
    *whole, last = text.split("\n")
    n_unreadable = sum(not _take(lines, line) for line in whole if line.strip())
    if last.strip() and not _take(lines, last):
        lines.problems.append(f"{path.name} ends within a line, which is left out")
    if n_unreadable:
        lines.problems.append(f"{path.name} has {n_unreadable:,} unreadable line{'s'[: n_unreadable > 1]}")
    if not any(records for _, records in lines.parts):
        lines.problems.append(f"{path.name} is empty")
    return lines


def number(value: object) -> float | None:
    """`value` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond any float
        return None


def _take(lines: Lines, line: str) -> bool:
    """Add one line; whether it could be read."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(record, dict):
        return False
    if "began" in record:
        offset, began = number(record.get("offset")) or 0.0, number(record["began"])
        lines.parts.append((max(0.0, offset), []))
        if lines.began is None and began is not None:
            lines.began = began - offset
        return True
    if not lines.parts:
        lines.parts.append((0.0, []))
    lines.parts[-1][1].append(record)
    return True
