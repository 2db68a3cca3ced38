"""`flatout doctor`: measures an env with some settings on this machine and says what would hold a run back."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flatout.advice.short_benchmark import TINY, measure
from flatout.agent import Agent
from flatout.buffers.rollout import Rollout
from flatout.config.fields import flag
from flatout.config.run_config import memory_needed
from flatout.device.accelerator import choose_precision, device_memory_share, is_accelerator
from flatout.device.cards import card
from flatout.device.machine import usable_memory
from flatout.envs.loader import Code
from flatout.envs.make import EnvSource
from flatout.errors import FlatoutError, did_you_mean
from flatout.models.params import ParamBlock
from flatout.perf.case import Case, Finding, peak_memory, throttling
from flatout.perf.costs import NO_UPDATE, Costs, Network, Settings, UpdateCost, update_seconds
from flatout.perf.decide import Request, decide, describe
from flatout.perf.decide import duration as _time
from flatout.perf.findings import UNFILLED, UNFILLED_CARD, diagnose, unfilled
from flatout.perf.planner import UpdateProbe, copied_to_cpu
from flatout.perf.roofline import on_card
from flatout.perf.simulate import FEW_ENV_STEPS, Forecast, ladder, simulate
from flatout.runlog.files import plural
from flatout.runlog.samples import Samples, read_samples
from flatout.views.notebook import text_html

BENCHMARK_SECONDS = 5.0
SMALLER = (256, 256)
"""The network that a big one is compared with."""
NETWORK = {
    "collectors": {"": 1.0},
    "latency": {"us": 1e-6, "ms": 1e-3, "s": 1.0},
    "bandwidth": {"Mbit": 1e6 / 8, "Gbit": 1e9 / 8},
}
"""Of collectors on other machines, with units in seconds and in bytes a second."""
WHAT_IFS = ("gpu", "devices", "cores", "n_envs", "n_steps", "batch_size", "n_epochs", "step_ms", *NETWORK)
FED = 0.95
"""A learner that works for this share of its best speed is fed."""
MAX_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The doctor's answer."""

    env: str
    device: str
    settings: Settings
    timesteps: int
    executor_reason: str
    overlap_reason: str
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

    @property
    def _unfilled(self) -> list[Finding]:
        """That one run cannot fill the card, if it is so: no change of its settings would."""
        return [finding for finding in self.findings if finding.kind == UNFILLED_CARD]

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)

    def _repr_html_(self) -> str:
        return text_html(str(self))

    def __str__(self) -> str:
        settings, forecast = self.settings, self.forecast
        kind = "mostly waiting" if self.waits else "computing"
        limit = "collecting" if forecast.collect_rate < forecast.learn_rate else "learning"
        where = " in subprocesses" if settings.in_subprocesses else ""
        ratio = settings.train_ratio
        work = f"{settings.n_epochs} epochs" if ratio is None else f"{ratio:g} updates per env step"
        lines = [
            f"{self.env} on {self.device} with {plural(settings.n_cores, 'core')}: {plural(settings.n_envs, 'env')} × {settings.n_steps} "
            f"steps, batch {settings.batch_size}, {work}, {self.timesteps:,} steps in all",
            f"executor {settings.executor}{where}: {self.executor_reason}",
            f"overlap {'on' if settings.overlap else 'off'}: {self.overlap_reason}",
            "",
            f"measured        {_speed(self.steps_per_second, self.learner_busy)}",
            f"a step          {_time(self.step_seconds)}, {kind}",
            f"an update       {_time(self.update_seconds)}, {settings.n_updates:,g} per iteration",
            f"collect rate    {forecast.collect_rate:,.0f} steps/s if collectors never waited",
            f"learn rate      {forecast.learn_rate:,.0f} steps/s if data were always ready",
            f"pipeline limit  {forecast.limit:,.0f} steps/s: {limit} is the limit",
        ]
        lines += [f"device          {finding.what}: {finding.change}" for finding in self._unfilled]
        shown = [finding for finding in self.findings if finding not in self._unfilled]
        for nth, finding in enumerate(shown[:MAX_SHOWN], 1):
            lines += ["", f"{nth}. {finding.what}", f"   {finding.evidence}", f"   → {_advice(finding)}"]
        if not self.findings:
            lines += ["", "Nothing found that is worth changing."]
        if self.what_if is not None:
            reply, wishes = self.what_if, self.what_if["wishes"]
            words = ", ".join(f"{name} {value}" for name, value in wishes.items())
            speed = _speed(reply["steps_per_second"], reply["learner_busy"])
            source = " (the card from its data sheet, not measured)" if "gpu" in wishes else ""
            if wishes.keys() & NETWORK.keys():
                source += " (the network by its figures, not measured)"
            lines += ["", f"what if {words}: about {speed}, best with {reply['way']}{source}"]
            if "gpu" in wishes and reply["learner_busy"] <= UNFILLED:
                lines.append("   " + ": ".join(unfilled(reply["learner_busy"], f"a {wishes['gpu']}")))
            if (share := reply["memory_share"]) is not None and share > 1:
                lines.append(
                    f"   its rollouts and network need {share:.1f} × the card's memory: fewer envs or shorter rollouts"
                )
        return "\n".join([*lines, "", f"run: {self.command}"])


def _speed(steps_per_second: float, learner_busy: float) -> str:
    return f"{steps_per_second:,.0f} steps/s, learner busy {100 * learner_busy:.0f} %"


def _advice(finding: Finding) -> str:
    flags = f" ({' '.join(finding.flags)})" if finding.flags else ""
    speed, busy, gain = finding.steps_per_second, finding.learner_busy, finding.gain
    if speed is None or busy is None or gain is None:
        return finding.change + flags
    return (
        f"{finding.change}{flags}: about {speed:,.0f} steps/s, {gain:.1f} ×, learner busy {100 * busy:.0f} %"
    )


def doctor(
    env: EnvSource,
    *,
    what_if: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
    **settings: Any,
) -> Diagnosis:
    """Measure an env with these settings on this machine and find what would hold a run back."""
    wishes = parse_what_if(what_if) if what_if else None
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(env, runs_dir=folder, run_name="probe", **settings | {"log": ()})
        case = measure(agent, BENCHMARK_SECONDS, tell)
        samples = read_samples(Path(folder, "probe", "samples.jsonl"))
        memory = _memory_share(agent, samples)
        case = replace(case, smaller=_smaller(agent), on_cpu=_on_cpu(agent), memory_share=memory)
        case = replace(case, throttled=throttling(samples))
        agent.close()
    findings, reply = diagnose(case), answer(case, wishes, agent) if wishes else None
    if reply is not None:
        reply["memory_share"] = _share_of_card(agent, reply["wishes"])
    return Diagnosis(
        env=agent.config.env,
        device=agent.device,
        settings=case.settings,
        timesteps=agent.config.timesteps,
        executor_reason=agent.summary["executor"]["reason"],
        overlap_reason=agent.summary["overlap"]["reason"],
        step_seconds=case.costs.step_seconds,
        waits=case.costs.waits,
        update_seconds=update_seconds(case.costs, case.settings),
        steps_per_second=case.steps_per_second,
        learner_busy=case.learner_busy,
        forecast=case.now,
        findings=findings,
        what_if=reply,
        command=command(agent.config.env, settings, findings),
    )


def _memory_share(agent: Agent, samples: Samples) -> float | None:
    """The used share of the memory of the device that learns: the card's peak, or as it is now."""
    if not is_accelerator(agent.policy.device):
        total, free = usable_memory()
        return 1 - free / total
    return peak_memory(samples, {}) if samples.gpu else device_memory_share(agent.policy.device)


def _smaller(agent: Agent) -> tuple[tuple[int, ...], UpdateCost] | None:
    """A usual network and its update, if the agent's network is far bigger."""
    policy, config = agent.policy, agent.config
    spec = config.learner_spec(policy.obs, policy.action)
    spec = replace(spec, network=replace(config.network, network_arch=SMALLER))
    n_params = sum(p.numel() for p in spec.make_model().parameters())
    if policy.n_params < 4 * n_params:
        return None
    precision = choose_precision(config.precision, policy.device, n_params)
    learner = spec.make_learner(str(policy.device), precision)
    probe, n_threads = UpdateProbe(config, policy, learner), learner.threads(agent.machine.cores)
    if is_accelerator(policy.device) and (cost := probe.fast(n_threads)) is not None:
        return SMALLER, cost
    return SMALLER, probe.eager(n_threads, TINY, config.algorithm.batch_size, launch=probe.launch_seconds())


def _on_cpu(agent: Agent) -> UpdateCost | None:
    """The agent's update on the CPU, if it learns on a GPU."""
    if agent.policy.device.type == "cpu":
        return None
    config = replace(agent.config, precision="auto")  # the CPU may not have the card's
    probe = UpdateProbe.of_copy(config, copied_to_cpu(agent.policy))
    return probe.seconds(probe.learner.threads(agent.machine.cores))


def _share_of_card(agent: Agent, wishes: dict[str, str]) -> float | None:
    """What a run needs at least of the memory of the card that is wished for."""
    if "gpu" not in wishes:
        return None
    config, obs_bytes = agent.config, sum(x.nbytes for x in agent.policy.obs.alloc(1))
    n_envs, n_steps = config.n_envs, config.algorithm.n_steps
    n_envs, n_steps = int(float(wishes.get("n_envs", n_envs))), int(float(wishes.get("n_steps", n_steps)))
    needed = memory_needed(n_envs * n_steps, config.network.network_arch, obs_bytes)
    return needed / (card(wishes["gpu"]).memory * 1e9)


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
        elif name in NETWORK:
            _in_units(name, value)
        elif not _is_positive(value):
            raise FlatoutError(f"--what-if {name}={value}: it must be a number above 0")
        wishes[name] = value
    return wishes


def _is_positive(value: str) -> bool:
    try:
        return float(value) > 0
    except ValueError:
        return False


def _in_units(name: str, value: str) -> float:
    """`10Gbit`, `0.2ms` or `64` as a number."""
    for unit, factor in NETWORK[name].items():
        if value.endswith(unit) and _is_positive(value.removesuffix(unit)):
            return float(value.removesuffix(unit)) * factor
    units = " or ".join(f"10{unit}" for unit in NETWORK[name])
    raise FlatoutError(f"--what-if {name}={value}: it must be a number above 0, such as {units}")


def answer(case: Case, wishes: dict[str, str], agent: Agent) -> dict[str, Any]:
    """What `train` would reach on another machine or with other settings, in the way it would choose there."""
    settings, costs = case.settings, case.costs
    for name in {"cores", "n_envs", "n_steps", "batch_size", "n_epochs"} & wishes.keys():
        field = "n_cores" if name == "cores" else name
        settings = replace(settings, **{field: int(float(wishes[name]))})  # type: ignore[arg-type]
    if "step_ms" in wishes:
        factor = float(wishes["step_ms"]) / 1e3 / costs.step_seconds
        wait, compute = (tuple(s * factor for s in times) for times in (costs.wait, costs.compute))
        costs = replace(costs, wait=wait, compute=compute)
    scale, known = case.steps_per_second / case.now.steps_per_second, costs
    if "gpu" in wishes:
        scale = 1.0  # what the run was off by is the learner's part, and that goes to the card
        one, n = card(wishes["gpu"]), int(float(wishes.get("devices", 1)))
        costs, settings = on_card(agent.config, agent.policy, costs, settings, one, agent.env_info(), n)
        known = replace(costs, update=NO_UPDATE)  # `train` does not time updates on a card
    if wishes.keys() & NETWORK.keys():
        there = replace(settings, network=_network(wishes, agent, settings.n_cores))
        n_collectors = _in_units("collectors", wishes["collectors"]) if "collectors" in wishes else 0
        way = across(costs, there, case.timesteps, int(n_collectors))
    else:
        way = replace(case, costs=known, settings=settings).decision("auto").ways[0]
    forecast = simulate(costs, way)
    return {
        "wishes": wishes,
        "steps_per_second": forecast.steps_per_second * scale,
        "learner_busy": min(forecast.learner_busy, 1.0),
        "collect_rate": forecast.collect_rate,
        "learn_rate": forecast.learn_rate,
        "way": describe(way),
    }


def _network(wishes: dict[str, str], agent: Agent, n_cores: int) -> Network:
    """The network that is wished for, to machines with so many cores, and what this agent sends through it."""
    return Network(
        latency=_in_units("latency", wishes.get("latency", "0.2ms")),
        bandwidth=_in_units("bandwidth", wishes.get("bandwidth", "10Gbit")),
        cores=n_cores,
        **sizes(agent),
    )


def sizes(agent: Agent) -> dict[str, int]:
    """Bytes that a network carries for this agent: of its parameters, and of a transition."""
    policy = agent.policy
    step = Rollout.alloc(policy.obs, policy.action, 1, 1)
    param_bytes = 4 * ParamBlock.size(policy.model)
    return {"param_bytes": param_bytes, "step_bytes": sum(x.nbytes for x in step.by_name.values())}


def across(costs: Costs, settings: Settings, timesteps: float, n_collectors: int = 0) -> Settings:
    """The run with so many Ray actors on other machines; 0: with as few as feed the learner."""

    def way(n: int) -> Settings:
        request = Request(timesteps=timesteps, executor="ray", n_collectors=n)
        return decide(request, settings.in_one_process, costs).ways[0]

    numbers = [n_collectors] if n_collectors else [*ladder(1, settings.n_envs), settings.n_envs]
    speeds = {it: simulate(costs, it, FEW_ENV_STEPS).steps_per_second for it in map(way, numbers)}
    return next(it for it, speed in speeds.items() if speed >= FED * max(speeds.values()))


def command(env: str, settings: dict[str, Any], findings: list[Finding]) -> str:
    """The line to run: what was given, changed by the first finding that has flags."""
    given = {flag(name): _as_text(value) for name, value in settings.items() if value is not None}
    flags = next((finding.flags for finding in findings if finding.flags), ())
    given |= dict(zip(flags[::2], flags[1::2], strict=True))
    return shlex.join(["flatout", "train", env, *(word for pair in given.items() for word in pair)])


def _as_text(value: Any) -> str:
    """A setting as the command line takes it."""
    if isinstance(value, dict):  # of widths, or env kwargs
        by_name = all(isinstance(item, tuple | list) for item in value.values())
        parts = (f"{name}={_as_text(item)}" for name, item in value.items())
        return ";".join(parts) if by_name and value else json.dumps(value)
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return Code.of(value) if callable(value) else str(value)
