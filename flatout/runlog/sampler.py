"""Writes samples.jsonl while a run goes on, in a thread of its own that can never fail the run.

In: the run's file, clock and device. Out: a line some times a second, and figures for summary.json.
"""

from __future__ import annotations

import io
import json
import math
import os
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flatout.runlog.host import HostMeter
from flatout.runlog.nvml import GpuMeter, open_gpu
from flatout.runlog.samples import core_loads, gpu_of, number, read_rows

VERSION = 1
CLOSE_SECONDS = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """A run's samples in one number each; None for what was never told."""

    device_utilization: float | None = None
    """Mean share of time in which any kernel ran, 0 to 1."""

    device_energy_joules: float | None = None
    """Of the whole card since the run began."""

    device_memory_bytes: int | None = None
    """The most that was in use on the card."""

    memory_bytes: int | None = None
    """The most that was in use on the machine."""

    run_memory_bytes: int | None = None
    """The most the run's processes held together."""

    cores_percent: float | None = None
    """Mean load of the machine's cores."""


@dataclass(slots=True)
class _Tally:
    """Figures of the sample lines so far."""

    sums: dict[str, tuple[int, float]] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> None:
        gpu = gpu_of(row)
        for load in core_loads(row):
            self._sum("cores", load)
        self._sum("utilization", number(gpu.get("utilization")))
        for name, value in (
            ("device_memory", gpu.get("memory")),
            ("energy", gpu.get("energy")),
            ("memory", row.get("memory")),
            ("run_memory", row.get("run_memory")),
        ):
            if math.isfinite(it := number(value)):
                self.most[name] = max(it, self.most.get(name, it))

    def figures(self) -> Figures:
        return Figures(
            device_utilization=self._mean("utilization"),
            device_energy_joules=self.most.get("energy"),
            device_memory_bytes=self._bytes("device_memory"),
            memory_bytes=self._bytes("memory"),
            run_memory_bytes=self._bytes("run_memory"),
            cores_percent=self._mean("cores"),
        )

    def _sum(self, name: str, value: float) -> None:
        if math.isfinite(value):
            n, total = self.sums.get(name, (0, 0.0))
            self.sums[name] = n + 1, total + value

    def _mean(self, name: str) -> float | None:
        n, total = self.sums.get(name, (0, 0.0))
        return total / n if n else None

    def _bytes(self, name: str) -> int | None:
        return int(self.most[name]) if name in self.most else None


class Sampler:
    """Samples from its creation until `close`; `began` is in unix seconds, `offset` what the run had before."""

    def __init__(self, path: Path, *, began: float, offset: float, device: str, hertz: float = 5) -> None:
        self._path, self._period, self._device = path, 1 / hertz, device
        self._header = {"began": began, "offset": offset, "version": VERSION}
        # Anchored once: a clock that is set while the run goes on moves no sample.
        self._zero = time.perf_counter() - (time.time() - began)
        self._tally = _Tally()
        self._joules_before = 0.0
        self._figures = Figures()
        self._ending = threading.Event()
        self.problem: str | None = None
        """Why sampling stopped early, or why a part of the samples is null, in one line."""
        self.gpu_reason = ""
        """Which GPU is sampled, or why none is; empty until that is known."""
        self._thread = threading.Thread(target=self._run, name="flatout-sampler", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self.problem = f"nothing is sampled: {error}"

    def figures(self) -> Figures:
        """The figures so far, what earlier parts of a resumed run wrote included; cheap, from any thread."""
        return self._figures

    def close(self) -> None:
        """End sampling; soon, even when the driver or the disk hangs."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        gpu = None
        try:
            gpu, self.gpu_reason = open_gpu(self._device)
            self._take_up()
            with self._path.open("ab+", buffering=0) as file:
                self._begin(file)
                self._sample(file, HostMeter(), gpu)
        except OSError as error:
            self.problem = f"sampling stopped: {self._path.name}: {error.strerror or error}"
        except Exception as error:  # whatever it is, a run is worth more than its samples
            self.problem = f"sampling stopped: {type(error).__name__}: {error}"
        finally:
            if gpu is not None:
                gpu.close()

    def _take_up(self) -> None:
        """Count what the run wrote before it was resumed, up to the checkpoint it was resumed from."""
        if self._header["offset"] <= 0 or not self._path.exists():
            return
        for row in read_rows(self._path)[0]:
            if row["t"] <= self._header["offset"]:
                self._tally.add(row)
        self._joules_before = self._tally.most.get("energy", 0.0)
        self._figures = self._tally.figures()

    def _begin(self, file: io.FileIO) -> None:
        # A killed run may have left half a line.
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            file.write(b"\n")
        file.write(_line(self._header))

    def _sample(self, file: io.FileIO, host: HostMeter, gpu: GpuMeter | None) -> None:
        while not self._ending.wait(self._period):
            row = self._row(host, gpu)
            file.write(_line(row))
            self._count(row)

    def _row(self, host: HostMeter, gpu: GpuMeter | None) -> dict[str, Any]:
        now = host.read()
        card = gpu.read() if gpu is not None else None
        if gpu is not None and card is None:
            self.problem = "the GPU does not answer any more"
        return {
            "t": round(time.perf_counter() - self._zero, 3),
            **asdict(now),
            "run_cpu": None if now.run_cpu is None else round(now.run_cpu, 1),
            "gpu": None if card is None else asdict(card),
        }

    def _count(self, row: dict[str, Any]) -> None:
        if (gpu := row["gpu"]) is not None and gpu["energy"] is not None:
            row = {**row, "gpu": {**gpu, "energy": self._joules_before + gpu["energy"]}}
        self._tally.add(row)
        self._figures = self._tally.figures()


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"
