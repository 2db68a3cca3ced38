"""Whether collecting and learning should run side by side, and how the cores are shared between them.

The first question decides what is learned from, so it is answered by facts that do not change from run to run;
measured times only decide how many collectors there are.
"""

from __future__ import annotations

from dataclasses import replace

from flatout.executors.choose import Plan, Probe, children

MIN_UPDATES = 2000
"""A run with fewer updates is over before child collectors have paid for their start."""


def decide_overlap(
    wanted: str,
    *,
    batched: bool,
    waits: bool,
    on_gpu: bool,
    can_have_children: bool,
    n_updates: int,
) -> tuple[bool, str]:
    """Whether to overlap, and why."""
    if wanted != "auto":
        return wanted == "on", f"asked for with --overlap {wanted}"
    if batched:
        return False, "the batched env and the learner take turns in one process"
    if waits:
        return True, "the learner works while envs wait"
    if n_updates < MIN_UPDATES:
        return False, "the run is too short for it to pay"
    if on_gpu:
        return True, "the GPU learns while the CPU collects"
    if can_have_children:
        return True, "collectors and the learner run on different cores"
    return False, "there is no core to spare"


def share_cores(
    ranked: list[Plan], measured: Probe, *, n_envs: int, n_cores: int, n_steps: int, learn_seconds: float
) -> list[Plan]:
    """The plans for overlap: child collectors first, one core left to the learner if it needs a whole one."""
    possible = [n for n in (n_cores - 1, n_cores) if n >= 1]
    plans = {n: children(measured, n_envs, n) for n in possible}

    def seconds(n: int) -> float:
        collect = n_envs * n_steps / plans[n].steps_per_second
        # With a collector on every core the learner shares its core, and all of them finish together.
        shared = (collect * n + learn_seconds) / n_cores if n == n_cores else 0.0
        return max(collect, learn_seconds, shared)

    best = plans[min(possible, key=seconds)]
    rate = n_envs * n_steps / seconds(best.n_collectors)
    who = "1 collector" if best.n_collectors == 1 else f"{best.n_collectors} collectors"
    reason = f"{who} beside the learner on {n_cores} cores, about {rate:,.0f} steps/s"
    return [replace(best, reason=reason), *(plan for plan in ranked if not plan.children)]
