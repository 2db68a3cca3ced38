"""The lock on a run's folder: one process trains in it, and readers see whether one does.

It is an flock, which the kernel releases when the process ends, however it ends. The lock file stays; it says who held
the lock last.
"""

from __future__ import annotations

import errno
import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

from flatout.errors import FlatoutError

LOCK_FILE = ".lock"
_N_TRIES, _TRY_SECONDS = 20, 0.05
"""A reader that looks at the lock holds it for a moment."""
_held: set[int] = set()


def _close_in_child() -> None:
    """A forked child closes the locks, or they would be held for as long as it lives."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def try_lock(descriptor: int, *, shared: bool = False) -> bool | None:
    """Whether the lock was free and is taken now; None where files cannot be locked, as on Windows or some network disks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


class RunLock:
    """The lock on one run's folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._descriptor: int | None = None
        self.note: str | None = None
        """A line for the user if the folder cannot be locked."""

    def take(self) -> None:
        """Take the lock, if this object does not hold it yet; refused if another process trains in the folder."""
        if self._descriptor is not None:
            return
        descriptor = os.open(
            self._path, os.O_RDWR | os.O_CREAT, 0o666
        )  # closed in programs that this one starts
        for _ in range(_N_TRIES):
            if (taken := try_lock(descriptor)) is not False:
                break
            sleep(_TRY_SECONDS)
        else:
            os.close(descriptor)
            raise FlatoutError(
                f"run {self._path.parent.name!r} is training in {_who(holder(self._path.parent))}; "
                "stop it first, or use another --run-name"
            )
        self._descriptor = descriptor
        _held.add(descriptor)
        if taken is None:
            self.note = "files cannot be locked here: make sure that no other process trains in this folder"
        with suppress(OSError):  # a full disk: the lock holds without a name
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(this_process()).encode())

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._descriptor is not None:
            if self._descriptor in _held:  # not in a forked child
                _held.remove(self._descriptor)
                os.close(self._descriptor)
            self._descriptor = None


def is_locked(folder: Path) -> bool | None:
    """Whether a process trains in a folder; None if the lock does not tell."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return None
    try:
        free = try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)
    return None if free is None else not free


def this_process() -> dict[str, Any]:
    """Who writes: process id and host."""
    return {"pid": os.getpid(), "host": platform.node()}


def holder(folder: Path) -> dict[str, Any]:
    """Who took the lock last; empty if that is not known."""
    try:
        value = json.loads((folder / LOCK_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _who(process: dict[str, Any]) -> str:
    host = process.get("host")
    where = f" on {host}" if host not in (None, platform.node()) else ""
    return f"process {process['pid']}{where}" if "pid" in process else "another process"
