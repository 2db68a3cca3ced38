"""A measured run, from a short benchmark or from the records of a finished run, and what it would reach if changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from flatout.perf.costs import COMPILED_PYTHON, Costs, Settings, UpdateCost
from flatout.perf.decide import Decision, Request, decide, seconds_per_step
from flatout.perf.simulate import Forecast, simulate
from flatout.runlog.samples import Samples
from flatout.timing import LEARN_PHASES, Phase

EXTRA_PHASES = ("checkpoint", "evaluate")
"""Work besides collecting and learning that comes with env steps; records come with time."""
THROTTLED_SHARE = 0.1
"""A card that gives a reason for throttling in this share of its samples is throttled."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One bottleneck, its evidence and its remedy."""

    kind: str
    """Its short name, such as `envs wait`."""
    what: str
    """What is wrong, in a sentence."""
    evidence: str
    """The measured figures that show it."""
    change: str
    """What to do about it, in a sentence."""
    flags: tuple[str, ...] = ()
    """The change as flags of `flatout train`."""
    steps_per_second: float | None = None
    """Predicted with the change."""
    learner_busy: float | None = None
    """Predicted with the change."""
    gain: float | None = None
    """Predicted steps/s ÷ steps/s now."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured speed of a run."""

    steps_per_second: float
    learner_busy: float
    """Share of wall time."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Share of wall time by phase."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The learner's metrics: medians over iterations."""


@dataclass(frozen=True, kw_only=True)
class Case(Measured):
    """A measured run and everything that decides its speed; what is not known is None or empty."""

    costs: Costs
    settings: Settings
    timesteps: float = float("inf")
    """Env steps of the run, in which starting processes has to pay."""
    network_arch: tuple[int, ...] = ()
    smaller: tuple[tuple[int, ...], UpdateCost] | None = None
    """A smaller network and its update."""
    on_cpu: UpdateCost | None = None
    """The same update on the CPU, if the learner is on a GPU."""
    eval_every: int = 0
    checkpoint_every: int = 0
    memory_share: float | None = None
    """Used share of the device's memory, or of the machine's."""
    device_utilization: float | None = None
    throttled: tuple[str, ...] = ()
    """The card's reasons for running below its clock."""

    @cached_property
    def now(self) -> Forecast:
        """What the simulation predicts for the run as it is."""
        return simulate(self.costs, self.settings)

    def decision(self, overlap: str) -> Decision:
        """How `train` would run this with `--executor auto` and this `--overlap`."""
        kind = self.settings.executor if self.settings.executor in ("batched", "async") else ""
        request = Request(timesteps=self.timesteps, overlap=overlap, env=kind)
        return decide(request, self.settings.in_one_process, self.costs)

    @cached_property
    def best(self) -> Settings:
        """The run as `train --executor auto` would run it, with the overlap that it has."""
        return self.decision("on" if self.settings.overlap else "off").ways[0]

    def predict(self, settings: Settings, **costs: Any) -> tuple[float, float, float]:
        """Steps/s, learner busy and gain with other settings or costs: simulated, scaled by what was measured.

        The gain is that of the whole run: it includes the start of processes.
        """
        after = simulate(replace(self.costs, **costs), settings)
        rate = self.steps_per_second * after.steps_per_second / self.now.steps_per_second
        before = seconds_per_step(self.steps_per_second, self.settings, self.timesteps)
        gain = before / seconds_per_step(rate, settings, self.timesteps)
        return gain * self.steps_per_second, min(after.learner_busy, 1.0), gain

    def faster(self, gain: float) -> tuple[float, float, float]:
        """The same for a run in which the learner loses less time."""
        return gain * self.steps_per_second, gain * self.learner_busy, gain


def case_of_run(
    summary: Mapping[str, Any], config: Mapping[str, Any], system: Mapping[str, Any], samples: Samples | None
) -> Case:
    """A finished run as a case, from summary.json, config.json, system.json and samples.jsonl.

    Raises what lookups and conversions raise where something is missing. What the records do not hold stays unknown:
    fewer findings are possible then, none is made up.
    """
    settings = _settings(summary, config, int(system["cores"]))
    wall = float(summary["wall_seconds"])
    return Case(
        costs=_costs(summary, settings),
        settings=settings,
        timesteps=float(summary["env_steps"]),
        steps_per_second=float(summary["steps_per_second"]),
        learner_busy=float(summary["learner_busy"]),
        phases={name: seconds / wall for name, seconds in _phases(summary).items()},
        metrics=summary.get("metrics") or {},
        network_arch=tuple(config["network"]["network_arch"]),
        eval_every=config["eval_every"],
        checkpoint_every=config["checkpoint_every"],
        memory_share=peak_memory(samples, system),
        device_utilization=summary.get("device_utilization"),
        throttled=throttling(samples),
    )


def throttling(samples: Samples | None) -> tuple[str, ...]:
    """The card's reasons for running below its clock in a notable part of the samples."""
    reasons = samples.throttled.items() if samples is not None else ()
    return tuple(reason for reason, share in reasons if share >= THROTTLED_SHARE)


def on_device_clock(
    phases: Mapping[str, float], lanes: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """The learner's phases, its work and copies by the clock of the device where there is one: the host only launches."""
    device = lanes.get("device") or {}
    return {**phases, **{name: device[name] for name in (Phase.STAGE, *LEARN_PHASES) if name in device}}


def _phases(summary: Mapping[str, Any]) -> dict[str, float]:
    return on_device_clock(summary["phases"], summary["lanes"])


def _settings(summary: Mapping[str, Any], config: Mapping[str, Any], n_cores: int) -> Settings:
    executor, widths = summary["executor"], config["network"]["network_arch"]
    algorithm = next(part for part in config.values() if isinstance(part, dict) and "n_steps" in part)
    extra = sum(summary["phases"].get(name, 0.0) for name in EXTRA_PHASES)
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
        on_device=summary["device"] != "cpu",
        n_params=2 * sum(a * b for a, b in pairwise(widths)),
        extra_seconds=extra / max(summary["env_steps"] / (config["n_envs"] * algorithm["n_steps"]), 1),
    )


def _costs(summary: Mapping[str, Any], settings: Settings) -> Costs:
    measured, phases = summary["measured"], _phases(summary)
    step, share = measured["step_seconds"], measured["compute_share"]
    collectors = [lane for name, lane in summary["lanes"].items() if name.startswith("collector")]
    if step is None:  # it was not timed before the run: what stepping took, spread over the env steps
        step, share = sum(lane.get("env", 0.0) for lane in collectors) / summary["env_steps"], 1.0
    n_steps = summary["env_steps"] / settings.n_envs
    acting = sum(lane.get("act", 0.0) for lane in collectors) / len(collectors) / n_steps
    update = phases["update"] / max(summary["updates"], 1)
    launch = measured.get("launch_seconds")
    if launch is None:
        launch = COMPILED_PYTHON if settings.compiled else 0.0
    cost = UpdateCost(python=min(launch, update), points=((settings.batch_size, update),))
    return Costs(
        wait=(step * (1 - share),),
        compute=(step * share,),
        picklable=measured.get("picklable") is not False,
        act=((max(settings.n_envs // settings.n_collectors, 1), max(acting, 1e-6)),),
        update=cost,
        compiled=cost if settings.compiled else None,
        learn_overhead=1 + phases.get("advantage", 0.0) / max(phases["update"], 1e-9),
    )


def peak_memory(samples: Samples | None, system: Mapping[str, Any]) -> float | None:
    """The highest share of the card's memory that was in use, or of the machine's."""
    if samples is None:
        return None
    used = samples.gpu.get("memory", samples.memory)
    shares = used / samples.gpu.get("memory_total", system.get("memory_bytes", np.nan))
    return float(np.nanmax(shares)) if np.isfinite(shares).any() else None
