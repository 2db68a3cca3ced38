"""The runs of a folder: a row for each with its status and figures, and their learning curves. Reading is cheap when repeated.

A run is a folder with a config.json, in the runs folder or one level below it (seeds, trials of a sweep). Folders and
records that are links are left out, so nothing outside the runs folder is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.runlog.files import number, read_json
from flatout.runlog.folder import RunFolder
from flatout.runlog.records import EVALUATED, RunRecords, read_metrics, run_status
from flatout.views.figures import plain

CURVE_POINTS = 400
RECORDS: tuple[str, ...] = (
    *("config.json", "summary.json", "progress.json", "metrics.csv", "spans.jsonl", "samples.jsonl"),
    *("system.json", "faults.log", "sweep.html", ".lock", "agent.gif", "agent.mp4"),
)
"""Files of a run that are read here or by its page."""
_CURVE = ("time/total_timesteps", "time/time_elapsed", "rollout/ep_rew_mean", EVALUATED)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """A run in a table; None for what is not known."""

    name: str
    """Its path below the runs folder."""
    status: str
    """running, finished, stopped, failed, killed or unknown."""
    env: str = ""
    algo: str = ""
    seed: float | None = None
    group: str = ""
    """The same for runs that differ only in their seeds."""
    env_steps: float | None = None
    total_steps: float | None = None
    return_mean: float | None = None
    return_std: float | None = None
    steps_per_second: float | None = None
    learner_busy: float | None = None
    card_busy: float | None = None
    """NVML's device utilisation."""
    wall_seconds: float | None = None
    time: float = 0.0
    """When it last wrote its state, in seconds since 1970."""


class RunIndex:
    """Finds the runs of a folder and keeps their rows; only what has changed is read again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rows: dict[str, RunRow] = {}
        self.sweeps: dict[str, Path] = {}
        self.version = 0
        """Grows with every change."""
        self._changed: dict[str, int] = {}
        self._marks: dict[str, tuple[Any, ...]] = {}
        self._configs: dict[str, tuple[int, dict[str, Any]]] = {}

    def read(self) -> dict[str, RunRow]:
        """The rows now, by name."""
        found: dict[str, RunRow] = {}
        sweeps: dict[str, Path] = {}
        changed: list[str] = []
        for path in _folders(self.root):
            name = path.relative_to(self.root).as_posix()
            if "sweep.html" in (files := _files(path)):
                sweeps[name] = path
            if "config.json" not in files:
                continue
            mark = tuple(files.get(key) for key in RECORDS[:3])
            # Whether a run without a summary still trains is not seen in its files.
            if self._marks.get(name) != mark or self.rows[name].status in ("running", "unknown"):
                self._marks[name] = mark
                row = self._row(name, path, files)
                if row != self.rows.get(name):
                    changed.append(name)
                found[name] = row
            else:
                found[name] = self.rows[name]
        for name in self.rows.keys() - found.keys():
            changed.append(name)
            self._marks.pop(name, None)
            self._configs.pop(name, None)
        self.rows, self.sweeps = found, sweeps
        if changed:
            self._changed |= dict.fromkeys(changed, self.version + 1)
            self.version += 1
        return found

    def changes(self, since: int) -> tuple[list[RunRow], list[str]]:
        """Rows that are new or have changed since a version, and names of runs that are gone."""
        names = [name for name, version in list(self._changed.items()) if version > since]
        return [self.rows[it] for it in names if it in self.rows], [it for it in names if it not in self.rows]

    def path(self, name: str) -> Path | None:
        """The folder of a run that was found; nothing else has a path."""
        return self.root / name if name in self.rows else None

    def _row(self, name: str, path: Path, files: dict[str, tuple[int, int]]) -> RunRow:
        status, record = run_status(path)
        if status == "ended":
            status = str(record.get("status") or "unknown")
        config = self._config(name, path, files["config.json"][0])
        known = {**config, **record}
        at = max((files[key][0] for key in RECORDS[:3] if key in files), default=0) / 1e9
        keys = ("seed", "env_steps", "return_mean", "return_std", "steps_per_second", "learner_busy")
        gpu, overlap = record.get("gpu"), record.get("overlap")
        overlaps = isinstance(overlap, dict) and overlap.get("on") is True
        card = gpu.get("utilization") if isinstance(gpu, dict) else record.get("device_utilization")
        return RunRow(
            name=name,
            status=status,
            env=str(known.get("env") or ""),
            algo=str(known.get("algo") or ""),
            group=f"{config['group']}{'-overlap' if overlaps else ''}",
            total_steps=number(record.get("total_steps")) or number(config.get("timesteps")),
            card_busy=number(card),
            wall_seconds=number(record.get("wall_seconds")),
            time=at,
            **{key: number(known.get(key)) for key in keys},
        )

    def _config(self, name: str, path: Path, written: int) -> dict[str, Any]:
        """What a row needs of the config, which is read once."""
        if (kept := self._configs.get(name)) is not None and kept[0] == written:
            return kept[1]
        config = read_json(path / "config.json")
        # Of --seeds the first run decides whether to overlap, and the others are told: what they did counts.
        rest = {key: value for key, value in config.items() if key not in ("seed", "signature", "overlap")}
        text = json.dumps([str(path.parent.resolve()), rest], sort_keys=True, default=str)
        few = {key: config.get(key) for key in ("env", "algo", "seed", "timesteps")}
        few["group"] = hashlib.sha256(text.encode()).hexdigest()[:12]
        self._configs[name] = written, few
        return few


def row_of(path: Path) -> RunRow | None:
    """The row of one run; None if the folder is not a run."""
    files = _files(path)
    return RunIndex(path.parent)._row(path.name, path, files) if "config.json" in files else None


def newest_first(rows: Iterable[RunRow]) -> list[RunRow]:
    """Running runs by name, so that they keep their places, then the others by when they last wrote."""
    return sorted(
        rows, key=lambda it: (it.status != "running", 0 if it.status == "running" else -it.time, it.name)
    )


def curve_of(folder: Path) -> dict[str, Any]:
    """A run's learning curve in few points: env steps, seconds, mean return of the last 100 episodes, evaluations."""
    try:
        columns = read_metrics(RunFolder(folder).metrics, _CURVE)
    except OSError:
        columns = {}
    steps, seconds, returns, evaluated = (columns.get(name, np.zeros(0)) for name in _CURVE)
    if not len(steps) == len(seconds) == len(returns):
        return {"steps": [], "seconds": [], "return": [], "eval": [[], [], []]}
    kept = _some(np.isfinite(steps) & np.isfinite(seconds) & np.isfinite(returns))
    tested = _some(np.isfinite(evaluated) & np.isfinite(steps)) if len(evaluated) == len(steps) else kept[:0]
    return {
        "steps": plain(steps[kept]),
        "seconds": plain(seconds[kept], 2),
        "return": plain(returns[kept], 4),
        "eval": [plain(column[tested], 4) for column in (steps, seconds, evaluated)]
        if len(tested)
        else [[]] * 3,
    }


def newest_recording(records: RunRecords | Path) -> Path | None:
    """The newest picture of a run's agent that `flatout play` has left in its folder."""
    folder = records if isinstance(records, Path) else records.path
    found = [path for name in ("agent.gif", "agent.mp4") if _is_file(path := folder / name)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _some(wanted: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    indices = np.flatnonzero(wanted)
    some = np.linspace(0, len(indices) - 1, min(len(indices), CURVE_POINTS)).astype(int)
    return np.asarray(indices[some], np.intp)


def _folders(root: Path) -> Iterator[Path]:
    """Folders in which a run may be."""
    for path in _inside(root):
        yield path
        if not (path / "config.json").exists():
            yield from _inside(path)


def _inside(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.name[0] != "." and e.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [folder / name for name in sorted(names)]


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """When the records of a folder were written, and their sizes; none if one of them is not a plain file."""
    found = {}
    for name in RECORDS:
        try:
            about = os.lstat(folder / name)
        except OSError:
            continue
        if not stat.S_ISREG(about.st_mode):
            return {}
        found[name] = about.st_mtime_ns, about.st_size
    return found


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
