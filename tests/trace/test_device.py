"""The device's lane, with a device whose time is told."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from flatout.trace.device import DeviceClock


class Stream:
    """A device that works on what it is given, one thing after the other, when time passes."""

    def __init__(self) -> None:
        self.given = self.now = 0.0
        self.n_waits = 0

    def event(self) -> Mark:
        return Mark(self)


class Mark:
    def __init__(self, stream: Stream) -> None:
        self._stream, self.at = stream, -1.0

    def record(self) -> None:
        self.at = self._stream.given

    def query(self) -> bool:
        return self._stream.now >= self.at

    def synchronize(self) -> None:
        self._stream.n_waits += 1

    def elapsed_time(self, end: Mark, /) -> float:
        return (end.at - self.at) * 1e3


def test_phases_are_told_when_the_device_has_finished_them() -> None:
    stream = Stream()
    clock = DeviceClock(stream.event)
    for phase, seconds in (("advantage", 0.5), ("update", 2.0), ("idle", 1.0), ("update", 1.0)):
        clock.enter(phase)
        stream.given += seconds
    clock.enter("idle")
    stream.now = 2.6
    clock.cut()
    assert clock.read() == pytest.approx({"idle": 0.0, "advantage": 0.5, "update": 2.0})
    stream.now = 99.0
    clock.cut()
    assert clock.read() == pytest.approx({"idle": 1.0, "advantage": 0.5, "update": 3.0})
    ends = [(span.start, span.end) for span in clock.spans]
    assert all(a[1] == b[0] for a, b in pairwise(ends))
    assert stream.n_waits == 1  # only at the very beginning


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_device_tells_its_phases() -> None:
    clock = DeviceClock(lambda: torch.cuda.Event(enable_timing=True))
    clock.enter("update")
    x = torch.randn(2000, 2000, device="cuda")
    for _ in range(50):
        x = x @ x / 2000
    clock.enter("idle")
    torch.cuda.synchronize()
    clock.cut()
    assert clock.read()["update"] > 0
