"""What spans and samples cost: CartPole training with and without them, alternating in one process.

`python -m benchmarks.tracing [--rounds 9]` → docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

from benchmarks.page import conditions, table, write_section

SETTING: dict[str, Any] = {
    "n_envs": 32,
    "n_steps": 32,
    "batch_size": 256,
    "n_epochs": 4,
    "network_arch": (64, 64),
}
STEPS = 100_000


def rate(way: str, folder: str, nth: int, overlap: str) -> float:
    """Steps/s of one run; `lanes` and `samples` are what is told apart."""
    import flatout
    from flatout.records import recorder
    from flatout.run import Trainer

    begin, sampler = Trainer.begin_lanes, recorder.Sampler
    if way != "both":
        Trainer.begin_lanes = lambda self, **_: begin(self, spans=way == "spans")  # type: ignore[method-assign]
        recorder.Sampler = lambda *_, **__: None  # type: ignore
    try:
        agent = flatout.PPO(
            "CartPole-v1",
            preset="auto",
            **SETTING,
            seed=1,
            overlap=overlap,
            runs_dir=folder,
            run_name=f"{way}{nth}",
        )
        agent.learn(STEPS)
    finally:
        Trainer.begin_lanes, recorder.Sampler = begin, sampler  # type: ignore
    agent.close()
    return float(agent.summary["steps_per_second"])


def main() -> None:
    """Alternate and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    rows = []
    for overlap in ("off", "on"):
        rates: dict[str, list[float]] = {"none": [], "spans": [], "both": []}
        with tempfile.TemporaryDirectory() as folder:
            for nth in range(args.rounds + 1):
                order = list(rates) if nth % 2 else list(rates)[::-1]
                for way in order:
                    got = rate(way, folder, 100 * (overlap == "on") + nth, overlap)
                    if nth:  # the first round warms up
                        rates[way].append(got)
        for way, name in (("spans", "spans"), ("both", "spans and samples")):
            ratios = [a / b for a, b in zip(rates[way], rates["none"], strict=True)]
            cost = f"{100 * (1 - statistics.median(ratios)):.1f} %"
            row = [name, overlap, f"{statistics.median(rates['none']):,.0f}", cost]
            row.append(f"{100 * (1 - max(ratios)):.1f} to {100 * (1 - min(ratios)):.1f} %")
            print(" | ".join(row), flush=True)
            rows.append(row)
    text = (
        f"## What watching costs\n\n`python -m benchmarks.tracing`: PPO on CartPole-v1, 32 envs × 32 steps, batch 256, "
        f"4 epochs, {STEPS:,} env steps, {args.rounds} rounds, alternating.\n{conditions()}\n\n"
        + table(["written", "overlap", "steps/s without", "cost, median", "least to most"], rows)
    )
    write_section("tracing", text)


if __name__ == "__main__":
    main()
