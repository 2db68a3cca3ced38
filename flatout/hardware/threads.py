"""How many threads the update should use: one for small work, where splitting costs more than it saves."""

from __future__ import annotations

SMALL_WORK = 30_000_000
"""Parameters × minibatch rows below which one thread is faster (measured on 2 and more cores)."""


def learner_threads(n_params: int, batch_size: int, n_cores: int) -> int:
    """Threads for the learner; depends on nothing that changes between runs of one machine."""
    return 1 if n_params * batch_size < SMALL_WORK else n_cores
