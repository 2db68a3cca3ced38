"""How often a host may be asked: one limit for all envs of all processes, kept in a small locked file.

The file holds the moment of the next free turn on the machine's monotonic clock. Without a limit, and until a host asks
for a pause, nothing is read or written.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

MAX_PAUSE = 3600.0
"""The longest Retry-After that is believed."""


class Pace:
    """One host's turns."""

    def __init__(self, origin: str, rate: float | None) -> None:
        self._interval = 1.0 / rate if rate else 0.0
        self._held = False
        folder = Path(tempfile.gettempdir()) / f"flatout-pace-{os.getuid()}"
        self._path = folder / hashlib.sha256(origin.encode()).hexdigest()[:24]

    def slow_down(self, interval: float) -> None:
        """Leave at least so many seconds between two requests."""
        self._interval = max(self._interval, min(interval, MAX_PAUSE))

    def turn(self, max_wait: float) -> float | None:
        """Seconds to wait for a turn, which is then taken; None, and no turn, if that is longer than `max_wait`."""
        if not self._interval and not self._held:
            return 0.0
        now = time.monotonic()
        at = self._change(lambda free: max(free, now) + self._interval if free - now <= max_wait else free)
        return max(at - now, 0.0) if at - now <= max_wait else None

    def hold(self, seconds: float) -> None:
        """No turns for so long: the host has asked for it."""
        until = time.monotonic() + min(seconds, MAX_PAUSE)
        self._held = True
        self._change(lambda free: max(free, until))

    def _change(self, new: Callable[[float], float]) -> float:
        """Replace the moment of the next free turn; returns what it was."""
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            data = os.pread(file, 8, 0)
            free = struct.unpack("d", data)[0] if len(data) == 8 else 0.0
            # A moment that no pause explains is left over from before the machine was started anew.
            if not free <= time.monotonic() + 2 * MAX_PAUSE:
                free = 0.0
            os.pwrite(file, struct.pack("d", new(free)), 0)
            return float(free)
        finally:
            os.close(file)
