"""`flatout tune`: the fastest way to run an env on this machine, by the simulation first and real trials after.

Comes in: an env, settings, a budget in seconds. Goes out: settings to train with. What is learned from (total batch,
minibatches, epochs, learning rate) stays as it is unless that is allowed to change.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from flatout.advice.doctor import describe
from flatout.advice.short_benchmark import fitted, measure_costs, run_a_moment, settings_of
from flatout.agent import Agent
from flatout.config.fields import replace as replace_leaves
from flatout.config.run_config import RunConfig, save_tuned
from flatout.envs.make import EnvSource
from flatout.perf.choose import START_SECONDS
from flatout.perf.costs import Costs, Settings
from flatout.perf.simulate import ladder, steps_per_second
from flatout.perf.ways import ways
from flatout.runlog.folder import write_json

TRIAL_SECONDS = 3.0
MOST_ENVS = 512
FEWEST_STEPS = 16
NEAR = 0.9
"""A way that promises less than this share of the best measured is not tried."""
CLOSE = 0.87
"""A way that reached this share of the best may be the better one: a moment's figure is that uncertain."""
MOST_CONTENDERS = 3
WORTH = 1.05
"""Below this gain the settings stay as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One way, as promised and as measured."""

    settings: Settings
    config: dict[str, Any]
    """What differs from the settings that were given."""
    predicted: float
    measured: float | None = None
    learner_busy: float | None = None
    seconds: float = 0.0
    """What running it took, its start included."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """What it has in common with ways of which the simulation is equally wrong."""
        way = self.settings
        return way.executor, way.in_subprocesses, way.n_collectors, way.overlap

    @property
    def as_promised(self) -> Trial:
        """The trial as if it had been run and had kept its promise."""
        way = self.settings
        start = 2 * START_SECONDS if way.in_subprocesses or way.executor == "process" else 0.5
        seconds = start + TRIAL_SECONDS + 2 * way.total_batch / self.predicted
        return replace(self, measured=self.predicted, seconds=seconds)

    @property
    def words(self) -> str:
        """How it runs."""
        return f"{self.settings.n_envs} envs × {self.settings.n_steps} steps, {describe(self.settings)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What tuning found."""

    before: Trial
    best: Trial
    trials: list[Trial]
    config: RunConfig
    seconds: float
    n_considered: int

    def __str__(self) -> str:
        before, best = self.before, self.best
        lines = [
            f"before  {before.measured:,.0f} steps/s, learner busy {100 * (before.learner_busy or 0):.0f} %: {before.words}",
            f"after   {best.measured:,.0f} steps/s, learner busy {100 * (best.learner_busy or 0):.0f} %: {best.words}",
        ]
        if best is before:
            lines[1] = "after   the same: nothing tried was faster"
        else:
            lines.append(f"gain    {(best.measured or 0) / (before.measured or 1):.2f} ×")
        lines.append(
            f"took    {self.seconds:.0f} s: {self.n_considered} ways reckoned, {len(self.trials)} of them run"
        )
        return "\n".join(lines)


def tune(
    env: EnvSource,
    *,
    budget: float = 60.0,
    allow_learning_changes: bool = False,
    tell: Callable[[str, float], None] = lambda *_: None,
    **settings: Any,
) -> Tuned:
    """Find the fastest way to run these settings within about `budget` seconds; `tell(what, share_done)`."""
    began = perf_counter()

    def told(what: str) -> None:
        tell(what, min((perf_counter() - began) / budget, 1.0))

    told("measuring env, policy and learner")
    agent = Agent(env, **settings)
    costs = measure_costs(agent, told)
    now = settings_of(agent)
    told("running the settings as they are")
    at = perf_counter()
    moment = run_a_moment(agent, TRIAL_SECONDS)
    now = replace(now, compiled=bool(moment.summary["compiled"]))
    agent.close()
    costs, forecast = fitted(costs, now, moment)
    before = Trial(
        settings=now,
        config={},
        predicted=forecast.steps_per_second,
        measured=moment.steps_per_second,
        learner_busy=moment.learner_busy,
        seconds=perf_counter() - at,
    )
    told("reckoning")
    reckoned = _reckon(costs, now, allow_learning_changes)
    trials = [before]
    while candidate := _most_promising(reckoned, trials):
        kept = candidate.as_promised
        again = sum(trial.seconds for trial in _contenders([*trials, kept]))
        if perf_counter() - began + kept.seconds + again > budget:
            break
        told(candidate.words)
        trials.append(_run(agent, candidate))
    contenders = _contenders(trials)
    if contenders != [before]:
        for trial in contenders:
            told(f"once more: {trial.words}")
            trials[trials.index(trial)] = _mean(trial, _run(agent, trial))
    before, best = trials[0], max(trials, key=lambda trial: trial.measured or 0.0)
    if (best.measured or 0.0) < WORTH * (before.measured or 0.0):
        best = before
    config = replace_leaves(agent.config, best.config)
    save_tuned(config, agent.device, agent._machine.cores)
    told("done")
    return Tuned(
        before=before,
        best=best,
        trials=trials,
        config=config,
        seconds=perf_counter() - began,
        n_considered=len(reckoned),
    )


def _reckon(costs: Costs, now: Settings, learning: bool) -> list[Trial]:
    """Every other way and number of envs with what the simulation promises."""
    return [
        Trial(settings=way, config=_as_config(way, now), predicted=steps_per_second(costs, way))
        for shape in _shapes(now, learning)
        for way in ways(costs, shape)
        if way != now
    ]


def _shapes(now: Settings, learning: bool) -> Iterator[Settings]:
    """Other numbers of envs for the same total batch; other minibatches too, if learning may change."""
    total = now.total_batch
    numbers = {now.n_envs, *ladder(max(now.n_envs // 4, 1), MOST_ENVS)}
    for n in sorted(numbers):
        fits = total % n == 0 and (total // n >= FEWEST_STEPS or n == now.n_envs)
        if fits and not (now.executor == "batched" and n != now.n_envs):
            shape = replace(now, n_envs=n, n_steps=total // n)
            yield shape
            if learning:
                sizes = [b for b in ladder(2 * now.batch_size, total // 4) if total % b == 0]
                yield from (replace(shape, batch_size=b, compiled=False) for b in sizes[:2])


def _most_promising(reckoned: list[Trial], trials: list[Trial]) -> Trial | None:
    """The way to try next: what the simulation promises, corrected by how wrong it was about that kind so far."""
    ratios: dict[tuple[Any, ...], list[float]] = {}
    for trial in trials:
        ratios.setdefault(trial.kind, []).append((trial.measured or 0.0) / trial.predicted)
    tried = {trial.settings for trial in trials}
    untried = [trial for trial in reckoned if trial.settings not in tried]

    def promise(trial: Trial) -> float:
        return trial.predicted * statistics.fmean(ratios.get(trial.kind, [1.0]))

    best = max(untried, key=promise, default=None)
    fastest = max(trial.measured or 0.0 for trial in trials)
    return best if best is not None and promise(best) > NEAR * fastest else None


def _as_config(way: Settings, now: Settings) -> dict[str, Any]:
    """The settings of a run that make it run this way."""
    out: dict[str, Any] = {
        "n_envs": way.n_envs,
        "n_steps": way.n_steps,
        "overlap": "on" if way.overlap else "off",
    }
    if way.batch_size != now.batch_size:
        out["batch_size"] = way.batch_size
    if way.in_subprocesses:
        return out | {"executor": "auto", "n_collectors": way.n_collectors, "n_workers": 0}
    workers = way.n_workers if way.executor == "process" else 0
    return out | {"executor": way.executor, "n_collectors": 0, "n_workers": workers}


def _contenders(trials: list[Trial]) -> list[Trial]:
    """The fastest, and those so close to it that only a second run tells; the settings as they are go before others."""
    ranked = sorted(trials, key=lambda trial: -(trial.measured or 0.0))
    close = [trial for trial in ranked if (trial.measured or 0.0) >= CLOSE * (ranked[0].measured or 0.0)]
    return sorted(close, key=lambda trial: (trial is not ranked[0], trial is not trials[0]))[:MOST_CONTENDERS]


def _run(agent: Agent, trial: Trial) -> Trial:
    """The trial with what a moment of it gave."""
    began = perf_counter()
    changed = agent.changed(trial.config)
    try:
        moment = run_a_moment(changed, TRIAL_SECONDS)
    finally:
        changed.close()
    return replace(
        trial,
        measured=moment.steps_per_second,
        learner_busy=moment.learner_busy,
        seconds=perf_counter() - began,
    )


def _mean(first: Trial, second: Trial) -> Trial:
    """Two tries of the same way as one."""
    both = (first.measured or 0.0) + (second.measured or 0.0)
    busy = (first.learner_busy or 0.0) + (second.learner_busy or 0.0)
    return replace(first, measured=both / 2, learner_busy=busy / 2)


def save(tuned: Tuned, path: Path) -> None:
    """Write the config that `flatout train --config` takes."""
    write_json(path, tuned.config.to_json())
