"""Runs with a known fault: is it the doctor's first finding, and does its advice gain what was predicted?

`python -m benchmarks.diagnosing [--cases sleeps,burns,…]` → docs/benchmarks.md. Before and after alternate, each a fresh
process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from itertools import count
from typing import Any

from benchmarks.envs import Burn, Wait, loops_for
from benchmarks.page import conditions, table, write_section

_instances = count()


class OneSlow(Wait):
    """Waits 2 ± 1 ms; one instance of 32 ten times as long."""

    def __init__(self) -> None:
        slow = next(_instances) % 32 == 7
        super().__init__(0.020 if slow else 0.002, 0.001)


class NoneSlow(Wait):
    """Waits 2 ± 1 ms."""

    def __init__(self) -> None:
        super().__init__(0.002, 0.001)


ENVS: dict[str, Any] = {"Burn": Burn, "Wait": Wait, "OneSlow": OneSlow, "NoneSlow": NoneSlow}
SMALL: dict[str, Any] = {
    "preset": "auto",
    "network_arch": (64, 64),
    "n_epochs": 4,
    "batch_size": 256,
    "seed": 1,
}
CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "an env that sleeps": ("envs wait", "Wait", {"n_envs": 8, "n_steps": 128}, ""),
    "an env that burns CPU": (
        "env computes",
        "Burn",
        {"n_envs": 16, "n_steps": 64, "executor": "serial"},
        "",
    ),
    "one slow env among 32": ("slow env", "OneSlow", {"n_envs": 32, "n_steps": 32}, "NoneSlow"),
    "a giant network": (
        "big network",
        "CartPole-v1",
        {"n_envs": 8, "n_steps": 64, "network_arch": (1024, 1024, 512, 256)},
        "",
    ),
    "batch 8": ("tiny batches", "CartPole-v1", {"n_envs": 8, "n_steps": 64, "batch_size": 8}, ""),
    "64 processes on 2 cores": (
        "too many processes",
        "CartPole-v1",
        {"n_envs": 64, "n_steps": 32, "executor": "process", "n_workers": 64},
        "",
    ),
    "a checkpoint every iteration": (
        "checkpoints too often",
        "CartPole-v1",
        {"n_envs": 8, "n_steps": 32, "checkpoint_every": 1},
        "",
    ),
    "30 useless epochs": (
        "useless epochs",
        "CartPole-v1",
        {
            "n_envs": 16,
            "n_steps": 128,
            "batch_size": 512,
            "n_epochs": 30,
            "network_arch": (256, 256),
        },
        "",
    ),
}
"""Name → the finding that is wanted, env, settings, and the env with the fault put right if no flag does it."""


def examine(env: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The doctor's findings."""
    from time import perf_counter

    from flatout.advice.doctor import doctor

    began = perf_counter()
    found = doctor(ENVS.get(env, env), **settings)
    return found.to_json() | {"seconds": perf_counter() - began}


def reach(env: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Steps/s of a real run of some seconds."""
    import tempfile

    import flatout
    from flatout.advice.short_benchmark import short_benchmark

    with tempfile.TemporaryDirectory() as folder:
        agent = flatout.PPO(ENVS.get(env, env), runs_dir=folder, run_name="run", **settings)
        moment = short_benchmark(agent, 6.0)
        agent.close()
    return {"steps_per_second": moment.steps_per_second}


def in_a_process(what: str, env: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One of the above in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.diagnosing", "--one", what, env, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return out


def changed(settings: dict[str, Any], flags: list[str]) -> dict[str, Any]:
    """The settings with the advice taken."""
    advice = {name[2:].replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    return settings | advice


def main() -> None:
    """Examine, take the advice, compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", nargs=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    if args.one:
        what, env, settings = args.one
        function = examine if what == "examine" else reach
        print(json.dumps(function(env, json.loads(settings))))
        return
    os.environ["BURN_LOOPS"] = str(loops_for(300.0))  # the same cost in every process
    rows = []
    for name in args.cases.split(","):
        wanted, env, own, mended = CASES[name]
        settings = SMALL | own
        found = in_a_process("examine", env, settings)
        first = found["findings"][0] if found["findings"] else {"kind": "nothing", "flags": [], "gain": None}
        ratios = []
        for _ in range(args.rounds):
            before = in_a_process("reach", env, settings)["steps_per_second"]
            after = in_a_process("reach", mended or env, changed(settings, first["flags"]))[
                "steps_per_second"
            ]
            ratios.append(after / before)
        got = statistics.median(ratios)
        share = (got - 1) / (first["gain"] - 1) if first["gain"] else float("nan")
        kinds = [finding["kind"] for finding in found["findings"]]
        right = "yes" if first["kind"] == wanted else f"no: {', '.join(kinds)}"
        row = [name, right, " ".join(first["flags"]) or "fix the env", f"{first['gain'] or 0:.2f} ×"]
        row += [f"{got:.2f} ×", f"{100 * share:.0f} %", f"{found['seconds']:.0f} s"]
        print(" | ".join(row), flush=True)
        rows.append(row)
    header = [
        "fault",
        "found first",
        "advice",
        "predicted",
        "measured",
        "share of the predicted gain",
        "doctor took",
    ]
    text = (
        f"## What `flatout doctor` finds\n\n`python -m benchmarks.diagnosing`: runs with a known fault, before and "
        f"after taking the advice; {args.rounds} rounds.\n{conditions()}\n\n" + table(header, rows)
    )
    write_section("diagnosing", text)


if __name__ == "__main__":
    main()
