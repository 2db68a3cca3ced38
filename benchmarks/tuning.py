"""`flatout tune` against an exhaustive grid of the same ways: how near it comes, in what part of the time.

`python -m benchmarks.tuning [--keep FILE]` → docs/benchmarks.md. The best of the grid and what tuning found are run again,
alternating. A walk through the grid that is in the kept file is not walked again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.envs import Wait
from benchmarks.page import conditions, table, write_section

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "slow envs": (
        Wait,
        {
            "preset": "auto",
            "n_envs": 32,
            "n_steps": 64,
            "batch_size": 512,
            "n_epochs": 10,
            "network_arch": (256, 256),
        },
    ),
    "CartPole-v1": (
        "CartPole-v1",
        {
            "preset": "auto",
            "n_envs": 32,
            "n_steps": 32,
            "batch_size": 256,
            "n_epochs": 4,
            "network_arch": (64, 64),
        },
    ),
}
SECONDS = 6.0
BUDGET = 65.0


def grid(case: str) -> list[dict[str, Any]]:
    """Every number of envs with the same total batch × every executor × overlap."""
    _, own = CASES[case]
    total = own["n_envs"] * own["n_steps"]
    # In turn, slow envs would take a minute for each of some rollouts, in one process or in two.
    in_turn = [{"executor": "serial"}, *({"executor": "auto", "n_collectors": n} for n in (1, 2))]
    ways = [{"executor": "process"}, *(in_turn if case == "CartPole-v1" else [{"executor": "thread"}])]
    numbers = (8, 16, 32, 64) if case == "CartPole-v1" else (8, 16, 32, 64, 128)
    return [
        {"n_envs": n, "n_steps": total // n, "overlap": overlap, **way}
        for n in numbers
        for way in ways
        for overlap in ("off", "on")
    ]


def reach(case: str, settings: dict[str, Any]) -> float:
    """Steps/s of a real run of some seconds."""
    import flatout
    from flatout.advice.short_benchmark import short_benchmark

    env, own = CASES[case]
    agent = flatout.PPO(env, **(own | settings), seed=1)
    moment = short_benchmark(agent, SECONDS)
    agent.close()
    return moment.steps_per_second


def tuned(case: str) -> dict[str, Any]:
    """What tuning chooses, and how long it takes."""
    from flatout.advice.tune import tune

    env, own = CASES[case]
    found = tune(env, budget=BUDGET, seed=1, **own)
    trials = [(t.words, t.predicted, t.measured) for t in found.trials]
    return {"config": found.best.config, "seconds": found.seconds, "trials": trials}


def in_a_process(what: str, case: str, settings: dict[str, Any]) -> Any:
    """One of the above in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.tuning", "--one", what, case, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr.splitlines()[-1], flush=True)
        return 0.0
    return json.loads(done.stdout.splitlines()[-1])


def walk(case: str, keep: Path | None) -> tuple[list[tuple[float, dict[str, Any]]], float]:
    """Steps/s of every way of the grid, and how long they took together."""
    kept = json.loads(keep.read_text()) if keep and keep.exists() else {}
    if case not in kept:
        began = perf_counter()
        rates = []
        for settings in grid(case):
            rates.append((in_a_process("reach", case, settings), settings))
            print(case, settings, round(rates[-1][0]), flush=True)
        kept[case] = rates, perf_counter() - began
        if keep:
            keep.write_text(json.dumps(kept))
    rates, seconds = kept[case]
    return rates, seconds


def main() -> None:
    """Tune, walk the grid, compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", nargs=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    if args.one:
        what, case, text = args.one
        print(json.dumps(reach(case, json.loads(text)) if what == "reach" else tuned(case)))
        return
    rows = []
    for case in args.cases.split(","):
        found = in_a_process("tune", case, {})
        print(found, flush=True)
        rates, grid_seconds = walk(case, args.keep)
        top = [settings for _, settings in sorted(rates, key=lambda item: -item[0])[:3]]
        again: list[list[float]] = [[] for _ in (found["config"], *top)]
        for _ in range(3):
            for values, settings in zip(again, (found["config"], *top), strict=True):
                values.append(in_a_process("reach", case, settings))
        print(case, "tuned, then the best of the grid:", again, flush=True)
        ours, *theirs = map(statistics.median, again)
        best = theirs.index(max(theirs))
        shown = {k: v for k, v in found["config"].items() if v not in (0, None)}
        ratio = f"{100 * ours / theirs[best]:.0f} %"
        cells = [
            f"{theirs[best]:,.0f}",
            f"the same settings (measured twice: {ratio})" if shown == top[best] else ratio,
        ]
        cells += [
            f"{found['seconds']:.0f} s",
            f"{grid_seconds:.0f} s, {len(rates)} runs",
            str(shown),
            str(top[best]),
        ]
        print(" | ".join([case, *cells]), flush=True)
        rows.append([case, *cells])
    header = [
        "case",
        "best of the grid, steps/s",
        "tuned ÷ best",
        "tuning took",
        "the grid took",
        "tuned",
        "best",
    ]
    text = (
        "## What `flatout tune` finds\n\n`python -m benchmarks.tuning`: `flatout tune`, and all settings of a grid. The "
        f"three best of the grid and the tuned settings are run again, three rounds; medians.\n{conditions()}\n\n"
        + table(header, rows)
    )
    write_section("tuning", text)


if __name__ == "__main__":
    main()
