"""Builds the extension once and keeps it: the folder's name says which sources and which torch it is of."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
NAME = "simcard_extension"


def load() -> types.ModuleType:
    """The extension, built if need be."""
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library() -> Path:
    """The built extension's file. Processes that want it at once wait for the first of them."""
    target = folder()
    target.mkdir(parents=True, exist_ok=True)
    file = target / f"{NAME}.so"
    with (target / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            _build(target, file)
    return file


def folder() -> Path:
    """Where the built extension is kept."""
    content = hashlib.sha256()
    for file in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        content.update(file.name.encode() + file.read_bytes())
    content.update(f"{torch.__version__} {sys.version}".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("SIMCARD_CACHE", cache / "simcard")) / content.hexdigest()[:16]


def _build(target: Path, file: Path) -> None:
    """Builds in a process of its own, because torch loads what it has built."""
    print("simcard: building the simulated card (once, one to two minutes)", file=sys.stderr)
    work = target / "build"
    work.mkdir(exist_ok=True)
    (work / "lock").unlink(missing_ok=True)  # torch's own, of a build that was killed: it would wait for ever
    result = subprocess.run(
        [sys.executable, __file__, str(work)], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError(f"the simulated card was not built:\n{result.stdout}{result.stderr}")
    (work / f"{NAME}.so").rename(file)


def _compile(work: str) -> None:
    from torch.utils import cpp_extension

    cpp_extension.load(
        name=NAME,
        sources=[str(file) for file in sorted(SOURCES.glob("*.cpp"))],
        extra_cflags=["-O2", "-std=c++20"],
        build_directory=work,
        is_python_module=False,
    )


if __name__ == "__main__":
    _compile(sys.argv[1])
