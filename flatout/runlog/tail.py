"""Files that grow while they are read: only what is new is read again.

In: the path of a file that may be missing, cut, replaced or gone. Out: its new whole lines.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_HEAD_BYTES = 64
_LAST_BYTES = 32_768


class Tail:
    """The whole lines that a file has gained since the last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._head = b""
        self._number: int | None = None

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether the file is another one than before (or gone), and the lines that are new."""
        try:
            with self._path.open("rb") as file:
                stat, head = os.fstat(file.fileno()), file.read(_HEAD_BYTES)
                # The head too: a file system gives the number of a removed file to the next one.
                is_same = head.startswith(self._head) and self._number in (None, stat.st_ino)
                restarted = not (is_same and stat.st_size >= self._at)
                if restarted:
                    self._forget()
                self._number, self._head = stat.st_ino, head
                file.seek(self._at)
                chunk = file.read()
        except OSError:
            was_there = self._number is not None
            self._forget()
            return was_there, []
        whole = chunk.rfind(b"\n") + 1
        self._at += whole
        return restarted, chunk[:whole].splitlines()

    def _forget(self) -> None:
        self._at, self._head, self._number = 0, b"", None


def last_record(path: Path, key: str) -> dict[str, Any]:
    """The last whole line of JSON that has `key`; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    records = (json_object(line) for line in reversed(lines))
    return next((record for record in records if key in record), {})


def json_object(text: bytes) -> dict[str, Any]:
    """The object that `text` is as JSON; empty where it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
