"""Semaphores of the C library inside compiled loops, so that two threads meet there without Python's lock."""

from __future__ import annotations

import ctypes
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding  # type: ignore[import-untyped]

from flatout.device.jit import compiled

_numba: Any = numba
_types = _numba.types
Semaphore = npt.NDArray[np.int64]
_SIZE = 8
"""Words of 8 bytes for a semaphore, which is smaller."""


def _found(name: str) -> int:
    """The address of a function of the C library; 0 where there is none."""
    try:
        return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0
    except (OSError, TypeError, AttributeError):
        return 0


_ADDRESSES = {name: _found(name) for name in ("sem_init", "sem_post", "sem_wait", "sem_trywait")}
for _name in ("sem_post", "sem_wait", "sem_trywait"):
    binding.add_symbol(f"flatout_{_name}", _ADDRESSES[_name])
_post = _types.ExternalFunction("flatout_sem_post", _types.int32(_types.uintp))
_wait = _types.ExternalFunction("flatout_sem_wait", _types.int32(_types.uintp))
_try_wait = _types.ExternalFunction("flatout_sem_trywait", _types.int32(_types.uintp))


def new_semaphore() -> Semaphore | None:
    """A semaphore with nothing to take; None where the C library has none."""
    it = np.zeros(_SIZE, np.int64)
    if not all(_ADDRESSES.values()):
        return None
    init = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    return it if init(_ADDRESSES["sem_init"])(it.ctypes.data, 0, 0) == 0 else None


@compiled
def post(semaphore: Semaphore) -> None:
    """Let one wait end."""
    _post(semaphore.ctypes.data)


@compiled
def wait(semaphore: Semaphore, n_spins: int) -> None:
    """Wait for a `post`, for so many tries without giving up the core; a signal does not end it."""
    for _ in range(n_spins):
        if _try_wait(semaphore.ctypes.data) == 0:
            return
    while _wait(semaphore.ctypes.data) != 0:
        pass
