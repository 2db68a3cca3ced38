"""Readings of the machine, the run's processes and an NVIDIA GPU: the only file that knows NVML."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from types import ModuleType
from typing import Any

import psutil

TREE_SECONDS = 1.0
"""The list of the run's processes is renewed this often: making it looks at every process of the machine."""


MOST_SAMPLES = 1000
"""Samples of a card that are kept for a reader who does not come."""
_THROTTLED = {
    0x002: "clocks set by the user",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "heat",
    0x040: "heat (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}
_IDLE = 0x001


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSample:
    """One reading of the machine and of the run's processes."""

    cores: list[float]
    """Load of each core in percent."""
    memory: int
    """Bytes in use on the machine."""
    run_memory: int
    """Resident bytes of the run's processes; shared memory counts once per process."""
    run_cpu: float | None
    """CPU of the run's processes in percent of one core; None when no time has passed."""
    n_processes: int
    """Processes of the run."""


class HostMeter:
    """Reads the machine, and the process `pid` (this one unless given) with its descendants.

    Loads are over the time since the last read. Make and read it in one thread: psutil keeps the last loads per
    thread.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._root = psutil.Process(pid)
        self._processes: list[psutil.Process] = []
        self._walked = float("-inf")
        self._cpu_seconds: dict[int, float] = {}
        self._then = perf_counter()
        self.read()

    def read(self) -> HostSample:
        """The machine and the run now, without processes that end meanwhile."""
        now = perf_counter()
        if now - self._walked >= TREE_SECONDS:
            self._walked, self._processes = now, []
            with suppress(psutil.Error):
                self._processes = [self._root, *self._root.children(recursive=True)]
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

    def _load(self, seconds: dict[int, float], now: float) -> float | None:
        """Percent of one core since the last read, over processes present both times."""
        before, elapsed = self._cpu_seconds, now - self._then
        used = sum(spent - before[pid] for pid, spent in seconds.items() if pid in before)
        self._cpu_seconds, self._then = seconds, now
        return 100 * max(0.0, used) / elapsed if elapsed > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """One reading of a GPU; None for what the card does not report."""

    utilization: float | None
    """Share of the driver's last period (1/6 to 1 s) in which any kernel ran, 0 to 1; not occupancy."""
    memory: int | None
    """Bytes in use, by all processes."""
    memory_total: int | None
    power: float | None
    """Watts."""
    energy: float | None
    """Joules since the meter was opened: the card's counter, or power integrated over time."""
    sm_clock: int | None
    """MHz of the multiprocessors."""
    temperature: int | None
    """Degrees Celsius."""
    throttled: list[str] | None
    """Why the clocks are held down, in plain words; empty if they are not."""
    n_processes: int | None
    """Compute processes on the card that the driver shows."""


class GpuMeter:
    """One open card."""

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._refusals = (nvml.NVMLError, nvml.NVMLLibraryMismatchError)
        self._counted_before = self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
        self._joules = 0.0
        self._last_power: tuple[float, float] | None = None
        self._energy(self._power())

    def read(self) -> GpuSample | None:
        """One reading; None when the card answers nothing at all."""
        nvml = self._nvml
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
        processes = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses)
        power, sensor = self._power(), nvml.NVML_TEMPERATURE_GPU
        # Drivers before 2025 have only the older call for temperature, those before 535 for throttling.
        temperature = self._ask(nvml.nvmlDeviceGetTemperatureV, sensor)
        if temperature is None:
            temperature = self._ask(nvml.nvmlDeviceGetTemperature, sensor)
        bits = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons)
        if bits is None:
            bits = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        sample = GpuSample(
            utilization=None if rates is None else rates.gpu / 100,
            memory=None if memory is None else memory.used,
            memory_total=None if memory is None else memory.total,
            power=power,
            energy=self._energy(power),
            sm_clock=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            temperature=temperature,
            throttled=None if bits is None else throttle_words(bits),
            n_processes=None if processes is None else len(processes),
        )
        known = (getattr(sample, name) for name in GpuSample.__slots__ if name != "energy")
        return None if all(value is None for value in known) else sample

    def close(self) -> None:
        """Release the driver."""
        with suppress(*self._refusals):
            self._nvml.nvmlShutdown()

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        try:
            return question(self._handle, *args)
        except self._refusals:
            return None

    def _power(self) -> float | None:
        milliwatts = self._ask(self._nvml.nvmlDeviceGetPowerUsage)
        return None if milliwatts is None else milliwatts / 1000

    def _energy(self, power: float | None) -> float | None:
        """Joules since opening; without a counter the power is integrated."""
        if self._counted_before is not None:
            counted = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption)
            return None if counted is None else (counted - self._counted_before) / 1000
        if power is None:
            return None
        now = perf_counter()
        then, power_then = self._last_power or (now, power)
        self._joules += (power + power_then) / 2 * (now - then)
        self._last_power = now, power
        return self._joules


def throttle_words(bits: int) -> list[str]:
    """The reasons in NVML's mask of clock event reasons, without idleness."""
    unknown = bits & ~_IDLE & ~sum(_THROTTLED)
    words = [word for bit, word in _THROTTLED.items() if bits & bit]
    return [*words, f"unknown reason {unknown:#x}"] if unknown else words


def open_gpu(device: str) -> tuple[GpuMeter | None, str]:
    """A meter of the GPU that `cuda`, `cuda:N` or a UUID (`GPU-…`) names, or None; and which or why not."""
    if not device.startswith(("cuda", "GPU-", "MIG-")):
        return None, f"{device} is not an NVIDIA GPU"
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"no NVIDIA driver answers: {error}"
    try:
        handle, reason = _find(pynvml, device)
        if handle is not None:
            return GpuMeter(pynvml, handle), reason
    except pynvml.NVMLError as error:
        reason = f"the driver does not open {device}: {error}"
    with suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    return None, reason


def open_all_gpus() -> tuple[dict[str, GpuMeter], str]:
    """A meter for every card of the driver by number and name, in its order; and why there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {}, f"no NVIDIA driver answers: {error}"
    meters: dict[str, GpuMeter] = {}
    with suppress(pynvml.NVMLError):
        for index, handle in enumerate(_cards(pynvml)):
            pynvml.nvmlInit()  # each meter ends its own
            meters[f"{index} {pynvml.nvmlDeviceGetName(handle)}"] = GpuMeter(pynvml, handle)
    with suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    return meters, "" if meters else "the driver has no card"


class GpuWatch:
    """Reads all cards again and again in a thread that never fails its program."""

    def __init__(self, hertz: float = 5.0) -> None:
        self._meters, self.reason = open_all_gpus()
        """Why there is no card; empty if there is one."""
        self._period = 1 / hertz
        self._lock = threading.Lock()
        self._samples: dict[str, list[GpuSample]] = {name: [] for name in self._meters}
        self._ending = threading.Event()
        self._read()
        if self._meters:
            threading.Thread(target=self._run, name="flatout-cards", daemon=True).start()

    def newest(self) -> dict[str, GpuSample]:
        """The newest sample of each card that answers, with its mean utilisation since the last call."""
        with self._lock:
            seen = {name: samples for name, samples in self._samples.items() if samples}
            self._samples = {name: samples[-1:] for name, samples in self._samples.items()}
        return {name: _averaged(samples) for name, samples in seen.items()}

    def close(self) -> None:
        """Stop reading."""
        self._ending.set()

    def _run(self) -> None:
        while not self._ending.wait(self._period):
            self._read()
        for meter in self._meters.values():
            meter.close()

    def _read(self) -> None:
        read = {name: meter.read() for name, meter in self._meters.items()}
        with self._lock:
            for name, sample in read.items():
                kept = self._samples[name][-MOST_SAMPLES:]
                self._samples[name] = [] if sample is None else [*kept, sample]


def _averaged(samples: list[GpuSample]) -> GpuSample:
    known = [s.utilization for s in samples[1:] or samples if s.utilization is not None]
    return replace(samples[-1], utilization=sum(known) / len(known) if known else None)


def _find(nvml: ModuleType, device: str) -> tuple[Any, str]:
    if not device.startswith("cuda"):
        return _by_uuid(nvml, device)
    index = int(device.partition(":")[2] or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        name = names[index] if index < len(names) else ""
        if name.startswith(("GPU-", "MIG-")):
            return _by_uuid(nvml, name)
        if not name.isdecimal():
            return None, f"CUDA_VISIBLE_DEVICES={visible!r} has no device {index}"
        index = int(name)
    return _by_index(nvml, index)


def _by_index(nvml: ModuleType, index: int) -> tuple[Any, str]:
    cards = _cards(nvml)
    if index >= len(cards):
        return None, f"the driver has {len(cards)} GPUs, none with index {index}"
    # CUDA orders cards by speed unless told otherwise, NVML by bus: the same only for equal cards.
    models = {nvml.nvmlDeviceGetName(card) for card in cards}
    if len(models) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return None, f"{len(cards)} different GPUs and an unknown order; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    return cards[index], f"GPU {index} of the driver"


def _by_uuid(nvml: ModuleType, uuid: str) -> tuple[Any, str]:
    if uuid.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(uuid), uuid
    # Like CUDA, accept the beginning of a UUID if only one card has it.
    found = [card for card in _cards(nvml) if nvml.nvmlDeviceGetUUID(card).startswith(uuid)]
    if len(found) != 1:
        return None, f"{len(found)} GPUs have the UUID {uuid}"
    return found[0], uuid


def _cards(nvml: ModuleType) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
