"""The training loop between two iterations: records, evaluation, checkpoints, target, stop; and its summary.

Comes in: a trainer. Goes out: the run's status and what summary.json says.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeAlias

import torch

from flatout.collect.ragged import Interrupted
from flatout.runlog.metrics import Progress
from flatout.runlog.recorder import Recorder
from flatout.timing import COLLECT_PHASES, LEARN_PHASES, Phase
from flatout.training.checkpoint import CheckpointFolder
from flatout.training.stop import StopRequest
from flatout.training.trainer import Trainer

Callback: TypeAlias = Callable[[Progress], bool | None]
"""Sees the progress after each iteration; returning False stops the run."""


def train(
    trainer: Trainer,
    *,
    until: int,
    recorder: Recorder,
    checkpoints: CheckpointFolder | None = None,
    callback: Callback | None = None,
    stop: StopRequest | None = None,
) -> str:
    """Iterate to `until` env steps, the target return or a stop; returns the run's status."""
    stop = stop or StopRequest()
    n_threads = torch.get_num_threads()
    try:
        with stop.listening():
            return _Loop(trainer, until, recorder, checkpoints, callback, stop).run()
    finally:
        torch.set_num_threads(n_threads)


class _Loop:
    """The training loop and what happens between two iterations."""

    def __init__(
        self,
        trainer: Trainer,
        until: int,
        recorder: Recorder,
        checkpoints: CheckpointFolder | None,
        callback: Callback | None,
        stop: StopRequest,
    ) -> None:
        self._trainer, self._until, self._recorder = trainer, until, recorder
        self._checkpoints, self._callback, self._stop = checkpoints, callback, stop
        self._began = perf_counter() - trainer.state.wall_seconds
        trainer.begin_lanes(spans=recorder.traces)
        recorder.observe(
            lambda: trainer.lanes, offset=trainer.state.wall_seconds, device=str(trainer.policy.device)
        )

    def run(self) -> str:
        trainer, state, stop = self._trainer, self._trainer.state, self._stop
        status, goes_on = "finished", True
        while state.env_steps < self._until:
            steps_before = state.env_steps
            try:
                metrics = trainer.iterate(self._until, stop)
            except Interrupted:
                status = "stopped"
                break
            state.wall_seconds = perf_counter() - self._began
            self._say_restarts()
            self._evaluate_if_due(steps_before, metrics)
            reached = self._reached_target()
            is_last = state.env_steps >= self._until or reached or stop.requested
            goes_on = self._tell(metrics, always=is_last or "eval/mean_reward" in metrics)
            self._checkpoint_if_due(steps_before)
            trainer.clock.cut()
            if reached:
                break
            if stop.requested or not goes_on:
                status = "stopped"
                break
        state.wall_seconds = perf_counter() - self._began
        state.lanes = trainer.read_lanes()
        return status

    def _say_restarts(self) -> None:
        budget = self._trainer.budget
        for note, traceback_text in zip(budget.notes, budget.tracebacks, strict=True):
            self._recorder.fault(note, traceback_text)
        budget.notes.clear()
        budget.tracebacks.clear()
        for note in self._trainer.take_notes():
            self._recorder.note(note)

    def _reached_target(self) -> bool:
        state = self._trainer.state
        if not state.reached(self._trainer.config.target_return):
            return False
        if state.target_reached_steps is None:
            state.target_reached_steps, state.target_reached_seconds = state.env_steps, state.wall_seconds
        return True

    def _tell(self, metrics: dict[str, float], *, always: bool) -> bool:
        """Callback, records and display; false when the callback wants to stop."""
        due = always or self._recorder.is_due()
        if not due and self._callback is None:
            return True
        self._trainer.clock.enter(Phase.RECORD)
        progress = self._progress(metrics)
        goes_on = self._callback is None or self._callback(progress) is not False
        if due or not goes_on:
            self._recorder.write(progress)
        return goes_on

    def _progress(self, metrics: dict[str, float]) -> Progress:
        state, lanes = self._trainer.state, self._trainer.read_lanes()
        phases = run_phases(lanes, overlapped=self._trainer.overlap)
        wall = max(state.wall_seconds, 1e-9)
        return Progress(
            env_steps=state.env_steps,
            total_steps=self._until,
            iteration=state.iteration,
            updates=state.n_updates,
            episodes=state.n_episodes,
            seconds=state.wall_seconds,
            steps_per_second=state.env_steps / wall,
            return_mean=state.return_mean,
            return_std=state.return_std,
            length_mean=state.length_mean,
            metrics=metrics,
            phases=phases,
            learner_busy=busy_seconds(lanes) / wall,
        )

    def _evaluate_if_due(self, steps_before: int, metrics: dict[str, float]) -> None:
        trainer, state = self._trainer, self._trainer.state
        if not _crossed(trainer.config.eval_every, steps_before, state.env_steps):
            return
        trainer.clock.enter(Phase.EVALUATE)
        result = trainer.evaluate()
        metrics |= {"eval/mean_reward": result.return_mean, "eval/mean_ep_length": result.length_mean}
        self._save_if_best(result.return_mean)

    def _checkpoint_if_due(self, steps_before: int) -> None:
        trainer, state = self._trainer, self._trainer.state
        if not _crossed(trainer.config.checkpoint_every, steps_before, state.env_steps):
            return
        trainer.clock.enter(Phase.CHECKPOINT)
        if self._checkpoints is not None:
            self._checkpoints.save(trainer.checkpoint(), state.env_steps)
        if not trainer.config.eval_every and state.return_mean is not None:
            self._save_if_best(state.return_mean)

    def _save_if_best(self, value: float) -> None:
        state = self._trainer.state
        if state.best_return is None or value > state.best_return:
            state.best_return = value
            if self._checkpoints is not None:
                self._checkpoints.save_best(self._trainer.checkpoint())


def _crossed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of `every` env steps was passed; frequencies count env steps, never calls."""
    return every > 0 and now // every > before // every


def run_phases(lanes: dict[str, dict[str, float]], *, overlapped: bool) -> dict[str, float]:
    """Seconds per phase of the run as a whole, which add up to its wall time.

    In lockstep the learner's waiting is what the collectors did meanwhile.
    """
    phases = dict(lanes["learner"])
    spent = {name: sum(lane.get(name, 0.0) for lane in _collectors(lanes)) for name in COLLECT_PHASES}
    total = sum(spent.values())
    if not overlapped and total > 0:
        waited = phases.pop(Phase.WAIT, 0.0)
        phases |= {name: seconds * waited / total for name, seconds in spent.items() if seconds > 0}
    return phases


def _collectors(lanes: dict[str, dict[str, float]]) -> list[dict[str, float]]:
    return [lane for name, lane in lanes.items() if name.startswith("collector")]


def collect_seconds(lanes: dict[str, dict[str, float]]) -> float:
    """Seconds that collecting took, with nobody waiting for the learner."""
    return max(
        (sum(lane.get(name, 0.0) for name in COLLECT_PHASES) for lane in _collectors(lanes)), default=0.0
    )


def busy_seconds(lanes: dict[str, dict[str, float]]) -> float:
    """Seconds in which the learner's device ran update work, on the device's own clock if it has one."""
    phases = lanes.get("device") or lanes["learner"]
    return sum(phases.get(name, 0.0) for name in LEARN_PHASES)


def identity(trainer: Trainer, device: str) -> dict[str, Any]:
    """What a run is, apart from how it goes."""
    config, plan = trainer.config, trainer.plan
    return {
        "env": config.env,
        "algo": config.descriptor.name,
        "preset": config.preset or "auto",
        "seed": config.seed,
        "device": device,
        "executor": {
            "kind": plan.kind,
            "collectors": plan.n_collectors,
            "children": plan.in_subprocesses,
            "workers": plan.n_workers,
            "reason": plan.reason,
        },
        "overlap": {
            "on": trainer.overlap,
            "reason": trainer.overlap_reason,
            "fell_back": trainer.state.fell_back,
        },
    }


def summarize(
    trainer: Trainer, *, status: str, device: str, startup_seconds: float, error: str | None = None
) -> dict[str, Any]:
    """The run's summary.json."""
    config, state = trainer.config, trainer.state
    lanes, wall = state.lanes or {"learner": {}}, state.wall_seconds
    phases, collect = run_phases(lanes, overlapped=trainer.overlap), collect_seconds(lanes)
    busy = busy_seconds(lanes)
    rate, collect_rate, learn_rate = (
        state.env_steps / seconds if seconds > 0 else None for seconds in (wall, collect, busy)
    )
    limit = min(collect_rate, learn_rate) if collect_rate and learn_rate else None
    return {
        "status": status,
        "error": error,
        **identity(trainer, device),
        "env_steps": state.env_steps,
        "updates": state.n_updates,
        "startup_seconds": startup_seconds,
        "wall_seconds": wall,
        "steps_per_second": rate,
        "episodes": state.n_episodes,
        "return_mean": state.return_mean,
        "return_std": state.return_std,
        "target_return": config.target_return,
        "target_reached_seconds": state.target_reached_seconds,
        "target_reached_steps": state.target_reached_steps,
        "learner_busy": busy / wall if wall > 0 else None,
        "phases": phases,
        "lanes": lanes,
        "collect_rate": collect_rate,
        "learn_rate": learn_rate,
        "pipeline_efficiency": rate / limit if rate and limit else None,
        "policy_lag_mean": state.lag_sum / max(state.iteration, 1),
        "policy_lag_max": state.lag_max,
        "precision": trainer.precision,
        "measured": trainer.measured(),
        "compiled": trainer.compiled,
        "backend": trainer.learner.update.backend,
        "restarts": trainer.budget.n_restarts,
        "oom_backoffs": trainer.learner.n_backoffs,
        "nan_skips": state.nan_skips,
    }
