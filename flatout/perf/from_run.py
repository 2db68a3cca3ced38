"""A finished run as a case to be diagnosed, from its own records: summary.json, config.json, system.json.

What the records do not tell stays out; then fewer findings are possible, none is made up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from flatout.perf.case import Case
from flatout.perf.costs import Costs, Settings, UpdateCost
from flatout.perf.finding import Finding
from flatout.perf.findings import diagnose
from flatout.timing import Phase


def findings_of_run(
    summary: Mapping[str, Any], config: Mapping[str, Any], system: Mapping[str, Any]
) -> list[Finding]:
    """What held the run back; empty where its records say too little."""
    try:
        case = case_of_run(summary, config, system)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return []
    return diagnose(case)


def case_of_run(summary: Mapping[str, Any], config: Mapping[str, Any], system: Mapping[str, Any]) -> Case:
    """The case; raises what plain lookups raise where something is missing."""
    settings = _settings(summary, config, int(system["cores"]))
    wall = float(summary["wall_seconds"])
    phases = {name: seconds / wall for name, seconds in summary["phases"].items()}
    return Case(
        costs=_costs(summary, settings),
        settings=settings,
        steps_per_second=float(summary["steps_per_second"]),
        learner_busy=float(summary["learner_busy"]),
        phases=phases,
        metrics=summary.get("metrics") or {},
        network_arch=tuple(config["network"]["network_arch"]),
        eval_every=config["eval_every"],
        checkpoint_every=config["checkpoint_every"],
        device_utilization=summary.get("device_utilization"),
    )


def _settings(summary: Mapping[str, Any], config: Mapping[str, Any], n_cores: int) -> Settings:
    executor, widths = summary["executor"], config["network"]["network_arch"]
    algorithm = config[config["algo"]]
    extra = sum(summary["phases"].get(name, 0.0) for name in (Phase.CHECKPOINT, Phase.EVALUATE, Phase.RECORD))
    return Settings(
        n_envs=config["n_envs"],
        n_steps=algorithm["n_steps"],
        batch_size=algorithm["batch_size"],
        n_epochs=algorithm.get("n_epochs", 1),
        train_ratio=algorithm.get("train_ratio"),
        executor=executor["kind"],
        n_collectors=executor["collectors"],
        in_subprocesses=bool(executor["children"]),
        n_workers=executor["workers"],
        overlap=bool(summary["overlap"]["on"]),
        compiled=bool(summary["compiled"]),
        n_cores=n_cores,
        on_device=str(summary["device"]).startswith("cuda"),
        n_params=2 * sum(a * b for a, b in pairwise(widths)),
        extra_seconds=extra / max(summary["env_steps"] / (config["n_envs"] * algorithm["n_steps"]), 1),
    )


def _costs(summary: Mapping[str, Any], settings: Settings) -> Costs:
    measured, phases = summary["measured"], summary["phases"]
    step, share = measured["step_seconds"], measured["compute_share"]
    if step is None:
        # A batched or async env: what stepping took, spread over the env steps.
        step, share = phases.get(Phase.ENV, 0.0) / summary["env_steps"], 1.0
    collectors = [lane for name, lane in summary["lanes"].items() if name.startswith("collector")]
    n_steps = summary["env_steps"] / settings.n_envs
    acting = sum(lane.get(Phase.ACT, 0.0) for lane in collectors) / len(collectors) / n_steps
    update = phases[Phase.UPDATE] / max(summary["updates"], 1)
    launch = min(float(measured["launch_seconds"]), update) if math.isfinite(update) else 0.0
    cost = UpdateCost(python=launch, rows=((settings.batch_size, update),))
    return Costs(
        wait=(step * (1 - share),),
        compute=(step * share,),
        act=((max(settings.n_envs // settings.n_collectors, 1), max(acting, 1e-6)),),
        update=cost,
        compiled=cost if settings.compiled else None,
        advantage=phases.get(Phase.ADVANTAGE, 0.0) / summary["env_steps"],
    )
