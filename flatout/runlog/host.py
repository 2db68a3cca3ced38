"""What the machine and the run's processes do, as the operating system tells it.

Out: a HostSample at each read. Loads are over the time since the read before.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import psutil

TREE_SECONDS = 1.0
"""How long a list of the run's processes is good for: making it looks at every process of the machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSample:
    """One reading of the machine and of the run on it."""

    cores: list[float]
    """Percent of each of the machine's cores in use, by anyone."""

    memory: int
    """Bytes in use on the machine, by anyone."""

    run_memory: int
    """Resident bytes of the run's processes together; what they share counts for each."""

    run_cpu: float | None
    """Percent of one core the run's processes used together; None when no time has passed."""

    n_processes: int
    """Processes of the run that are alive."""


class HostMeter:
    """Watches the machine, and the process `pid` (this one unless given) with all below it.

    Made and read in the same thread: psutil keeps the last loads of the cores for each thread.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._root = psutil.Process(pid)
        self._processes: list[psutil.Process] = []
        self._walked = float("-inf")
        self._cpu_seconds: dict[int, float] = {}
        self._then = perf_counter()
        self.read()

    def read(self) -> HostSample:
        """The machine and the run now; a process that ends meanwhile is left out."""
        now = perf_counter()
        self._list_processes(now)
        memory = psutil.virtual_memory()
        run_memory, seconds = 0, {}
        for process in self._processes:
            try:
                seconds[process.pid] = sum(process.cpu_times()[:2])
                run_memory += process.memory_info().rss
            except psutil.Error:
                seconds.pop(process.pid, None)
        return HostSample(
            cores=psutil.cpu_percent(percpu=True),
            memory=memory.total - memory.available,
            run_memory=run_memory,
            run_cpu=self._load(seconds, now),
            n_processes=len(seconds),
        )

    def _list_processes(self, now: float) -> None:
        if now - self._walked < TREE_SECONDS:
            return
        try:
            self._processes = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            self._processes = []
        self._walked = now

    def _load(self, seconds: dict[int, float], now: float) -> float | None:
        """Percent of one core since the last read, over the processes that were there both times."""
        before, elapsed = self._cpu_seconds, now - self._then
        used = sum(spent - before[pid] for pid, spent in seconds.items() if pid in before)
        self._cpu_seconds, self._then = seconds, now
        return 100 * max(0.0, used) / elapsed if elapsed > 0 else None
