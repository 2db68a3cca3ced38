"""Compiles loops over arrays to machine code with Numba; the result is cached on disk.

The cache saves time and must never fail a run: what cannot be read, is damaged or is out of date is compiled again.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from types import FunctionType
from typing import Any, TypeVar, cast

from numba import njit

from flatout.device.private import find
from flatout.timing import compile_listeners

FunctionCache: Any = find("numba.core.caching.FunctionCache") or object
IndexDataCacheFile: Any = find("numba.core.caching.IndexDataCacheFile") or object
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(
    function: Function, *, nogil: bool = True, contract: bool = False, reorder: bool = False
) -> Function:
    """The function, compiled at its first call.

    Floating-point operations keep the order in which they are written; `contract` lets a multiply and an add become
    one instruction, `reorder` sums change their order, too, so that they use wide registers. `nogil=False` keeps Python's lock: for functions that take less time than getting the lock back.
    """
    options: dict[str, Any] = {"error_model": "numpy", "nogil": nogil}
    if contract or reorder:
        options["fastmath"] = {"contract", "reassoc"} if reorder else {"contract"}
    dispatcher = njit(**options)(function)
    with suppress(
        Exception
    ):  # no folder can be written, or Numba's cache is another one: compiled in each process
        dispatcher._cache = _Cache(function)
    return cast(Function, dispatcher)


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of a function, read and written without raising."""

    stamp: str
    """Changes with the source that the function is compiled from."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        # Numba looks at the function's own file only, but what it calls from other files is compiled into it.
        caches = [getattr(value, "_cache", None) for value in function.__globals__.values()]
        stamps = {cache.stamp for cache in caches if isinstance(cache, _Cache)}
        own = self._impl.locator.get_source_stamp()
        self.stamp = sha256(repr((own, sorted(stamps))).encode()).hexdigest()
        self._cache_file = _HashedFile(self._cache_path, self._impl.filename_base, self.stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = None
        try:
            found = super().load_overload(sig, target_context)
        except Exception:
            with suppress(Exception):
                self.flush()  # a damaged index could not be saved to either
        if found is None:
            _tell(begins=True)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(Exception):
            super().save_overload(sig, data)
        _tell(begins=False)


def _tell(*, begins: bool) -> None:
    for listener in compile_listeners:
        listener(begins)


class _HashedFile(IndexDataCacheFile):  # type: ignore[misc]
    """Numba's files, each entry with its hash: damaged machine code must not be run."""

    def save(self, key: Any, data: Any) -> None:
        content = self._dump(data)
        super().save(key, (sha256(content).digest(), content))

    def load(self, key: Any) -> Any:
        if (entry := super().load(key)) is None:
            return None
        digest, content = entry
        return pickle.loads(content) if sha256(content).digest() == digest else None


def renamed(function: Function, suffix: str) -> Function:
    """A copy of a compiled function's source function, to compile with other options; the cache goes by names."""
    source = function.py_func  # type: ignore[attr-defined]
    copy = FunctionType(source.__code__, source.__globals__, f"{source.__name__}_{suffix}")
    copy.__qualname__ = copy.__name__
    return cast(Function, copy)
