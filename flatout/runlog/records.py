"""A run's folder read back: whether the run is still training, and everything that it has written so far."""

from __future__ import annotations

import os
from array import array
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from platform import node
from typing import Any, BinaryIO

import numpy as np
import psutil

from flatout.runlog.files import MAX_LINE, number, read_json
from flatout.runlog.folder import RunFolder, holder, is_locked
from flatout.runlog.recorder import cell_value
from flatout.runlog.samples import Samples, read_samples
from flatout.runlog.spans import Floats, Spans, cause_of, idle_causes, is_idle, lane_use, read_spans

_CLOCK_SECONDS = 60.0
"""By how much the system's clock may have been set."""
EVALUATED = "eval/mean_reward"
MAX_ROWS = 10_000
"""Rows of a long metrics.csv that are read; a curve shows fewer."""
HUGE_BYTES = 64 << 20
"""Above this size a file is not read as a whole …"""
SAMPLED_LINE = 4096
"""… and its longer lines are left out."""
_FROM_METRICS = {
    "env_steps": "time/total_timesteps",
    "wall_seconds": "time/time_elapsed",
    "return_mean": "rollout/ep_rew_mean",
    "episodes": "rollout/episodes",
    "updates": "train/n_updates",
    "learner_busy": "learner_busy",
}


def run_status(path: Path) -> tuple[str, dict[str, Any]]:
    """`running`, `ended`, `killed` or `unknown`, and the content of progress.json or summary.json.

    A run of another host whose lock cannot be seen here is `unknown`.
    """
    progress, summary = path / "progress.json", path / "summary.json"
    # A resumed run has the summary of its earlier part beside its progress; one that just ended may still have both.
    record = read_json(progress) if _written(progress) > _written(summary) else {}
    if not record and _written(summary) > 0:
        return "ended", read_json(summary)
    locked = is_locked(path)
    if not locked and (holder(path) | record).get("host", node()) != node():
        return "unknown", record
    runs = is_alive(record) if locked is None else locked
    return "running" if runs else "killed" if record else "unknown", record


def is_running(path: Path) -> bool:
    """Whether the run is training; cheap for runs that have ended, of which there may be thousands."""
    has_ended = (path / "summary.json").exists() and not (path / "progress.json").exists()
    return not has_ended and run_status(path)[0] == "running"


def is_alive(progress: Mapping[str, Any]) -> bool:
    """Whether the process that wrote progress.json exists, and is not another one with the same id."""
    pid, updated = progress.get("pid"), number(progress.get("updated"))
    if not isinstance(pid, int):
        return False
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return updated is None or process.create_time() <= updated + _CLOCK_SECONDS
    except psutil.AccessDenied:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False


@dataclass(frozen=True)
class RunRecords:
    """What a run has written."""

    path: Path
    config: Mapping[str, Any]
    system: Mapping[str, Any]
    summary: Mapping[str, Any]
    """The keys of summary.json that are known; `status` may also be running, killed or unknown."""
    metrics: Mapping[str, Floats]
    """Columns of metrics.csv; NaN for empty cells."""
    spans: Spans
    samples: Samples
    faults: str
    """The end of faults.log."""
    problems: list[str]
    """What is missing or damaged."""

    @property
    def idle(self) -> dict[str, float]:
        """The learner's idle seconds by cause, largest first."""
        if "learner" in self.spans.lanes:
            return idle_causes(self.spans)
        causes = {cause_of(phase): s for phase, s in self.phases.items() if is_idle("learner", phase)}
        return dict(sorted(causes.items(), key=lambda item: -item[1]))

    @property
    def phases(self) -> dict[str, float]:
        """The learner's seconds per phase: from its spans, or from the summary of a run without spans."""
        if (learner := self.spans.lanes.get("learner")) is not None:
            return learner.total()
        phases = self.summary.get("phases")
        known = phases.items() if isinstance(phases, dict) else ()
        return {phase: seconds for phase, value in known if (seconds := number(value))}


def read_run(path: Path) -> RunRecords:
    """Read a run's folder in any state; only a folder that is not a run is refused."""
    folder = RunFolder.open(path)
    problems: list[str] = []
    config = _read_json(folder.config, problems)
    metrics = _read_metrics(folder.metrics, problems)
    spans, samples = read_spans(folder.spans), read_samples(folder.samples)
    summary = _summary(folder, config, metrics, spans, problems)
    system = _read_json(folder.system, problems)
    faults = _end_of(folder.faults)
    problems += [*spans.problems, *samples.problems]
    return RunRecords(path, config, system, summary, metrics, spans, samples, faults, problems)


def _summary(
    folder: RunFolder,
    config: Mapping[str, Any],
    metrics: Mapping[str, Floats],
    spans: Spans,
    problems: list[str],
) -> dict[str, Any]:
    """summary.json or, before the end, what the progress and the last row of the metrics say."""
    status, known = run_status(folder.path)
    if status == "ended" and known:
        return known
    if status == "ended":
        status = "unknown"
        problems.append("summary.json cannot be read")
    elif status != "running":
        problems.append("summary.json is missing: the run did not end properly")
    for key, column in _FROM_METRICS.items():
        values = metrics.get(column, np.zeros(0))
        if known.get(key) is None and (seen := values[np.isfinite(values)]).size:
            known[key] = float(seen[-1])
    steps, wall = number(known.get("env_steps")), number(known.get("wall_seconds"))
    if known.get("steps_per_second") is None and steps and wall:
        known["steps_per_second"] = steps / wall
    if known.get("learner_busy") is None and "learner" in spans.lanes:
        known["learner_busy"] = lane_use(spans.lanes["learner"]).busy
    identity = {key: config[key] for key in ("env", "algo", "preset", "seed") if key in config}
    return {**identity, **known, "status": status}


def _read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    value = read_json(path)
    if not value:
        problems.append(f"{path.name} {'cannot be read' if path.exists() else 'is missing'}")
    return value


def _read_metrics(path: Path, problems: list[str]) -> dict[str, Floats]:
    try:
        columns = read_metrics(path)
    except OSError:
        problems.append(f"{path.name} is missing: no learning curve")
        return {}
    if not columns or not len(next(iter(columns.values()))):
        problems.append(f"{path.name} has no row yet: no learning curve")
    return columns


def read_metrics(path: Path, names: Collection[str] | None = None) -> dict[str, Floats]:
    """The columns of metrics.csv, all or some; NaN for what is not a number.

    Of a long file about MAX_ROWS rows are read, evenly spread, and all with an evaluation; of a huge one only the former.
    """
    with path.open("rb") as file:
        header = file.readline(MAX_LINE).decode(errors="replace").strip().split(",")
        kept = {name: nth for nth, name in enumerate(header) if name and (names is None or name in names)}
        evaluated = header.index(EVALUATED) if EVALUATED in header else None
        columns: dict[str, array[float]] = {name: array("d") for name in kept}
        for line in _spread_lines(file, evaluated):
            cells = line.decode(errors="replace").rstrip("\r\n").split(",")
            for name, nth in kept.items():
                columns[name].append(cell_value(cells[nth] if nth < len(cells) else None))
    return {name: np.array(values) for name, values in columns.items()}


def _spread_lines(file: BinaryIO, evaluated: int | None) -> Iterator[bytes]:
    """The complete lines from here on, or some of them."""
    begin = file.tell()
    if (size := os.fstat(file.fileno()).st_size - begin) > HUGE_BYTES:
        for nth in range(MAX_ROWS):
            file.seek(begin + size * nth // MAX_ROWS)
            file.readline(SAMPLED_LINE)  # the rest of a line
            if (line := file.readline(SAMPLED_LINE)).endswith(b"\n"):
                yield line
        return
    n_lines = sum(block.count(b"\n") for block in iter(partial(file.read, 1 << 20), b""))
    every = max(1, n_lines // MAX_ROWS)
    file.seek(begin)
    for nth, line in enumerate(iter(partial(file.readline, MAX_LINE), b"")):
        wanted = nth % every == 0 or nth == n_lines - 1
        if not wanted and evaluated is not None:
            wanted = bool(line.split(b",", evaluated + 1)[evaluated : evaluated + 1] not in ([], [b""]))
        if wanted and line.endswith(b"\n"):
            yield line


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _end_of(path: Path) -> str:
    """The last 4,000 bytes of a file as text; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4000))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
