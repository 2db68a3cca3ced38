"""Out-of-memory handling: the work is repeated in smaller parts, with the same result.

Parts are halved until they fit, and stay that small for the rest of the run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

SHARE_OF_FREE = 0.5
"""Fraction of the free memory that one part's activations may take; the rest is for gradients and copies."""


class PartSize:
    """How many samples are processed at once; shrinks when memory runs out."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self.n_backoffs = 0
        self.notes: list[str] = []
        """One line for each time memory ran out."""

    def attempt(self, work: Callable[[], T]) -> T:
        """What `work` returns; if it runs out of memory it is repeated with parts of half the size.

        `work` must read `n_rows` itself, and leave no trace when it fails.
        """
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self.n_rows == 1:
                    raise
                reason = str(error).split("\n")[0].split(". ")[0]
            # Outside the except block, so that the tensors that the traceback held are freed.
            self._shrink(reason)

    def _shrink(self, reason: str) -> None:
        before, self.n_rows = self.n_rows, -(-self.n_rows // 2)
        self.n_backoffs += 1
        self.notes.append(
            f"out of memory with {before} samples at once; continuing with {self.n_rows}, same result ({reason})"
        )
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def in_parts(function: Callable[[slice], Tensor], n_rows: int, size: int) -> Tensor:
    """`function` of all rows, `size` at a time."""
    if size >= n_rows:
        return function(slice(None))
    return torch.cat([function(slice(i, i + size)) for i in range(0, n_rows, size)])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the memory of the device or the host is exhausted."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "not enough memory" in str(error)


def bytes_per_row(loss: Callable[[], Tensor], n_rows: int) -> float:
    """Bytes per row that `loss`, over `n_rows` rows, saves for its backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Tensors that do not grow with the rows, such as parameters, do not count.
        if tensor.ndim and tensor.shape[0] == n_rows:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss()
    return sum(kept.values()) / n_rows


def rows_that_fit(free_bytes: int, row_bytes: float, n_rows: int) -> int:
    """The largest of n_rows, n_rows / 2, n_rows / 4 … whose activations fit."""
    while n_rows > 1 and n_rows * row_bytes > free_bytes * SHARE_OF_FREE:
        n_rows = -(-n_rows // 2)
    return n_rows
