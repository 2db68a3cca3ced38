from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flatout.device.machine import (
    gc_frozen,
    machine,
    remembered,
    torch_threads,
    usable_cores,
    usable_memory,
)


def test_this_machine_is_described_in_json() -> None:
    found = machine()
    stored = json.loads(json.dumps(found.to_json()))
    assert 1 <= stored["cores"] <= (os.cpu_count() or 1)
    assert 0 < stored["memory_available_bytes"] <= stored["memory_bytes"] <= psutil.virtual_memory().total
    assert stored["cpu"]
    assert stored["versions"]["python"] == sys.version.split()[0]
    assert stored["versions"]["torch"].startswith("2.")
    assert isinstance(stored["gpus"], list)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinities")
def test_cpu_affinity_limits_the_cores() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from flatout.device.machine import usable_cores; print(usable_cores())"
    )
    repository = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "1"


def group(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}),
        (
            "0::/a/b\n",
            {"cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n", "a/b/cpu.max": "max 100000\n"},
        ),
        ("0::/on/the/host\n", {"cpu.max": "100000 100000\n"}),
        (
            "4:cpu,cpuacct:/d\n0::/\n",
            {"cpu/d/cpu.cfs_quota_us": "100000\n", "cpu/d/cpu.cfs_period_us": "100000\n"},
        ),
    ],
)
def test_a_containers_cpu_quota_limits_the_cores(
    tmp_path: Path, membership: str, files: dict[str, str]
) -> None:
    (tmp_path / "membership").write_text(membership)
    assert usable_cores(group(tmp_path / "cgroup", files), tmp_path / "membership") == 1


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}),
        ("0::/\n", {"cpu.max": "6400000 100000\n"}),
        ("", {}),
    ],
)
def test_without_a_quota_all_cores_are_used(tmp_path: Path, membership: str, files: dict[str, str]) -> None:
    (tmp_path / "membership").write_text(membership)
    cores = usable_cores(group(tmp_path / "cgroup", files), tmp_path / "membership")
    assert cores == usable_cores(tmp_path / "none", tmp_path / "none")


def test_a_containers_memory_limit_counts_and_file_cache_is_free(tmp_path: Path) -> None:
    mib = 2**20
    (tmp_path / "membership").write_text("0::/\n")
    files = {
        "memory.max": f"{100 * mib}\n",
        "memory.current": f"{70 * mib}\n",
        "memory.stat": f"anon 5\ninactive_file {30 * mib}\n",
    }
    assert usable_memory(group(tmp_path / "cgroup", files), tmp_path / "membership") == (100 * mib, 60 * mib)


def test_a_measured_value_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    values = iter([1.3, 1.1, 1.0])
    assert remembered({"env": "a"}, lambda: next(values)) == 1.3
    assert remembered({"env": "a"}, lambda: next(values)) == 1.3
    assert remembered({"env": "b"}, lambda: next(values)) == 1.1
    for file in (tmp_path / "choices").iterdir():
        file.write_text("not json")
    assert remembered({"env": "a"}, lambda: next(values)) == 1.0


def test_the_number_of_threads_depends_on_the_work_and_on_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert torch_threads(10_000, 256, 8) == 1
    assert torch_threads(1_000_000, 256, 8) == 8
    assert torch_threads(1_000_000, 256, 8, n_taken=3) == 5
    assert torch_threads(1_000_000, 4096, 8, n_taken=3) == 8
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert torch_threads(1_000_000, 4096, 8) == 1


def test_existing_objects_are_frozen_from_garbage_collection_meanwhile() -> None:
    assert gc.get_freeze_count() == 0
    with gc_frozen():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_objects_frozen_by_others_stay_frozen() -> None:
    gc.freeze()
    try:
        with gc_frozen():
            pass
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
