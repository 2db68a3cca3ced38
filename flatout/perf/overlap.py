"""Whether collecting and learning should run side by side, and how the cores are shared between them.

The first question decides what is learned from. Where its answer is a measured gain, that is measured once for an env,
its settings and a machine, and remembered: the same seed gives the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flatout.executors.base import Plan
from flatout.perf.choose import SHARED, Probe, children

MIN_UPDATES = 10_000
"""A run with fewer updates is over before child collectors have paid for their start."""
MIN_ITERATIONS = {"waits": 20, "computes": 200}
"""With fewer rollouts in a run, being one behind costs more than overlap gains: LunarLander with 18 rollouts of 16,384
steps stood 98 lower. Envs that wait gain more, so fewer will do."""
MIN_GAIN = {"waits": 1.15, "computes": 1.5}
"""Overlap must promise to be this much faster than lockstep: data of the last policy is worth less. CartPole with rollouts
of 32 steps ran 1.25 × as fast and stood at 317 after 300,000 steps, lockstep at 469; envs that wait leave no choice."""
AROUND = 1.3
"""A learner's iteration, of its updates at their fastest alone: advantages, shuffling, updates that something disturbs."""
CROWDED = 1.3
"""How much longer work takes with more processes than cores: CartPole 47 k steps/s with two collectors beside a learner on two
cores, 53 k with one; by the work alone two would be faster."""


def decide_overlap(
    wanted: str,
    *,
    batched: bool,
    waits: bool,
    on_gpu: bool,
    can_have_children: bool,
    n_updates: int,
    n_iterations: int,
    gain: Callable[[], float],
) -> tuple[bool, str]:
    """Whether to overlap, and why; `gain` is how much faster it would be, infinite where it need not be measured."""
    if wanted != "auto":
        return wanted == "on", f"asked for with --overlap {wanted}"
    if batched:
        return False, "the batched env and the learner take turns in one process"
    few = f"a run of {n_iterations} rollouts learns better from the newest"
    if waits:
        if n_iterations < MIN_ITERATIONS["waits"]:
            return False, few
        if (times := gain()) < MIN_GAIN["waits"]:
            return False, f"learning takes little beside waiting for envs (it would gain {times:.2f} ×)"
        return True, "the learner works while envs wait"
    if n_updates < MIN_UPDATES:
        return False, "the run is too short for it to pay"
    if n_iterations < MIN_ITERATIONS["computes"]:
        return False, few
    if on_gpu:
        return True, "the GPU learns while the CPU collects"
    if not can_have_children:
        return False, "there is no core to spare"
    times = gain()
    if times < MIN_GAIN["computes"]:
        return False, f"learning from the newest is worth more (overlap would gain {times:.2f} ×)"
    return True, f"collectors and the learner run on different cores, {times:.1f} × as fast"


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one iteration costs."""

    measured: Probe
    n_envs: int
    n_steps: int
    n_cores: int
    learn_seconds: float
    """Learning beside collectors, on `learn_threads` threads."""
    learn_threads: int
    alone_seconds: float
    """Learning while nobody collects."""
    lock_seconds: float = 0.0
    """Of learning, with Python's lock: launching operations."""

    def seconds(self, n_collectors: int) -> float:
        """Of an iteration with so many collectors beside the learner."""
        plan = children(self.measured, self.n_envs, n_collectors)
        collect, learn = self.n_envs * self.n_steps / plan.steps_per_second, SHARED * self.learn_seconds
        if plan.n_collectors == 1:  # which has the learner beside it
            collect *= SHARED
        # Where there are not cores enough for all, they are shared, and all finish together.
        crowded = plan.n_collectors + self.learn_threads > self.n_cores
        work = collect * plan.n_collectors + learn * self.learn_threads
        together = CROWDED * work / self.n_cores if crowded else 0.0
        return max(collect, learn, together)

    def best(self) -> int:
        """The number of collectors that suits the cores best."""
        return min((n for n in (self.n_cores - 1, self.n_cores) if n >= 1), key=self.seconds)

    def gain(self, lockstep: Plan) -> float:
        """How much faster overlap is than collecting that way in turn with learning."""
        collect = self.n_envs * self.n_steps / lockstep.steps_per_second
        if self.measured.waits:  # collecting and launching updates take turns with Python's lock
            return (collect + self.alone_seconds) / max(collect + self.lock_seconds, self.learn_seconds)
        return (collect + self.alone_seconds) / self.seconds(self.best())


def share_cores(ranked: list[Plan], work: Work) -> list[Plan]:
    """The plans for overlap: child collectors first, one core left to the learner if it needs a whole one."""
    best = children(work.measured, work.n_envs, work.best())
    rate = work.n_envs * work.n_steps / work.seconds(best.n_collectors)
    who = "1 collector" if best.n_collectors == 1 else f"{best.n_collectors} collectors"
    reason = f"{who} beside the learner on {work.n_cores} cores, about {rate:,.0f} steps/s"
    return [replace(best, reason=reason), *(plan for plan in ranked if not plan.in_subprocesses)]
