from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flatout.errors import FlatoutError
from flatout.perf.case import Finding
from flatout.runlog.records import read_run
from flatout.views.text import report_text
from tests.runlog.lane_examples import CONFIG, SUMMARY, write_killed_run, write_run

FINDING = Finding(
    kind="envs wait",
    what="The learner waits for envs 29 % of the time.",
    evidence="2.9 of 10.0 s",
    change="Collect while learning",
    flags=("--overlap", "on"),
    steps_per_second=8200.0,
    learner_busy=0.8,
    gain=1.64,
)


def test_the_verdict_comes_first_and_says_what_limits_the_run(tmp_path: Path) -> None:
    text = report_text(write_run(tmp_path / "a"), [FINDING])
    lines = text.splitlines()
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 100
    assert " ".join(lines[:2]) == (
        "Finished: 50,000 env steps in 10.0 s, 5,000 steps/s, return 486.2 ± 12.0. "
        "The learner was busy 50 % of the time. Largest cause of idle time: waiting for envs (29 %)."
    )
    assert "time went to  updates 51 %, waiting for envs 29 %, waiting for inference 10 %" in text
    assert "Collect while learning (--overlap on)" in text
    assert "about 1.6 × the speed" in text
    assert "475.0 reached after 7.5 s" in text
    assert lines[-2:] == [f"folder        {tmp_path / 'a'}", f"next          flatout play {tmp_path / 'a'}"]
    assert "missing" not in text


def test_a_busy_learner_is_the_limit(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"learner_busy": 0.93}))
    assert "busy 93 % of the time: learning itself is the limit." in report_text(folder).replace("\n", " ")


def test_a_killed_run_shows_what_is_there_and_says_what_is_missing(tmp_path: Path) -> None:
    text = report_text(write_killed_run(tmp_path / "a"))
    assert text.startswith("Killed: 31,000 env steps in 6.2 s")
    assert "summary.json is missing: the run did not end properly" in text
    assert "spans.jsonl ends in an incomplete line" in text.replace("\n              ", " ")


def test_a_stopped_run_says_how_to_go_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "my runs")
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"status": "stopped"}))
    assert [line.strip() for line in report_text(folder).splitlines()[-2:]] == [
        f"next          flatout resume '{folder}'",
        f"flatout play '{folder}'",
    ]


def test_a_running_run_is_reported_as_running(tmp_path: Path) -> None:
    folder = write_killed_run(tmp_path / "a")
    progress = json.loads((folder / "progress.json").read_text()) | {"pid": os.getpid()}
    (folder / "progress.json").write_text(json.dumps(progress))
    text = report_text(folder)
    assert text.startswith("Still running: 31,000 env steps")
    assert "summary.json" not in text


def test_the_summary_before_a_resume_is_not_the_end(tmp_path: Path) -> None:
    folder = write_killed_run(tmp_path / "a")
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"status": "stopped"}))
    os.utime(folder / "summary.json", (1, 1))
    assert report_text(folder).startswith("Killed: 31,000 env steps")


def test_without_summary_and_progress_the_metrics_are_used(tmp_path: Path) -> None:
    folder = write_killed_run(tmp_path / "a")
    (folder / "progress.json").unlink()
    os.utime(folder / "samples.jsonl", (1, 1))  # a fresh one would mean that it is running
    with (folder / "metrics.csv").open("a") as file:
        file.write("999999,91,")  # a row that was being written
    text = report_text(folder)
    assert text.startswith(
        "Not ended, running or killed: 50,000 env steps in 10.0 s, 5,000 steps/s, return 48"
    )
    assert "run           CartPole-v1, ppo, seed 1" in text


def test_an_empty_run_folder_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    text = report_text(tmp_path)
    assert text.startswith("Not ended, running or killed: no env step is recorded.")
    records = read_run(tmp_path)
    missing = [problem.split()[0] for problem in records.problems if "is missing" in problem]
    assert sorted(missing) == ["metrics.csv", "samples.jsonl", "spans.jsonl", "summary.json", "system.json"]
    assert records.idle == {}


def test_without_spans_the_summarys_phases_are_used(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "spans.jsonl").unlink()
    assert (
        "time went to  updates 50 %, waiting for data 44 %, starting 4 %, writing records 2 %"
        in report_text(folder)
    )


@pytest.mark.parametrize(
    "name", ["config.json", "summary.json", "system.json", "metrics.csv", "samples.jsonl"]
)
@pytest.mark.parametrize("content", [b"", b"\xff\x00{", b"[]", b'{"a": 1}\n{"t": "x"}\n'])
def test_broken_files_never_raise(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_run(tmp_path / "a")
    (folder / name).write_bytes(content)
    text = report_text(folder)
    assert "50,000 env steps" in text
    assert len(text.splitlines()) <= 15
    assert "nan" not in text
    assert "None" not in text


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlatoutError, match=r"is not a run: it has no config\.json"):
        report_text(tmp_path)
