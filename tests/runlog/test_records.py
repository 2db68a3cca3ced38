"""Whether a run is alive."""

from __future__ import annotations

import os
import time

from flatout.runlog.records import is_alive


def test_another_process_with_the_same_number_is_not_the_run() -> None:
    assert is_alive({"pid": os.getpid(), "updated": time.time()})
    assert not is_alive({"pid": os.getpid(), "updated": 1_000_000.0})
    for pid in (-1, 2**80, "7", None, 1.5):
        assert not is_alive({"pid": pid, "updated": time.time()})
