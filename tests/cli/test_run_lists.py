"""`flatout runs` and `flatout monitor DIR`: all runs of a folder, whatever state they are in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flatout.cli.main import run
from tests.runlog.lane_examples import write_killed_run, write_run
from tests.views.test_monitor import make_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A running run, a killed one, and two finished seeds in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    for nth, name in enumerate(("group/seed-1", "group/seed-2")):
        write_run(folder / name)
        for file in (folder / name).iterdir():
            os.utime(file, (1_790_000_000 + nth, 1_790_000_000 + nth))
    write_killed_run(folder / "killed")
    make_run(folder / "z-training")
    return folder


def test_runs_are_listed_with_their_status_and_figures(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["runs"]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == "run env algo status env steps return steps/s learner busy age".split()
    assert [line.split()[0] for line in lines] == ["z-training", "killed", "group/seed-2", "group/seed-1"]
    assert "running" in lines[0]
    assert "125,000 (25 %)" in lines[0]
    assert "143.2 ± 30.1" in lines[0]
    assert "killed" in lines[1].split()[3]
    assert lines[2].split()[1:-2] == "CartPole-v1 ppo finished 50,000 486.2 ± 12.0 5,000 50 %".split()
    assert run(["runs", str(runs / "group"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["return_mean"]) for row in rows] == [("seed-2", 486.2), ("seed-1", 486.2)]


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("nowhere", "nowhere does not exist; name the folder"),
        ("runs/killed", "runs/killed is a run; name the"),
    ],
)
def test_what_is_no_folder_of_runs_is_refused_in_one_line(
    folder: str, message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["runs", folder]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_an_empty_folder_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}/\n"


def test_the_monitor_shows_a_folder_as_a_table(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["monitor", "--once", "runs"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("cores")
    names = ("z-training", "killed", "group/seed-2", "group/seed-1")
    places = [shown.index(name) for name in names]
    assert places == sorted(places)
    assert run(["monitor", "--json", "group"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["runs"]] == ["seed-2", "seed-1"]
    assert run(["monitor", "runs", "killed"]) == 2
    assert "runs is a folder of runs; name it alone" in capsys.readouterr().err
