"""Whether a run goes on, has ended or was killed, as its folder and the process list tell.

In: a run's folder. Out: a status, and the newest record that the run has left of itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import Any

import psutil

from flatout.runlog.lines import number
from flatout.runlog.tail import json_object

_FRESH_SECONDS = 3.0
"""A run that has told nothing yet goes on if it wrote samples this short a time ago."""
_CLOCK_SECONDS = 60.0
"""By how much the clock may have been set."""


def life(path: Path) -> tuple[str, dict[str, Any]]:
    """`running`, `ended`, `killed` or `unknown`, and what progress.json or summary.json says."""
    progress, summary = path / "progress.json", path / "summary.json"
    # A resumed run has an old summary beside its progress; one that just ended may still have both.
    if _written(progress) > _written(summary) and (record := _read(progress)):
        return "running" if is_alive(record) else "killed", record
    if _written(summary) > 0:
        return "ended", _read(summary)
    is_fresh = time() - _written(path / "samples.jsonl") < _FRESH_SECONDS
    return "running" if is_fresh else "unknown", {}


def goes_on(path: Path) -> bool:
    """Whether the run goes on; cheap for those that have ended, of which there may be thousands."""
    has_ended = (path / "summary.json").exists() and not (path / "progress.json").exists()
    return not has_ended and life(path)[0] == "running"


def is_alive(progress: Mapping[str, Any]) -> bool:
    """Whether the process that wrote progress.json is there, and not another with its number."""
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


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path) -> dict[str, Any]:
    try:
        return json_object(path.read_bytes())
    except OSError:
        return {}
