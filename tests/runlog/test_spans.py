from __future__ import annotations

from pathlib import Path

import pytest

from flatout.runlog.spans import SpanFollower, read_spans
from tests.runlog.lane_examples import chain, cut, folded, lockstep, overlap, write_lines


def test_a_whole_file_gives_every_lane_on_its_clock(tmp_path: Path) -> None:
    spans = read_spans(write_lines(tmp_path / "spans.jsonl", overlap(n_collectors=11)))
    assert list(spans.lanes) == ["learner", "device", *(f"collector {i}" for i in range(11))]
    assert spans.problems == []
    assert [spans.lanes[name].clock for name in ("learner", "device", "collector 3")] == [
        "host",
        "device",
        "host",
    ]
    assert spans.lanes["learner"].wall == pytest.approx(10.1)
    assert spans.lanes["learner"].total()["update"] == pytest.approx(24 * 0.15)


def test_folded_spans_keep_the_seconds_of_each_phase(tmp_path: Path) -> None:
    lane = read_spans(write_lines(tmp_path / "spans.jsonl", lockstep())).lanes["learner"]
    assert lane.total() == pytest.approx(
        {"start": 0.4, "wait": 4.32, "advantage": 0.384, "update": 4.704, "record": 0.192}
    )
    assert lane.until([0.4, lane.end[-1]]).sum(axis=1) == pytest.approx([0.4, 10.0])


@pytest.mark.parametrize("n_bytes", range(1, 90, 4))
def test_a_file_cut_anywhere_in_its_last_line_loses_only_that(tmp_path: Path, n_bytes: int) -> None:
    path = write_lines(tmp_path / "spans.jsonl", chain("learner", [("start", 1.0), ("update", 0.123456789)]))
    cut(path, n_bytes)
    spans = read_spans(path)
    if n_bytes == 1:  # only the newline is gone
        assert spans.problems == []
        assert spans.lanes["learner"].end.tolist() == pytest.approx([1.0, 1.123457])
    else:
        assert spans.problems == ["spans.jsonl ends in an incomplete line, which is ignored"]
        assert spans.lanes["learner"].end.tolist() == [1.0]


def test_unreadable_records_are_counted_and_reported(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "spans.jsonl", chain("learner", [("update", 1.0)]))
    with path.open("ab") as file:
        file.write(b"\x00\xff rubbish\n[1, 2]\n\n")
        file.write(b'{"dropped": 40}\n{"dropped": 2}\n')
        file.write(b'{"lane": "learner", "start": 3, "end": 2, "phases": {"update": 1}}\n')
        file.write(b'{"lane": 7, "start": 1, "end": 2, "phases": {"update": 1}}\n')
        file.write(b'{"lane": "learner", "start": 1, "end": 2, "phases": {"update": "long"}}\n')
        file.write(b'{"lane": "learner", "start": 1, "end": NaN, "phases": {"update": 1}}\n')
    spans = read_spans(path)
    assert spans.problems == [
        "spans.jsonl has 2 unreadable lines",
        "spans.jsonl has 4 records without a valid span",
        "42 spans lost in writing",
    ]
    assert spans.lanes["learner"].end.tolist() == [1.0]


def test_missing_and_empty_files_are_reported(tmp_path: Path) -> None:
    assert read_spans(tmp_path / "spans.jsonl").problems == ["spans.jsonl is missing"]
    (tmp_path / "spans.jsonl").touch()
    spans = read_spans(tmp_path / "spans.jsonl")
    assert spans.problems == ["spans.jsonl is empty"]
    assert (spans.lanes, spans.end) == ({}, 0.0)


def test_a_resumed_run_is_one_timeline_without_repeated_steps(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "spans.jsonl", chain("learner", [("start", 1.0), ("update", 3.0), ("wait", 1.0)])
    )
    write_lines(path, chain("learner", [("start", 0.5), ("update", 2.0)]), offset=2.0, mode="a")
    spans = read_spans(path)
    lane = spans.lanes["learner"]
    assert lane.start.tolist() == [0.0, 1.0, 2.0, 2.5]
    assert lane.end.tolist() == [1.0, 2.0, 2.5, 4.5]
    assert {phase: seconds for phase, seconds in lane.total().items() if seconds} == {
        "start": 1.5,
        "update": 3.0,
    }
    assert spans.problems == []


def test_spans_that_overlap_are_cut_and_reported(tmp_path: Path) -> None:
    records = [
        folded("learner", 0.0, {"update": 2.0}),
        folded("learner", 1.0, {"wait": 1.0, "update": 1.0}),
        folded("learner", 1.5, {"record": 0.25}),
    ]
    spans = read_spans(write_lines(tmp_path / "spans.jsonl", records))
    lane = spans.lanes["learner"]
    assert (lane.start[1:] >= lane.end[:-1]).all()
    assert lane.total() == {"update": 2.5, "wait": 0.5, "record": 0.0}
    assert spans.problems == ["2 spans cut where they overlap others of their lane"]


def test_spans_after_a_checkpoint_are_dropped_when_the_run_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    write_lines(path, chain("learner", [("update", 10.0), ("wait", 10.0)]))
    follower = SpanFollower(path)
    assert follower.read()
    assert follower.last().lanes["learner"].total() == {"update": 10.0, "wait": 10.0}
    write_lines(path, chain("learner", [("update", 3.0)]), offset=12.0, mode="a")
    assert follower.read()
    assert follower.last().lanes["learner"].total() == pytest.approx({"update": 13.0, "wait": 2.0})
    assert follower.last(4.0).lanes["learner"].total() == pytest.approx({"wait": 1.0, "update": 3.0})
    assert not follower.read()
