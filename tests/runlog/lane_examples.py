"""Examples of run folders: lockstep, overlap, on a GPU, killed, and with broken files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flatout.runlog.recorder import COLUMNS

BEGAN = 1_794_790_166.5
Phases = Iterable[tuple[str, float]]

CONFIG: dict[str, Any] = {
    "env": "CartPole-v1",
    "algo": "ppo",
    "preset": None,
    "timesteps": 50_000,
    "n_envs": 8,
    "seed": 1,
    "ppo": {"n_steps": 32, "batch_size": 256, "learning_rate": 0.001},
    "network": {"network_arch": [64, 64], "activation": "tanh"},
}
SYSTEM: dict[str, Any] = {
    "cores": 2,
    "memory_bytes": 25_274_793_984,
    "cpu": "AMD EPYC",
    "platform": "Linux",
    "versions": {"python": "3.11.7", "flatout": "0.1.0", "torch": "2.13.0+cpu"},
    "gpus": [],
}
SUMMARY: dict[str, Any] = {
    "status": "finished",
    "env": "CartPole-v1",
    "algo": "ppo",
    "preset": "auto",
    "seed": 1,
    "device": "cpu",
    "env_steps": 50_000,
    "updates": 3900,
    "startup_seconds": 2.1,
    "wall_seconds": 10.0,
    "steps_per_second": 5000.0,
    "episodes": 339,
    "return_mean": 486.2,
    "return_std": 12.04,
    "target_return": 475.0,
    "target_reached_seconds": 7.5,
    "target_reached_steps": 38_000,
    "learner_busy": 0.5,
    "device_utilization": None,
    "phases": {"start": 0.4, "wait": 4.4, "advantage": 0.4, "update": 4.6, "record": 0.2},
    "collect_rate": 11_000.0,
    "learn_rate": 10_000.0,
    "pipeline_efficiency": 0.5,
    "executor": {"kind": "serial", "collectors": 1, "workers": 0, "reason": "a step takes 14 µs"},
    "restarts": 0,
}


def header(offset: float = 0.0) -> dict[str, Any]:
    return {"began": BEGAN + offset, "offset": offset, "version": 1}


def chain(lane: str, phases: Phases, start: float = 0.0, clock: str = "host") -> list[dict[str, Any]]:
    """Fine spans one after another."""
    spans = []
    for phase, seconds in phases:
        end = start + seconds
        spans.append(
            {
                "lane": lane,
                "clock": clock,
                "start": round(start, 6),
                "end": round(end, 6),
                "phases": {phase: seconds},
            }
        )
        start = end
    return spans


def folded(lane: str, start: float, phases: Mapping[str, float]) -> dict[str, Any]:
    """One span over a longer stretch."""
    end = round(start + sum(phases.values()), 6)
    return {"lane": lane, "clock": "host", "start": start, "end": end, "phases": dict(phases)}


def lockstep(n_iterations: int = 48, folded_from: int = 36) -> list[dict[str, Any]]:
    """A learner and one collector that take turns, 0.2 s an iteration, the last ones folded."""
    learner = chain("learner", [("start", 0.4)])
    collector = chain("collector 0", [("slot", 0.4)])
    for i in range(n_iterations):
        t = 0.4 + 0.2 * i
        learning = {"wait": 0.09, "advantage": 0.008, "update": 0.098, "record": 0.004}
        collecting = {"act": 0.02, "env": 0.06, "store": 0.01, "slot": 0.11}
        if i < folded_from:
            learner += chain("learner", learning.items(), t)
            collector += chain("collector 0", collecting.items(), t)
        else:
            learner.append(folded("learner", round(t, 6), learning))
            collector.append(folded("collector 0", round(t, 6), collecting))
    return sorted(learner + collector, key=lambda span: float(span["end"]))


def overlap(n_iterations: int = 24, n_collectors: int = 3) -> list[dict[str, Any]]:
    """A learner on a device, with collectors beside it that wait for slow envs."""
    spans = chain("learner", [("start", 0.5)])
    for c in range(n_collectors):
        spans += chain(f"collector {c}", [("slot", 0.5)])
    for i in range(n_iterations):
        t = 0.5 + 0.4 * i
        learning = [("wait", 0.2), ("stage", 0.02), ("advantage", 0.02), ("update", 0.15), ("publish", 0.01)]
        spans += chain("learner", learning, t)
        spans += chain("device", [("idle", 0.25), ("update", 0.15)], t, clock="device")
        for c in range(n_collectors):
            env = 0.2 + 0.1 * c / n_collectors
            spans += chain(
                f"collector {c}", [("act", 0.04), ("env", env), ("tail", 0.33 - env), ("slot", 0.03)], t
            )
    return spans


def samples(seconds: float = 10.0, gpu: bool = False) -> list[dict[str, Any]]:
    def device(t: float) -> dict[str, Any] | None:
        return {"utilization": 0.4 + 0.2 * math.sin(t), "memory": 10**9, "power": 90.0} if gpu else None

    times = [round(0.2 * i, 3) for i in range(int(seconds * 5))]
    return [
        {
            "t": t,
            "cores": [50 + 30 * math.sin(t), 95.0],
            "memory": 2 * 10**9,
            "run_cpu": 140.0,
            "gpu": device(t),
        }
        for t in times
    ]


def metrics(n_rows: int = 90, seconds: float = 10.0) -> str:
    """A learning curve as metrics.csv holds it."""
    lines = [",".join(COLUMNS)]
    for i in range(1, n_rows + 1):
        row: dict[str, float | str] = {
            "time/total_timesteps": i * 50_000 // n_rows,
            "time/iterations": i,
            "time/time_elapsed": seconds * i / n_rows,
            "time/fps": 5000,
            "rollout/ep_rew_mean": round(20 + 466 / (1 + math.exp(-(i / n_rows - 0.5) * 12)), 4),
            "learner_busy": 0.5,
        }
        if i % 30 == 0:
            row["eval/mean_reward"] = 500 * i / n_rows
        lines.append(",".join(str(row.get(name, "")) for name in COLUMNS))
    return "\n".join(lines) + "\n"


def write_lines(
    path: Path, records: Iterable[Mapping[str, Any]], offset: float = 0.0, mode: str = "w"
) -> Path:
    with path.open(mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in [header(offset), *records])
    return path


def write_run(folder: Path, gpu: bool = False, config: Mapping[str, Any] = CONFIG) -> Path:
    """A finished run with every record; on a GPU with overlap, else in lockstep."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "system.json").write_text(json.dumps(SYSTEM))
    changes = {"device": "cuda", "device_utilization": 0.41, "learner_busy": 0.4} if gpu else {}
    (folder / "summary.json").write_text(json.dumps(SUMMARY | changes))
    (folder / "metrics.csv").write_text(metrics())
    write_lines(folder / "spans.jsonl", overlap() if gpu else lockstep())
    write_lines(folder / "samples.jsonl", samples(gpu=gpu))
    return folder


def write_killed_run(folder: Path) -> Path:
    """The same run, killed: no summary, half a last line, progress.json of a process that is gone."""
    write_run(folder)
    (folder / "summary.json").unlink()
    cut(folder / "spans.jsonl")
    progress = SUMMARY | {"status": "running", "pid": 2**22 + 1, "env_steps": 31_000, "wall_seconds": 6.2}
    (folder / "progress.json").write_text(json.dumps(progress))
    return folder


def cut(path: Path, n_bytes: int = 20) -> None:
    """Cut the end of a file, as a kill does."""
    data = path.read_bytes()
    path.write_bytes(data[:-n_bytes])
