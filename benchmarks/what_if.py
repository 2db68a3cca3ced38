"""How well `flatout doctor ENV --what-if gpu=CARD` predicts: on the CPU alone, beside what the simulated card gives.

`python -m benchmarks.what_if [--card rtx4070] [--cases fast,heavy,…]` → docs/benchmarks.md. A prediction is made in a process
that knows of no card; right before it the same case is run on the simulated card, because the machine's own speed changes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from benchmarks.accelerator import CASES, ROOT, measure
from benchmarks.page import conditions, table, write_section

MANY_STEPS = 1_000_000_000
"""Env steps of a run in which starting processes costs nothing, as in the measured ones."""
CLOSE = 0.15
"""A prediction that is off by less than this share is a good one."""
HEADER = ["case", "predicted steps/s", "measured", "predicted ÷ measured", "predicted way", "measured way"]


def predict(name: str, card: str) -> dict[str, Any]:
    """The doctor's answer for a case."""
    from flatout.advice.doctor import doctor

    case = CASES[name]
    how: dict[str, Any] = {"algo": case.algo.lower(), "timesteps": MANY_STEPS, "seed": 1, "device": "cpu"}
    found = doctor(case.env, what_if=f"gpu={card}", **how, **case.settings)
    assert found.what_if is not None, "it was asked"
    assert "simcard" not in sys.modules, "a prediction knows of no card"
    measured = {"cpu_steps_per_second": found.steps_per_second, "step_seconds": found.step_seconds}
    return found.what_if | measured


def predicted(name: str, card: str) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.what_if", "--one", name, "--card", card]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(name, answer, flush=True)
    return answer


def row(name: str, answer: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """A line of the table."""
    speed, real = answer["steps_per_second"], measured["steps_per_second"]
    return [name, f"{speed:,.0f}", f"{real:,.0f}", f"{speed / real:.2f}", answer["way"], measured["way"]]


def is_close(answer: dict[str, Any], measured: dict[str, Any]) -> bool:
    """Whether a prediction is a good one."""
    return bool(abs(answer["steps_per_second"] / measured["steps_per_second"] - 1) <= CLOSE)


def main() -> None:
    """Predict the cases that were measured, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", default="rtx4070")
    parser.add_argument("--cases", default="", help="default: all")
    parser.add_argument("--one", metavar="CASE")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(predict(args.one, args.card)))
        return
    path = ROOT / "benchmarks" / "results" / f"what_if_{args.card}.json"
    pairs: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in args.cases.split(",") if args.cases else CASES:
        pairs[name] = measure(name, "flatout", args.card), predicted(name, args.card)
        path.write_text(json.dumps(pairs, indent=1) + "\n")
    pairs = {name: (answer, measured) for name, (measured, answer) in pairs.items()}
    n_close = sum(is_close(*pair) for pair in pairs.values())
    text = f"""## What a {args.card} would give, predicted without one
`python -m benchmarks.what_if --card {args.card}`. {conditions()} The prediction is that of `flatout doctor ENV --what-if
gpu={args.card}` at the case's settings on the CPU alone; beside it what flatout reached on the simulated card right before.
{n_close} of {len(pairs)} are within {CLOSE:.0%}.

{table(HEADER, [row(name, *pair) for name, pair in pairs.items()])}
"""
    write_section(f"what-if {args.card}", text)


if __name__ == "__main__":
    main()
