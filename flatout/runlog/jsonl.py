"""Reads JSON lines that a run appends: the file may be missing, cut, damaged, replaced or still growing."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

Record: TypeAlias = dict[str, Any]
_HEAD_BYTES = 64
_LAST_BYTES = 32_768


class Tail:
    """Reads the complete lines that a file has gained since the last read."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._head = path, 0, b""
        self._inode: int | None = None

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether the file was replaced or removed since the last read, and its new lines."""
        try:
            with self._path.open("rb") as file:
                stat, head = os.fstat(file.fileno()), file.read(_HEAD_BYTES)
                # The head too: a file system gives the inode of a removed file to the next one.
                is_same = head.startswith(self._head) and self._inode in (None, stat.st_ino)
                restarted = not (is_same and stat.st_size >= self._at)
                if restarted:
                    self._reset()
                self._inode, self._head = stat.st_ino, head
                file.seek(self._at)
                chunk = file.read()
        except OSError:
            was_there = self._inode is not None
            self._reset()
            return was_there, []
        end = chunk.rfind(b"\n") + 1
        self._at += end
        return restarted, chunk[:end].splitlines()

    def _reset(self) -> None:
        self._at, self._head, self._inode = 0, b"", None


def read_records(path: Path) -> tuple[list[Record], list[str]]:
    """The records of a whole file, and what is wrong with it in plain words; never raises."""
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], [f"{path.name} is missing"]
    except OSError as error:
        return [], [f"{path.name} cannot be read: {error.strerror}"]
    found = [json_object(line) for line in lines if line.strip()]
    records = [record for record in found if record is not None]
    problems = []
    if last.strip():
        if (record := json_object(last)) is not None:
            records.append(record)
        else:
            problems.append(f"{path.name} ends in an incomplete line, which is ignored")
    if n_unreadable := found.count(None):
        problems.append(f"{path.name} has {plural(n_unreadable, 'unreadable line')}")
    if not any("began" not in record for record in records):
        problems.append(f"{path.name} is empty")
    return records, problems


def last_record(path: Path, key: str) -> Record:
    """The last record with `key` near the end of a file; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    records = (json_object(line) or {} for line in reversed(lines))
    return next((record for record in records if key in record), {})


def json_object(text: bytes) -> Record | None:
    """The JSON object in `text`; None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number(value: object) -> float | None:
    """`value` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond any float
        return None


def end_last_line(path: Path) -> None:
    """End a line that a killed run left incomplete, so that the next record starts on its own line."""
    with suppress(FileNotFoundError), path.open("rb+") as file:
        if file.seek(0, 2) and file.seek(-1, 2) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")


def plural(n: int, noun: str) -> str:
    """`1 line`, `2,000 lines`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
