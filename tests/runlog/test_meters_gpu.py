from __future__ import annotations

import time

import pytest

from flatout.runlog.meters import GpuMeter, GpuSample, open_gpu, throttle_words
from tests.runlog.card import T4, UUIDS, install, refuse

MEMORY = "nvmlDeviceGetMemoryInfo"


def opened(device: str = "cuda") -> GpuMeter:
    meter, reason = open_gpu(device)
    assert meter is not None, reason
    return meter


def read(device: str = "cuda") -> GpuSample:
    sample = opened(device).read()
    assert sample is not None
    return sample


def test_a_card_is_read_in_plain_units(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, T4)
    assert read() == GpuSample(
        utilization=0.63,
        memory=3 << 30,
        memory_total=15 << 30,
        power=68.25,
        energy=13.5,
        sm_clock=1245,
        temperature=71,
        throttled=["power cap"],
        n_processes=2,
    )


def test_energy_counts_from_the_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, T4)
    meter = opened()
    assert [sample.energy for sample in (meter.read(), meter.read()) if sample] == [13.5, 27.0]


def test_without_a_counter_power_is_integrated(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, T4 | {"nvmlDeviceGetTotalEnergyConsumption": refuse("NotSupported")})
    before = time.perf_counter()
    meter = opened()
    opened_at = time.perf_counter()
    time.sleep(0.05)
    asked = time.perf_counter()
    sample = meter.read()
    after = time.perf_counter()
    assert sample is not None
    assert sample.energy is not None
    assert 68.25 * (asked - opened_at) <= sample.energy <= 68.25 * (after - before)


def test_a_card_without_counter_and_power_has_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    no = refuse("NotSupported")
    install(
        monkeypatch,
        T4 | {"nvmlDeviceGetTotalEnergyConsumption": no, "nvmlDeviceGetPowerUsage": refuse("NotSupported")},
    )
    sample = read()
    assert sample.energy is None
    assert sample.power is None
    assert sample.utilization == 0.63


@pytest.mark.parametrize(
    ("question", "fields"),
    [
        ("nvmlDeviceGetUtilizationRates", ["utilization"]),
        (MEMORY, ["memory", "memory_total"]),
        ("nvmlDeviceGetPowerUsage", ["power"]),
        ("nvmlDeviceGetClockInfo", ["sm_clock"]),
        ("nvmlDeviceGetComputeRunningProcesses", ["n_processes"]),
    ],
)
def test_what_a_card_does_not_support_is_none_and_nothing_else(
    question: str, fields: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, T4 | {question: refuse("NotSupported")})
    sample = read()
    assert [name for name in GpuSample.__slots__ if getattr(sample, name) is None] == sorted(
        fields, key=GpuSample.__slots__.index
    )


def test_old_drivers_are_asked_by_the_old_names(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {
        "nvmlDeviceGetCurrentClocksEventReasons": refuse("FunctionNotFound"),
        "nvmlDeviceGetTemperatureV": refuse("FunctionNotFound"),
    }
    install(monkeypatch, T4 | missing)
    sample = read()
    assert sample.throttled == ["power cap"]
    assert sample.temperature == 71


def test_a_lost_gpu_gives_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {name: refuse("GpuIsLost") for name in T4})
    assert opened().read() is None


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x0, []),
        (0x1, []),
        (0x4, ["power cap"]),
        (0x8 | 0x40, ["hardware slowdown", "heat (hardware)"]),
        (0x1 | 0x20, ["heat"]),
        (0x4 | 0x10000, ["power cap", "unknown reason 0x10000"]),
    ],
)
def test_throttling_is_described_in_words(bits: int, words: list[str]) -> None:
    assert throttle_words(bits) == words


@pytest.mark.parametrize("error", ["LibraryNotFound", "DriverNotLoaded"])
def test_without_a_driver_there_is_no_meter_and_a_reason(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, T4)

    def fail() -> None:
        raise refuse(error)

    monkeypatch.setattr("pynvml.nvmlInit", fail)
    meter, reason = open_gpu("cuda:0")
    assert meter is None
    assert reason == f"no NVIDIA driver answers: {refuse(error)}"


def test_a_cpu_is_no_gpu() -> None:
    assert open_gpu("cpu") == (None, "cpu is not an NVIDIA GPU")


SMALL, LARGE = T4, T4 | {"nvmlDeviceGetClockInfo": 2610}


@pytest.mark.parametrize(
    ("device", "visible", "clock"),
    [
        ("cuda", None, 1245),
        ("cuda:1", None, 2610),
        ("cuda:0", "1", 2610),
        ("cuda:1", "1, 0", 1245),
        ("cuda:0", UUIDS[1], 2610),
        ("cuda:1", f"{UUIDS[1]},GPU-8932", 1245),
        (UUIDS[1], None, 2610),
        (UUIDS[1], "0", 2610),
    ],
)
def test_the_card_is_the_one_cuda_means(
    device: str, visible: str | None, clock: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, SMALL, LARGE)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert read(device).sm_clock == clock


@pytest.mark.parametrize(
    ("device", "visible", "reason"),
    [
        ("cuda:2", None, "the driver has 2 GPUs, none with index 2"),
        ("cuda:1", "0", "CUDA_VISIBLE_DEVICES='0' has no device 1"),
        ("cuda:0", "", "CUDA_VISIBLE_DEVICES='' has no device 0"),
        ("cuda:0", "-1", "CUDA_VISIBLE_DEVICES='-1' has no device 0"),
        ("cuda:0", "GPU-89", "2 GPUs have the UUID GPU-89"),
        ("GPU-nowhere", None, "0 GPUs have the UUID GPU-nowhere"),
    ],
)
def test_a_missing_gpu_gives_a_reason_and_the_driver_is_released(
    device: str, visible: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = install(monkeypatch, SMALL, LARGE)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert open_gpu(device) == (None, reason)
    assert log == ["init", "shutdown"]


def test_with_different_gpus_none_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, SMALL, LARGE, models=("Tesla T4", "NVIDIA GeForce RTX 4070"))
    meter, reason = open_gpu("cuda:0")
    assert meter is None
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in reason
    assert read(UUIDS[1]).sm_clock == 2610
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert read("cuda:1").sm_clock == 2610
