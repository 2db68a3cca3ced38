"""Files that grow by records while a run trains: metrics, spans, samples, faults, TensorBoard's events.

A disk that is full, gone or read-only must not end a run. A record that cannot be written waits and is tried again with
the next one, so a short failure loses nothing. Beyond MAX_WAITING bytes records are lost, and counted.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import BinaryIO

MAX_WAITING = 1 << 20
"""Bytes of a file that wait in memory for the disk."""
RETRY_SECONDS = 1.0
"""Time between two tries on a disk that fails."""


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
