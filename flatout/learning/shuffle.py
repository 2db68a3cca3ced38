"""Orders of minibatches, drawn in one call without Python's lock: a thread that collects goes on meanwhile."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flatout.device.jit import compiled

Order = npt.NDArray[np.int64]


def draw_orders(seed: int, n_epochs: int, n: int) -> Order:
    """(n_epochs, n): what `torch.randperm(n)` gives so many times in a row with a CPU generator of this seed."""
    drawn = np.random.RandomState(seed & 0xFFFFFFFF).randint(0, 1 << 32, (n_epochs, n), np.uint32)
    out = np.empty((n_epochs, n), np.int64)
    _shuffle(drawn.reshape(-1), out)
    return out


def _shuffle(drawn: npt.NDArray[np.uint32], out: Order) -> None:
    """Fisher and Yates, with one number for each place but the last."""
    n_epochs, n = out.shape
    position = 0
    for k in range(n_epochs):
        row = out[k]
        for i in range(n):
            row[i] = i
        for i in range(n - 1):
            j = i + drawn[position] % (n - i)
            position += 1
            row[i], row[j] = row[j], row[i]


_shuffle = compiled(_shuffle)
