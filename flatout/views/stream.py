"""A text stream for displays that never fails its writer: a display problem must not end a run."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import TextIO

# One character for one, so that no line gets longer.
_ASCII = str.maketrans("±·–—…°╭╮╰╯│─━╸╺▁▂▃▄▅▆▇█", "~|--. ++++|-=-- .:-=+*#")


class SafeStream(io.TextIOBase):
    """Writes to `stream` until it fails, in ASCII if its encoding is not UTF-8."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._broken = False
        encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
        self._code = "utf-8" if encoding.startswith("utf") else "ascii"

    def write(self, text: str) -> int:
        """Write `text`; once the stream has failed, do nothing."""
        if self._code == "ascii":
            text = text.translate(_ASCII)
        # Encode and decode: a file name in a note may contain what no encoding can represent.
        self._attempt(self._stream.write, text.encode(self._code, "replace").decode(self._code))
        return len(text)

    def flush(self) -> None:
        """Flush the stream, unless it has failed."""
        self._attempt(self._stream.flush)

    def isatty(self) -> bool:
        """Whether the stream is a terminal that can move its cursor."""
        try:
            return self._stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        except ValueError:
            return False

    def columns_and_lines(self) -> tuple[int, int]:
        """The terminal's current size; 80 × 24 if it is not known."""
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return 80, 24
        return size.columns or 80, size.lines or 24

    def _attempt(self, call: Callable[..., object], *args: str) -> None:
        if self._broken:
            return
        try:
            call(*args)
        except BlockingIOError:
            # The terminal is slow, not gone: drop this frame.
            return
        except (OSError, ValueError):
            self._broken = True
