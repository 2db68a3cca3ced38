"""Cost of recording spans: they are switched on and off every few iterations of one run, and neighbours are compared.

`python -m benchmarks.tracing [--seconds 30]` → docs/benchmarks.md. In the run every span is kept in detail, which a
real run does for a part of its time only.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from time import perf_counter, process_time
from typing import Any

from benchmarks.page import conditions, table, write_section

SETTING: dict[str, Any] = {
    "n_envs": 32,
    "n_steps": 32,
    "batch_size": 256,
    "n_epochs": 4,
    "network_arch": (64, 64),
}
BLOCK = 1
"""Iterations between two switches."""


def cost(overlap: str, seconds: float, detail: bool) -> tuple[float, float, int]:
    """Share of CPU time that spans cost, CPU seconds of an iteration, and the number of pairs compared."""
    import flatout
    from flatout import timing

    timing.DETAIL, timing.STRETCH = (10**9, 10**6) if detail else (1000, 300)
    with tempfile.TemporaryDirectory() as folder:
        agent = flatout.PPO(
            "CartPole-v1",
            preset="auto",
            **SETTING,
            seed=1,
            overlap=overlap,
            executor="serial",
            runs_dir=folder,
            run_name="run",
        )
        times: list[tuple[bool, float]] = []
        began, last = perf_counter(), process_time()
        on = True

        def watch(progress: Any) -> bool:
            nonlocal last, on
            if progress.iteration % BLOCK == 0:
                times.append((on, process_time() - last))
                on = not on
                switch(agent, on)
                last = process_time()
            return perf_counter() - began < seconds

        agent.learn(10**8, callback=watch)
        agent.close()
    times = times[20:]
    ratios = []
    for (first, a), (_, b) in zip(times[::2], times[1::2], strict=False):
        traced, plain = (a, b) if first else (b, a)
        ratios.append(plain / traced)
    usual = statistics.median(seconds for is_on, seconds in times if not is_on)
    return 1 - statistics.median(ratios), usual / BLOCK, len(ratios)


def switch(agent: Any, on: bool) -> None:
    """Keep spans from here on, or not."""
    trainer = agent._trainer
    clocks = [trainer.clock, *(lane for lane in trainer.collector.lanes if hasattr(lane, "cut"))]
    for clock in clocks:
        clock.traced = on
        clock._begin_fold()
        clock._room = clock._free_room() if on else 0
    if hasattr(trainer.collector, "_traced"):
        trainer.collector._traced = on


def main() -> None:
    """Both pipelines, in detail and as in runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    rows = []
    for overlap in ("off", "on"):
        for detail in (True, False):
            share, usual, n = cost(overlap, args.seconds, detail)
            what = "every span kept" if detail else "as in runs"
            row = [what, overlap, f"{1e3 * usual:.1f} ms", f"{100 * share:.2f} %", str(n)]
            print(" | ".join(row), flush=True)
            rows.append(row)
    header = ["spans", "overlap", "CPU time of an iteration", "cost, median", "iterations compared"]
    text = (
        "## Cost of recording spans\n\n`python -m benchmarks.tracing`: PPO on CartPole-v1, 32 envs × 32 steps, batch 256, "
        f"4 epochs, all in one process, one run of {args.seconds:.0f} s. Spans are on and off in alternate iterations; the table compares their CPU time.\n{conditions()}\n\n"
        + table(header, rows)
        + "\n\nIn addition the machine is sampled twice a second (five times with a GPU), a millisecond each time."
    )
    write_section("tracing", text)


if __name__ == "__main__":
    main()
