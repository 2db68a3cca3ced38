"""Compiles loops over arrays to machine code with Numba; the result is cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, *, nogil: bool = True, contract: bool = False) -> Function:
    """The function, compiled at its first call.

    Floating-point operations keep the order in which they are written; `contract` lets a multiply and an add become
    one instruction. `nogil=False` keeps Python's lock: for functions that take less time than getting the lock back.
    """
    options: dict[str, Any] = {"cache": True, "error_model": "numpy", "nogil": nogil}
    if contract:
        options["fastmath"] = {"contract"}
    return cast(Function, njit(**options)(function))


def renamed(function: Function, suffix: str) -> Function:
    """A copy of a compiled function's source function, to compile with other options; the cache goes by names."""
    source = function.py_func  # type: ignore[attr-defined]
    copy = FunctionType(source.__code__, source.__globals__, f"{source.__name__}_{suffix}")
    copy.__qualname__ = copy.__name__
    return cast(Function, copy)
