"""A recorded card behind the real `pynvml` module: each function of it that is used answers from a record.

Names, constants and errors stay those of the installed package, so that a call it does not have fails here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-89aa0000-0000-4106-c12f-20bd9faed9f6")

T4 = {
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=63, memory=20),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3 << 30, total=15 << 30, free=12 << 30),
    "nvmlDeviceGetPowerUsage": 68_250,
    "nvmlDeviceGetTotalEnergyConsumption": [1_000_000, 1_000_000, 1_013_500, 1_027_000],
    "nvmlDeviceGetClockInfo": 1245,
    "nvmlDeviceGetTemperatureV": 71,
    "nvmlDeviceGetTemperature": 71,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
    "nvmlDeviceGetComputeRunningProcesses": [[SimpleNamespace(pid=1), SimpleNamespace(pid=2)]],
}
"""What a T4 under load told; a list is told one by one, its last for ever."""


def refuse(name: str) -> Exception:
    """The error of that name as the package raises it: `NotSupported`, `GpuIsLost`, …"""
    error: Exception = getattr(pynvml, f"NVMLError_{name}")()
    return error


def install(
    monkeypatch: pytest.MonkeyPatch, *cards: dict[str, Any], models: tuple[str, ...] = ()
) -> list[str]:
    """Put these cards on the bus; returns the log of inits and shutdowns."""
    log: list[str] = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    answers = {
        "nvmlInit": lambda: log.append("init"),
        "nvmlShutdown": lambda: log.append("shutdown"),
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: UUIDS[handle],
        "nvmlDeviceGetName": lambda handle: models[handle] if models else "Tesla T4",
        **{name: _told(name, [dict(card) for card in cards]) for name in T4},
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return log


def _told(name: str, cards: list[dict[str, Any]]) -> Callable[..., Any]:
    left = [list(card[name]) if isinstance(card[name], list) else [card[name]] for card in cards]

    def tell(handle: int, *_: Any) -> Any:
        answer = left[handle].pop(0) if len(left[handle]) > 1 else left[handle][0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return tell
