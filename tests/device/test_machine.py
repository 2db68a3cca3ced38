from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flatout.device.machine import Gpu, machine, resolve_device, usable_cores, usable_memory
from flatout.errors import FlatoutError

CARDS = [
    Gpu(name="NVIDIA GeForce RTX 4070", memory_bytes=12 * 2**30, compute_capability="8.9"),
    Gpu(name="Tesla T4", memory_bytes=16 * 2**30, compute_capability="7.5"),
]


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
def test_affinity_counts() -> None:
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
def test_a_containers_cpu_quota_counts(tmp_path: Path, membership: str, files: dict[str, str]) -> None:
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
def test_no_quota_leaves_what_the_system_gives(
    tmp_path: Path, membership: str, files: dict[str, str]
) -> None:
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


@pytest.mark.parametrize(
    ("text", "gpus", "device"),
    [
        ("auto", [], "cpu"),
        ("auto", CARDS, "cuda"),
        ("cpu", CARDS, "cpu"),
        (" CUDA ", CARDS, "cuda"),
        ("cuda:1", CARDS, "cuda:1"),
    ],
)
def test_devices_that_are_there(text: str, gpus: list[Gpu], device: str) -> None:
    assert resolve_device(text, gpus) == device


@pytest.mark.parametrize(
    ("text", "gpus", "words"),
    [
        ("cuda", [], ["--device cuda: no CUDA device found; this torch build (", "use --device cpu"]),
        ("cuda:7", CARDS, ["cuda:0 (NVIDIA GeForce RTX 4070), cuda:1 (Tesla T4)"]),
        ("gpu", CARDS, ["did you mean 'cuda'?"]),
        ("cdua", [], ["did you mean 'cuda'"]),
        ("mps", [], ["auto, cpu, cuda or cuda:N"]),
        ("cuda:-1", CARDS, ["did you mean 'cuda'"]),
        ("", [], ["auto, cpu, cuda or cuda:N"]),
    ],
)
def test_devices_that_are_not_are_explained_in_one_line(text: str, gpus: list[Gpu], words: list[str]) -> None:
    with pytest.raises(FlatoutError) as caught:
        resolve_device(text, gpus)
    message = str(caught.value)
    assert all(word in message for word in words)
    assert "\n" not in message


def test_this_torch_is_asked_when_no_devices_are_given() -> None:
    import torch

    assert resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
