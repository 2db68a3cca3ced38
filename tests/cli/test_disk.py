"""Whole runs on a disk that fails, on a folder that is in use, and with damaged files.

The disk "fills up" by a limit on the size of the run's files, which the test sets while the run trains.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from flatout import PPO
from tests.cli.test_runs import TINY, start_and_wait, summary_of
from tests.command import command, flatout

RUN = ["train", "CartPole-v1", *TINY, "--executor", "serial", "--checkpoint-every", "1000", "--run-name", "a"]


def set_full(process: subprocess.Popen[str], is_full: bool) -> None:
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0 if is_full else hard, hard))


@contextmanager
def running(run: Path, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """A run that has a checkpoint; killed at the end."""
    process = start_and_wait(run, *argv)
    try:
        while not list(run.glob("checkpoints/step-*.flatout")):
            assert process.poll() is None
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], *patterns: str) -> None:
    """Read the run's messages until each of these has come."""
    assert process.stderr is not None
    missing = set(patterns)
    while missing:
        line = process.stderr.readline()
        assert line, f"the run ended without {missing}"
        missing -= {pattern for pattern in missing if re.search(pattern, line)}


def newest(run: Path) -> str:
    return max(path.name for path in (run / "checkpoints").glob("step-*.flatout"))


def test_a_run_goes_on_while_the_disk_is_full_and_records_again_afterwards(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    with running(run, *RUN, "--timesteps", "1e7") as process:
        set_full(process, True)
        goes_on = "File too large; training goes on and tries again"
        read_until(
            process, f"cannot write checkpoint '.*step-.*{goes_on}", f"cannot write (?!check).*{goes_on}"
        )
        last_good = newest(run)
        set_full(process, False)
        read_until(process, "note: checkpoints can be written again", "note: records can be written again")
        assert newest(run) > last_good
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 143
    assert "Traceback" not in errors
    summary = summary_of(run)
    assert (summary["status"], summary["records_lost"]) == ("stopped", 0)
    assert not (run / "progress.json").exists()
    resumed = flatout("resume", "a", "--timesteps", str(summary["env_steps"] + 500), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr


def test_a_run_that_cannot_save_its_end_says_so_and_prints_its_summary(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    with running(run, *RUN, "--timesteps", "60000", "--json") as process:
        set_full(process, True)
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in errors
    said = re.findall(r"^flatout: cannot write .*?([\w-]+\.\w+)'?: File too large$", errors, re.MULTILINE)
    assert said == ["step-000000060032.flatout", "summary.json", "report.html"]
    summary = json.loads(out.splitlines()[-1])
    assert (summary["status"], summary["env_steps"]) == ("finished", 60_032)
    assert summary["error"].startswith(
        "cannot write checkpoint 'runs/a/checkpoints/step-000000060032.flatout'"
    )
    assert summary["records_lost"] > 0
    assert not (run / "summary.json").exists()
    resumed = flatout("resume", "a", "--quiet", cwd=tmp_path)  # from the last good checkpoint
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert summary_of(run)["env_steps"] == 60_032


def test_a_stop_that_cannot_be_saved_is_no_orderly_stop(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    with running(run, *RUN, "--timesteps", "1e7") as process:
        set_full(process, True)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "\nflatout: cannot write checkpoint " in errors


def test_the_end_of_a_run_is_saved_on_a_disk_that_fails_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    free = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (hard, hard))
    monkeypatch.setattr("flatout.agent.sleep", lambda seconds: free())

    def fill(progress: object) -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        return False

    agent = PPO("CartPole-v1", n_envs=2, n_steps=32, batch_size=64, runs_dir=tmp_path, run_name="a")
    try:
        agent.learn(640, callback=fill)
    finally:
        free()
    assert agent.is_saved
    assert newest(tmp_path / "a") == "step-000000000064.flatout"
    assert summary_of(tmp_path / "a")["error"] is None


def test_a_run_that_cannot_begin_on_a_full_disk_leaves_no_folder(tmp_path: Path) -> None:
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    refused = subprocess.run(
        command(*RUN, "--timesteps", "500"), cwd=tmp_path, capture_output=True, text=True, preexec_fn=full
    )
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == "flatout: cannot write runs/a/config.json: File too large"
    assert not (tmp_path / "runs").exists()


def test_a_run_that_is_training_is_neither_resumed_nor_overwritten_until_it_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    with running(run, *RUN, "--timesteps", "1e7") as process:
        for argv in (["resume", "a"], [*RUN, "--resume"], [*RUN, "--overwrite", "--timesteps", "500"]):
            refused = flatout(*argv, cwd=tmp_path)
            assert refused.returncode == 2
            words = f"run 'a' is training in process {process.pid}; stop it first, or use another --run-name"
            assert refused.stderr.splitlines()[-1] == f"flatout: {words}"
        assert process.poll() is None
    done = flatout(*RUN, "--overwrite", "--timesteps", "500", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert summary_of(run)["env_steps"] == 512


def test_runs_started_in_the_same_second_all_train(tmp_path: Path) -> None:
    argv = command("train", "CartPole-v1", *TINY, "--executor", "serial", "--timesteps", "256", "--quiet")
    started = [
        subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for _ in range(3)  # likely, not surely, in one second
    ]
    assert [process.communicate()[1] for process in started] == [""] * 3
    assert len(list((tmp_path / "runs").glob("*/summary.json"))) == 3


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_replay_is_named_and_the_run_resumes_without_it(damage: str, tmp_path: Path) -> None:
    dqn = "--algo dqn --save-replay --n-envs 4 --learning-starts 200 --buffer-size 5000 --network-arch 16".split()
    argv = [
        "train",
        "CartPole-v1",
        *dqn,
        "--executor",
        "serial",
        "--overlap",
        "off",
        "--run-name",
        "a",
        "--quiet",
    ]
    assert flatout(*argv, "--timesteps", "1000", cwd=tmp_path).returncode == 0
    (replay,) = (tmp_path / "runs" / "a" / "checkpoints").glob("*.replay")
    content = bytearray(replay.read_bytes())
    content[2000:2064] = b"\xff" * 64
    replay.write_bytes(content[:-5000] if damage == "cut" else content)
    resumed = flatout("resume", "a", "--timesteps", "2000", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "is damaged, or is not a replay that flatout saved; the run goes on without it" in resumed.stderr
    assert summary_of(tmp_path / "runs" / "a")["nan_skips"] == 0


@pytest.mark.parametrize("value", ["Infinity", "NaN", "[1, -Infinity]"])
def test_env_kwargs_that_no_checkpoint_could_hold_are_refused_at_the_start(
    value: str, tmp_path: Path
) -> None:
    done = flatout("train", "CartPole-v1", "--env-kwargs", f'{{"limit": {value}}}', cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("flatout: --env-kwargs is {'limit': ")
    assert done.stderr.endswith("it must be a JSON object, with finite numbers\n")
    assert list(tmp_path.iterdir()) == []
