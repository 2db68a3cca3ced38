"""Lanes: phases add up to wall time, spans follow each other, and a file of them stays small."""

from __future__ import annotations

import json
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import flatout
from flatout import timing
from flatout.runlog.recorder import SpanFile
from flatout.timing import DeviceClock, Phase, PhaseClock, Span
from tests.executors.slow import AsyncCartPole, Counter, Script


class Time:
    """A clock that advances on command."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(timing, "perf_counter", clock)
    return clock


def stretch(clock: PhaseClock, time: Time, n_steps: int, seconds: float = 0.001) -> None:
    for _ in range(n_steps):
        for phase in (Phase.ACT, Phase.ENV):
            clock.enter(phase)
            time.now += seconds
    clock.enter(Phase.SLOT)
    clock.cut()


def assert_whole(spans: list[Span], began: float, ended: float) -> None:
    assert spans[0].start == began
    assert spans[-1].end == pytest.approx(ended)
    for before, after in pairwise(spans):
        assert after.start == before.end
    for span in spans:
        assert sum(span.phases.values()) == pytest.approx(span.end - span.start)


def test_spans_follow_each_other_and_sum_to_the_phases(time: Time) -> None:
    clock = PhaseClock()
    clock.traced = True
    clock.restart({}, Phase.SLOT)
    for _ in range(20):
        stretch(clock, time, 100)
        time.now += 0.05
    spans = list(clock.spans)
    assert_whole(spans, 100.0, spans[-1].end)
    assert spans[-1].end > time.now - timing.FOLD_SECONDS - 0.25
    kinds = {len(span.phases) > 1 for span in spans}
    assert kinds == {True, False}  # some in detail, some folded
    assert clock.read() == pytest.approx({"slot": 1.0, "act": 2.0, "env": 2.0})


def test_a_week_of_spans_fits_a_small_file(time: Time) -> None:
    clock = PhaseClock()
    clock.traced = True
    clock.restart({})
    for _ in range(7 * 24 * 60):
        stretch(clock, time, 100, seconds=0.3)
    assert clock.n_spans < 60_000
    fine = [span.start for span in clock.spans if len(span.phases) == 1]
    assert max(fine) > time.now / 2  # and detail is not all from the beginning


def test_without_a_reader_no_spans_are_kept(time: Time) -> None:
    clock = PhaseClock()
    stretch(clock, time, 1000)
    assert not clock.spans
    assert clock.read()["act"] == pytest.approx(1.0)


def test_spans_are_written_and_read_back_and_a_cut_file_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_text('{"lane": "lea')  # a killed run
    clock = PhaseClock("collector 0")
    clock.traced = True
    clock.restart({})
    file = SpanFile(path, lambda: [clock], offset=3.0)
    clock.enter(Phase.ACT)
    clock.enter(Phase.ENV)
    file.close()
    _, header, first, second = path.read_text().splitlines()
    assert json.loads(header)["offset"] == 3.0
    assert json.loads(first)["phases"].keys() == {"start"}
    span = json.loads(second)
    assert (span["lane"], span["clock"]) == ("collector 0", "host")
    assert span["phases"]["act"] == pytest.approx(span["end"] - span["start"], abs=2e-6)


def test_lost_spans_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PhaseClock()
    clock.traced = True
    clock.restart({})
    clock.spans = deque(maxlen=10)
    for _ in range(25):
        clock.enter(Phase.ACT)
    SpanFile(tmp_path / "s", lambda: [clock]).close()
    assert '{"dropped": 15, "lane": "learner"}' in (tmp_path / "s").read_text()


class Stream:
    """A device that works through its queue as time passes."""

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


def test_device_phases_are_reported_once_the_device_has_finished_them() -> None:
    stream = Stream()
    clock = DeviceClock(stream.event)
    for phase, seconds in (
        (Phase.ADVANTAGE, 0.5),
        (Phase.UPDATE, 2.0),
        (Phase.IDLE, 1.0),
        (Phase.UPDATE, 1.0),
    ):
        clock.enter(phase)
        stream.given += seconds
    clock.enter(Phase.IDLE)
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
def test_a_real_device_reports_its_phases() -> None:
    clock = DeviceClock(lambda: torch.cuda.Event(enable_timing=True))
    clock.enter(Phase.UPDATE)
    x = torch.randn(2000, 2000, device="cuda")
    for _ in range(50):
        x = x @ x / 2000
    clock.enter(Phase.IDLE)
    torch.cuda.synchronize()
    clock.cut()
    assert clock.read()["update"] > 0


SMALL: dict[str, Any] = {"preset": "auto", "n_envs": 8, "n_steps": 32, "batch_size": 64, "n_epochs": 2}
WAYS: dict[str, dict[str, Any]] = {
    "serial": {"executor": "serial", "overlap": "off"},
    "serial beside learning": {"executor": "serial", "overlap": "on"},
    "children": {"overlap": "off"},
    "children beside learning": {"overlap": "on"},
    "threads": {"executor": "thread", "overlap": "off"},
    "threads beside learning": {"executor": "thread", "overlap": "on"},
    "async": {"overlap": "off"},
    "async beside learning": {"overlap": "on"},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_phases_of_every_lane_add_up_to_its_wall_time(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env: Any = "CartPole-v1"
    if way.startswith("threads"):
        env = lambda: Counter(Script(seconds=(0.0005, 0.002)))  # noqa: E731
    if way.startswith("async"):
        env = AsyncCartPole
    if way.startswith("children"):
        monkeypatch.setattr("flatout.perf.decide.START_SECONDS", -1e9)
    agent = flatout.PPO(env, **SMALL, **WAYS[way], runs_dir=tmp_path, run_name="run", seed=1)
    agent.learn(8 * 32 * 12)
    lanes: dict[str, list[dict[str, Any]]] = {}
    for line in (tmp_path / "run" / "spans.jsonl").read_text().splitlines()[1:]:
        span = json.loads(line)
        lanes.setdefault(span["lane"], []).append(span)
    wall = agent.summary["wall_seconds"]
    n_collectors = agent.summary["executor"]["collectors"]
    assert lanes.keys() == {"learner", *(f"collector {i}" for i in range(n_collectors))}
    assert lanes.keys() == agent.summary["lanes"].keys()
    for name, spans in lanes.items():
        spans.sort(key=lambda span: span["start"])
        for before, after in pairwise(spans):
            assert after["start"] == pytest.approx(before["end"], abs=2e-6)
        told = sum(sum(span["phases"].values()) for span in spans)
        assert told == pytest.approx(spans[-1]["end"] - spans[0]["start"], rel=0.02)
        assert sum(agent.summary["lanes"][name].values()) == pytest.approx(wall, rel=0.02, abs=0.1)
    assert sum(agent.summary["phases"].values()) == pytest.approx(wall, rel=0.02)
