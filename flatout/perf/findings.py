"""Names a run's bottlenecks from its figures, and predicts what removing each would give.

A finding is a condition and a change of settings; what the change gives is simulated. Ways to step envs and overlap are
judged by `decide`, so a report never advises what `train` would not choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from flatout.perf.case import Case, Finding, case_of_run
from flatout.perf.costs import (
    COMPILED_PYTHON,
    WORKERS_PER_CORE,
    WORTH,
    Settings,
    UpdateCost,
    update_seconds,
)
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
UNFILLED = 0.3
"""A run that cannot keep a card busier than this leaves it to others."""
OVERHEAD_SHARE = 0.02
"""Evaluation or checkpoints may take this share of the time."""
UNFILLED_CARD = "small network on a big GPU"
COMPILED_NATIVE = 0.9
"""Arithmetic of a compiled update ÷ that of the eager one."""


def diagnose(case: Case) -> list[Finding]:
    """All findings, the one with the most to gain first; those without a prediction last."""
    looks = (_envs_that_wait, _envs_that_compute, _turns, _updates, _epochs, _interruptions, _device)
    found = (finding for look in looks for finding in look(case))
    return sorted((f for f in found if f.gain is None or f.gain >= WORTH), key=lambda f: -(f.gain or 0.0))


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


def _wait_in_turn(case: Case) -> bool:
    """Whether envs wait one after the other that could wait at the same time."""
    executor = case.settings.executor
    return case.costs.waits and executor in ("serial", "process") and case.best.executor != executor


def _envs_that_wait(case: Case) -> Iterator[Finding]:
    costs, settings = case.costs, case.settings
    step = _time(costs.step_seconds)
    if _wait_in_turn(case):
        yield Finding(
            "envs wait in turn",
            "the envs wait, one after the other",
            f"a step takes {step}, {_percent(1 - costs.compute_share)} of it waiting",
            f"let them wait at the same time: {describe(case.best)}",
            ("--executor", case.best.executor),
            *case.predict(case.best),
        )
    slow = {i: factor for i, factor in enumerate(costs.slowness) if factor > 2}
    n, total = settings.n_envs, settings.total_batch
    more = [
        replace(settings, n_envs=m, n_steps=total // m, n_workers=m if settings.n_workers else 0)
        for m in ladder(2 * n, 16 * n)
        if total % m == 0
    ]
    if costs.waits and settings.executor in ("thread", "async") and not slow and more:
        rates = [case.predict(tried)[0] for tried in more]
        # The smallest number that gives nearly all there is to gain.
        best = next(tried for tried, rate in zip(more, rates, strict=True) if rate >= 0.95 * max(rates))
        yield Finding(
            "envs wait",
            "the learner waits for envs that wait",
            f"{n} envs that take {step} a step give {_rate(case.now.collect_rate)}, "
            f"the learner could take {_rate(case.now.learn_rate)}",
            f"run {best.n_envs} envs; rollouts of {best.n_steps} steps keep the total batch at {total:,}",
            ("--n-envs", str(best.n_envs), "--n-steps", str(best.n_steps)),
            *case.predict(best),
        )
    if slow:
        names = list(map(str, slow))
        who = f"env {names[0]} takes" if len(slow) == 1 else f"envs {', '.join(names[:5])} take"
        yield Finding(
            "slow env",
            "every rollout waits for the slowest env",
            f"{who} {max(slow.values()):.0f} × as long for a step as the others ({step})",
            "make it as fast as the others, or leave it out",
            (),
            *case.predict(settings, slowness=(1.0,)),
        )


def _envs_that_compute(case: Case) -> Iterator[Finding]:
    costs, settings, now = case.costs, case.settings, case.now
    if costs.waits:
        return
    step, n_cores = _time(costs.step_seconds), settings.n_cores
    if settings.executor != "batched" and now.collect_rate <= 2 * now.learn_rate:
        evidence = (
            f"a step computes {step}: {_rate(now.collect_rate)} with "
            f"{stepping(settings)}, the learner could take {_rate(now.learn_rate)}"
        )
        most = n_cores / costs.step_seconds
        all_busy = settings.starts_processes or min(n_cores, settings.n_envs) < 2
        env_is_most = most < 2 * now.collect_rate  # of the time of collecting
        if not settings.starts_processes and case.best.starts_processes:
            yield Finding(
                "env computes",
                "one process steps all envs while other cores idle",
                evidence,
                f"use the other cores: {describe(case.best)}",
                ("--executor", "auto"),
                *case.predict(case.best),
            )
        elif all_busy and env_is_most and now.collect_rate <= 0.8 * now.learn_rate:
            yield Finding(
                "env computes",
                "the env's own computing is the limit, and all cores are busy with it",
                evidence,
                f"make a step cheaper: {n_cores} cores cannot step it more than {_rate(most)}",
            )
    if settings.executor == "process" and settings.n_workers > WORKERS_PER_CORE * n_cores:
        yield Finding(
            "too many processes",
            f"{settings.n_workers} processes share {n_cores} cores",
            f"each time step is {settings.n_workers} messages of {_time(costs.handover)}, for envs that compute {step}",
            f"fewer messages: {describe(case.best)}",
            ("--executor", "auto", "--n-workers", "0"),
            *case.predict(case.best),
        )


def _turns(case: Case) -> Iterator[Finding]:
    settings = case.settings
    if settings.overlap or settings.executor == "batched" or _wait_in_turn(case):
        return
    decision = case.decision("auto")
    if decision.overlap:
        better = decision.ways[0]
        same = (better.executor, better.in_subprocesses) == (settings.executor, settings.in_subprocesses)
        yield Finding(
            "learns in turn",
            "collecting and learning take turns",
            f"the learner is busy {_percent(case.learner_busy)} of the time and waits for the rest",
            f"collect the next rollout while learning from this one: {describe(better)}",
            ("--overlap", "on", *(() if same else ("--executor", "auto"))),
            *case.predict(better),
        )


def _updates(case: Case) -> Iterator[Finding]:
    costs, settings, now = case.costs, case.settings, case.now
    cost, size = costs.update, settings.batch_size
    total = cost.seconds(size)
    if case.smaller is not None and cost.python <= 0.5 * total and now.learn_rate <= now.collect_rate:
        arch, its_cost = case.smaller
        names = [",".join(map(str, widths)) for widths in (case.network_arch, arch)]
        yield Finding(
            "big network",
            "the network's arithmetic is the limit",
            f"an update of {names[0]} takes {_time(total)}, {settings.n_updates:g} of them an iteration; the envs could "
            f"give {_rate(now.collect_rate)}",
            f"see whether {names[1]} learns as well (its update takes {_time(its_cost.seconds(size))})"
            + ("" if settings.on_device else ", or learn on a GPU"),
            ("--network-arch", names[1]),
            *case.predict(replace(settings, compiled=False), update=its_cost, compiled=None),
        )
    larger = [n for n in ladder(2 * size, GOOD_BATCH) if settings.total_batch % n == 0]
    if size < SMALL_BATCH and cost.python >= 0.5 * total and larger:
        good = larger[-1]
        yield Finding(
            "tiny batches",
            "minibatches are so small that launching them is most of the work",
            f"an update with a minibatch of {size} takes {_time(update_seconds(costs, settings))}, one of "
            f"{good} {_time(cost.seconds(good))}; {settings.n_updates:,g} updates an iteration",
            f"learn from minibatches of {good}; this changes what is learned, so compare the returns",
            ("--batch-size", str(good)),
            *case.predict(replace(settings, batch_size=good, compiled=False)),
        )
    if not settings.compiled and not settings.on_device and cost.python >= 0.4 * total:
        # What compiling usually leaves: nearly no launching, a little less arithmetic.
        native = max(total - cost.python, 0.1 * cost.python) * COMPILED_NATIVE
        guess = UpdateCost(python=COMPILED_PYTHON, points=((size, native + COMPILED_PYTHON),))
        yield Finding(
            "update overhead",
            "updates are mostly Python launching small operations",
            f"an update takes {_time(total)}, of which about {_time(min(cost.python, total))} are launching",
            "compile the update (half a minute, once for these settings)",
            ("--compile", "on"),
            *case.predict(replace(settings, compiled=True), compiled=costs.compiled or guess),
        )


def _epochs(case: Case) -> Iterator[Finding]:
    settings, metrics = case.settings, case.metrics
    clipped, kl = metrics.get("train/clip_fraction"), metrics.get("train/approx_kl")
    if settings.n_epochs <= GOOD_EPOCHS or clipped is None or kl is None:
        return
    settled = metrics.get("train/kl_settled", 0.0)
    if clipped >= MUCH_CLIPPED:
        why = "much of their change is clipped"
    elif kl < NO_CHANGE:
        why = "they hardly move the policy"
    elif settled >= SETTLED:
        why = f"after half of them the policy has moved {_percent(settled)} as far as after all"
    else:
        return
    yield Finding(
        "useless epochs",
        f"{settings.n_epochs} epochs keep the learner busy, but {why}",
        f"{_percent(clipped)} of samples clipped, KL {kl:.2g} an iteration",
        f"{GOOD_EPOCHS} epochs; utilisation falls, the return should not: compare at equal wall time",
        ("--n-epochs", str(GOOD_EPOCHS)),
        *case.predict(replace(settings, n_epochs=GOOD_EPOCHS)),
    )


def _interruptions(case: Case) -> Iterator[Finding]:
    saving = case.phases.get(Phase.CHECKPOINT, 0.0), case.checkpoint_every, "checkpoints take", "checkpoint"
    playing = case.phases.get(Phase.EVALUATE, 0.0), case.eval_every, "evaluation takes", "eval"
    share, every, what, flag = max(saving, playing)
    if share < OVERHEAD_SHARE or not every:
        return
    every = max(every, case.settings.total_batch)
    fewer = _round_up(every * share / (1 - share) / (OVERHEAD_SHARE / 2))
    gain = (1 - share * every / fewer) / (1 - share)
    yield Finding(
        f"{what.split()[0]} too often",
        f"{what} {_percent(share)} of the time",
        f"every {every:,} env steps, that is every {every / case.steps_per_second:.1f} s",
        f"every {fewer:,} env steps",
        (f"--{flag}-every", str(fewer)),
        *case.faster(gain),
    )


def _device(case: Case) -> Iterator[Finding]:
    costs, settings, now = case.costs, case.settings, case.now
    here = update_seconds(costs, settings)
    there = case.on_cpu.seconds(settings.batch_size) if case.on_cpu is not None else here
    if case.on_cpu is not None and settings.on_device and there <= here:
        yield Finding(
            "GPU slower than CPU",
            "this network is too small for the GPU",
            f"an update takes {_time(here)} on the GPU and {_time(there)} on the CPU",
            "learn on the CPU",
            ("--device", "cpu"),
            *case.predict(replace(settings, on_device=False), update=case.on_cpu, compiled=None),
        )
    used, busy = case.device_utilization, case.learner_busy
    most = case.predict(case.decision("auto").ways[0])[1] if settings.on_device else 1.0
    if max(busy if used is None else used, most) <= UNFILLED and now.learn_rate >= 2 * now.collect_rate:
        known = (
            "" if used is None else f", device utilisation {_percent(used)} (time in which any kernel ran)"
        )
        what, change = unfilled(max(busy, most), "this GPU")
        evidence = f"learner busy {_percent(busy)}{known}; the fastest way to collect would keep it busy {_percent(most)}"
        yield Finding(UNFILLED_CARD, what, evidence, change)
    share = case.phases.get(Phase.STAGE, 0.0)
    if share >= 0.1 and settings.on_device:
        yield Finding(
            "copies",
            "moving rollouts to the device takes a notable part of the time",
            f"{_percent(share)} of the time",
            "overlap hides it; an env that steps on the device avoids it",
            () if settings.overlap else ("--overlap", "on"),
            *case.faster(1 / (1 - share)),
        )
    if case.memory_share is not None and case.memory_share >= 0.9:
        yield Finding(
            "memory near the limit",
            "the card's memory is nearly full" if settings.on_device else "memory is nearly full",
            f"{_percent(case.memory_share)} in use",
            *_less_memory(settings),
        )
    if case.throttled:
        yield Finding(
            "throttled",
            "the card runs below its clock",
            f"it gives as reason: {', '.join(case.throttled)}",
            "better cooling or a higher power limit",
        )


def unfilled(share: float, card: str) -> tuple[str, str]:
    """That one run is so small a part of what a card can do, and what would fill it."""
    return (
        f"the work of one run is {100 * share:.2g} % of {card}",
        f"more runs side by side (seeds, settings) would fill it, about {1 / max(share, 0.01):.0f} of them, or a "
        "larger network, if it learns better; more epochs do not count, they keep it busy with nothing new",
    )


def _less_memory(settings: Settings) -> tuple[str, tuple[str, ...]]:
    """What to do about full memory, and as flags."""
    by_itself = "an update that does not fit is split by itself"
    if settings.on_device:
        return f"minibatches in two parts, with the same result; {by_itself}", ("--accumulate", "2")
    halved = str(max(settings.n_steps // 2, 1))
    return f"shorter rollouts or fewer envs; {by_itself}", ("--n-steps", halved)


def _round_up(value: float) -> int:
    """To one digit: 7,300 → 8,000."""
    scale = 10 ** (len(str(int(value))) - 1)
    return int(-(-value // scale) * scale)


def _rate(value: float) -> str:
    return f"{value:,.0f} steps/s"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
