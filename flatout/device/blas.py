"""Matrix products inside compiled loops, by the routine that torch itself calls for them."""

from __future__ import annotations

import ctypes
import inspect
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import binding  # type: ignore[import-untyped]

from flatout.device.jit import compiled
from flatout.device.private import note_missing

_numba: Any = numba
types = _numba.types
Flat = npt.NDArray[np.float32]
SYMBOL = "sgemm_"
"""The Fortran interface: all arguments are pointers, matrices are stored by columns."""
_SIGNATURE = types.void(*[types.uintp] * 13)
_TRANSPOSED, _PLAIN = np.int32(ord("T")), np.int32(ord("N"))


def torch_routine() -> int | None:
    """The address of torch's own; None, and a note, if its library does not show it."""
    for path in (Path(inspect.getfile(torch)).parent / "lib").glob("libtorch_cpu.*"):
        try:
            return ctypes.cast(getattr(ctypes.CDLL(str(path)), SYMBOL), ctypes.c_void_p).value
        except (OSError, AttributeError):
            break
    note_missing("torch", SYMBOL, "matrix products of the fused backend are plain loops")
    return None


def _by_loops() -> int:
    """The address of the same as plain loops, many times slower for wide layers."""
    whole, real = types.CPointer(types.int32), types.CPointer(types.float32)

    @numba.cfunc(types.void(*[whole] * 5, real, real, whole, real, whole, real, real, whole))
    def multiply(
        flip_b: Any,
        flip_a: Any,
        n: Any,
        m: Any,
        k: Any,
        _: Any,
        b: Any,
        ldb: Any,
        a: Any,
        lda: Any,
        __: Any,
        c: Any,
        ldc: Any,
    ) -> None:
        rows, columns, depth = m[0], n[0], k[0]
        turned_a, turned_b = flip_a[0] == _TRANSPOSED, flip_b[0] == _TRANSPOSED
        left = _numba.carray(a, ((depth if turned_a else rows) * lda[0],))
        right = _numba.carray(b, ((columns if turned_b else depth) * ldb[0],))
        out = _numba.carray(c, (rows * ldc[0],))
        for i in range(rows):
            row = out[i * ldc[0] : i * ldc[0] + columns]
            row[:] = 0
            for j in range(depth):
                size = left[j * lda[0] + i] if turned_a else left[i * lda[0] + j]
                if turned_b:
                    for x in range(columns):
                        row[x] += size * right[x * ldb[0] + j]
                else:
                    along = right[j * ldb[0] : j * ldb[0] + columns]
                    for x in range(columns):
                        row[x] += size * along[x]

    _KEPT.append(multiply)
    return int(multiply.address or 0)


_KEPT: list[Any] = []
_found: int | None = torch_routine()
IS_FAST = _found is not None
"""Whether wide layers are fast."""
binding.add_symbol("flatout_sgemm", _found or _by_loops())
_sgemm = types.ExternalFunction("flatout_sgemm", _SIGNATURE)


@compiled
def product(
    n_rows: int, n_columns: int, depth: int, a: Flat, flip_a: bool, b: Flat, flip_b: bool, out: Flat
) -> None:
    """out = A B, of float32, each in a flat array with its rows one after another; a flipped one is stored transposed."""
    scales, words = np.empty(2, np.float32), np.empty(8, np.int32)
    scales[0], scales[1] = 1, 0
    # By columns, rows are those of the transpose, and (A B)ᵀ = Bᵀ Aᵀ.
    words[0], words[1], words[2] = n_columns, n_rows, depth
    words[3], words[4] = (depth, _TRANSPOSED) if flip_b else (n_columns, _PLAIN)
    words[5], words[6] = (n_rows, _TRANSPOSED) if flip_a else (depth, _PLAIN)
    at, one = words.ctypes.data, scales.ctypes.data
    right, left, to = b.ctypes.data, a.ctypes.data, out.ctypes.data
    _sgemm(at + 16, at + 24, at, at + 4, at + 8, one, right, at + 12, left, at + 20, one + 4, to, at)
