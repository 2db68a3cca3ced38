"""How this room's loops are compiled, and random numbers as a pure function of (seed, draw, place).

SplitMix64 (Steele, Lea and Flood 2014): no generator state to save, and none to share between threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])

_WORD = 0xFFFFFFFFFFFFFFFF
_WEYL, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_U_WEYL, _U_MIX1, _U_MIX2 = np.uint64(_WEYL), np.uint64(_MIX1), np.uint64(_MIX2)
_U11, _U27, _U30, _U31 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31)


def compiled(function: Function) -> Function:
    """Compiled at its first call, then kept on disk; runs without the interpreter's lock and adds in the order written."""
    options: Any = {"cache": True, "error_model": "numpy", "nogil": True}
    return cast(Function, njit(**options)(function))


def _prefetch(_typing: Any, array: Any, place: Any) -> Any:
    """Ask for the memory of a flat array's element without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), cgutils.voidptr_t)
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        insert: Any = cgutils.get_or_insert_function
        call = insert(builder.module, kind, "llvm.prefetch.p0")
        builder.call(call, [address, word(0), word(3), word(1)])  # to read, to keep, data
        return context.get_dummy_value()

    return types.void(array, place), generate


prefetch: Any = intrinsic(_prefetch)


def draw_key(seed: int, draw: int) -> np.uint64:
    """The key of draw number `draw`, from which `uniform` makes its numbers."""
    key = _mix((seed & _WORD) * _WEYL + _WEYL)
    return np.uint64(_mix(key + (draw + 1) * _WEYL))


def _mix(x: int) -> int:
    x &= _WORD
    x = ((x ^ (x >> 30)) * _MIX1) & _WORD
    x = ((x ^ (x >> 27)) * _MIX2) & _WORD
    return x ^ (x >> 31)


@compiled
def uniform(key: Any, place: int) -> float:
    """The number at `place` of a key's stream, strictly between 0 and 1."""
    x = key + np.uint64(place + 1) * _U_WEYL
    x = (x ^ (x >> _U30)) * _U_MIX1
    x = (x ^ (x >> _U27)) * _U_MIX2
    x = x ^ (x >> _U31)
    # 53 bits, of which the last is always set: the upper end cannot round to 1.
    return float((x >> _U11) | np.uint64(1)) * 2.0**-53


@compiled
def fill_uniforms(key: Any, out: Any) -> None:
    """The first numbers of a key's stream."""
    for i in range(len(out)):
        out[i] = uniform(key, i)
