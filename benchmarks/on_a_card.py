"""A card in two minutes: what `make test-gpu` runs, and the text to paste into an issue.

`python -m benchmarks.on_a_card [--tests] [--seconds 20] [--cases fast,heavy,snake,dqn] [--device auto]`. Without a card: one line, exit
code 1. On the simulated card: `python -m simcard --timed rtx4070 benchmarks/on_a_card.py`.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.page import table

ROOT = Path(__file__).parents[1]
CASES: dict[str, dict[str, Any]] = {
    "fast": {"env": "CartPole-v1", "algo": "ppo", "preset": "fast"},
    "heavy": {"env": "CartPole-v1", "algo": "ppo", "preset": "heavy"},
    "snake": {"env": "snake", "algo": "pqn", "n_envs": 4096},
    "dqn": {"env": "CartPole-v1", "algo": "dqn", "preset": "gpu", "train_ratio": 1.0, "learning_starts": 32},
}


def main(argv: list[str] | None = None) -> int:
    """Run the tests and the cases, print the text; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_a_card", description=__doc__)
    parser.add_argument("--tests", action="store_true", help="run the tests marked cuda, too")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each case")
    parser.add_argument("--cases", default=",".join(CASES), help="some of them, separated by commas")
    parser.add_argument("--device", default="auto", help="auto, cuda[:N] (ROCm too), xpu[:N] or mps")
    args = parser.parse_args(argv)

    from flatout.device.accelerator import resolve_device
    from flatout.errors import FlatoutError

    try:
        device = resolve_device(args.device)
    except FlatoutError as error:
        print(error)
        return 2
    if device == "cpu":
        print("no card: torch sees no CUDA, ROCm, XPU or MPS device on this machine")
        return 1
    tests, failed = run_tests() if args.tests else ("not run", False)
    rows = []
    for name in args.cases.split(","):
        print(f"{name}: {args.seconds:.0f} s …", file=sys.stderr, flush=True)
        rows.append([name, *run_case(name, device, args.seconds)])
    print(text(device, tests, rows))
    return int(failed or any(row[1] == "failed" for row in rows))


def run_tests() -> tuple[str, bool]:
    """pytest's last line for the tests marked cuda with the names of those that failed, and whether any did."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-rf", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or ["no output"]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "\n".join([re.sub(r"^=+ | =+$", "", lines[-1]), *failures]), done.returncode != 0


def run_case(name: str, device: str, seconds: float) -> list[str]:
    """Steps/s, learner busy, device utilisation and the backend of one case; or why it failed."""
    import flatout
    from flatout.advice.short_benchmark import short_benchmark

    with tempfile.TemporaryDirectory() as folder:
        agent = None
        try:
            agent = flatout.Agent(**CASES[name], device=device, seed=1, runs_dir=folder)
            measured = short_benchmark(agent, seconds)
        except Exception as error:  # the text says so, and the other cases still run
            return ["failed", f"{type(error).__name__}: {str(error).splitlines()[0][:80]}", "", ""]
        finally:
            if agent is not None:
                agent.close()
        used, backoffs = agent.summary["device_utilization"], agent.summary["oom_backoffs"]
        return [
            f"{measured.steps_per_second:,.0f}",
            f"{100 * measured.learner_busy:.0f} %",
            "not known" if used is None else f"{100 * used:.0f} %",
            agent.summary["backend"] + (f", out of memory {backoffs} times" if backoffs else ""),
        ]


def text(device: str, tests: str, rows: list[list[str]]) -> str:
    """What to paste into an issue."""
    import torch

    from flatout.device.machine import machine

    here = machine()
    gpu = here.gpus[int(device.partition(":")[2] or 0)]
    build = torch.version.cuda or torch.version.hip or "neither CUDA nor ROCm"
    capability = f", compute capability {gpu.compute_capability}" if gpu.compute_capability else ""
    lines = [
        "--- paste from here ---",
        f"card     {gpu.name}, {gpu.memory_bytes / 1e9:.1f} GB{capability}, as {device}",
        f"driver   {driver()}",
        f"torch    {torch.__version__} ({build}), Python {platform.python_version()}, {platform.system()}",
        f"machine  {here.cpu}, {here.cores} cores",
        f"tests    {tests}",
        "",
        table(["case", "env steps/s", "learner busy", "device utilisation", "updates"], rows),
        "--- to here ---",
    ]
    return "\n".join(lines)


def driver() -> str:
    """The version of NVIDIA's driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return f"NVIDIA {pynvml.nvmlSystemGetDriverVersion()}"
    except pynvml.NVMLError as error:
        return f"not NVIDIA's ({error})"


if __name__ == "__main__":
    sys.exit(main())
