"""Plays cases for some time, two at once, and prints a table of faults by executor."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from tests.chaos.cases import EXECUTORS, Outcome, play


def main() -> int:
    """Play; returns 1 if anything that must hold did not."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="play this case only")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    if args.case is not None:
        outcomes = [play(args.case)]
        report(outcomes[0])
    else:
        outcomes = played(args.seed * 10_000, args.seconds, args.jobs)
    print(table(outcomes))
    bad = [outcome for outcome in outcomes if outcome.violations]
    for outcome in bad:
        print(f"VIOLATED: {outcome.case}\n  repeat with: python -m tests.chaos --case {outcome.case.seed}")
    n_faults, n_runs = sum(len(it.faults) for it in outcomes), sum(it.n_runs for it in outcomes)
    print(f"{n_faults} faults over {len(outcomes)} cases ({n_runs} processes), {len(bad)} violations")
    return 1 if bad else 0


def played(first: int, seconds: float, n_jobs: int) -> list[Outcome]:
    """Outcomes of cases from `first` on, as they come, for so long."""
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(n_jobs) as pool:
        seed, running = first, set[Future[Outcome]]()
        outcomes = []
        while running or time.monotonic() < until:
            while len(running) < n_jobs and time.monotonic() < until:
                running.add(pool.submit(play, seed))
                seed += 1
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                outcomes.append(future.result())
                report(outcomes[-1])
    return outcomes


def report(outcome: Outcome) -> None:
    """One line, and what was violated."""
    word = "VIOLATED" if outcome.violations else "ok"
    print(f"{word:8} {outcome.seconds:5.1f} s {outcome.n_runs:2d} processes  {outcome.case}", flush=True)
    for violation in outcome.violations:
        print("    " + violation.replace("\n", "\n    "), flush=True)


def table(outcomes: list[Outcome]) -> str:
    """How often each fault took place, by executor."""
    counts = Counter((fault, outcome.case.executor) for outcome in outcomes for fault in outcome.faults)
    kinds = sorted({fault for fault, _ in counts})
    rows = [f"| fault | {' | '.join(EXECUTORS)} |", f"|---|{'---|' * len(EXECUTORS)}"]
    rows += [f"| {kind} | {' | '.join(str(counts[kind, e] or '–') for e in EXECUTORS)} |" for kind in kinds]
    cases = Counter(outcome.case.executor for outcome in outcomes)
    rows.append(f"| cases | {' | '.join(str(cases[e]) for e in EXECUTORS)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
