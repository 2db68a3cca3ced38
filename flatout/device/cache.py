"""What is kept between runs of this machine: compiled updates, and choices that were measured once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """`$FLATOUT_CACHE`, or `flatout` in the user's cache folder."""
    given = os.environ.get("FLATOUT_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flatout"


def remembered(facts: dict[str, Any], measure: Callable[[], float]) -> float:
    """What was measured when these facts were first met, so that the same question always has the same answer."""
    text = json.dumps(facts, sort_keys=True)
    path = cache_folder() / "choices" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return float(json.loads(path.read_text())["value"])
    value = measure()
    with suppress(OSError):  # a folder that cannot be written: measured anew each time
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps({"facts": facts, "value": value}, indent=2))
        os.replace(fresh, path)
    return value
