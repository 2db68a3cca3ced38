"""How many threads the maths should use: one for small work, where splitting costs more than it saves.

OpenMP's threads wait for each other by spinning unless told otherwise before torch is loaded. Where anything
else wants a core that is ruinous: an update of 5 ms took 170 ms with 2 spinning threads on 2 cores. Sleeping at once
is too slow for small products of matrices, of 0.1 ms each: so they spin for about as long, then sleep.
"""

from __future__ import annotations

import os
import sys

SMALL_WORK = 100_000_000
"""Parameters × rows below which one thread is about as fast as several."""
DENSE_WORK = 3_000_000
"""The same where hardly anything but products of matrices is left: one thread more from each time this much."""
LARGE_WORK = 1_000_000_000
"""From here on all cores pay even where collectors want some of them: a learner that slow is what the rest waits for."""


SPINS = 10_000
"""How often a thread looks before it sleeps: about 0.1 ms."""


def wait_without_spinning() -> None:
    """Have OpenMP's threads soon sleep while they wait; in time only if torch is not loaded yet."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def torch_threads(n_params: int, n_rows: int, n_cores: int, n_taken: int = 0, *, dense: bool = False) -> int:
    """Threads for this much work on cores of which `n_taken` have other work too; depends on nothing that changes
    between runs of one machine. `dense`: the work is hardly anything but products of matrices."""
    spins = os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE"
    work = n_params * n_rows
    if spins or work < (DENSE_WORK if dense else SMALL_WORK):
        return 1
    free = max(n_cores - n_taken, 1)
    if work < SMALL_WORK:
        return min(1 + work // DENSE_WORK, free)
    return n_cores if work >= LARGE_WORK else free
