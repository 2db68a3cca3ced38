from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import pytest

from flatout.runlog.samples import Figures, Sampler, read_samples
from tests.runlog.card import T4, install, refuse


def until(holds: Callable[[], object]) -> None:
    """Wait until it holds."""
    for _ in range(600):
        if holds():
            return
        time.sleep(0.02)
    pytest.fail("it never came")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def n_written(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def end(sampler: Sampler) -> None:
    """Close it and wait for its thread."""
    sampler.close()
    sampler._thread.join()


def sampled(path: Path, n: int, *, offset: float = 0.0, device: str = "cpu") -> Sampler:
    """A sampler that has added at least `n` samples, and is closed."""
    n_lines = n_written(path) + n + 2  # a header, and perhaps the end of a cut line
    sampler = Sampler(path, began=time.time(), offset=offset, device=device, hertz=50)
    until(lambda: n_written(path) >= n_lines)
    end(sampler)
    assert sampler.problem is None
    return sampler


def test_the_file_has_the_documented_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, T4)
    path = tmp_path / "samples.jsonl"
    sampled(path, 3, offset=7.5, device="cuda")
    header, *rows = lines(path)
    assert list(header) == ["began", "offset", "version"]
    assert (header["offset"], header["version"]) == (7.5, 1)
    for row in rows:
        assert list(row) == ["t", "cores", "memory", "run_memory", "run_cpu", "n_processes", "gpu"]
    assert set(rows[0]["gpu"]) == {
        *("utilization", "memory", "memory_total", "power", "energy"),
        *("sm_clock", "temperature", "throttled", "n_processes"),
    }
    assert all(a["t"] < b["t"] for a, b in pairwise(rows))


def test_times_count_from_when_the_run_began(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    sampler = Sampler(path, began=time.time() - 100, offset=0.0, device="cpu", hertz=50)
    until(lambda: n_written(path) >= 2)
    end(sampler)
    assert lines(path)[1]["t"] >= 100


def test_figures_without_a_gpu_are_those_of_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    sampler = sampled(path, 3)
    figures, samples = sampler.figures(), read_samples(path)
    assert samples.gpu == {}
    assert (figures.device_utilization, figures.device_energy_joules, figures.device_memory_bytes) == (
        None,
    ) * 3
    assert figures.run_memory_bytes == samples.run_memory.max()
    assert figures.memory_bytes == samples.memory.max()
    assert figures.cores_percent == pytest.approx(samples.cores.mean())


def test_figures_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, T4)
    figures = sampled(tmp_path / "samples.jsonl", 3, device="cuda").figures()
    assert figures.device_utilization == pytest.approx(0.63)
    assert figures.device_energy_joules == 27.0
    assert figures.device_memory_bytes == 3 << 30


def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "samples.jsonl"
    install(monkeypatch, T4)
    sampled(path, 3, device="cuda")
    with path.open("ab") as file:
        file.write(b'{"t": 0.4, "cores": [1')  # killed while it wrote
    install(monkeypatch, T4)
    figures = sampled(path, 3, offset=100.0, device="cuda").figures()
    samples = read_samples(path)
    assert len(samples.t) >= 6
    assert all(a < b for a, b in pairwise(samples.t))
    assert samples.t[-1] > 100
    assert len(samples.problems) == 1
    assert samples.gpu["energy"][-1] == figures.device_energy_joules == 54.0
    gaps = np.diff(samples.t, prepend=0.0)  # of the first part; the second is sampled every 0.02 s
    gaps[samples.t > 100] = 0.02
    assert figures.cores_percent == pytest.approx(np.average(samples.cores.mean(axis=1), weights=gaps))


def test_closing_twice_or_at_once_ends_the_thread(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path / "samples.jsonl", began=time.time(), offset=0.0, device="cpu")
    sampler.close()
    sampler.close()
    until(lambda: not sampler._thread.is_alive())
    assert sampler.problem is None
    assert sampler.figures() == Figures()


def test_nothing_is_written_after_the_close(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    sampled(path, 1)
    size = path.stat().st_size
    time.sleep(0.1)
    assert path.stat().st_size == size


def test_closing_waits_for_no_driver_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, T4)
    asked, answer = threading.Event(), threading.Event()

    def hang(handle: int) -> None:
        asked.set()
        answer.wait()

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", hang)
    sampler = Sampler(tmp_path / "samples.jsonl", began=time.time(), offset=0.0, device="cuda", hertz=50)
    until(asked.is_set)
    sampler.close()
    assert sampler._thread.is_alive()
    answer.set()
    end(sampler)


def test_samples_wait_for_a_folder_that_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.runlog.files.RETRY_SECONDS", 0.05)
    path = tmp_path / "gone" / "samples.jsonl"
    sampler = Sampler(path, began=time.time(), offset=0.0, device="cpu", hertz=50)
    until(lambda: sampler.file.problem)
    assert sampler.file.problem == "cannot write samples.jsonl: No such file or directory"
    path.parent.mkdir()
    until(lambda: n_written(path) >= 3)
    end(sampler)
    assert sampler.problem is None
    assert sampler.file.n_lost == 0
    assert lines(path)[0]["version"] == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_loses_samples_but_no_figures(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.symlink_to("/dev/full")
    sampler = Sampler(path, began=time.time(), offset=0.0, device="cpu", hertz=50)
    until(lambda: sampler.file.problem and sampler.figures().memory_bytes)
    assert sampler.file.problem == "cannot write samples.jsonl: No space left on device"
    end(sampler)
    assert sampler.file.n_lost >= 2
    assert sampler.problem is None


def test_the_longer_a_run_the_farther_apart_its_samples_are_written(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    seen: list[float | None] = []
    sampler = Sampler(path, began=time.time() - 1e6, offset=0.0, device="cpu", hertz=50)

    def has_sampled() -> bool:
        seen.append(sampler.figures().cores_percent)
        return len(set(seen)) > 3

    until(has_sampled)
    end(sampler)
    assert len(lines(path)) == 2  # a header and one sample: the next is due after 1e6 / 10,000 seconds


def test_a_card_that_is_lost_is_null_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: dict[str, Any] = {name: [value, refuse("GpuIsLost")] for name, value in T4.items()}
    lost["nvmlDeviceGetPowerUsage"] = [68_250, 68_250, refuse("GpuIsLost")]
    lost["nvmlDeviceGetTotalEnergyConsumption"] = [1000, 1000, 2000, refuse("GpuIsLost")]
    lost["nvmlDeviceGetComputeRunningProcesses"] = [[], refuse("GpuIsLost")]
    # The older names are asked only once the newer ones fail.
    for old in ("nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        lost[old] = refuse("GpuIsLost")
    log = install(monkeypatch, lost)
    path = tmp_path / "samples.jsonl"
    sampler = Sampler(path, began=time.time(), offset=0.0, device="cuda", hertz=50)
    until(lambda: n_written(path) >= 4)
    end(sampler)
    gpus = [row["gpu"] for row in lines(path)[1:]]
    assert gpus[0]["utilization"] == 0.63
    assert gpus[1:] == [None] * len(gpus[1:])
    assert sampler.problem == "the GPU does not answer any more"
    assert sampler.figures().device_energy_joules == 1.0
    assert log == ["init", "shutdown"]
