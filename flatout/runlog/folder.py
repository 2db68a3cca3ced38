"""A run's folder, and the lock on it.

Two runs never share a folder, and a run that learned nothing leaves none behind. One process trains in a folder, and
readers see whether one does: the lock is an flock, which the kernel releases when the process ends, however it ends. The
lock file stays; it says who held the lock last.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any

from flatout.errors import FlatoutError, did_you_mean
from flatout.runlog.files import read_json, write_json

_MARKS_OF_A_RUN = ("config.json", "summary.json", "checkpoints")
LOCK_FILE = ".lock"
_N_TRIES, _TRY_SECONDS = 20, 0.05
"""A reader that looks at the lock holds it for a moment."""
_held: set[int] = set()


class RunFolder:
    """The folder of one run, new (`create`) or existing (`open`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        """The complete config."""
        self.system = path / "system.json"
        """The machine that the run used."""
        self.progress = path / "progress.json"
        """The state of a run that is training; removed at its end."""
        self.summary = path / "summary.json"
        """How the run ended."""
        self.metrics = path / "metrics.csv"
        """One row per iteration."""
        self.spans = path / "spans.jsonl"
        """What each lane did, and when."""
        self.samples = path / "samples.jsonl"
        """What the machine and the device did."""
        self.faults = path / "faults.log"
        """Envs and workers that failed and were rebuilt, with their tracebacks; only if any were."""
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path
        """TensorBoard's event files: in the folder itself, so that `--logdir runs` shows the runs' names."""
        self.lock = RunLock(path)
        """Held by the process that trains."""
        self._made: list[Path] = []
        self._replaced: Path | None = None

    @classmethod
    def create(
        cls, runs_dir: Path, name: str, overwrite: bool = False, *, numbered: bool = False
    ) -> RunFolder:
        """Create and lock `runs_dir/name` for a new run.

        An existing name is refused unless `overwrite`; if `numbered`, the run is called `name-2`, `name-3`, … instead.
        """
        _check_name(name)
        for number in count(1):
            folder = cls(runs_dir / (name if number == 1 else f"{name}-{number}"))
            try:
                folder._create(overwrite and not numbered)
                break
            except FileExistsError:
                folder.discard()
                if not numbered:
                    raise FlatoutError(
                        f"run {name!r} exists in {os.path.join(runs_dir, '')}; pass --resume to continue it, "
                        "--overwrite to replace it, or another --run-name"
                    ) from None
            except OSError as error:
                folder.discard()
                raise FlatoutError(f"cannot make {folder.path}: {error.strerror or error}") from None
        return folder

    def _create(self, overwrite: bool) -> None:
        self._make_parents()
        if overwrite:
            self._set_old_aside()
        self.path.mkdir()
        self._made.append(self.path)
        self.lock.take()

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an existing run; the error names the nearest runs."""
        if (path / "config.json").is_file():
            return cls(path)
        if runs := sorted(path.glob("seed-*/config.json")):
            raise FlatoutError(
                f"{path} holds the runs of several seeds; name one of them, such as {runs[0].parent}"
            )
        if path.is_dir():
            raise FlatoutError(f"{path} is not a run: it has no config.json")
        if path.exists():
            raise FlatoutError(f"{path} is a file; name the run's folder")
        names = _run_names(path.parent)
        hint = did_you_mean(path.name, names) or (f"; newest there: {names[0]!r}" if names else "")
        raise FlatoutError(f"no run {path.name!r} in {os.path.join(path.parent, '')}{hint}")

    def claim(self) -> None:
        """Take the folder's lock to train in it; refused while another process does."""
        try:
            self.lock.take()
        except OSError as error:
            raise FlatoutError(f"cannot lock {self.path}: {error.strerror or error}") from None

    def end(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json and remove progress.json, whose room is the last resort on a full disk."""
        try:
            write_json(self.summary, summary)
        except FlatoutError:
            self._end_progress()
            write_json(self.summary, summary, compact=True)
        self._end_progress()

    def _end_progress(self) -> None:
        with suppress(OSError):
            self.progress.unlink()

    def settle(self) -> None:
        """Delete the run that `overwrite` replaced, now that this one has learned something."""
        if self._replaced is not None:
            _remove(self._replaced)
            self._replaced = None

    def discard(self) -> None:
        """Remove what `create` made, and restore the run that it replaced."""
        self.lock.release()
        if self.path in self._made:
            self._made.remove(self.path)
            shutil.rmtree(self.path, ignore_errors=True)
        if self._replaced is not None:
            with suppress(OSError):
                self._replaced.rename(self.path)
            self._replaced = None
        for parent in reversed(self._made):
            # rmdir, not rmtree: another run may have been created there meanwhile.
            with suppress(OSError):
                parent.rmdir()
        self._made.clear()

    def _make_parents(self) -> None:
        for folder in reversed([parent for parent in self.path.parents if not parent.exists()]):
            # If another run creates it first, the folder is not ours to remove.
            with suppress(FileExistsError):
                folder.mkdir()
                self._made.append(folder)

    def _set_old_aside(self) -> None:
        """Rename the old run instead of removing it, until the new one has learned something."""
        if not os.path.lexists(self.path):
            return
        if not self.path.is_dir():
            raise FlatoutError(f"{self.path} is a file, not a run; it is not overwritten")
        inside = {entry.name for entry in self.path.iterdir()}
        if inside and inside.isdisjoint(_MARKS_OF_A_RUN):
            raise FlatoutError(
                f"{self.path} does not look like a run (no config.json); it is not overwritten"
            )
        old = RunLock(self.path)
        old.take()  # refused while the old run is training
        aside = self.path.with_name(f".{self.path.name}.replaced")
        _remove(aside)
        self.path.rename(aside)
        self._replaced = aside
        old.release()


def default_run_name(env_name: str, algo: str, seed: int, now: datetime) -> str:
    """A name that sorts by env: `CartPole-v1-ppo-seed1-20261115-190331`."""
    file, separator, factory = env_name.rpartition(".py:")
    readable = f"{Path(file).name}-{factory}" if separator else env_name
    # 50 characters: file systems allow 255 bytes, and one character may take four.
    safe = re.sub(r"[^\w.-]+", "-", readable).strip("-.")[:50] or "env"
    return f"{safe}-{algo}-seed{seed}-{now:%Y%m%d-%H%M%S}"


def _check_name(name: str) -> None:
    if not name.strip():
        raise FlatoutError("--run-name is empty; give the run a name, such as 'first-try'")
    if name.startswith(".") or not name.isprintable() or "/" in name or "\\" in name:
        raise FlatoutError(
            f"--run-name {name!r} is not a valid folder name; use letters, digits, '-', '_' and '.', not '.' first"
        )


def _run_names(runs_dir: Path) -> list[str]:
    """The runs of a folder, newest first."""
    with suppress(OSError):
        configs = [c for c in runs_dir.glob("*/config.json") if not c.parent.name.startswith(".")]
        return [c.parent.name for c in sorted(configs, key=lambda c: c.stat().st_mtime, reverse=True)]
    return []


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
        # It is closed in programs that this one starts.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
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
    return read_json(folder / LOCK_FILE)


def _who(process: dict[str, Any]) -> str:
    host = process.get("host")
    where = f" on {host}" if host not in (None, platform.node()) else ""
    return f"process {process['pid']}{where}" if "pid" in process else "another process"
