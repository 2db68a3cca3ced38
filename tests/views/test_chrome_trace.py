from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flatout.runlog.samples import read_samples
from flatout.runlog.spans import read_spans
from flatout.views.chrome_trace import trace_json
from tests.runlog.lane_examples import cut, lockstep, overlap, samples, write_lines


def trace(folder: Path, spans: list[dict[str, Any]], gpu: bool = False) -> list[dict[str, Any]]:
    path = write_lines(folder / "spans.jsonl", spans)
    usage = read_samples(write_lines(folder / "samples.jsonl", samples(gpu=gpu)))
    document = json.loads(trace_json("r", read_spans(path), usage))
    assert document.keys() == {"displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def assert_valid(events: list[dict[str, Any]]) -> None:
    """The rules of the Trace Event Format that viewers rely on."""
    for event in events:
        assert event.keys() >= {"name", "ph", "ts", "pid", "tid", "args"}, event
        assert event["ph"] in "MXC"
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] != "C" or all(isinstance(v, int | float) for v in event["args"].values())
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    free_from: dict[tuple[int, int], int] = {}
    for event in (e for e in events if e["ph"] == "X"):
        thread = event["pid"], event["tid"]
        assert event["ts"] >= free_from.get(thread, 0), event
        free_from[thread] = event["ts"] + event["dur"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == set(free_from)


def threads(events: list[dict[str, Any]]) -> dict[str, int]:
    return {e["args"]["name"]: e["pid"] for e in events if e["name"] == "thread_name"}


def test_a_trace_follows_the_format_and_keeps_the_seconds(tmp_path: Path) -> None:
    events = trace(tmp_path, lockstep())
    assert_valid(events)
    assert threads(events) == {"learner": 1, "collector 0": 1}
    learner = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert sum(e["dur"] for e in learner) == pytest.approx(10e6, abs=len(learner))
    fine = [e for e in learner if e["cat"] == "span" and e["name"] == "update"]
    assert [e["dur"] for e in fine] == pytest.approx([98_000] * 36, abs=1)
    whole = [e for e in learner if e["cat"] == "folded"]
    assert {e["name"] for e in whole} == {"update"}
    assert whole[0]["args"] == {
        "wait (s)": 0.09,
        "advantage (s)": 0.008,
        "update (s)": 0.098,
        "record (s)": 0.004,
    }


def test_host_and_device_clocks_are_never_in_one_process(tmp_path: Path) -> None:
    events = trace(tmp_path, overlap(), gpu=True)
    assert_valid(events)
    assert threads(events) == {"learner": 1, "device": 2, **{f"collector {i}": 1 for i in range(3)}}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "r (host clock)", 2: "r (device clock)"}
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert "device utilisation (%)" in counters


def test_without_a_gpu_only_the_cores_are_counted(tmp_path: Path) -> None:
    counters = [e for e in trace(tmp_path, lockstep()) if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"cores in use (%)", "cores of this run"}
    assert counters[0]["args"]["value"] == pytest.approx(72.5)


def test_a_cut_file_still_gives_a_valid_trace(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "spans.jsonl", lockstep())
    cut(path, 1000)
    assert_valid(
        json.loads(trace_json("r", read_spans(path), read_samples(tmp_path / "none")))["traceEvents"]
    )
