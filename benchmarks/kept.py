"""Results of long benchmarks are kept in a JSON file as they come, so that a benchmark can be run in pieces and continued."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


def read(results: Path) -> dict[str, dict[str, Any]]:
    """The results so far."""
    known: dict[str, dict[str, Any]] = json.loads(results.read_text()) if results.exists() else {}
    return known


def add(results: Path, key: str, result: dict[str, Any] | None) -> None:
    """Add a result to the file, which other processes may be doing, too."""
    if result is None:
        return
    results.parent.mkdir(exist_ok=True)
    folder = os.open(results.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    known = dict(sorted((read(results) | {key: result}).items()))
    new = results.with_suffix(".new")
    new.write_text(json.dumps(known, indent=2) + "\n")
    new.replace(results)
    os.close(folder)
