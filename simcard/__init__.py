"""A simulated card: the torch device `sim`, for tests and benchmarks of code that is meant for a GPU. See README.md."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.utils import backend_registration

from .cards import CARDS, Card

__all__ = [
    "CARDS",
    "Card",
    "Counters",
    "SyncLine",
    "counters",
    "fail_allocation",
    "install",
    "mode",
    "queued",
    "reset",
    "set_memory_limit",
    "sync_lines",
]

_extension: types.ModuleType | None = None


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What a device has done since the last `reset()`."""

    launches: int
    """kernels, and replays of graphs as one each"""
    replays: int
    allocations: int
    h2d_copies: int
    h2d_bytes: int
    d2h_copies: int
    d2h_bytes: int
    d2d_copies: int
    d2d_bytes: int
    busy_seconds: float
    """timed mode: seconds in which kernels occupied the card"""
    copy_seconds: float
    """timed mode: seconds in which copies occupied the link"""
    sync_kinds: dict[str, int] = field(default_factory=dict)
    """how often the host waited, by what made it wait"""

    @property
    def syncs(self) -> int:
        """How often the host waited."""
        return sum(self.sync_kinds.values())


@dataclass(frozen=True)
class SyncLine:
    """One wait of the host."""

    kind: str
    line: str
    """file:line of the innermost Python code that is neither torch's nor the card's"""


def install(
    mode: str = "exact", card: str = "rtx4070", n_devices: int = 2, memory_bytes: int | None = None
) -> None:
    """Makes `sim` a device of torch in this process, for good. A second call changes the mode and the memory limit."""
    global _extension
    memory = CARDS[card].memory_bytes if memory_bytes is None else memory_bytes
    if _extension is None:
        from . import build, parameters, torch_module

        extension = build.load()
        backend_registration.rename_privateuse1_backend("sim")
        extension.install(n_devices, memory)
        torch_module.extension = extension
        torch._register_device_module("sim", torch_module)
        backend_registration.generate_methods_for_privateuse1_backend()
        parameters.keep_when_modules_move()
        _extension = extension
    elif n_devices != _extension.device_count():
        raise ValueError(f"the card has {_extension.device_count()} devices in this process, not {n_devices}")
    for device in range(n_devices):
        _extension.set_memory_limit(device, memory)
    _set_mode(mode, card)


def mode(mode: str, card: str = "rtx4070") -> None:
    """Changes between `exact` and `timed`; work that is queued is finished first."""
    _set_mode(mode, card)


def counters(device: int = 0) -> Counters:
    """The counters of a device."""
    return Counters(**_installed().counters(device))


def reset() -> None:
    """Sets all counters of all devices to zero."""
    _installed().reset()


def queued(device: int = 0) -> int:
    """Exact mode: how many entries wait in the device's streams."""
    return int(_installed().queued(device))


def fail_allocation(nth: int, device: int = 0) -> None:
    """The n-th allocation from now on fails once, as if memory had run out; 0 takes it back."""
    _installed().fail_allocation(device, nth)


def set_memory_limit(memory_bytes: int, device: int = 0) -> None:
    """How much memory the device has."""
    _installed().set_memory_limit(device, memory_bytes)


@contextmanager
def sync_lines() -> Iterator[list[SyncLine]]:
    """Within: notes the line of each wait of the host; the list is filled at the end."""
    extension = _installed()
    extension.take_lines()
    extension.record_lines(True)
    found: list[SyncLine] = []
    try:
        yield found
    finally:
        extension.record_lines(False)
        found += [SyncLine(*entry) for entry in extension.take_lines()]


def _installed() -> types.ModuleType:
    if _extension is None:
        raise RuntimeError("simcard.install() comes first")
    return _extension


def _set_mode(mode: str, card: str) -> None:
    if mode not in ("exact", "timed"):
        raise ValueError(f"mode is 'exact' or 'timed', not {mode!r}")
    from . import torch_module

    _installed().set_mode(mode == "timed", CARDS[card].spec())
    torch_module.capability = CARDS[card].capability if mode == "timed" else (0, 0)
