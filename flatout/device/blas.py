"""Matrix products inside compiled loops: by one core, or by several with the routine that torch itself calls for them."""

from __future__ import annotations

import ctypes
import inspect
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding  # type: ignore[import-untyped]

from flatout.device.jit import compiled
from flatout.device.private import note_missing
from flatout.device.tiles import Flat
from flatout.device.tiles import product as product_on_one_core

_numba: Any = numba
types = _numba.types
SYMBOLS = "sgemm_", "omp_get_max_threads"
"""The Fortran interface: all arguments are pointers, matrices are stored by columns; and the threads that it has."""
SHARED = 1_000_000
"""Multiplications of a product that several threads share."""
_TRANSPOSED, _PLAIN = np.int32(ord("T")), np.int32(ord("N"))


_one_thread = _numba.cfunc(types.int32())(lambda: 1)


def torch_routines() -> list[int]:
    """The addresses of torch's own; if its library does not show them, a note, and a single thread."""
    for path in (Path(inspect.getfile(torch)).parent / "lib").glob("libtorch_cpu.*"):
        try:
            library = ctypes.CDLL(str(path))
            return [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in SYMBOLS]
        except (OSError, AttributeError):
            break
    note_missing("torch", SYMBOLS[0], "matrix products of the fused backend have one thread")
    return [_one_thread.address] * len(SYMBOLS)


for _name, _address in zip(SYMBOLS, torch_routines(), strict=True):
    binding.add_symbol(f"flatout_{_name}", _address)
_sgemm = types.ExternalFunction(f"flatout_{SYMBOLS[0]}", types.void(*[types.uintp] * 13))
_n_threads = types.ExternalFunction(f"flatout_{SYMBOLS[1]}", types.int32())


@compiled
def product(
    n_rows: int, n_columns: int, depth: int, a: Flat, flip_a: bool, b: Flat, flip_b: bool, out: Flat
) -> None:
    """out = A B, of float32, each in a flat array with its rows one after another; a flipped one is stored transposed."""
    if n_rows * n_columns * depth < SHARED or _n_threads() == 1:
        product_on_one_core(n_rows, n_columns, depth, a, flip_a, b, flip_b, out)
        return
    scales, words = np.empty(2, np.float32), np.empty(8, np.int32)
    scales[0], scales[1] = 1, 0
    # By columns, rows are those of the transpose, and (A B)ᵀ = Bᵀ Aᵀ.
    words[0], words[1], words[2] = n_columns, n_rows, depth
    words[3], words[4] = (depth, _TRANSPOSED) if flip_b else (n_columns, _PLAIN)
    words[5], words[6] = (n_rows, _TRANSPOSED) if flip_a else (depth, _PLAIN)
    at, one = words.ctypes.data, scales.ctypes.data
    right, left, to = b.ctypes.data, a.ctypes.data, out.ctypes.data
    _sgemm(at + 16, at + 24, at, at + 4, at + 8, one, right, at + 12, left, at + 20, one + 4, to, at)
