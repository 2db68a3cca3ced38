"""The four envs that come with flatout: their speed compared with peers, and what their recipes learn.

`python -m benchmarks.workloads [--only snake,market]` → the speeds in docs/benchmarks.md;
`python -m benchmarks.workloads --curves RUN …` → learning curves of finished runs, docs/images/workloads.svg.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.page import PAGE, conditions, write_section

TITLES = {
    "snake": "Snake: N games as tensors",
    "market": "Market: N accounts in NumPy",
    "mission": "Mission: plain Python on every core",
    "crawl": "Crawl: a site that answers after 20 or 100 ms",
}


def speed(name: str, quick: bool) -> list[str]:
    """The lines of one workload's table."""
    if name == "snake":
        from benchmarks import workloads_snake as snake

        return snake.run(quick)
    if name == "market":
        from benchmarks import workloads_market as market

        return market.speed(*((3, 0.2) if quick else (7, 0.7)))
    if name == "mission":
        from benchmarks import workloads_mission as mission

        return mission.run(quick)
    from benchmarks import workloads_crawl as crawl

    return crawl.speed(quick)


def in_a_process(name: str, quick: bool) -> list[str]:
    """The same in a fresh process, so that no workload's threads or memory touch another's."""
    command = [sys.executable, "-m", "benchmarks.workloads", "--one", name, *(["--quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr.splitlines()[-1]}")
    lines: list[str] = json.loads(done.stdout.splitlines()[-1])
    print(f"### {TITLES[name]}", *lines, "", sep="\n", flush=True)
    return lines


def curves(runs: list[Path]) -> None:
    """Learning curves of finished runs, one picture for each env, and a table of what they reached."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    by_env: dict[str, list[tuple[dict[str, Any], list[float], list[float]]]] = {}
    for run in runs:
        summary = json.loads((run / "summary.json").read_text())
        config = json.loads((run / "config.json").read_text())
        kwargs = ", ".join(f"{k} {v}" for k, v in (config.get("env_kwargs") or {}).items())
        with (run / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["rollout/ep_rew_mean"]]
        steps = [float(row["time/total_timesteps"]) / 1e6 for row in rows]
        returns = [float(row["rollout/ep_rew_mean"]) for row in rows]
        title = summary["env"] + (f" ({kwargs})" if kwargs else "")
        by_env.setdefault(title, []).append((summary, steps, returns))
    figure, grid = plt.subplots(1, len(by_env), figsize=(3.4 * len(by_env), 3.2), squeeze=False)
    lines = ["| env | env steps | return of the last 100 episodes, each seed |", "| --- | --- | --- |"]
    for axes, (title, found) in zip(grid[0], by_env.items(), strict=True):
        for summary, steps, returns in found:
            axes.plot(steps, returns, lw=1, label=f"seed {summary['seed']}")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("million env steps")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        each = ", ".join(f"{summary['return_mean']:.1f}" for summary, _, _ in found)
        lines.append(f"| {title} | {found[0][0]['env_steps']:,} | {each} |")
    grid[0, 0].set_ylabel("mean return of 100 episodes")
    figure.tight_layout()
    figure.savefig(PAGE.parent / "images" / "workloads.svg")
    text = "\n".join(lines)
    write_section(
        "workloads-learning",
        "## Returns on the envs that come with flatout\n\n`flatout train snake`, `market`, `mission` and `crawl` with their "
        f"recipes; the table and the picture by `python -m benchmarks.workloads --curves RUN …`. Several runs shared the machine, so this table has no speeds.\n{conditions()}\n\n{text}\n\n"
        "![Learning curves of the four workloads](images/workloads.svg)",
    )


def main() -> None:
    """What was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(TITLES))
    parser.add_argument("--one")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--curves", nargs="+", type=Path)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(speed(args.one, args.quick)))
    elif args.curves:
        curves(args.curves)
    else:
        parts = [
            "\n".join([f"### {TITLES[name]}", "", *in_a_process(name, args.quick)])
            for name in args.only.split(",")
        ]
        write_section(
            "workloads",
            "## The envs that come with flatout\n\n`python -m benchmarks.workloads`: the rows of each table take turns; "
            f"medians, and medians of the ratios.\n{conditions()}\n\n" + "\n\n".join(parts),
        )


if __name__ == "__main__":
    main()
