"""A run's folder read back: whether the run is still training, and everything that it has written so far."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from platform import node
from typing import Any

import numpy as np
import psutil

from flatout.runlog.files import number, read_json
from flatout.runlog.folder import RunFolder, holder, is_locked
from flatout.runlog.recorder import cell_value, read_rows
from flatout.runlog.samples import Samples, read_samples
from flatout.runlog.spans import Floats, Spans, cause_of, idle_causes, is_idle, lane_use, read_spans

_CLOCK_SECONDS = 60.0
"""By how much the system's clock may have been set."""
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
    columns: dict[str, array[float]] = {}
    try:
        for row in read_rows(path):
            for name, cell in row.items():
                if name:
                    columns.setdefault(name, array("d")).append(cell_value(cell))
    except OSError:
        problems.append(f"{path.name} is missing: no learning curve")
    except csv.Error as error:
        problems.append(f"{path.name} is damaged: {error}")
    else:
        if not columns:
            problems.append(f"{path.name} has no row yet: no learning curve")
    n_rows = min(map(len, columns.values()), default=0)
    return {name: np.array(values[:n_rows]) for name, values in columns.items()}


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
