"""Records on a disk that fails, for a while or for good; the failures are real, by a limit on the size of files."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from flatout.runlog.files import MAX_WAITING, AppendedFile
from flatout.runlog.folder import RunFolder
from flatout.runlog.recorder import MetricsLog, Recorder, read_rows
from flatout.timing import DeviceClock, Phase
from tests.runlog.progress_examples import progress


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """Writing beyond this size fails meanwhile, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(autouse=True)
def _retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.runlog.files.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("flatout.runlog.recorder.PROGRESS_SECONDS", 0.0)


def test_records_that_could_not_be_written_are_written_later_whole_and_in_order(tmp_path: Path) -> None:
    file = AppendedFile(tmp_path / "x")
    file.write(b"first\n")
    with largest_file(10):
        file.write(b"second\n")
        assert (tmp_path / "x").read_bytes() == b"first\nseco"
        assert "File too large" in str(file.problem)
        file.write(b"third\n")
    file.write(b"fourth\n")
    assert not file.problem
    file.close()
    assert (tmp_path / "x").read_bytes() == b"first\nsecond\nthird\nfourth\n"
    assert file.n_lost == 0


def test_a_disk_that_stays_full_loses_records_and_they_are_counted(tmp_path: Path) -> None:
    file, record = AppendedFile(tmp_path / "x"), b"x" * (MAX_WAITING // 4)
    with largest_file(0):
        file.write(*[record] * 3)
        assert file.n_lost == 0
        file.write(*[record] * 3)
        assert file.n_lost == 2
        file.close()
        file.close()
    assert file.n_lost == 6


def test_metrics_of_a_resumed_run_wait_for_room_to_be_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("time/total_timesteps\n1000\n2000\n3000\n")
    with largest_file(0):
        log = MetricsLog(path, resume_at=2000)
        log.write(log.row(progress(env_steps=2500)))
    assert path.read_text().endswith("3000\n")
    log.write(log.row(progress(env_steps=3500)))
    log.close()
    assert [row["time/total_timesteps"] for row in read_rows(path)] == ["1000", "2000", "2500", "3500"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.csv"]


class Notes:
    """A sink that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def write(self, progress: object) -> None: ...
    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None: ...


def test_the_user_is_told_once_that_records_cannot_be_written_and_once_that_they_can(tmp_path: Path) -> None:
    folder, notes = RunFolder.create(tmp_path, "a"), Notes()
    recorder = Recorder(folder, [notes])
    with largest_file(0):
        for n in range(5):
            recorder.write(progress(env_steps=n, seconds=float(n)))
            recorder.fault("env 3 raised", "Traceback …\n")
    recorder.write(progress(env_steps=5, seconds=5.0))
    recorder.fault("env 4 raised", "Traceback …\n")
    recorder.write(progress(env_steps=6, seconds=6.0))
    recorder.close()
    told = [note for note in notes.notes if "raised" not in note]
    assert [note.partition(";")[2] for note in told] == [" training goes on and tries again", ""]
    assert told[1] == "note: records can be written again"
    assert recorder.figures()["records_lost"] == 0
    assert len(list(read_rows(folder.metrics))) == 7
    assert folder.faults.read_text().count("env 3 raised") == 5


def test_faults_that_repeat_are_thinned_out_and_others_are_not(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a")
    recorder = Recorder(folder)
    for n in range(5000):
        recorder.fault(f"worker {n % 3}, pid {4000 + n}: killed by SIGKILL", "")
        if n % 1000 == 0:
            recorder.fault(f"env 7 raised in step {n}", "x" * 1_000_000 + "\n")
    for n in range(5000):
        recorder.fault("another kind: " + "x" * 10 * n, "Traceback …\n")
    recorder.close()
    lines = folder.faults.read_text().splitlines()
    assert sum("SIGKILL" in line for line in lines) == 100 + 6
    assert sum("env 7 raised" in line for line in lines) == 5
    assert any(line.endswith("pid 8095: killed by SIGKILL (4,096 such faults by now)") for line in lines)
    assert folder.faults.stat().st_size < 1_000_000


def test_the_longer_a_run_the_farther_apart_its_rows_but_the_last_is_written(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a")
    recorder = Recorder(folder)
    for n in range(1000):  # a row is due every 100 s or so
        evaluated = {"eval/mean_reward": 1.0} if n == 555 else {}
        recorder.write(progress(env_steps=n, seconds=1e6 + n, metrics=evaluated))
    recorder.close()
    steps = [int(row["time/total_timesteps"]) for row in read_rows(folder.metrics)]
    assert len(steps) < 20
    assert steps[0] == 0
    assert 555 in steps
    assert steps[-1] == 999


class Event:
    """A timing event of a device that runs a phase per millisecond."""

    now = 0.0

    def record(self) -> None:
        self.at, Event.now = Event.now, Event.now + 1.0

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def test_spans_of_the_device_are_folded_in_a_long_run() -> None:
    clock = DeviceClock(Event)
    for n in range(60_000):
        clock.enter(Phase.UPDATE if n % 2 else Phase.IDLE)
        clock.cut()
    spans = list(clock.spans)
    assert len(spans) < 10_000
    assert all(a.end == pytest.approx(b.start) for a, b in pairwise(spans))
    assert sum(sum(span.phases.values()) for span in spans) == pytest.approx(60, rel=0.01)
