"""Arrays in memory shared between processes, in an anonymous file (memfd).

Unlike a named segment it does not count against the limit of /dev/shm, and the kernel frees it when the last process
that holds it ends, however it ends.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import signal
import sys
from collections.abc import Mapping
from multiprocessing import get_all_start_methods, reduction
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.errors import FlatoutError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Array: TypeAlias = npt.NDArray[Any]
Spec: TypeAlias = Mapping[str, tuple[tuple[int, ...], Any]]
"""Name → shape and dtype."""
ALIGNMENT = 64


def no_processes() -> str:
    """Why this platform cannot have worker processes, in one line; empty if it can."""
    needed = {
        "memfd_create": os,
        "F_SETSIG": fcntl,
        "poll": select,
        "pthread_sigmask": signal,
        "SIGHUP": signal,
        "killpg": os,
    }
    missing = [name for name, module in needed.items() if not hasattr(module, name)]
    if "forkserver" not in get_all_start_methods():
        missing.append("fork server")
    return f"worker processes need Linux: {sys.platform} has no {', '.join(missing)}" if missing else ""


class SharedArrays:
    """Named arrays in one shared block. Pickled while a child process starts, it is the same memory in the child."""

    def __init__(self, spec: Spec) -> None:
        if reason := no_processes():
            raise FlatoutError(reason)
        self._spec = {name: (shape, np.dtype(dtype).str) for name, (shape, dtype) in spec.items()}
        fd = os.memfd_create("flatout", os.MFD_CLOEXEC)
        os.ftruncate(fd, max(self._layout()[1], 1))
        self._open(fd)

    def _open(self, fd: int) -> None:
        offsets, size = self._layout()
        self._fd = fd
        self._map = mmap.mmap(fd, max(size, 1))
        self.arrays: dict[str, Array] = {
            name: np.frombuffer(self._map, dtype, count=math.prod(shape), offset=offsets[name]).reshape(shape)
            for name, (shape, dtype) in self._spec.items()
        }

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self._spec, "fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._spec = state["spec"]
        self._open(state["fd"].detach())

    def __del__(self) -> None:
        # The mapping itself is freed with the last array that uses it.
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def _layout(self) -> tuple[dict[str, int], int]:
        offsets, end = {}, 0
        for name, (shape, dtype) in self._spec.items():
            offsets[name] = end
            n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
            end += -(-n_bytes // ALIGNMENT) * ALIGNMENT
        return offsets, end
