"""Other ways to run the same thing: every executor that could work, and machines that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flatout.perf.costs import Costs, Settings, UpdateCost
from flatout.perf.simulate import Forecast, simulate

GPU_SHARE = 0.25
"""Of its peak that a card reaches with the matrices of an update."""
GPU_LAUNCH = 0.25e-3
"""An update's kernels, however small, replayed as one graph."""
WORKERS_PER_CORE = 2
WORTH = 1.05
"""A way that is more complicated must promise to be this much faster."""


def ways(costs: Costs, settings: Settings) -> Iterator[Settings]:
    """Every way to step these envs and share the cores, overlapped or not; simple ones first."""
    if settings.executor in ("batched", "async"):
        yield from (replace(settings, overlap=on) for on in (False, settings.executor == "async"))
        return
    plain = replace(
        settings, executor="serial", in_subprocesses=False, n_collectors=1, n_workers=0, overlap=False
    )
    yield plain
    if costs.waits:
        for on in (False, True):
            yield replace(plain, executor="thread", n_workers=settings.n_envs, overlap=on)
    workers = min(settings.n_envs, 32 if costs.waits else WORKERS_PER_CORE * settings.n_cores)
    if settings.n_envs > 1:
        for on in (False, True):
            yield replace(plain, executor="process", n_workers=workers, overlap=on)
    if settings.n_envs > 1 and settings.n_cores > 1:
        for n in sorted({settings.n_cores - 1, min(settings.n_cores, settings.n_envs)}):
            if n <= settings.n_envs:
                for on in (False, True):
                    yield replace(plain, in_subprocesses=True, n_collectors=n, overlap=on, learn_threads=1)


def best_way(costs: Costs, settings: Settings) -> tuple[Settings, Forecast]:
    """The simplest of the fastest by the simulation."""
    forecasts = [(way, simulate(costs, way)) for way in ways(costs, settings)]
    best = max(forecast.steps_per_second for _, forecast in forecasts)
    return next(item for item in forecasts if WORTH * item[1].steps_per_second >= best)


def on_card(costs: Costs, settings: Settings, teraflops: float) -> tuple[Costs, Settings]:
    """The same run with a card to learn on: reckoned from its data sheet, not measured."""
    flops = 6.0 * settings.n_params * settings.batch_size
    seconds = GPU_LAUNCH + flops / (GPU_SHARE * teraflops * 1e12)
    cost = UpdateCost(python=0.05e-3, rows=((settings.batch_size, seconds),))
    return replace(costs, update=cost, compiled=None), replace(settings, on_device=True, compiled=False)
