"""All that a run's folder holds, read as far as it goes.

In: the folder of a run that ended, still goes or was killed. Out: its records, and what is missing in plain words.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flatout.perf.finding import Finding
from flatout.perf.from_run import findings_of_run
from flatout.runlog.folder import RunFolder
from flatout.runlog.lanes import cause_of, idle_causes, is_idle, lane_use
from flatout.runlog.lines import number
from flatout.runlog.samples import Samples, read_samples
from flatout.runlog.spans import Floats, Spans, read_spans
from flatout.views.life import is_alive

_FROM_METRICS = {
    "env_steps": "time/total_timesteps",
    "wall_seconds": "time/time_elapsed",
    "return_mean": "rollout/ep_rew_mean",
    "episodes": "rollout/episodes",
    "updates": "train/n_updates",
    "learner_busy": "learner_busy",
}


@dataclass(frozen=True)
class RunRecords:
    """What a run has written."""

    path: Path
    config: Mapping[str, Any]
    system: Mapping[str, Any]
    summary: Mapping[str, Any]
    """The keys of summary.json as far as they are known; `status` may also be running, killed or unknown."""
    metrics: Mapping[str, Floats]
    """Columns of metrics.csv; NaN where a row says nothing."""
    spans: Spans
    samples: Samples
    faults: str
    problems: list[str]
    """What is missing or broken."""

    @cached_property
    def findings(self) -> list[Finding]:
        """What held the run back and what to change."""
        usual = {name: _median(column) for name, column in self.metrics.items()}
        known = {name: value for name, value in usual.items() if value is not None}
        return findings_of_run({**self.summary, "metrics": known}, self.config, self.system)

    @property
    def idle(self) -> dict[str, float]:
        """Seconds that the learner did nothing of use, by cause, largest first."""
        if "learner" in self.spans.lanes:
            return idle_causes(self.spans)
        # Runs without spans still have the learner's seconds per phase in their summary.
        phases = self.summary.get("phases")
        found = {
            phase: number(value) for phase, value in (phases if isinstance(phases, dict) else {}).items()
        }
        causes = {cause_of(p): s for p, s in found.items() if s and is_idle("learner", p)}
        return dict(sorted(causes.items(), key=lambda item: -item[1]))


def read_run(path: Path) -> RunRecords:
    """Read a run's folder; only a folder that is no run is refused."""
    folder = RunFolder.open(path)
    problems: list[str] = []
    config = _read_json(folder.config, problems)
    metrics = _read_metrics(folder.metrics, problems)
    spans = read_spans(folder.spans)
    samples = read_samples(folder.samples)
    summary = _summary(folder, config, metrics, spans, problems)
    if system_is_missing := not folder.system.exists():
        problems.append("system.json is missing")
    system = {} if system_is_missing else _read_json(folder.system, problems)
    faults = folder.faults.read_text(errors="replace") if folder.faults.is_file() else ""
    problems += spans.problems
    problems += samples.problems if folder.samples.exists() else ["samples.jsonl is missing"]
    return RunRecords(path, config, system, summary, metrics, spans, samples, faults, problems)


def _summary(
    folder: RunFolder,
    config: Mapping[str, Any],
    metrics: Mapping[str, Floats],
    spans: Spans,
    problems: list[str],
) -> dict[str, Any]:
    """The summary or, before the end, what the progress and the last row of the metrics say."""
    if _has_ended(folder) and (summary := _read_json(folder.summary, problems)):
        return summary
    known = _read_json(folder.progress, problems) if folder.progress.exists() else {}
    status = _status(known)
    if status != "running":
        problems.append("summary.json is missing: the run has not come to its end")
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


def _has_ended(folder: RunFolder) -> bool:
    """Whether summary.json tells the end; that of an earlier part, before the run was resumed, does not."""
    if not folder.summary.exists() or not folder.progress.exists():
        return folder.summary.exists()
    return folder.summary.stat().st_mtime >= folder.progress.stat().st_mtime


def _status(progress: Mapping[str, Any]) -> str:
    status, pid = progress.get("status"), progress.get("pid")
    if status != "running" or not isinstance(pid, int):
        return str(status or "unknown")
    return "running" if is_alive(progress) else "killed"


def _read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    return value if isinstance(value, dict) else {}


def _read_metrics(path: Path, problems: list[str]) -> dict[str, Floats]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        problems.append(f"{path.name} is missing: no learning curve")
        return {}
    # A row is whole once its newline is there.
    rows = list(csv.DictReader(text[: text.rfind("\n") + 1].replace("\0", "").splitlines(), restval=""))
    if not rows:
        problems.append(f"{path.name} has no row yet: no learning curve")
        return {}
    return {name: np.array([_cell(row.get(name)) for row in rows]) for name in rows[0] if name}


def _median(column: Floats) -> float | None:
    seen = column[np.isfinite(column)]
    return float(np.median(seen)) if seen.size else None


def _cell(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return float("nan")
