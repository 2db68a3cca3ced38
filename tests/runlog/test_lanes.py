from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.runlog.spans import Spans, idle_causes, lane_use, make_lane, read_spans, timeline
from tests.runlog.lane_examples import chain, folded, lockstep, overlap, write_lines

COLLECTING = ("act", "env", "tail", "store", "slot")
LEARNING = ("wait", "update", "advantage", "stage", "record", "start", "somethingnew")


def test_shares_of_a_lane(tmp_path: Path) -> None:
    spans = read_spans(write_lines(tmp_path / "s", lockstep()))
    learner, collector = lane_use(spans.lanes["learner"]), lane_use(spans.lanes["collector 0"])
    assert learner.wall == pytest.approx(10.0)
    assert learner.busy == pytest.approx((4.704 + 0.384) / 10)
    assert learner.idle == pytest.approx(1 - learner.busy)
    assert collector.idle == pytest.approx((0.4 + 48 * 0.11) / 10)


def test_a_lost_stretch_counts_as_neither_busy_nor_idle(tmp_path: Path) -> None:
    records = [*chain("learner", [("update", 1.0)]), *chain("learner", [("update", 1.0)], start=3.0)]
    use = lane_use(read_spans(write_lines(tmp_path / "s", records)).lanes["learner"])
    assert (use.busy, use.idle) == (0.5, 0.0)


def test_the_timeline_spreads_what_is_folded() -> None:
    lane, _ = make_lane(
        "learner", "host", [(0.0, 1.0, {"wait": 1.0}), (1.0, 3.0, {"wait": 0.5, "update": 1.5})]
    )
    edges = np.array([0.0, 0.5, 1.0, 2.0, 3.0, 4.0])
    assert timeline(lane, edges).tolist() == [[1, 0], [1, 0], [0.25, 0.75], [0.25, 0.75], [0, 0]]


def test_the_learners_waiting_is_split_by_what_the_collectors_did(tmp_path: Path) -> None:
    causes = idle_causes(read_spans(write_lines(tmp_path / "s", lockstep())))
    assert causes == pytest.approx(
        {
            "waiting for envs": 48 * 0.06,
            "waiting for inference": 48 * 0.02,
            "Python overhead of collecting": 48 * 0.01,
            "starting": 0.4,
            "writing records": 48 * 0.004,
        }
    )
    assert next(iter(causes)) == "waiting for envs"
    slow = idle_causes(read_spans(write_lines(tmp_path / "t", overlap())))
    assert slow["staging data"] == pytest.approx(24 * 0.02)
    assert slow["waiting for envs"] > slow["waiting for inference"] > 0
    assert "waiting for data" not in slow


def test_a_collector_that_has_finished_explains_no_waiting(tmp_path: Path) -> None:
    records = chain("learner", [("wait", 1.0)])
    records += chain("collector 0", [("env", 0.1), ("slot", 0.9)]) + chain("collector 1", [("tail", 1.0)])
    spans = read_spans(write_lines(tmp_path / "s", records))
    assert idle_causes(spans) == pytest.approx(
        {"waiting for the slowest env": 1 / 1.1, "waiting for envs": 0.1 / 1.1}
    )
    assert idle_causes(spans, "collector 0") == pytest.approx({"waiting for the learner": 0.9})


def test_detail_of_one_lane_and_a_fold_of_the_other_still_explain_the_waiting(tmp_path: Path) -> None:
    records = chain("learner", [("wait", 0.1), ("update", 0.9)])
    records.append(folded("collector 0", 0.0, {"env": 0.06, "act": 0.04, "slot": 0.9}))
    causes = idle_causes(read_spans(write_lines(tmp_path / "s", records)))
    assert causes == pytest.approx({"waiting for envs": 0.06, "waiting for inference": 0.04})


def test_waiting_that_nothing_explains_is_waiting_for_data(tmp_path: Path) -> None:
    alone = read_spans(write_lines(tmp_path / "s", chain("learner", [("wait", 1.0), ("update", 1.0)])))
    assert idle_causes(alone) == {"waiting for data": 1.0}
    partly = chain("learner", [("wait", 1.0)]) + chain("collector 0", [("env", 0.25), ("slot", 0.75)])
    assert idle_causes(read_spans(write_lines(tmp_path / "t", partly))) == {
        "waiting for data": 0.75,
        "waiting for envs": 0.25,
    }
    assert idle_causes(Spans()) == {}


seconds = st.floats(0, 2, allow_subnormal=False)


def lane_of(name: str, phases: tuple[str, ...]) -> st.SearchStrategy[list[dict[str, object]]]:
    spans = st.lists(st.dictionaries(st.sampled_from(phases), seconds, min_size=1), max_size=12)

    def build(parts: list[dict[str, float]]) -> list[dict[str, object]]:
        start, records = 0.0, []
        for part in parts:
            records.append(folded(name, start, part))
            start = records[-1]["end"]
        return records

    return spans.map(build)


@settings(deadline=None)
@given(learner=lane_of("learner", LEARNING), collectors=st.lists(lane_of("c", COLLECTING), max_size=3))
def test_the_causes_add_up_to_the_idle_time(
    learner: list[dict[str, object]],
    collectors: list[list[dict[str, object]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    records = learner + [r | {"lane": f"collector {i}"} for i, lane in enumerate(collectors) for r in lane]
    spans = read_spans(write_lines(tmp_path_factory.mktemp("spans") / "s.jsonl", records))
    for name, lane in spans.lanes.items():
        use, causes = lane_use(lane), idle_causes(spans, name)
        assert sum(causes.values()) == pytest.approx(use.idle * use.wall, rel=1e-9, abs=1e-9), json.dumps(
            records
        )
        assert min(causes.values(), default=0) >= 0
        edges = np.linspace(0, spans.end, 14)
        binned = (timeline(lane, edges) * np.diff(edges)[:, None]).sum(axis=0)
        assert binned == pytest.approx(lane.seconds.sum(axis=0), abs=1e-6)
