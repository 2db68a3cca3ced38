"""How many threads the maths should use: one for small work, where splitting costs more than it saves.

OpenMP's threads wait for each other by spinning unless told otherwise before torch is loaded. Where anything
else wants a core that is ruinous: an update of 5 ms took 170 ms with 2 spinning threads on 2 cores.
"""

from __future__ import annotations

import os
import sys

SMALL_WORK = 100_000_000
"""Parameters × rows below which one thread is about as fast as several."""
LARGE_WORK = 1_000_000_000
"""From here on all cores pay even where collectors want some of them: a learner that slow is what the rest waits for."""


def wait_without_spinning() -> None:
    """Have OpenMP's threads sleep while they wait; in time only if torch is not loaded yet."""
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def torch_threads(n_params: int, n_rows: int, n_cores: int, n_taken: int = 0) -> int:
    """Threads for this much work on cores of which `n_taken` have other work too; depends on nothing that changes
    between runs of one machine."""
    spins = os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE"
    work = n_params * n_rows
    if spins or work < SMALL_WORK:
        return 1
    return n_cores if work >= LARGE_WORK else max(n_cores - n_taken, 1)
