from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.runlog.recorder import COLUMNS, MetricsLog, TimeLeft, scalars
from tests.runlog.progress_examples import progress


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def steps(path: Path) -> list[int]:
    return [int(row["time/total_timesteps"]) for row in rows(path)]


def test_a_row_has_blanks_where_values_are_unknown(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    log = MetricsLog(path)
    log.write(log.row(progress(return_mean=None, length_mean=None, metrics={})))
    log.write(
        log.row(progress(metrics={"train/loss": float("nan"), "eval/mean_reward": 480.0, "train/new": 1.0}))
    )
    log.close()
    log.close()
    first, second = rows(path)
    assert tuple(first) == COLUMNS
    assert first["rollout/ep_rew_mean"] == first["train/loss"] == first["eval/mean_reward"] == ""
    assert first["time/total_timesteps"] == "125000"
    assert first["train/n_updates"] == "900"
    assert float(second["rollout/ep_rew_mean"]) == 143.21
    assert (second["train/loss"], second["eval/mean_reward"]) == ("nan", "480")
    assert float(second["learner_busy"]) == 0.61


def test_scalars_keep_stable_baselines_names() -> None:
    found = scalars(progress())
    assert found["time/fps"] == 18_200.4
    assert found["rollout/ep_rew_mean"] == 143.21
    assert found["train/approx_kl"] == 0.0112
    assert set(found) <= set(COLUMNS)
    assert "rollout/ep_rew_mean" not in scalars(progress(return_mean=None))


def test_a_killed_run_keeps_every_row_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from flatout.runlog.recorder import MetricsLog\n"
        "from tests.runlog.progress_examples import progress\n"
        "log = MetricsLog(Path(sys.argv[1]))\n"
        "for n in (1000, 2000, 3000): log.write(log.row(progress(env_steps=n)))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    repository = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", code, str(path)], cwd=repository, env={**os.environ})
    assert ended.returncode == -signal.SIGKILL
    assert steps(path) == [1000, 2000, 3000]


def test_resuming_drops_later_rows_and_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    log = MetricsLog(path)
    for n in (1000, 2000, 3000, 4000):
        log.write(log.row(progress(env_steps=n)))
    log.close()
    before = path.read_text().splitlines()
    path.write_text("\n".join(before) + "\n10")

    log = MetricsLog(path, resume_at=2000)
    log.write(log.row(progress(env_steps=2500)))
    log.close()
    assert steps(path) == [1000, 2000, 2500]
    assert path.read_text().splitlines()[:3] == before[:3]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.csv"]


def test_resuming_without_a_log_or_with_an_older_one_works(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    MetricsLog(path, resume_at=2000).close()
    assert path.read_text() == ",".join(COLUMNS) + "\n"

    path.write_text("gone,time/total_timesteps,train/loss\n7,1000,0.5\nx,?,\n")
    MetricsLog(path, resume_at=2000).close()
    (row,) = rows(path)
    assert (row["time/total_timesteps"], row["train/loss"], row["time/fps"]) == ("1000", "0.5", "")


def test_a_new_log_does_not_keep_another_runs_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("left over\n")
    MetricsLog(path).close()
    assert rows(path) == []


def test_the_time_left_is_not_told_by_a_slow_start() -> None:
    left = TimeLeft()
    # The first iteration compiles for 30 s; after it the run makes 1,000 steps a second, of 79,000.
    told = {second: left.estimate(1000 + 1000 * second, 79_000, 30.0 + second) for second in range(79)}
    assert all(told[second] is None for second in range(5))
    assert [told[second] for second in (5, 20, 78)] == pytest.approx([73.0, 58.0, 0.0])
    # Twice as slow from here on: what counts is the last half of the time.
    later = [left.estimate(80_000 + 500 * n, 200_000, 108.0 + n) for n in range(200)]
    assert later[-1] == pytest.approx((200_000 - 179_500) / 500, rel=0.05)


def test_an_update_that_is_compiled_does_not_tell_the_time_left() -> None:
    left = TimeLeft()
    # 10,000 env steps in a second without updates; the first one is compiled for 30 s; then there are 1,000 steps a second.
    for n in range(1, 626):
        left.estimate(16 * n, 100_000, 2.0 + n / 625)
    told = [left.estimate(10_000 + 16 * n, 100_000, 33.0 + 0.016 * n) for n in range(1, 1000)]
    assert all(it is None for it in told[:300])
    assert told[-1] == pytest.approx((100_000 - 10_000 - 16 * 999) / 1000, rel=0.01)


def test_the_time_left_of_long_iterations_is_told_after_the_second() -> None:
    left = TimeLeft()
    told = [left.estimate(1000 * n, 10_000, 100.0 * n) for n in range(1, 5)]
    assert told == [None, *(pytest.approx(100 * (10 - n)) for n in (2, 3, 4))]
