"""How the files of a run are written and read.

JSON files are replaced atomically. Others grow by records while a run trains: metrics, spans, samples, faults,
TensorBoard's events. A disk that is full, gone or read-only must not end a run. A record that cannot be written waits and
is tried again with the next one, so a short failure loses nothing. Beyond MAX_WAITING bytes records are lost, and counted.
Readers accept a file that is missing, cut, damaged, replaced or still growing.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO, TypeAlias

from flatout.errors import FlatoutError

Record: TypeAlias = dict[str, Any]
_HEAD_BYTES = 64
MAX_LINE = 1 << 20
"""A longer line is damage; it is read in pieces."""
MAX_WAITING = 1 << 20
"""Bytes of a file that wait in memory for the disk."""
RETRY_SECONDS = 1.0
"""Time between two tries on a disk that fails."""


def write_json(path: Path, value: object, *, compact: bool = False) -> None:
    """Replace a JSON file atomically; NaN and ±inf become null."""
    style: dict[str, Any] = {"separators": (",", ":")} if compact else {"indent": 2}
    write_text(path, json.dumps(_plain(value), ensure_ascii=False, **style) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old content or the new."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise FlatoutError(f"cannot write {path}: {error.strerror or error}") from None


def _plain(value: object) -> Any:
    """`value` in JSON's types. NumPy scalars are registered as numbers, so NumPy need not be imported."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)


def end_last_line(path: Path) -> None:
    """End a line that a killed run left incomplete, so that the next record starts on its own line."""
    with suppress(FileNotFoundError), path.open("rb+") as file:
        if file.seek(0, 2) and file.seek(-1, 2) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")


class AppendedFile:
    """Appends records to a file, each as soon as the disk takes it; no method raises OSError."""

    def __init__(self, path: Path, prepare: Callable[[Path], None] = end_last_line) -> None:
        """`prepare` is called once, before the first record is written."""
        self.path = path
        self._prepare: Callable[[Path], None] | None = prepare
        self._file: BinaryIO | None = None
        self._waiting: deque[bytes] = deque()
        self._failed_at = float("-inf")
        self.n_lost = 0
        self.problem: str | None = None
        """Why records wait; None once they are written."""

    def write(self, *records: bytes) -> None:
        """Append the records, after those that wait."""
        room = MAX_WAITING - sum(map(len, self._waiting))
        for record in records:
            if len(record) > room:
                self.n_lost += 1
            else:
                self._waiting.append(record)
                room -= len(record)
        if perf_counter() - self._failed_at >= RETRY_SECONDS:
            self._write_waiting()

    def close(self) -> None:
        """Try once more to write what waits, count the rest as lost, and close; a second call does nothing."""
        if self._waiting:
            self._write_waiting()
        self.n_lost += len(self._waiting)
        self._waiting.clear()
        self._close()

    def _write_waiting(self) -> None:
        try:
            if self._prepare is not None:
                self._prepare(self.path)
                self._prepare = None
            self._file = self._file or self.path.open("ab", buffering=0)
            while self._waiting:
                self._written(os.write(self._file.fileno(), b"".join(self._waiting)))
            self.problem = None
        except OSError as error:
            self.problem = f"cannot write {self.path.name}: {error.strerror or error}"
            self._failed_at = perf_counter()
            self._close()  # opened again at the next try: a network file system's handle may be stale

    def _written(self, n_bytes: int) -> None:
        """Forget what is on the disk; a disk that is almost full takes part of a record."""
        while n_bytes:
            first = self._waiting.popleft()
            if len(first) > n_bytes:
                self._waiting.appendleft(first[n_bytes:])
            n_bytes -= min(n_bytes, len(first))

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    try:
        return json_object(path.read_bytes()) or {}
    except OSError:
        return {}


def read_records(path: Path, problems: list[str]) -> Iterator[Record]:
    """The records of a file, one at a time; what is wrong with it is added to `problems` in plain words."""
    n_records = n_unreadable = 0
    try:
        with path.open("rb") as file:
            for line in iter(partial(file.readline, MAX_LINE), b""):
                if (record := json_object(line)) is not None:
                    n_records += 1
                    yield record
                elif line.endswith(b"\n"):
                    n_unreadable += bool(line.strip())
                else:
                    problems.append(f"{path.name} ends in an incomplete line, which is ignored")
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        problems.append(f"{path.name} {'is missing' if is_missing else f'cannot be read: {error.strerror}'}")
        return
    if n_unreadable:
        problems.append(f"{path.name} has {plural(n_unreadable, 'unreadable line')}")
    if not n_records:
        problems.append(f"{path.name} is empty")


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


def plural(n: int, noun: str) -> str:
    """`1 line`, `2,000 lines`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
