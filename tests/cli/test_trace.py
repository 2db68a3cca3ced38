from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatout.cli.main import run
from tests.runlog.lane_examples import CONFIG, write_killed_run, write_run


def test_a_trace_is_written_to_the_runs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "runs" / "a")
    assert run(["trace", "a", "--runs-dir", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    assert str(folder / "trace.json") in said
    assert "learner, collector 0 over 10.0 s" in said
    assert "https://ui.perfetto.dev" in said
    assert len(json.loads((folder / "trace.json").read_text())["traceEvents"]) > 300


def test_a_killed_run_is_traced_up_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_killed_run(tmp_path / "a")
    (folder / "samples.jsonl").unlink()
    assert run(["trace", str(folder), "--out", str(tmp_path / "t.json")]) == 0
    assert "note: spans.jsonl ends in an incomplete line, which is ignored" in capsys.readouterr().out
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert not (folder / "trace.json").exists()


def test_a_run_that_cannot_be_traced_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    assert run(["trace", str(bare)]) == 2
    assert capsys.readouterr().err == f"flatout: {bare} is not a run: it has no config.json\n"
    (bare / "config.json").write_text(json.dumps(CONFIG))
    assert run(["trace", str(bare)]) == 2
    assert capsys.readouterr().err == f"flatout: nothing to trace in {bare}: spans.jsonl is missing\n"
    write_run(tmp_path / "b")
    assert run(["trace", str(tmp_path / "b"), "--out", str(tmp_path / "no" / "t.json")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".part")] == []
