"""Builds the extension once and keeps it: the folder's name says which sources and which torch it is of."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import sys
import types
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
NAME = "simcard_extension"


def folder() -> Path:
    """Where the built extension is kept."""
    content = hashlib.sha256()
    for file in sorted(SOURCES.iterdir()):
        content.update(file.name.encode() + file.read_bytes())
    content.update(f"{torch.__version__} {sys.version}".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("SIMCARD_CACHE", cache / "simcard")) / content.hexdigest()[:16]


def load() -> types.ModuleType:
    """The extension, built if need be. Processes that want it at once wait for the first of them."""
    target = folder()
    target.mkdir(parents=True, exist_ok=True)
    library = target / f"{NAME}.so"
    with (target / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(target)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(target: Path) -> None:
    from torch.utils import cpp_extension

    print("simcard: building the simulated card (once, about two minutes)", file=sys.stderr)
    work = target / f"build-{os.getpid()}"
    work.mkdir(exist_ok=True)
    cpp_extension.load(
        name=NAME,
        sources=[str(file) for file in sorted(SOURCES.glob("*.cpp"))],
        extra_cflags=["-O2", "-std=c++20"],
        build_directory=str(work),
        is_python_module=False,
    )
    (work / f"{NAME}.so").rename(target / f"{NAME}.so")
