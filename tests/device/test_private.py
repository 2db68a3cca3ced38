"""Versions of PyTorch and Numba without an interface that is not public: the same results, slower, and a note."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.device.private import INTERFACES

PACKAGE = Path(__file__).parents[2] / "flatout"
SCRIPT = """
import ctypes, json, sys, types
import numba, numba.core.caching, torch, torch._inductor, torch.fx.experimental.proxy_tensor
numba.njit(lambda x: x)(1)  # imports what Numba itself needs

missing, algo, settings = json.loads(sys.argv[1])
for name in missing:
    if name == "sgemm_":  # torch's library does not show it
        ctypes.CDLL = lambda path: types.SimpleNamespace()
        continue
    *path, last = name.split(".")
    owner = sys.modules[path[0]]
    for part in path[1:-1]:
        owner = getattr(owner, part)
    delattr(getattr(owner, path[-1]) if len(path) > 1 else owner, last)

import flatout
agent = getattr(flatout, algo)("CartPole-v1", seed=1, executor="serial", **settings)
agent.learn(256)
params = [x for p in agent.policy.model.parameters() for x in p.detach().flatten().tolist()]
agent.learn(1000)
notes = [line for line in agent.header() if " has no " in line]
print(json.dumps([params, notes, agent.summary["status"], agent.summary["backend"]]))
"""
PPO = {"n_envs": 4, "n_steps": 64, "batch_size": 64, "n_epochs": 4, "network_arch": [32, 32, 32]}
DQN = {"n_envs": 4, "learning_starts": 64, "buffer_size": 1000, "batch_size": 32, "network_arch": [32, 32]}
AOTI = [name for name in INTERFACES if "_aoti" in name]
CACHING = [name for name in INTERFACES if name.startswith("numba")]


def trained(folder: Path, algo: str, settings: dict[str, Any], missing: Sequence[str] = ()) -> Any:
    """Parameters after the first rollout, notes in the header, status and backend of a whole run."""
    return json.loads(_trained(folder if missing else None, json.dumps([missing, algo, settings])))


@cache
def _trained(folder: Path | None, words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "settings", "missing", "backend", "tolerance"),
    [
        ("PPO", PPO | {"compile": "off"}, ["torch._foreach_copy_", "torch._foreach_zero_"], "eager", 0),
        ("PPO", PPO | {"compile": "off"}, ["torch._fused_adam_"], "eager", 1e-5),
        ("PPO", PPO, ["sgemm_"], "fused", 1e-5),
        ("DQN", DQN, ["torch._foreach_copy_", *CACHING], "fused", 0),
    ],
)
def test_a_run_without_them_learns_the_same_and_says_so(
    algo: str, settings: dict[str, Any], missing: list[str], backend: str, tolerance: float, tmp_path: Path
) -> None:
    expected, no_notes, *_ = trained(tmp_path, algo, settings)
    params, notes, status, used = trained(tmp_path, algo, settings, missing)
    assert no_notes == []
    assert [line.split(" has no ")[1].split(":")[0] for line in sorted(notes)] == sorted(missing)
    assert (status, used) == ("finished", backend)
    np.testing.assert_allclose(params, expected, rtol=0, atol=tolerance)


def test_without_a_way_to_call_compiled_updates_they_are_eager(tmp_path: Path) -> None:
    expected, *_ = trained(tmp_path, "PPO", PPO | {"compile": "off"})
    params, notes, status, used = trained(tmp_path, "PPO", PPO | {"compile": "on"}, AOTI[:1])
    assert (status, used, params) == ("finished", "eager", expected)
    (note,) = notes
    assert note.endswith(f"has no {AOTI[0]}: updates are not compiled")


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    script = """
import torch, torch._inductor
del torch._inductor.aoti_compile_and_package
from pathlib import Path
from flatout.learning.compile import compile_to
compile_to(Path("x.so"), None, None)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
    )
    last = done.stderr.splitlines()[-1]
    assert "FlatoutError: torch" in last
    assert last.endswith("has no torch._inductor.aoti_compile_and_package: updates are not compiled")


def test_no_other_file_uses_interfaces_that_are_not_public() -> None:
    private = re.compile(r"\btorch\._\w|torch\.ops\b|numba\.core|torch\.fx\.experimental")
    for file in PACKAGE.rglob("*.py"):
        for line in file.read_text().splitlines():
            if private.search(line) and file.name != "private.py" and "torch.__version__" not in line:
                names = re.findall(r'"((?:torch|numba)[\w.]+)"', line)
                assert names, f"{file}: {line}"
                assert set(names) <= set(INTERFACES), f"{file}: {line}"
