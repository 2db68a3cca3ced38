"""On a terminal a command says what it does before it loads Gymnasium and torch, which take seconds."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = {
    "train CartPole-v1": "starting CartPole-v1 …",
    "tune CartPole-v1": "tuning CartPole-v1 …",
    "doctor CartPole-v1": "measuring CartPole-v1 …",
    "evaluate saved.flatout": "loading saved.flatout …",
    "play saved.flatout": "loading saved.flatout …",
    "export saved.flatout": "loading saved.flatout …",
    "import sb3 model.zip": "importing from sb3 …",
    "runs": "reading runs/ …",
    "report last": "reading last …",
    "compare a b": "comparing a …",
    "jobs status": "jobs: status …",
    "dashboard --no-browser": "reading runs/ …",
    "monitor": "looking at this machine …",
    "list": "listing envs, algorithms, recipes and presets …",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_first_line_comes_before_what_takes_long(command: str, tmp_path: Path) -> None:
    (tmp_path / "saved.flatout").touch()
    for slow in ("gymnasium", "numpy", "torch"):
        (tmp_path / f"{slow}.py").write_text("raise SystemExit(77)")  # in place of the real one
    ours, theirs = pty.openpty()
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "flatout", *command.split()],
        cwd=tmp_path,
        env=env,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        text = b""
        while b"\n" not in text:
            text += terminal.read(1000)
        assert text.decode().splitlines()[0] == COMMANDS[command]
        assert process.wait() == 77


@pytest.mark.parametrize("verb", ["evaluate", "play", "export"])
def test_a_run_that_is_not_there_is_refused_before_torch(verb: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(77)")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "flatout", verb, "none"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "flatout: no run 'none' in runs/\n")
