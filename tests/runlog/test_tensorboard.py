from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from flatout.runlog.recorder import TensorBoardLog
from tests.runlog.progress_examples import progress


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 6)) for event in read(folder).Scalars(tag)]


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    writer = TensorBoardLog(tmp_path)
    nan, inf = float("nan"), float("inf")
    writer.write(
        writer.row(
            progress(env_steps=1024, return_mean=21.5, steps_per_second=18_200, metrics={"train/loss": nan})
        )
    )
    writer.write(
        writer.row(
            progress(env_steps=2048, return_mean=34.25, steps_per_second=inf, metrics={"train/loss": 0.5})
        )
    )
    writer.close()
    writer.close()
    assert points(tmp_path, "rollout/ep_rew_mean") == [(1024, 21.5), (2048, 34.25)]
    assert points(tmp_path, "train/loss") == [(2048, 0.5)]
    assert points(tmp_path, "time/fps") == [(1024, 18_200.0)]


def test_a_resumed_run_draws_no_point_twice(tmp_path: Path) -> None:
    first = TensorBoardLog(tmp_path)
    for step in (1000, 2000, 3000):
        first.write(first.row(progress(env_steps=step, return_mean=1.0)))
    first.close()
    second = TensorBoardLog(tmp_path, resume_at=2000)
    for step in (3000, 4000):
        second.write(second.row(progress(env_steps=step, return_mean=2.0)))
    second.close()
    assert points(tmp_path, "rollout/ep_rew_mean") == [(1000, 1.0), (2000, 1.0), (3000, 2.0), (4000, 2.0)]


def test_importing_it_loads_neither_tensorboard_nor_torch() -> None:
    code = "import sys, flatout.runlog.recorder as t; print({'tensorboard', 'torch'} & set(sys.modules))"
    repository = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "set()"
