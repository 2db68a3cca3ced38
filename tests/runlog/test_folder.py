from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from flatout.errors import FlatoutError
from flatout.runlog.files import write_json
from flatout.runlog.folder import RunFolder, default_run_name


def old_run(runs: Path, name: str = "x") -> Path:
    """The run folder of an earlier command."""
    run = runs / name
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (run / "checkpoints" / "last").write_text("weights")
    return run


def test_a_run_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "deep" / "runs", "x")
    assert folder.path == tmp_path / "deep" / "runs" / "x"
    assert folder.path.is_dir()
    assert folder.tensorboard == folder.path
    assert [
        p.name for p in (folder.config, folder.summary, folder.metrics, folder.system, folder.checkpoints)
    ] == [
        "config.json",
        "summary.json",
        "metrics.csv",
        "system.json",
        "checkpoints",
    ]


def test_a_name_in_use_is_refused_and_its_run_left_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = old_run(Path("runs"))
    with pytest.raises(FlatoutError) as caught:
        RunFolder.create(Path("runs"), "x")
    assert str(caught.value) == (
        "run 'x' exists in runs/; pass --resume to continue it, --overwrite to replace it, or another --run-name"
    )
    assert (run / "checkpoints" / "last").read_text() == "weights"


def test_overwrite_starts_empty_and_deletes_the_old_run_once_the_new_one_has_begun(tmp_path: Path) -> None:
    run = old_run(tmp_path)
    folder = RunFolder.create(tmp_path, "x", overwrite=True)
    assert [entry.name for entry in run.iterdir()] == [".lock"]
    folder.settle()
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_failed_overwrite_gives_the_old_run_back(tmp_path: Path) -> None:
    run = old_run(tmp_path)
    folder = RunFolder.create(tmp_path, "x", overwrite=True)
    folder.config.write_text("new")
    folder.discard()
    assert (run / "config.json").read_text() == "{}"
    assert (run / "checkpoints" / "last").read_text() == "weights"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_overwrite_replaces_an_empty_folder_but_nothing_else_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path, "empty", overwrite=True).discard()
    assert (tmp_path / "empty").is_dir()

    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("…")
    with pytest.raises(FlatoutError, match="does not look like a run"):
        RunFolder.create(tmp_path, "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "chapter1.tex").exists()

    (tmp_path / "notes").write_text("mine")
    with pytest.raises(FlatoutError, match="is a file"):
        RunFolder.create(tmp_path, "notes", overwrite=True)
    assert (tmp_path / "notes").read_text() == "mine"


def test_discard_leaves_nothing_of_ours_and_everything_of_others(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "b", "x")
    folder.config.write_text("{}")
    folder.discard()
    assert list(tmp_path.iterdir()) == []

    folder = RunFolder.create(tmp_path / "a" / "b", "x")
    neighbour = RunFolder.create(tmp_path / "a" / "b", "y")
    folder.discard()
    assert not folder.path.exists()
    assert neighbour.path.is_dir()

    RunFolder.open(old_run(tmp_path, "kept")).discard()
    assert (tmp_path / "kept" / "config.json").exists()


@pytest.mark.parametrize(
    "name", ["", "  ", ".", "..", ".hidden", "a/b", "a\\b", "a\nb", "a\x00b", "\x1b[31m"]
)
def test_names_that_cannot_be_folders_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(FlatoutError) as caught:
        RunFolder.create(tmp_path / "runs", name)
    assert str(caught.value).isprintable()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for runs_dir in (tmp_path / "file", tmp_path / "file" / "runs", Path("/proc/flatout")):
        with pytest.raises(FlatoutError) as caught:
            RunFolder.create(runs_dir, "x")
        assert str(runs_dir) in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(FlatoutError, match="File name too long"):
        RunFolder.create(tmp_path / "runs", "x" * 300)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_opening_a_run_names_what_is_wrong(tmp_path: Path) -> None:
    run = old_run(tmp_path, "cartpole-1")
    assert RunFolder.open(run).path == run
    with pytest.raises(FlatoutError, match=r"no run 'cartpol-1' in .*; did you mean 'cartpole-1'\?"):
        RunFolder.open(tmp_path / "cartpol-1")
    with pytest.raises(FlatoutError, match="newest there: 'cartpole-1'"):
        RunFolder.open(tmp_path / "qqq")
    with pytest.raises(FlatoutError, match=r"no config\.json"):
        RunFolder.open(tmp_path)
    with pytest.raises(FlatoutError, match="is a file"):
        RunFolder.open(run / "config.json")
    with pytest.raises(FlatoutError, match="no run 'x'"):
        RunFolder.open(tmp_path / "nowhere" / "x")


def test_json_is_strict_ordered_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"old": 1})
    value = {
        "z": math.nan,
        "a": [math.inf, np.float32("nan"), np.float32(0.5), np.int64(3), True],
        "path": Path("runs") / "x",
        "nested": {"b": (1, 2)},
    }
    write_json(path, value)
    text = path.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text) == {
        "z": None,
        "a": [None, None, 0.5, 3, True],
        "path": "runs/x",
        "nested": {"b": [1, 2]},
    }
    assert list(json.loads(text)) == ["z", "a", "path", "nested"]
    assert text.startswith('{\n  "z"')
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
    with pytest.raises(FlatoutError, match="cannot write"):
        write_json(tmp_path / "gone" / "summary.json", {})


@pytest.mark.parametrize(
    ("env", "start"),
    [
        ("CartPole-v1", "CartPole-v1-ppo-"),
        ("ns/Env-v0", "ns-Env-v0-ppo-"),
        ("my_package:MyEnv-v0", "my_package-MyEnv-v0-ppo-"),
        ("my.py:make_env", "my-make_env-ppo-"),
        ("../code/my.py:make_env", "my-make_env-ppo-"),
        ("///", "env-ppo-"),
        ("x" * 400, "x" * 50 + "-ppo-"),
    ],
)
def test_default_names_are_valid_folder_names(tmp_path: Path, env: str, start: str) -> None:
    name = default_run_name(env, "ppo", 1, datetime(2026, 11, 15, 19, 3, 31))
    assert name == start + "seed1-20261115-190331"
    assert RunFolder.create(tmp_path, name).path.is_dir()
