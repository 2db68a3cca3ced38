from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.cli.main import run
from tests.runlog.lane_examples import CONFIG, write_killed_run, write_run


def test_a_report_prints_the_verdict_and_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "runs" / "a")
    assert run(["report", "a", "--runs-dir", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Finished: 50,000 env steps")
    assert lines[-1] == f"report        {folder / 'report.html'}"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_text_writes_nothing_and_out_writes_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_killed_run(tmp_path / "a")
    before = sorted(folder.iterdir())
    assert run(["report", str(folder), "--text"]) == 0
    assert "report.html" not in capsys.readouterr().out
    assert run(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert "Killed" in (tmp_path / "page.html").read_text()
    assert sorted(folder.iterdir()) == before


def test_json_has_the_same_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(write_run(tmp_path / "a")), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"].startswith("Finished")
    assert told["steps_per_second"] == 5000.0
    assert told["idle_seconds"]["waiting for envs"] == pytest.approx(2.88)
    assert told["problems"] == []
    assert told["report"].endswith("report.html")


def test_a_folder_without_a_run_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"flatout: {tmp_path} is not a run: it has no config.json\n"
    assert list(tmp_path.iterdir()) == []


def test_an_empty_run_is_reported_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code = f"import sys; from flatout.cli.main import run; run(['report', {str(tmp_path)!r}]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "no env step is recorded" in done.stdout
    assert "metrics.csv is missing" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
