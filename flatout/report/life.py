"""Whether a run goes on, has ended or was killed, as its folder and the process list tell.

In: a run's folder. Out: a status, and the newest record that the run has left of itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import Any

import psutil

from flatout.meter.lines import number
from flatout.meter.tail import json_object

_FRESH_SECONDS = 3.0
"""A run that has told nothing yet goes on if it wrote samples this short a time ago."""
_CLOCK_SECONDS = 60.0
"""By how much the clock may have been set."""


def status(path: Path) -> str:
    """`running`, `ended`, `killed`, or `unknown` for a run that has told nothing."""
    told, ended = _written(path / "progress.json"), _written(path / "summary.json")
    # A resumed run has an old summary beside its progress; one that just ended may still have both.
    if told > ended and (progress := _read(path / "progress.json")):
        return "running" if is_alive(progress) else "killed"
    if ended > 0:
        return "ended"
    return "running" if time() - _written(path / "samples.jsonl") < _FRESH_SECONDS else "unknown"


def life(path: Path) -> tuple[str, dict[str, Any]]:
    """The status, and what progress.json or summary.json says."""
    found = status(path)
    return found, _read(path / ("summary.json" if found == "ended" else "progress.json"))


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
