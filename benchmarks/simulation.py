"""Predicted and measured steps/s, at settings other than those the costs were measured with.

`python -m benchmarks.simulation` → docs/benchmarks.md. Costs are measured once per env and network with 16 envs; the
settings are other numbers of envs, overlapped or not. Every run is a fresh process.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.envs import Burn, Wait, loops_for
from benchmarks.page import conditions, table, write_section

FITTED = 16
"""Envs with which the costs were measured."""
SETTINGS: list[dict[str, Any]] = [
    {"wait_ms": ms, "net": net, "n_envs": n, "overlap": overlap}
    for ms in (2, 10)
    for net in ((64, 64), (256, 256))
    for n in (8, 64)
    for overlap in ("off", "on")
] + [
    {"wait_ms": 0, "net": (64, 64), "n_envs": n, "overlap": overlap}
    for n in (8, 32)
    for overlap in ("off", "on")
]
COMMON: dict[str, Any] = {"preset": "auto", "n_steps": 64, "batch_size": 256, "n_epochs": 4, "compile": "off"}


class Waits(Wait):
    """Waits 2 ± 1 ms."""

    def __init__(self) -> None:
        super().__init__(0.002, 0.001)


ENVS = {0: Burn, 2: Waits, 10: Wait}


def agent_for(wait_ms: int, net: tuple[int, ...], n_envs: int, overlap: str) -> Any:
    """An agent with these settings."""
    import flatout

    extra: dict[str, Any] = {"n_collectors": 1} if wait_ms == 0 and overlap == "on" else {}
    return flatout.PPO(
        ENVS[wait_ms], **COMMON, **extra, network_arch=net, n_envs=n_envs, overlap=overlap, seed=1
    )


def measure(wait_ms: int, net: tuple[int, ...], path: Path) -> dict[str, float]:
    """Costs of an env and a network, from 16 envs in lockstep."""
    from flatout.advice.short_benchmark import measure as measure_agent

    agent = agent_for(wait_ms, net, FITTED, "off")
    costs = measure_agent(agent, 4.0).costs
    agent.close()
    path.write_bytes(pickle.dumps(costs))
    return {"step_seconds": costs.step_seconds}


def compare(wait_ms: int, net: tuple[int, ...], n_envs: int, overlap: str, path: Path) -> dict[str, float]:
    """What the simulation says and what a run of some seconds gives."""
    from flatout.advice.short_benchmark import short_benchmark
    from flatout.perf.simulate import simulate

    agent = agent_for(wait_ms, net, n_envs, overlap)
    settings = agent.trainer().plan
    forecast = simulate(pickle.loads(path.read_bytes()), settings)
    result = short_benchmark(agent, 6.0)
    agent.close()
    return {
        "predicted": forecast.steps_per_second,
        "measured": result.steps_per_second,
        "busy_predicted": forecast.learner_busy,
        "busy_measured": result.learner_busy,
    }


def in_a_process(what: str, arguments: dict[str, Any]) -> Any:
    """One of the above in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.simulation", "--one", what, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, predict, run, write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", nargs=2)
    args = parser.parse_args()
    if args.one:
        given = json.loads(args.one[1])
        given |= {"net": tuple(given["net"]), "path": Path(given["path"])}
        print(json.dumps(measure(**given) if args.one[0] == "measure" else compare(**given)))
        return
    os.environ["BURN_LOOPS"] = str(loops_for(300.0))  # the same cost in every process
    rows, errors = [], []
    with tempfile.TemporaryDirectory() as folder:
        paths: dict[Any, str] = {}
        for setting in SETTINGS:
            key = (setting["wait_ms"], setting["net"])
            if key not in paths:
                paths[key] = str(Path(folder) / f"{len(paths)}.pickle")
                in_a_process("measure", {"wait_ms": key[0], "net": key[1], "path": paths[key]})
            got = in_a_process("compare", setting | {"path": paths[key]})
            off = got["predicted"] / got["measured"] - 1
            errors.append(abs(off))
            env = f"waits {key[0]} ms" if key[0] else "computes 300 µs"
            busy = f"{100 * got['busy_predicted']:.0f} / {100 * got['busy_measured']:.0f} %"
            cells = [f"{got['predicted']:,.0f}", f"{got['measured']:,.0f}", f"{100 * off:+.0f} %", busy]
            row = [env, "-".join(map(str, key[1])), str(setting["n_envs"]), setting["overlap"], *cells]
            print(" | ".join(row), flush=True)
            rows.append(row)
    within = sum(error <= 0.15 for error in errors)
    header = [
        "env",
        "network",
        "envs",
        "overlap",
        "predicted, steps/s",
        "measured, steps/s",
        "error",
        "learner busy, predicted / measured",
    ]
    text = (
        f"## Predicted and measured speed\n\n`python -m benchmarks.simulation`: costs are measured with {FITTED} envs "
        f"without overlap; then speed is predicted for other settings, and each is run for a few seconds.\n{conditions()}\n\n"
        + table(header, rows)
        + f"\n\nWithin 15 %: {within} of {len(rows)}; median error {100 * statistics.median(errors):.0f} %."
    )
    write_section("simulation", text)


if __name__ == "__main__":
    main()
