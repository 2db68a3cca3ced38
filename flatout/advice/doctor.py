"""`flatout doctor`: where would the time go, and what to change.

Comes in: an env and settings. Goes out: a diagnosis, from measurements of this machine that take some seconds.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from flatout.advice.short_benchmark import TINY, fitted, measure_costs, run_a_moment, settings_of, update_cost
from flatout.agent import Agent
from flatout.config.fields import flag
from flatout.device.accelerator import card
from flatout.device.machine import usable_memory
from flatout.envs.make import EnvSource
from flatout.errors import FlatoutError, did_you_mean
from flatout.models.config import NetworkConfig
from flatout.perf.case import Case
from flatout.perf.costs import Settings, UpdateCost
from flatout.perf.finding import Finding
from flatout.perf.findings import diagnose
from flatout.perf.planning import launch_seconds
from flatout.perf.simulate import Forecast, simulate, update_seconds
from flatout.perf.ways import best_way, on_card
from flatout.timing import PhaseClock

MOMENT_SECONDS = 5.0
SMALLER = (256, 256)
"""The network that a big one is compared with."""
WHAT_IFS = ("gpu", "cores", "n_envs", "n_steps", "batch_size", "n_epochs", "step_ms")
MAX_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What the doctor found."""

    env: str
    device: str
    settings: Settings
    step_seconds: float
    waits: bool
    update_seconds: float
    steps_per_second: float
    learner_busy: float
    forecast: Forecast
    findings: list[Finding]
    what_if: dict[str, Any] | None
    command: str
    """What to run next."""

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        return text(self)


def doctor(
    env: EnvSource,
    *,
    what_if: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
    **settings: Any,
) -> Diagnosis:
    """Measure an env with these settings on this machine and say what holds a run of it back."""
    wishes = parse_what_if(what_if) if what_if else None
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(env, runs_dir=folder, run_name="probe", **settings)
        case = examine(agent, tell)
        agent.close()
    findings = diagnose(case)
    return Diagnosis(
        env=agent.config.env,
        device=agent.device,
        settings=case.settings,
        step_seconds=case.costs.step_seconds,
        waits=case.costs.waits,
        update_seconds=update_seconds(case.costs, case.settings),
        steps_per_second=case.steps_per_second,
        learner_busy=case.learner_busy,
        forecast=case.now,
        findings=findings,
        what_if=answer(case, wishes) if wishes else None,
        command=command(agent.config.env, settings, findings),
    )


def examine(agent: Agent, tell: Callable[[str], None] = lambda _: None) -> Case:
    """Measure everything that a diagnosis needs; the agent trains for a moment."""
    costs = measure_costs(agent, tell)
    tell("starting the real run")
    settings = settings_of(agent)
    tell(f"running it for {MOMENT_SECONDS:.0f} s")
    moment = run_a_moment(agent, MOMENT_SECONDS)
    settings = replace(
        settings, compiled=bool(moment.summary["compiled"]), extra_seconds=moment.extra_seconds
    )
    costs, _ = fitted(costs, settings, moment)
    config = agent.config
    total, free = usable_memory()
    return Case(
        costs=costs,
        settings=settings,
        steps_per_second=moment.steps_per_second,
        learner_busy=moment.learner_busy,
        phases=moment.phases,
        metrics=moment.metrics,
        network_arch=config.network.network_arch,
        smaller=_smaller(agent),
        eval_every=config.eval_every,
        checkpoint_every=config.checkpoint_every,
        memory_share=1 - free / total,
        device_utilization=moment.summary.get("device_utilization"),
        blas_threads=_blas_threads(),
    )


def _smaller(agent: Agent) -> tuple[tuple[int, ...], UpdateCost] | None:
    """A usual network and its update, if the agent's is far bigger."""
    policy, config = agent.policy, agent.config
    network: NetworkConfig = replace(config.network, network_arch=SMALLER)
    model = replace(config.learner_spec(policy.obs, policy.action), network=network).make_model()
    n_params = sum(p.numel() for p in model.parameters())
    if policy.n_params < 4 * n_params:
        return None
    learner = config.descriptor.make_learner(
        model.to(policy.device), config.algorithm, n_envs=config.n_envs, seed=0, clock=PhaseClock()
    )
    return SMALLER, update_cost(learner, launch_seconds(policy, config), TINY, config.algorithm.batch_size)


def _blas_threads() -> int | None:
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() else None


def parse_what_if(text: str) -> dict[str, str]:
    """`gpu=a100,cores=32` as names and values."""
    wishes = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in WHAT_IFS:
            raise FlatoutError(
                f"--what-if {part.strip()!r}: not one of {', '.join(WHAT_IFS)}{did_you_mean(name, WHAT_IFS)}; "
                "write it as cores=32,n_envs=256"
            )
        if name == "gpu":
            card(value)
        elif not _is_positive(value):
            raise FlatoutError(f"--what-if {name}={value}: a number above 0 is wanted")
        wishes[name] = value
    return wishes


def _is_positive(value: str) -> bool:
    try:
        return float(value) > 0
    except ValueError:
        return False


def answer(case: Case, wishes: dict[str, str]) -> dict[str, Any]:
    """What the run would reach if the machine or the settings were others, in the best way to run it there."""
    settings, costs = case.settings, case.costs
    for name in ("n_envs", "n_steps", "batch_size", "n_epochs"):
        if name in wishes:
            settings = replace(settings, **{name: int(float(wishes[name]))})  # type: ignore[arg-type]
    if "cores" in wishes:
        settings = replace(settings, n_cores=int(float(wishes["cores"])))
    if "step_ms" in wishes:
        factor = float(wishes["step_ms"]) / 1e3 / costs.step_seconds
        costs = replace(
            costs,
            wait=tuple(w * factor for w in costs.wait),
            compute=tuple(c * factor for c in costs.compute),
        )
    if "gpu" in wishes:
        costs, settings = on_card(costs, settings, card(wishes["gpu"]).teraflops)
    way, forecast = best_way(costs, settings)
    scale = case.steps_per_second / simulate(case.costs, case.settings).steps_per_second
    return {
        "wishes": wishes,
        "steps_per_second": forecast.steps_per_second * scale,
        "learner_busy": min(forecast.learner_busy, 1.0),
        "collect_rate": forecast.collect_rate,
        "learn_rate": forecast.learn_rate,
        "way": describe(way),
    }


def describe(way: Settings) -> str:
    """How envs are stepped and learning goes, in words."""
    if way.in_subprocesses:
        who = "1 child collector" if way.n_collectors == 1 else f"{way.n_collectors} child collectors"
    else:
        who = f"executor {way.executor}"
        if way.executor == "process":
            who += f" with {way.n_workers} workers"
    return f"{who}, {'learning beside' if way.overlap else 'learning in turn'}"


def command(env: str, settings: dict[str, Any], findings: list[Finding]) -> str:
    """The line to run: what was given, changed by the first finding that has flags."""
    given = {flag(name): _text(value) for name, value in settings.items() if value is not None}
    flags = next((finding.flags for finding in findings if finding.flags), ())
    given |= dict(zip(flags[::2], flags[1::2], strict=True))
    return shlex.join(["flatout", "train", env, *(word for pair in given.items() for word in pair)])


def _work(settings: Settings) -> str:
    if settings.train_ratio is not None:
        return f"{settings.train_ratio:g} updates per env step"
    return f"{settings.n_epochs} epochs"


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def text(found: Diagnosis) -> str:
    """The diagnosis for a terminal."""
    settings, forecast = found.settings, found.forecast
    kind = "mostly waiting" if found.waits else "computing"
    limit = "collecting" if forecast.collect_rate < forecast.learn_rate else "learning"
    lines = [
        f"{found.env} on {found.device} with {settings.n_cores} cores: {settings.n_envs} envs × {settings.n_steps} "
        f"steps, batch {settings.batch_size}, {_work(settings)}, {describe(settings)}",
        "",
        f"measured       {found.steps_per_second:,.0f} steps/s, learner busy {100 * found.learner_busy:.0f} %",
        f"a step         {_time(found.step_seconds)}, {kind}",
        f"an update      {_time(found.update_seconds)}, {settings.n_updates:,g} of them an iteration",
        f"collect rate   {forecast.collect_rate:,.0f} steps/s with nobody waiting",
        f"learn rate     {forecast.learn_rate:,.0f} steps/s with data always ready",
        f"pipeline limit {forecast.limit:,.0f} steps/s: {limit} is the limit",
    ]
    for nth, finding in enumerate(found.findings[:MAX_SHOWN], 1):
        lines += ["", f"{nth}. {finding.what}", f"   {finding.evidence}", f"   → {_advice(finding)}"]
    if not found.findings:
        lines += ["", "Nothing found that is worth changing."]
    if found.what_if is not None:
        lines += ["", _what_if(found.what_if)]
    return "\n".join([*lines, "", f"run: {found.command}"])


def _advice(finding: Finding) -> str:
    flags = f" ({' '.join(finding.flags)})" if finding.flags else ""
    if finding.steps_per_second is None or finding.gain is None:
        return finding.change + flags
    busy = "" if finding.learner_busy is None else f", learner busy {100 * finding.learner_busy:.0f} %"
    return (
        f"{finding.change}{flags}: about {finding.steps_per_second:,.0f} steps/s, {finding.gain:.1f} ×{busy}"
    )


def _what_if(reply: dict[str, Any]) -> str:
    wishes = ", ".join(f"{name} {value}" for name, value in reply["wishes"].items())
    source = " (the card from its data sheet, not measured)" if "gpu" in reply["wishes"] else ""
    return (
        f"what if {wishes}: about {reply['steps_per_second']:,.0f} steps/s, learner busy "
        f"{100 * reply['learner_busy']:.0f} %, best with {reply['way']}{source}"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
