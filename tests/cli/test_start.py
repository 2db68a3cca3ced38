"""`flatout init`, `list`, `completion` and `export` as a user types them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from flatout.cli.main import VERBS, run
from tests.command import flatout


def test_init_writes_an_env_whose_test_passes_and_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = flatout("init", "grid_walk", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "flatout train grid_walk/env.py:GridWalk" in made.stdout
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "grid_walk"], capture_output=True, text=True, check=False
    )
    assert "3 passed" in tests.stdout, tests.stdout
    first = Path("grid_walk", "runs", "first")
    exported = flatout("export", str(first), "--format", "numpy", cwd=tmp_path)
    assert "differs by at most" in exported.stdout, exported.stderr
    assert (first / "export" / "policy.py").exists()
    assert f"flatout play {first}" in made.stdout
    played = flatout("play", str(first), "--out", "first.gif", cwd=tmp_path)
    assert played.returncode == 0, played.stderr
    with Image.open("first.gif") as film:
        assert getattr(film, "n_frames", 1) > 4
    elsewhere = flatout("play", "runs/first", cwd=tmp_path / "grid_walk")
    assert "go to the folder where the run was begun" in elsewhere.stderr


def test_init_writes_over_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert run(["init", "mine"]) == 2
    assert run(["init", "no-name"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert not list((tmp_path / "mine").iterdir())


def test_list_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list"]) == 0
    text = capsys.readouterr().out
    for word in ("snake", "CartPole-v1", "--algo sac", "beast", "recipes"):
        assert word in text
    assert run(["list", "env"]) == 2
    assert "did you mean 'envs'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["tr", "train"], ["train", "CartP", "CartPole-v1"], ["train", "snake", "--batch", "--batch-size"]],
)
def test_bash_completes_verbs_envs_and_flags(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "bash"]) == 0
    *typed, expected = words
    line = " ".join(f"'{word}'" for word in ["flatout", *typed])
    script = f"{capsys.readouterr().out}\nCOMP_WORDS=({line}); COMP_CWORD={len(typed)}; _flatout; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert expected in done.stdout.split()


def test_the_other_shells_know_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("zsh", "fish"):
        assert run(["completion", shell]) == 0
        text = capsys.readouterr().out
        assert all(verb in text for verb in VERBS)
