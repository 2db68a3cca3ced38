"""A run's folder and how its files are written and read.

Two runs never share a folder, and a run that learned nothing leaves none behind. JSON files are replaced atomically. JSON
lines are appended: their readers accept a file that is missing, cut, damaged, replaced or still growing.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import count
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeAlias

from flatout.errors import FlatoutError, did_you_mean
from flatout.runlog.lock import RunLock

Record: TypeAlias = dict[str, Any]
_HEAD_BYTES = 64
MAX_LINE = 1 << 20
"""A longer line is damage; it is read in pieces."""
_MARKS_OF_A_RUN = ("config.json", "summary.json", "checkpoints")


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
            write_text(self.summary, json.dumps(_plain(summary), ensure_ascii=False, separators=(",", ":")))
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


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file atomically; NaN and ±inf become null."""
    write_text(path, json.dumps(_plain(value), indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old content or the new."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise FlatoutError(f"cannot write {path}: {error.strerror or error}") from None


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
                    n_records += "began" not in record
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
