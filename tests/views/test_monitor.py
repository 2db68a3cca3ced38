"""The monitor on run folders in any state, and the cost of reading a large one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from flatout.runlog.folder import RunFolder
from flatout.runlog.meters import GpuWatch
from flatout.views.monitor import Job, JobReader, Monitor, MonitorState
from flatout.views.screen import cells_for, screen
from tests.runlog.card import T4, install

HEADER = {"began": 1_700_000_000.0, "offset": 0.0, "version": 1}


def span(lane: str, start: float, end: float, **phases: float) -> dict[str, Any]:
    clock = "device" if lane == "device" else "host"
    return {"lane": lane, "clock": clock, "start": start, "end": end, "phases": phases}


def write_lines(path: Path, *records: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def make_run(path: Path, **progress: Any) -> Path:
    """The folder of a run of this process, 30 seconds old."""
    path.mkdir(parents=True)
    config = {"env": "CartPole-v1", "algo": "ppo", "timesteps": 500_000}
    (path / "config.json").write_text(json.dumps(config))
    known = {
        "status": "running",
        "pid": os.getpid(),
        "env": "CartPole-v1",
        "algo": "ppo",
        "device": "cpu",
        "executor": {"kind": "serial", "collectors": 2, "workers": 0, "reason": ""},
        "overlap": {"on": False, "reason": ""},
        "env_steps": 125_000,
        "total_steps": 500_000,
        "episodes": 1204,
        "wall_seconds": 30.0,
        "steps_per_second": 5000.0,
        "seconds_left": 75.0,
        "return_mean": 143.2,
        "return_std": 30.1,
        "learner_busy": 0.61,
        "updated": time.time(),
    }
    (path / "progress.json").write_text(json.dumps(known | progress))
    rows = "".join(f"{n},{10 * n}\n" for n in range(8))
    (path / "metrics.csv").write_text(f"time/total_timesteps,rollout/ep_rew_mean\n{rows}")
    write_lines(
        path / "spans.jsonl",
        HEADER,
        span("learner", 0, 10, wait=9.0, publish=1.0),
        span("collector 0", 0, 10, env=8.0, act=2.0),
        span("learner", 10, 30, update=20.0),
        span("collector 0", 10, 30, slot=20.0),
    )
    return path


def look(*named: Path, runs_dir: Path = Path("nowhere")) -> MonitorState:
    return Monitor(runs_dir, named).read()


def text_of(state: MonitorState, columns: int = 80, lines: int | None = None, waits: bool = False) -> str:
    console = Console(width=columns, color_system=None, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(screen(state, columns, lines, waits))
    return captured.get()


def test_a_running_run_is_found_and_shown_completely(tmp_path: Path) -> None:
    make_run(tmp_path / "first")
    (job,) = look(runs_dir=tmp_path).jobs
    assert (job.name, job.status, job.env, job.algo) == ("first", "running", "CartPole-v1", "ppo")
    assert job.seconds_left == pytest.approx(75, abs=5)
    assert job.returns == [10.0 * n for n in range(8)]
    learner, collector = job.strips
    assert learner.cells == ["wait"] * 10 + ["update"] * 20 + [""] * 30
    assert collector.cells == ["env"] * 10 + ["slot"] * 20 + [""] * 30
    assert learner.busy == pytest.approx(2 / 3)
    assert next(iter(job.idle)) == "waiting for envs"
    assert job.idle["waiting for envs"] == pytest.approx(7.2 / 30)
    assert sum(job.idle.values()) == pytest.approx(1 / 3)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_its_screen_is_complete_without_colours(columns: int, tmp_path: Path) -> None:
    make_run(tmp_path / "first")
    state = Monitor(tmp_path).read(cells_for(columns))
    text = text_of(state, columns)
    assert max(map(len, text.splitlines())) == columns
    for words in (
        "first · running · CartPole-v1 · PPO · cpu",
        "125,000 of 500,000 (25 %)",
        "return       143.2 ± 30.1   ▁▂▃▄▅▆▇█",
        "5,000 steps/s   learner busy 61 %",
        "last 60 s    ",
        "U update",
        "w wait",
        "idle         33 %: 24 % waiting for envs, 6 %",
    ):
        assert words in text
    assert re.search("learner      w{5,}U{10,}·+  busy 67 %", text)
    assert re.search("collector 0  E{5,}l{10,}·+  busy 33 %", text)


def test_cores_memory_and_no_gpu(tmp_path: Path) -> None:
    make_run(tmp_path / "first")
    state = look(runs_dir=tmp_path)
    assert len(state.cores) == os.cpu_count()
    assert 0 < state.memory < state.memory_total
    assert state.gpus == {}
    text = text_of(replace(state, cores=[0.0, 1.0] * 32, no_gpu="no NVIDIA GPU: no driver answers"))
    assert "cores    ▁█▁█" in text
    assert "memory   ━" in text
    assert "no NVIDIA GPU: no driver answers\n" in text
    assert "kernels" not in text


def test_a_gpu_is_shown_by_its_newest_sample(tmp_path: Path) -> None:
    gpu = {
        "utilization": 0.63,
        "memory": 4 * 2**30,
        "memory_total": 16 * 2**30,
        "power": 68.2,
        "temperature": 61,
        "throttled": ["power cap"],
    }
    make_run(tmp_path / "first", device="cuda", gpu=gpu)
    text = text_of(look(runs_dir=tmp_path))
    assert "63 % of time in kernels  4.0 GB of 16.0 GB  68 W  61 °C" in text
    assert "slowed by power cap" in text
    assert "no NVIDIA GPU" not in text
    make_run(tmp_path / "other" / "second", device="cuda", gpu={"utilization": None, "memory": 2**30})
    text = text_of(look(runs_dir=tmp_path / "other"))
    assert "cuda     1.0 GB\n" in text
    assert "kernels" not in text


def test_every_card_is_shown_with_or_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = T4 | {
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetCurrentClocksEventReasons": 0x1,
        "nvmlDeviceGetPowerUsage": 9_100,
    }
    log = install(monkeypatch, T4, idle, models=("Tesla T4", "NVIDIA GeForce RTX 4070"))
    monitor = Monitor(tmp_path)
    state = monitor.read()
    assert list(state.gpus) == ["GPU 0 Tesla T4", "GPU 1 NVIDIA GeForce RTX 4070"]
    assert state.no_gpu == ""
    text = text_of(state, columns=120)
    assert re.search("GPU 0 .+63 % of time in kernels  3.0 GB of 15.0 GB  68 W  71 °C  Tesla T4", text)
    assert "slowed by power cap" in text
    assert re.search("GPU 1 .* 0 % of time in kernels .* 9 W", text)
    make_run(tmp_path / "first", device="cuda:1", gpu={"utilization": 0.5})
    assert list(monitor.read().gpus) == list(state.gpus)  # not a second time by the run's own samples
    monitor.close()
    deadline = time.monotonic() + 10
    while log.count("shutdown") < log.count("init") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert log.count("shutdown") == log.count("init")


def test_between_two_screens_a_card_is_sampled_and_averaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = [SimpleNamespace(gpu=load, memory=0) for load in (0, *[100] * 10, 0)]
    install(monkeypatch, T4 | {"nvmlDeviceGetUtilizationRates": loads})
    watch = GpuWatch(hertz=500)
    deadline = time.monotonic() + 10
    while len(watch._samples["0 Tesla T4"]) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    (sample,) = watch.newest().values()
    watch.close()
    assert sample.utilization is not None
    assert 0.0 < sample.utilization < 0.6  # half of the time, and less the longer it was read


def test_a_killed_run_is_shown_when_it_is_named(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        run = make_run(tmp_path / "first", pid=process.pid)
        assert look(run).jobs[0].status == "running"
        process.kill()
        # It is a zombie until somebody asks how it ended, and no run any more.
        deadline = time.monotonic() + 10
        while look(run).jobs[0].status == "running" and time.monotonic() < deadline:
            time.sleep(0.05)
    state = look(run)
    assert state.jobs[0].status == "killed"
    assert state.jobs[0].seconds_left is None
    assert "first · killed" in text_of(state)
    # All of it, not just the last minute.
    assert set(state.jobs[0].strips[0].cells) == {"wait", "update"}
    assert look(runs_dir=tmp_path).jobs == []


def test_an_ended_run_shows_how_it_ended_and_a_resumed_one_is_running(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    summary = {"status": "stopped", "env": "CartPole-v1", "algo": "ppo", "env_steps": 4000}
    (run / "summary.json").write_text(json.dumps(summary))
    os.utime(run / "progress.json", (1, 1))
    job = look(run).jobs[0]
    assert (job.status, job.outcome, job.env_steps, job.total_steps) == ("ended", "stopped", 4000, 500_000)
    assert "first · stopped" in text_of(look(run))
    os.utime(run / "summary.json", (1, 1))
    os.utime(run / "progress.json")
    assert look(run).jobs[0].status == "running"


def test_a_run_without_progress_yet_is_shown(tmp_path: Path) -> None:
    run = tmp_path / "new"
    run.mkdir()
    assert "new · not started" in text_of(look(run))
    assert look(runs_dir=tmp_path).jobs == []
    (run / "config.json").write_text('{"env": "CartPole-v1", "algo": "ppo"}')
    folder = RunFolder.open(run)
    folder.claim()
    assert look(runs_dir=tmp_path).jobs[0].status == "running"
    assert "collecting the first rollout" in text_of(look(runs_dir=tmp_path))
    folder.lock.release()
    assert look(run).jobs[0].status == "unknown"


def test_missing_runs_and_folders_are_reported(tmp_path: Path) -> None:
    text = text_of(look(runs_dir=tmp_path), columns=200, waits=True)
    assert f"no run is running in {tmp_path}/; waiting" in text
    text = text_of(look(runs_dir=tmp_path / "gone"), columns=200)
    assert f"{tmp_path}/gone/ does not exist\n" in text


def test_new_runs_appear_and_ended_ones_stay(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path)
    assert monitor.read().jobs == []
    run = make_run(tmp_path / "first")
    make_run(tmp_path / "second")
    assert [job.name for job in monitor.read().jobs] == ["first", "second"]
    (run / "progress.json").unlink()
    (run / "summary.json").write_text('{"status": "finished"}')
    jobs = monitor.read().jobs
    assert [(job.name, job.status) for job in jobs] == [("second", "running"), ("first", "ended")]


def test_a_named_run_is_over_when_its_folder_goes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    monitor = Monitor(tmp_path, [run])
    assert not monitor.has_ended(monitor.read())
    run.rename(tmp_path / "elsewhere")
    state = monitor.read()
    assert monitor.has_ended(state)
    assert "first · gone" in text_of(state)
    assert "125,000 of 500,000" in text_of(state)


@pytest.mark.parametrize(
    "name", ["progress.json", "config.json", "metrics.csv", "spans.jsonl", "samples.jsonl"]
)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]\n",
        b"null\n",
        b'{"pid": "x", "env_steps": "many", "phases": 3, "findings": {"a": 1}, "executor": 7, "gpu": 1, "t": []}\n',
        b'{"lane": 3, "start": NaN, "end": 1e999, "phases": {"a": -1}}\n',
        b'{"t": 1' + b"0" * 400 + b', "env_steps": 1' + b"0" * 400 + b"}\n",
        b"\xff\x00\xfe\n" * 50,
        b"[" * 100_000 + b"\n",
    ],
)
def test_nothing_in_a_folder_can_break_it(name: str, content: bytes, tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    (run / name).write_bytes(content)
    assert "first · " in text_of(look(run))
    assert json.loads(json.dumps(asdict(look(run))))["jobs"][0]["name"] == "first"


def test_text_from_a_folder_cannot_control_the_terminal(tmp_path: Path) -> None:
    executor = {"kind": "\x1b[2J[bold]x[/bold]"}
    run = make_run(tmp_path / "first", env="\x1b]0;title\x07[red]", executor=executor)
    text = text_of(look(run))
    assert "\x1b" not in text
    assert "[bold]x[/bold]" in text
    assert "[red]" in text


def test_a_low_terminal_shows_less_of_each_run(tmp_path: Path) -> None:
    for nth in range(12):
        make_run(tmp_path / f"run{nth:02d}")
    state = look(runs_dir=tmp_path)
    for lines in (200, 60, 24, 10, 6):
        text = text_of(state, 80, lines)
        assert len(text.splitlines()) <= lines
        assert "run00 · running" in text
    assert "run11 · running" in text_of(state, 80, 24)
    assert "… 10 more" in text_of(state, 80, 6)


def test_many_collectors_are_summed_up(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    lanes = [span(f"collector {n}", 0, 30, env=20.0, slot=10.0) for n in range(1, 40)]
    write_lines(run / "spans.jsonl", *lanes)
    text = text_of(look(run))
    assert "collector 4" in text
    assert "collector 5" not in text
    assert "… 35 more, busy 67 %" in text


def test_a_second_read_reads_only_new_lines(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    write_lines(run / "spans.jsonl", *(span("learner", 30 + n, 31 + n, update=1.0) for n in range(40_000)))
    reader = JobReader(run)
    first = _seconds(reader)
    write_lines(run / "spans.jsonl", span("learner", 40_030, 40_050, wait=20.0))
    again = min(_seconds(reader) for _ in range(3))
    assert again < first / 5
    assert reader.read(60).strips[0].phases == pytest.approx({"update": 2 / 3, "wait": 1 / 3})


def _seconds(reader: JobReader) -> float:
    began = time.perf_counter()
    job: Job = reader.read(60)
    assert job.strips
    return time.perf_counter() - began
