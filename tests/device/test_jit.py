"""Numba's cache on disk: used again, and never a reason to fail."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flatout.device.jit import compiled
from flatout.timing import CompileWatch, Phase, PhaseClock

HELPER = """
from flatout.device.jit import compiled
@compiled
def helper(x):
    return x + {added}
"""
MODULE = """
from helper import helper
from flatout.device.jit import compiled
@compiled
def double(x):
    return 2 * helper(x)
print(double(20))
print("cached" if sum(double.stats.cache_hits.values()) else "compiled") if hasattr(double._cache, "stamp") else print("no cache")
"""


def run(folder: Path, added: int = 1) -> list[str]:
    """Call the function in a new process; its result, and where it came from."""
    (folder / "helper.py").write_text(HELPER.format(added=added))
    (folder / "module.py").write_text(MODULE)
    environment = os.environ | {"XDG_CACHE_HOME": "/dev/null/nowhere", "HOME": "/dev/null/nowhere"}
    environment["PYTHONDONTWRITEBYTECODE"] = (
        "1"  # Python takes a file of the same size and second for the same
    )
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), str(folder)])
    done = subprocess.run(
        [sys.executable, "module.py"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:2]


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_cut_and_changed_files_are_compiled_again(suffix: str, tmp_path: Path) -> None:
    assert run(tmp_path) == ["42", "compiled"]
    assert run(tmp_path) == ["42", "cached"]
    for damage in (lambda b: b[:-20], lambda b: b[:5], lambda b: b"", lambda b: bytes(len(b))):
        for path in tmp_path.glob(f"__pycache__/*.{suffix}"):
            path.write_bytes(damage(path.read_bytes()))
        assert run(tmp_path) == ["42", "compiled"]
        assert run(tmp_path) == ["42", "cached"]


def test_damaged_machine_code_is_not_run(tmp_path: Path) -> None:
    run(tmp_path)
    for path in tmp_path.glob("__pycache__/*.nbc"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    assert run(tmp_path) == ["42", "compiled"]


def test_a_change_in_another_file_that_a_function_calls_is_seen(tmp_path: Path) -> None:
    assert run(tmp_path, added=1) == ["42", "compiled"]
    assert run(tmp_path, added=2) == ["44", "compiled"]


def test_without_a_folder_that_can_be_written_functions_are_compiled_in_each_process(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").write_text("a file")
    assert run(tmp_path) == ["42", "no cache"]


def test_compiling_is_told_once_and_counted_and_not_again_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "summing.py").write_text("def total(x):\n    return x.sum()\n")
    monkeypatch.syspath_prepend(tmp_path)
    summing, told = importlib.import_module("summing"), list[str]()
    for times in (1, 1):  # the second one is in the cache
        total, clock = compiled(summing.total), PhaseClock()
        clock.enter(Phase.ACT)
        with CompileWatch(lambda: told.append("")) as watch:
            watch.clock = clock
            assert total(np.ones(3)) == 3.0
        assert clock.current == Phase.ACT
        assert len(told) == times
    assert Phase.COMPILE not in clock.seconds
