"""This machine and this process on it: usable cores and memory, thread counts, garbage collection, the cache folder.

Limits of a container (cgroups) count, not what the host has.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from flatout.device.accelerator import Gpu, accelerators, free_device_memory, is_accelerator

_CGROUPS = Path("/sys/fs/cgroup")
SMALL_WORK = 100_000_000
"""Parameters × samples below which one thread is about as fast as several."""
LARGE_WORK = 1_000_000_000
"""From here on an update uses all cores even beside collectors: everything else waits for it anyway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The hardware and package versions of a run; system.json stores it."""

    cores: int
    """Cores this process may use, by affinity and CPU quota."""
    memory_bytes: int
    """Memory this process may use, by the container's limit."""
    memory_available_bytes: int
    cpu: str
    """The processor's model name."""
    platform: str
    """Operating system and architecture."""
    versions: dict[str, str | None]
    """Python and the packages that influence results; None if not installed."""
    gpus: tuple[Gpu, ...]
    """Accelerators in torch's order."""

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values for system.json."""
        return asdict(self)


def machine() -> Machine:
    """Describe this machine as it is now."""
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
        gpus=tuple(accelerators()),
    )


def usable_cores(cgroups: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Cores this process may use, by affinity and CPU quota; at least 1."""
    # Not every system has affinities.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _groups("cpu", cgroups, membership):
        v1 = [word for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us") for word in _words(folder / name)]
        quota = _words(folder / "cpu.max") or v1
        if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
            allowed = min(allowed, int(quota[0]) // int(quota[1]))
    return max(1, allowed)


def usable_memory(cgroups: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> tuple[int, int]:
    """Total and free bytes of memory that this process may use."""
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
    """Free bytes on a torch device; on the host, what this process may still use."""
    return free_device_memory(device) if is_accelerator(device) else usable_memory()[1]


def wait_without_spinning() -> None:
    """Make OpenMP's threads sleep while they wait; has an effect only before torch is loaded.

    By default they spin, which is ruinous where anything else needs a core: an update of 5 ms took 170 ms with
    2 spinning threads on 2 cores.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def torch_threads(n_params: int, batch_size: int, n_cores: int, n_taken: int = 0) -> int:
    """Threads for a forward or backward pass of this size; `n_taken` cores have other work.

    A function of its arguments alone, because the number of threads changes how sums round: the same seed must give
    the same run.
    """
    spins = os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE"
    work = n_params * batch_size
    if spins or work < SMALL_WORK:
        return 1
    return n_cores if work >= LARGE_WORK else max(n_cores - n_taken, 1)


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection: a pass over torch's takes 0.1 s."""
    ours = gc.get_freeze_count() == 0
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


def cache_folder() -> Path:
    """`$FLATOUT_CACHE`, or `flatout` in the user's cache folder."""
    given = os.environ.get("FLATOUT_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flatout"


def remembered(facts: dict[str, Any], measure: Callable[[], float]) -> float:
    """The value measured when these facts were first met on this machine, kept in the cache folder."""
    with suppress(TypeError, ValueError):
        return float(read_cache("choices", facts, "value"))
    value = measure()
    write_cache("choices", facts, {"facts": facts, "value": value})  # where it cannot be: measured anew
    return value


def read_cache(kind: str, facts: Any, key: str) -> Any:
    """What the cache folder holds under this key for these facts; None if there is nothing."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads(_cache_file(kind, facts).read_text())[key]
    return None


def write_cache(kind: str, facts: Any, content: dict[str, Any]) -> None:
    """Keep something for these facts in the cache folder, if that can be written."""
    path = _cache_file(kind, facts)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(content, indent=2, default=str))
        os.replace(fresh, path)


def _cache_file(kind: str, facts: Any) -> Path:
    text = json.dumps(facts, sort_keys=True, default=str)
    return cache_folder() / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _groups(controller: str, cgroups: Path, membership: Path) -> Iterator[Path]:
    """Folders of this process's control groups and their parents, whose limits all apply (cgroups v1 and v2)."""
    for line in _read(membership).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controller if controllers else cgroups
        own = root / group.lstrip("/")
        # Inside a container the path may be the host's; then only the root is there, and is the container's.
        yield from (folder for folder in (own, *own.parents) if folder == root or root in folder.parents)


def _bytes(folder: Path, *names: str) -> int | None:
    """The number in the first of the files that holds one."""
    return next((int(w[0]) for name in names if (w := _words(folder / name)) and w[0].isdigit()), None)


def _words(path: Path) -> list[str]:
    return _read(path).split()


def _read(path: Path) -> str:
    """The file's text; empty if it cannot be read."""
    with suppress(OSError):
        return path.read_text()
    return ""


def _cpu_model() -> str:
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    # Imported here: it takes 30 ms, and most callers of this module do not need it.
    from importlib.metadata import PackageNotFoundError, version

    with suppress(PackageNotFoundError):
        return version(package)
    return None
