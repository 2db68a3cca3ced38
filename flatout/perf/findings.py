"""Bottlenecks of a run: one function each, from measurements to a finding or None.

A finding is a condition and a change of settings; what the change gives is simulated. Ways to step envs and overlap are
judged by `decide`, so a report never advises what `train` would not choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from flatout.perf.case import Case, Finding, case_of_run
from flatout.perf.costs import COMPILED_PYTHON, WORKERS_PER_CORE, WORTH, Settings, UpdateCost, update_seconds
from flatout.perf.decide import describe, stepping
from flatout.perf.decide import duration as _time
from flatout.perf.simulate import ladder
from flatout.runlog.samples import Samples
from flatout.timing import Phase

SMALL_BATCH = 64
GOOD_BATCH = 256
GOOD_EPOCHS = 10
MUCH_CLIPPED = 0.25
"""Beyond this clip fraction further epochs mostly push against the clip."""
SETTLED = 0.8
"""From here on the second half of the epochs hardly moved the policy."""
NO_CHANGE = 1e-4
"""KL below which an iteration has hardly changed the policy."""
OVERHEAD_SHARE = 0.02
"""Evaluation or checkpoints may take this share of the time."""
COMPILED_NATIVE = 0.9
"""Arithmetic of a compiled update ÷ that of the eager one."""


def diagnose(case: Case) -> list[Finding]:
    """All findings, the one with the most to gain first; those without a prediction last."""
    found = [finding for look in LOOKS if (finding := look(case)) is not None]
    worth = [f for f in found if f.gain is None or f.gain >= WORTH]
    return sorted(worth, key=lambda f: -(f.gain or 0.0))


def findings_of_run(
    summary: Mapping[str, Any],
    config: Mapping[str, Any],
    system: Mapping[str, Any],
    samples: Samples | None = None,
) -> list[Finding]:
    """What held a finished run back; empty where its records say too little."""
    try:
        case = case_of_run(summary, config, system, samples)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return []
    return diagnose(case)


def waiting_in_turn(case: Case) -> Finding | None:
    """Envs that wait, one after the other."""
    costs, executor, best = case.costs, case.settings.executor, case.best
    if not costs.waits or executor not in ("serial", "process") or best.executor == executor:
        return None
    return case.finding(
        "envs wait in turn",
        "the envs wait, one after the other",
        f"a step takes {_time(costs.step_seconds)}, {_percent(1 - costs.compute_share)} of it waiting",
        f"let them wait at the same time: {describe(best)}",
        ("--executor", best.executor),
        settings=best,
    )


def too_few_envs(case: Case) -> Finding | None:
    """Envs that wait at the same time, but too few of them to keep the learner busy."""
    costs, settings = case.costs, case.settings
    if not costs.waits or settings.executor not in ("thread", "async") or max(costs.slowness) > 2:
        return None
    n, total = settings.n_envs, settings.total_batch
    tried = [case.with_envs(m) for m in ladder(2 * n, 16 * n) if total % m == 0]
    rates = [case.predict(more)[0] for more in tried]
    # The smallest number that gives nearly all there is to gain.
    best = next((more for more, rate in zip(tried, rates, strict=True) if rate >= 0.95 * max(rates)), None)
    if best is None:
        return None
    return case.finding(
        "envs wait",
        "the learner waits for envs that wait",
        f"{n} envs that take {_time(costs.step_seconds)} a step give {_rate(case.now.collect_rate)}, "
        f"the learner could take {_rate(case.now.learn_rate)}",
        f"run {best.n_envs} envs; rollouts of {best.n_steps} steps keep the total batch at {total:,}",
        ("--n-envs", str(best.n_envs), "--n-steps", str(best.n_steps)),
        settings=best,
    )


def slow_env(case: Case) -> Finding | None:
    """One env, or a few, that the others wait for."""
    slow = {i: factor for i, factor in enumerate(case.costs.slowness) if factor > 2}
    if not slow:
        return None
    names = list(map(str, slow))
    who = f"env {names[0]} takes" if len(slow) == 1 else f"envs {', '.join(names[:5])} take"
    return case.finding(
        "slow env",
        "every rollout waits for the slowest env",
        f"{who} {max(slow.values()):.0f} × as long for a step as the others ({_time(case.costs.step_seconds)})",
        "make it as fast as the others, or leave it out",
        costs=replace(case.costs, slowness=(1.0,)),
    )


def env_computes(case: Case) -> Finding | None:
    """Envs that burn a core, on fewer cores than there are."""
    costs, settings = case.costs, case.settings
    if costs.waits or settings.executor == "batched" or case.now.collect_rate > 2 * case.now.learn_rate:
        return None
    evidence = (
        f"a step computes {_time(costs.step_seconds)}: {_rate(case.now.collect_rate)} with "
        f"{stepping(settings)}, the learner could take {_rate(case.now.learn_rate)}"
    )
    if not settings.starts_processes and case.best.starts_processes:
        return case.finding(
            "env computes",
            "one process steps all envs while other cores idle",
            evidence,
            f"use the other cores: {describe(case.best)}",
            ("--executor", "auto"),
            settings=case.best,
        )
    all_at_work = settings.starts_processes or min(settings.n_cores, settings.n_envs) < 2
    most = settings.n_cores / costs.step_seconds
    env_is_most = most < 2 * case.now.collect_rate  # of the time of collecting
    if case.now.collect_rate > 0.8 * case.now.learn_rate or not all_at_work or not env_is_most:
        return None
    return case.finding(
        "env computes",
        "the env's own computing is the limit, and all cores are busy with it",
        evidence,
        f"make a step cheaper: {settings.n_cores} cores cannot step it more than {_rate(most)}",
    )


def too_many_processes(case: Case) -> Finding | None:
    """Worker processes that push each other off the cores."""
    settings = case.settings
    fitting = WORKERS_PER_CORE * settings.n_cores
    if settings.executor != "process" or case.costs.waits or settings.n_workers <= fitting:
        return None
    return case.finding(
        "too many processes",
        f"{settings.n_workers} processes share {settings.n_cores} cores",
        f"each time step is {settings.n_workers} messages of {_time(case.costs.handover)}, for envs that compute "
        f"{_time(case.costs.step_seconds)}",
        f"fewer messages: {describe(case.best)}",
        ("--executor", "auto", "--n-workers", "0"),
        settings=case.best,
    )


def learns_in_turn(case: Case) -> Finding | None:
    """Collecting and learning that could go on at the same time."""
    settings = case.settings
    if settings.overlap or settings.executor == "batched" or waiting_in_turn(case) is not None:
        return None
    decision = case.decision("auto")
    if not decision.overlap:
        return None
    better = decision.ways[0]
    flags: tuple[str, ...] = ("--overlap", "on")
    if better.executor != settings.executor or better.in_subprocesses != settings.in_subprocesses:
        flags += ("--executor", "auto")
    return case.finding(
        "learns in turn",
        "collecting and learning take turns",
        f"the learner is busy {_percent(case.learner_busy)} of the time and waits for the rest",
        f"collect the next rollout while learning from this one: {describe(better)}",
        flags,
        settings=better,
    )


def big_network(case: Case) -> Finding | None:
    """A network whose arithmetic is what takes the time."""
    settings, smaller = case.settings, case.smaller
    cost = case.costs.update
    total = cost.seconds(settings.batch_size)
    if smaller is None or cost.python > 0.5 * total or case.now.learn_rate > case.now.collect_rate:
        return None
    arch, its_cost = smaller
    costs = replace(case.costs, update=its_cost, compiled=None)
    names = [",".join(map(str, widths)) for widths in (case.network_arch, arch)]
    return case.finding(
        "big network",
        "the network's arithmetic is the limit",
        f"an update of {names[0]} takes {_time(total)}, {settings.n_updates:g} of them an iteration; the envs could "
        f"give {_rate(case.now.collect_rate)}",
        f"see whether {names[1]} learns as well (its update takes {_time(its_cost.seconds(settings.batch_size))}), "
        "or learn on a GPU",
        ("--network-arch", names[1]),
        settings=replace(settings, compiled=False),
        costs=costs,
    )


def tiny_batches(case: Case) -> Finding | None:
    """Minibatches so small that launching the update is all it does."""
    settings, cost = case.settings, case.costs.update
    if settings.batch_size >= SMALL_BATCH or cost.python < 0.5 * cost.seconds(settings.batch_size):
        return None
    sizes = [n for n in ladder(settings.batch_size, GOOD_BATCH) if settings.total_batch % n == 0]
    if sizes[-1] == settings.batch_size:
        return None
    better = replace(settings, batch_size=sizes[-1], compiled=False)
    return case.finding(
        "tiny batches",
        "minibatches are so small that launching them is most of the work",
        f"an update with a minibatch of {settings.batch_size} takes {_time(update_seconds(case.costs, settings))}, one of "
        f"{sizes[-1]} {_time(cost.seconds(sizes[-1]))}; {settings.n_updates:,g} updates an iteration",
        f"learn from minibatches of {sizes[-1]}; this changes what is learned, so compare the returns",
        ("--batch-size", str(sizes[-1])),
        settings=better,
    )


def update_overhead(case: Case) -> Finding | None:
    """An update that Python spends longer launching than the machine computing."""
    settings, cost = case.settings, case.costs.update
    total = cost.seconds(settings.batch_size)
    if settings.compiled or settings.on_device or cost.python < 0.4 * total:
        return None
    compiled = case.costs.compiled or _guess_compiled(cost, settings)
    costs = replace(case.costs, compiled=compiled)
    return case.finding(
        "update overhead",
        "updates are mostly Python launching small operations",
        f"an update takes {_time(total)}, of which about {_time(min(cost.python, total))} are launching",
        "compile the update (half a minute, once for these settings)",
        ("--compile", "on"),
        settings=replace(settings, compiled=True),
        costs=costs,
    )


def _guess_compiled(cost: UpdateCost, settings: Settings) -> UpdateCost:
    """What compiling usually leaves: nearly no launching, a little less arithmetic."""
    native = max(cost.seconds(settings.batch_size) - cost.python, 0.1 * cost.python) * COMPILED_NATIVE
    return UpdateCost(python=COMPILED_PYTHON, points=((settings.batch_size, native + COMPILED_PYTHON),))


def useless_epochs(case: Case) -> Finding | None:
    """Epochs that keep the learner busy and change nothing."""
    settings, metrics = case.settings, case.metrics
    clipped, kl = metrics.get("train/clip_fraction"), metrics.get("train/approx_kl")
    if settings.n_epochs <= GOOD_EPOCHS or clipped is None or kl is None:
        return None
    settled = metrics.get("train/kl_settled", 0.0)
    if clipped >= MUCH_CLIPPED:
        why = "much of their change is clipped"
    elif kl < NO_CHANGE:
        why = "they hardly move the policy"
    elif settled >= SETTLED:
        why = f"after half of them the policy has moved {_percent(settled)} as far as after all"
    else:
        return None
    return case.finding(
        "useless epochs",
        f"{settings.n_epochs} epochs keep the learner busy, but {why}",
        f"{_percent(clipped)} of samples clipped, KL {kl:.2g} an iteration",
        f"{GOOD_EPOCHS} epochs; utilisation falls, the return should not: compare at equal wall time",
        ("--n-epochs", str(GOOD_EPOCHS)),
        settings=replace(settings, n_epochs=GOOD_EPOCHS),
    )


def too_often(case: Case) -> Finding | None:
    """Evaluation or checkpoints that take a notable part of the time."""
    saving = case.phases.get(Phase.CHECKPOINT, 0.0), case.checkpoint_every, "checkpoints take", "checkpoint"
    playing = case.phases.get(Phase.EVALUATE, 0.0), case.eval_every, "evaluation takes", "eval"
    share, every, what, flag = max(saving, playing)
    if share < OVERHEAD_SHARE or not every:
        return None
    every = max(every, case.settings.total_batch)
    fewer = _round_up(every * share / (1 - share) / (OVERHEAD_SHARE / 2))
    gain = (1 - share * every / fewer) / (1 - share)
    return case.finding(
        f"{what.split()[0]} too often",
        f"{what} {_percent(share)} of the time",
        f"every {every:,} env steps, that is every {every / case.steps_per_second:.1f} s",
        f"every {fewer:,} env steps",
        (f"--{flag}-every", str(fewer)),
        predicted=(gain * case.steps_per_second, gain * case.learner_busy),
    )


def gpu_slower_than_cpu(case: Case) -> Finding | None:
    """A network so small that the CPU learns faster."""
    if case.on_cpu is None or not case.settings.on_device:
        return None
    here, there = update_seconds(case.costs, case.settings), case.on_cpu.seconds(case.settings.batch_size)
    if there > here:
        return None
    return case.finding(
        "GPU slower than CPU",
        "this network is too small for the GPU",
        f"an update takes {_time(here)} on the GPU and {_time(there)} on the CPU",
        "learn on the CPU",
        ("--device", "cpu"),
        settings=replace(case.settings, on_device=False),
        costs=replace(case.costs, update=case.on_cpu, compiled=None),
    )


def idle_gpu(case: Case) -> Finding | None:
    """A GPU that one run cannot fill."""
    used = case.device_utilization
    if used is None or used > 0.3 or case.now.learn_rate < 2 * case.now.collect_rate:
        return None
    return case.finding(
        "small network on a big GPU",
        "one run cannot fill this GPU",
        f"device utilisation {_percent(used)} (time in which any kernel ran), learner busy "
        f"{_percent(case.learner_busy)}",
        "run several seeds or settings at the same time",
    )


def copies(case: Case) -> Finding | None:
    """Rollouts that take long to reach the device."""
    share = case.phases.get(Phase.STAGE, 0.0)
    if share < 0.1 or not case.settings.on_device:
        return None
    return case.finding(
        "copies",
        "moving rollouts to the device takes a notable part of the time",
        f"{_percent(share)} of the time",
        "overlap hides it; an env that steps on the device avoids it",
        () if case.settings.overlap else ("--overlap", "on"),
        predicted=(case.steps_per_second / (1 - share), case.learner_busy / (1 - share)),
    )


def memory_is_short(case: Case) -> Finding | None:
    """Memory that is nearly full."""
    if case.memory_share is None or case.memory_share < 0.9:
        return None
    return case.finding(
        "memory near the limit",
        "memory is nearly full",
        f"{_percent(case.memory_share)} in use",
        "shorter rollouts or fewer envs; an update that does not fit is split by itself",
        ("--n-steps", str(max(case.settings.n_steps // 2, 1))),
    )


def throttling(case: Case) -> Finding | None:
    """A card that slows itself down."""
    if not case.throttled:
        return None
    return case.finding(
        "throttled",
        "the card runs below its clock",
        f"it gives as reason: {', '.join(case.throttled)}",
        "better cooling or a higher power limit",
    )


LOOKS: Iterable[Callable[[Case], Finding | None]] = (
    waiting_in_turn,
    too_few_envs,
    slow_env,
    env_computes,
    too_many_processes,
    learns_in_turn,
    big_network,
    tiny_batches,
    update_overhead,
    useless_epochs,
    too_often,
    gpu_slower_than_cpu,
    idle_gpu,
    copies,
    memory_is_short,
    throttling,
)


def _round_up(value: float) -> int:
    """To one digit: 7,300 → 8,000."""
    scale = 10 ** (len(str(int(value))) - 1)
    return int(-(-value // scale) * scale)


def _rate(value: float) -> str:
    return f"{value:,.0f} steps/s"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
