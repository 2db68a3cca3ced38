"""`flatout tune`: finds the fastest way to run an env on this machine, by simulation first and real trials after.

What is learned from (total batch, minibatches, epochs, learning rate) stays as it is unless it is allowed to change.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from flatout.advice.short_benchmark import measure, short_benchmark
from flatout.agent import Agent
from flatout.config.fields import replace as replace_leaves
from flatout.config.run_config import RunConfig, save_tuned
from flatout.envs.make import EnvSource
from flatout.errors import FlatoutError
from flatout.perf.costs import START_SECONDS, Costs, Settings
from flatout.perf.decide import candidates, describe
from flatout.perf.simulate import FEW_ENV_STEPS, ladder, simulate
from flatout.runlog.files import write_json
from flatout.views.notebook import text_html

TRIAL_SECONDS = 3.0
MOST_ENVS = 512
FEWEST_STEPS = 16
NEAR = 0.9
"""A way with a prediction below this share of the best measured is not tried."""
CLOSE = 0.87
"""A way that reached this share of the best may be the better one: a short benchmark is that uncertain."""
MOST_CONTENDERS = 3
MIN_MEASURED_GAIN = 1.05
"""Below this measured gain the settings stay as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One way to run, predicted and measured."""

    settings: Settings
    config: dict[str, Any]
    """Settings that differ from those given."""
    predicted: float
    measured: float = 0.0
    learner_busy: float = 0.0
    seconds: float = 0.0
    """Time it took, its start included."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """The simulation is about equally wrong for ways of the same kind."""
        way = self.settings
        return way.executor, way.in_subprocesses, way.n_collectors, way.overlap

    @property
    def as_predicted(self) -> Trial:
        """The trial as if it had been run and reached its prediction."""
        start = 2 * START_SECONDS if self.settings.starts_processes else 0.5
        seconds = start + TRIAL_SECONDS + 2 * self.settings.total_batch / self.predicted
        return replace(self, measured=self.predicted, seconds=seconds)

    @property
    def words(self) -> str:
        """The way to run in words."""
        return f"{self.settings.n_envs} envs × {self.settings.n_steps} steps, {describe(self.settings)}"

    def __str__(self) -> str:
        return f"{self.measured:,.0f} steps/s, learner busy {100 * self.learner_busy:.0f} %: {self.words}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The result of tuning."""

    before: Trial
    best: Trial
    trials: list[Trial]
    config: RunConfig
    seconds: float
    n_considered: int

    def _repr_html_(self) -> str:
        return text_html(str(self))

    def __str__(self) -> str:
        after = f"{self.best}\ngain    {self.best.measured / self.before.measured:.2f} ×"
        if self.best is self.before:
            after = "the same: nothing tried was faster"
        took = f"{self.seconds:.0f} s: {self.n_considered} ways simulated, {len(self.trials)} of them run"
        return f"before  {self.before}\nafter   {after}\ntook    {took}"


def tune(
    env: EnvSource,
    *,
    budget: float = 60.0,
    allow_learning_changes: bool = False,
    tell: Callable[[str, float], None] = lambda *_: None,
    **settings: Any,
) -> Tuned:
    """Find the fastest way to run these settings within about `budget` seconds; `tell(what, share_done)`.

    The most promising way is tried in any case.
    """
    began = perf_counter()

    def told(what: str) -> None:
        tell(what, min((perf_counter() - began) / budget, 1.0))

    told("measuring env, policy and learner")
    agent = Agent(env, **settings | {"log": ()})
    case = measure(agent, TRIAL_SECONDS, told)
    agent.close()
    now = replace(case.settings, extra_seconds=0.0)
    before = Trial(settings=now, config={}, predicted=case.now.steps_per_second).as_predicted
    before = replace(before, measured=case.steps_per_second, learner_busy=case.learner_busy)
    told("simulating")
    simulated = _simulate_all(case.costs, now, allow_learning_changes)
    simulated = [trial for trial in simulated if _is_valid(agent.config, trial.config)]
    trials = [before]
    while candidate := _most_promising(simulated, trials):
        expected = candidate.as_predicted
        seconds = expected.seconds + sum(trial.seconds for trial in _contenders([*trials, expected]))
        if len(trials) > 1 and perf_counter() - began + seconds > budget:
            break
        told(candidate.words)
        trials.append(_run(agent, candidate))
    contenders = _contenders(trials)
    if contenders != [before]:
        for trial in contenders:
            told(f"once more: {trial.words}")
            again = _run(agent, trial)
            speed = (trial.measured + again.measured) / 2
            busy = (trial.learner_busy + again.learner_busy) / 2
            trials[trials.index(trial)] = replace(trial, measured=speed, learner_busy=busy)
    before, best = trials[0], max(trials, key=lambda trial: trial.measured)
    if best.measured < MIN_MEASURED_GAIN * before.measured:
        best = before
    config = replace_leaves(agent.config, best.config)
    save_tuned(config, agent.device, agent.machine.cores)
    told("done")
    return Tuned(
        before=before,
        best=best,
        trials=trials,
        config=config,
        seconds=perf_counter() - began,
        n_considered=len(simulated),
    )


def _simulate_all(costs: Costs, now: Settings, learning: bool) -> list[Trial]:
    """Every other way and number of envs with the predicted speed."""
    return [
        Trial(
            settings=way,
            config=_as_config(way, now),
            predicted=simulate(costs, way, FEW_ENV_STEPS).steps_per_second,
        )
        for shape in _shapes(now, learning)
        for overlap in (False, True)
        for way in candidates(costs, replace(shape, overlap=overlap))
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


def _most_promising(simulated: list[Trial], trials: list[Trial]) -> Trial | None:
    """The way to try next, by its prediction, corrected by how wrong the simulation was about that kind so far."""
    ratios: dict[tuple[Any, ...], list[float]] = {}
    for trial in trials:
        ratios.setdefault(trial.kind, []).append(trial.measured / trial.predicted)
    tried = {trial.settings for trial in trials}
    untried = [trial for trial in simulated if trial.settings not in tried]

    def corrected(trial: Trial) -> float:
        return trial.predicted * statistics.fmean(ratios.get(trial.kind, [1.0]))

    best = max(untried, key=corrected, default=None)
    fastest = max(trial.measured for trial in trials)
    return best if best is not None and corrected(best) > NEAR * fastest else None


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


def _is_valid(config: RunConfig, changes: dict[str, Any]) -> bool:
    """Whether the algorithm takes a rollout and minibatches of these sizes."""
    try:
        replace_leaves(config, changes)
    except FlatoutError:
        return False
    return True


def _contenders(trials: list[Trial]) -> list[Trial]:
    """The fastest, and those so close to it that they are run again; the given settings before others."""
    ranked = sorted(trials, key=lambda trial: -trial.measured)
    close = [trial for trial in ranked if trial.measured >= CLOSE * ranked[0].measured]
    return sorted(close, key=lambda trial: (trial is not ranked[0], trial is not trials[0]))[:MOST_CONTENDERS]


def _run(agent: Agent, trial: Trial) -> Trial:
    """The trial with what a short benchmark of it measured."""
    began = perf_counter()
    changed = agent.changed(trial.config)
    try:
        result = short_benchmark(changed, TRIAL_SECONDS)
    finally:
        changed.close()
    seconds = perf_counter() - began
    return replace(trial, measured=result.steps_per_second, learner_busy=result.learner_busy, seconds=seconds)


def save(tuned: Tuned, path: Path) -> None:
    """Write the config for `flatout train --config`."""
    write_json(path, tuned.config.to_json())
