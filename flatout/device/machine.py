"""What this machine is: usable cores and memory, versions, CUDA devices; and which device a name means.

Limits set by a container (cgroups) count, not what the host has. Out: a Machine, which system.json stores.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from flatout.errors import FlatoutError, did_you_mean

_CGROUPS = Path("/sys/fs/cgroup")
_MEANT = {"gpu": "cuda", "nvidia": "cuda", "cuda0": "cuda:0", "cuda1": "cuda:1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One CUDA device."""

    name: str
    """As the driver calls it: `NVIDIA GeForce RTX 4070`."""

    memory_bytes: int
    """All of its memory."""

    compute_capability: str
    """Decides which precisions pay: `8.9`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a run has to work with, and the versions it ran on."""

    cores: int
    """Cores this process may use: affinity and a container's CPU quota count."""

    memory_bytes: int
    """Memory this process may use in all; a container's limit counts."""

    memory_available_bytes: int
    """What of it is free now."""

    cpu: str
    """The processor's model name."""

    platform: str
    """Operating system and architecture."""

    versions: dict[str, str | None]
    """Of Python and the packages that decide results; None for one that is not installed."""

    gpus: tuple[Gpu, ...]
    """CUDA devices that torch can use, in torch's order."""

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values for system.json."""
        return asdict(self)


def machine() -> Machine:
    """What this process finds now."""
    total, available = usable_memory()
    return Machine(
        cores=usable_cores(),
        memory_bytes=total,
        memory_available_bytes=available,
        cpu=_cpu_model(),
        platform=platform.platform(),
        versions={
            "python": platform.python_version(),
            **{name: _version(name) for name in ("flatout", "torch", "gymnasium", "numpy")},
        },
        gpus=tuple(cuda_devices()),
    )


def cuda_devices() -> list[Gpu]:
    """The CUDA devices torch can use; none when it is built without CUDA or finds no driver."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        Gpu(name=it.name, memory_bytes=it.total_memory, compute_capability=f"{it.major}.{it.minor}")
        for it in found
    ]


def resolve_device(text: str, gpus: Sequence[Gpu] | None = None) -> str:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device that is there; `gpus` are torch's unless given."""
    name = text.strip().lower()
    if name == "cpu":
        return name
    index = re.fullmatch(r"cuda(?::(\d+))?", name)
    if name != "auto" and index is None:
        meant = (
            f"; did you mean {_MEANT[name]!r}?"
            if name in _MEANT
            else did_you_mean(name, ("auto", "cpu", "cuda"))
        )
        raise FlatoutError(f"--device {text!r}: no such device{meant or ''} (auto, cpu, cuda or cuda:N)")
    if gpus is None:
        gpus = cuda_devices()
    if index is None:
        return "cuda" if gpus else "cpu"
    if not gpus:
        raise FlatoutError(f"--device {name}: no CUDA device found; {_torch_build()}; use --device cpu")
    if index[1] is not None and int(index[1]) >= len(gpus):
        there = ", ".join(f"cuda:{nth} ({gpu.name})" for nth, gpu in enumerate(gpus))
        raise FlatoutError(f"--device {name}: this machine has {there}")
    return name


def usable_cores(cgroups: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Cores this process may use at once: at least one, at most what affinity and CPU quota allow."""
    # Not every system has affinities.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _groups("cpu", cgroups, membership):
        quota = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(
            folder / "cpu.cfs_period_us"
        )
        if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
            allowed = min(allowed, int(quota[0]) // int(quota[1]))
    return max(1, allowed)


def usable_memory(cgroups: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> tuple[int, int]:
    """Bytes this process may use in all, and what of them is free now."""
    import psutil

    host = psutil.virtual_memory()
    total, available = int(host.total), int(host.available)
    for folder in _groups("memory", cgroups, membership):
        limit = _bytes(folder, "memory.max", "memory.limit_in_bytes")
        used = _bytes(folder, "memory.current", "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        # File cache counts as used but is given up on demand.
        stat = _words(folder / "memory.stat")
        cache = next((int(b) for a, b in pairwise(stat) if a.endswith("inactive_file")), 0)
        total = min(total, limit)
        available = min(available, max(0, limit - max(0, used - cache)))
    return total, available


def free_memory(device: Any) -> int:
    """Bytes that are free on a torch device, or for this process on the host."""
    if device.type != "cuda":
        return usable_memory()[1]
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


def _groups(controller: str, cgroups: Path, membership: Path) -> Iterator[Path]:
    """The folders of this process's control groups and those above, whose limits all hold (versions 2 and 1)."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controller if controllers else cgroups
        own = root / group.lstrip("/")
        # Inside a container the path may be the host's; then only the root is there, and is the container's.
        yield from (folder for folder in (own, *own.parents) if folder == root or root in folder.parents)


def _bytes(folder: Path, *names: str) -> int | None:
    """The first of the files that holds a number."""
    return next((int(w[0]) for name in names if (w := _words(folder / name)) and w[0].isdigit()), None)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    # Here and not at the top: 30 ms that resolve_device need not wait for.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch_build() -> str:
    import torch

    if torch.version.cuda is None:
        return f"this torch build ({torch.__version__}) has no CUDA"
    return f"this torch build ({torch.__version__}, CUDA {torch.version.cuda}) sees no usable driver"
