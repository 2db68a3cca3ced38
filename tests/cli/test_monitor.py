"""`flatout monitor` with real runs, in a terminal and in a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_runs import TINY
from tests.command import command, flatout
from tests.views.test_monitor import make_run

ENDLESS = ["train", "CartPole-v1", *TINY, "--timesteps", "100000000", "--quiet", "--executor", "serial"]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@contextmanager
def training(cwd: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command(*ENDLESS, "--run-name", name), cwd=cwd) as process:
        try:
            wait_until(lambda: (cwd / "runs" / name / "progress.json").exists())
            yield process
        finally:
            process.kill()


class Watching:
    """`flatout monitor` in a pseudo-terminal of its own."""

    def __init__(self, cwd: Path, columns: int, *argv: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(
            command("monitor", "--interval", "0.1", *argv),
            cwd=cwd,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color"},
        )
        self._chunks: list[bytes] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(OSError):
            while chunk := os.read(self._ours, 65_536):
                self._chunks.append(chunk)

    @property
    def raw(self) -> str:
        return b"".join(self._chunks).decode(errors="replace")

    @property
    def frame(self) -> str:
        """The last screen that was drawn completely."""
        drawn = self.raw.split("\x1b[H")
        return ESCAPES.sub("", drawn[-2] if len(drawn) > 2 else drawn[-1]).replace("\r", "")

    def wait_for(self, words: str) -> None:
        wait_until(lambda: words in self.frame or self.process.poll() is not None)
        assert words in self.frame

    def assert_terminal_is_as_before(self) -> None:
        assert self.raw.rindex("\x1b[?1049l") > self.raw.rindex("\x1b[?1049h")
        assert self.raw.rindex("\x1b[?25h") > self.raw.rindex("\x1b[?25l")
        assert termios.tcgetattr(self._theirs) == self.before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._theirs)
        os.close(self._ours)


@contextmanager
def watching(cwd: Path, columns: int, *argv: str) -> Iterator[Watching]:
    seen = Watching(cwd, columns, *argv)
    try:
        yield seen
    finally:
        seen.close()


def wait_until(is_so: Callable[[], bool], seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_so()


def jobs(cwd: Path, *argv: str) -> list[dict[str, Any]]:
    done = flatout("monitor", "--once", "--json", *argv, cwd=cwd)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["jobs"]
    return found


def test_a_real_run_is_watched_and_then_killed(tmp_path: Path) -> None:
    with training(tmp_path, "first") as process:
        wait_until(lambda: bool(jobs(tmp_path)[0]["strips"]))
        (job,) = jobs(tmp_path)
        assert (job["name"], job["status"], job["env"]) == ("first", "running", "CartPole-v1")
        assert 0 < job["env_steps"] < job["total_steps"] == 100_000_000
        assert job["steps_per_second"] > 0
        assert 0 < job["learner_busy"] < 1
        wait_until(lambda: jobs(tmp_path)[0]["seconds_left"] is not None)  # after some seconds
        assert {strip["lane"] for strip in job["strips"]} >= {"learner", "collector 0"}
        learner = job["strips"][0]
        assert len(learner["cells"]) == 60
        assert sum(learner["phases"].values()) == pytest.approx(1, abs=0.05)
        assert learner["busy"] + sum(job["idle"].values()) == pytest.approx(1, abs=0.05)
        process.kill()
    assert jobs(tmp_path) == []
    (job,) = jobs(tmp_path, "first")
    assert job["status"] == "killed"
    assert job["env_steps"] > 0


def test_an_ended_run_is_shown_with_its_outcome(tmp_path: Path) -> None:
    done = flatout("train", "CartPole-v1", *TINY, "--timesteps", "500", "--run-name", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (job,) = jobs(tmp_path, "a")
    assert (job["status"], job["outcome"], job["env_steps"]) == ("ended", "finished", 512)
    shown = flatout("monitor", "a", cwd=tmp_path)
    assert shown.returncode == 0
    assert "a · finished · CartPole-v1 · PPO" in shown.stdout
    assert "\x1b" not in shown.stdout


@pytest.mark.parametrize("columns", [80, 120])
def test_live_until_ctrl_c(columns: int, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "first")
    with watching(tmp_path, columns) as seen:
        seen.wait_for("125,000 of 500,000 (25 %)")
        assert "first · running" in seen.frame
        assert max(map(len, seen.frame.splitlines())) == columns
        progress = json.loads((run / "progress.json").read_text())
        (run / "progress.json").write_text(json.dumps(progress | {"env_steps": 250_000}))
        seen.wait_for("250,000 of 500,000 (50 %)")
        (run / "progress.json").unlink()
        (run / "summary.json").write_text('{"status": "finished", "env_steps": 500000}')
        seen.wait_for("first · finished")
        seen.wait_for("no run is running in runs/; waiting")
        make_run(tmp_path / "runs" / "second")
        seen.wait_for("second · running")
        assert "no run is going on" not in seen.frame
        seen.process.send_signal(signal.SIGINT)
        assert seen.process.wait(30) == 0
        wait_until(lambda: "\x1b[?1049l" in seen.raw)
        seen.assert_terminal_is_as_before()
        assert "Traceback" not in seen.raw


def test_it_exits_when_the_named_runs_have_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "first")
    with watching(tmp_path, 100, "first") as seen:
        seen.wait_for("first · running")
        (run / "progress.json").unlink()
        (run / "summary.json").write_text('{"status": "finished", "env_steps": 500000}')
        assert seen.process.wait(30) == 0
        wait_until(lambda: "first · finished" in ESCAPES.sub("", seen.raw.split("\x1b[?1049l")[-1]))
        seen.assert_terminal_is_as_before()


def test_it_waits_for_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    with watching(tmp_path, 80) as seen:
        seen.wait_for("runs/ does not exist; waiting")
        make_run(tmp_path / "runs" / "first")
        seen.wait_for("first · running")
        seen.process.send_signal(signal.SIGTERM)
        assert seen.process.wait(30) == 143
        wait_until(lambda: "\x1b[?1049l" in seen.raw)
        seen.assert_terminal_is_as_before()


def test_once_without_a_run(tmp_path: Path) -> None:
    done = flatout("monitor", "--once", cwd=tmp_path)
    assert done.returncode == 0
    assert "runs/ does not exist\n" in done.stdout
    assert "cores " in done.stdout


def test_a_terminal_without_unicode_gets_ascii(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "first")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command("monitor"), cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert b"143.2 ~ 30.1" in done.stdout
    assert b"?" not in done.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nothing"], "no run 'nothing' in runs/"),
        (["frist"], "did you mean 'first'?"),
        (["--interval", "0"], "--interval is 0; it must be from 0.05 to 3600 seconds"),
        (["--interval", "nan"], "--interval is nan"),
        (["--onec"], "--once"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], words: str, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "first")
    done = flatout("monitor", *argv, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_it_starts_without_torch(tmp_path: Path) -> None:
    code = "import sys, flatout.cli.monitor as m; m.monitor(['--once']); sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.DEVNULL).returncode == 0
    )
