"""`flatout train ENV --seeds N`: the runs equal single ones, their mean and spread are written, Ctrl-C stops all, resume goes on."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.test_runs import TINY, assert_same, summary_of
from tests.command import command, flatout


@pytest.mark.slow
def test_the_runs_equal_single_ones_and_their_mean_and_spread_are_told(tmp_path: Path) -> None:
    argv = ["train", "CartPole-v1", *TINY, "--timesteps", "2048"]
    done = flatout(*argv, "--seeds", "3", "--seed", "4", "--run-name", "many", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    group = tmp_path / "runs" / "many"
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary == summary_of(group)
    assert summary["status"] == "finished"
    assert summary["seeds"] == [run["seed"] for run in summary["runs"]] == [4, 5, 6]
    returns = [summary_of(group / f"seed-{seed}")["return_mean"] for seed in (4, 5, 6)]
    assert summary["return_mean"] == pytest.approx(statistics.mean(returns))
    assert summary["return_std"] == pytest.approx(statistics.stdev(returns))
    assert (summary["return_min"], summary["return_max"]) == (min(returns), max(returns))
    assert "over 3 seeds" in done.stdout
    flatout(*argv, "--seed", "5", "--run-name", "one", "--quiet", cwd=tmp_path)
    assert_same(group / "seed-5", tmp_path / "runs" / "one")
    for verb in ("report", "evaluate"):
        line = flatout(verb, "many", cwd=tmp_path).stderr
        assert "holds the runs of several seeds; name one of them, such as runs/many/seed-4" in line
    again = flatout(*argv, "--seeds", "3", "--run-name", "many", cwd=tmp_path)
    assert again.returncode == 2
    assert "pass --resume to continue it" in again.stderr


@pytest.mark.slow
def test_ctrl_c_stops_all_and_resume_continues_all(tmp_path: Path) -> None:
    argv = ["train", "CartPole-v1", *TINY, "--timesteps", "20480", "--seeds", "3", "--run-name"]
    assert flatout(*argv, "whole", "--quiet", cwd=tmp_path).returncode == 0
    process = subprocess.Popen(command(*argv, "cut", "--at-once", "2", "--quiet"), cwd=tmp_path)
    group, deadline = tmp_path / "runs" / "cut", time.monotonic() + 120
    while not (group / "seed-1" / "progress.json").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    summary = summary_of(group)
    assert summary["status"] == "stopped"
    assert summary["runs"][0]["status"] == "finished"
    assert summary["runs"][2]["status"] in ("stopped", None)
    done = flatout("resume", "cut", "--quiet", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"
    for seed in range(3):
        assert_same(group / f"seed-{seed}", tmp_path / "runs" / "whole" / f"seed-{seed}")


def test_a_mistake_is_told_once_and_leaves_nothing(tmp_path: Path) -> None:
    done = flatout("train", "CartPole-v1", "--seeds", "0", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--seeds is 0; it must be at least 1" in done.stderr
    done = flatout("train", "CartPole-v1", "--seeds", "2", "--network", "no.py:Net", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "network file" in done.stderr
    assert not list((tmp_path / "runs").glob("*"))
