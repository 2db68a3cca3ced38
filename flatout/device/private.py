"""Interfaces of PyTorch and Numba that are not public, so that another version may not have them.

All of them are listed here, with what flatout does instead: the same, slower. Imports neither by itself.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

_NO_COMPILED = "updates are not compiled"
INTERFACES = {
    "torch._foreach_copy_": "tensors are copied one by one",
    "torch._foreach_zero_": "tensors are set to zero one by one",
    "torch._fused_adam_": "Adam of the eager backend takes several passes over the parameters",
    "torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors": _NO_COMPILED,
    "torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs": _NO_COMPILED,
    "torch._inductor.aoti_compile_and_package": _NO_COMPILED,
    "torch.fx.experimental.proxy_tensor.make_fx": _NO_COMPILED,
    "numba.core.caching.FunctionCache": "each process compiles its loops again",
    "numba.core.caching.IndexDataCacheFile": "each process compiles its loops again",
}
"""Name → what happens without it."""
notes: list[str] = []
"""One line for each interface that was looked up and is missing."""


@cache
def find(name: str) -> Any:
    """The interface of this name; None, and a note, if the installed version has none."""
    package, *attributes = name.split(".")
    path, found = package, import_module(package)
    for attribute in attributes:
        path += f".{attribute}"
        try:
            found = getattr(found, attribute) if hasattr(found, attribute) else import_module(path)
        except ImportError:
            note_missing(package, name, INTERFACES[name])
            return None
    return found


def note_missing(package: str, name: str, instead: str) -> None:
    """Note that the installed version of a package lacks something, and what is done instead."""
    notes.append(f"{package} {import_module(package).__version__} has no {name}: {instead}")
