"""The training loop: iterate, evaluate, record, save, until the run has its steps, its target or a signal."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from traceback import format_exception

import torch

from flatout.collect.ragged import Interrupted
from flatout.errors import one_line
from flatout.executors.episodes import LastEpisodes
from flatout.runlog.recorder import Progress, Recorder, TimeLeft
from flatout.timing import Phase, busy_seconds, run_phases
from flatout.training.callbacks import OnIteration
from flatout.training.checkpoint import CheckpointFolder
from flatout.training.evaluation import Evaluation
from flatout.training.stop import StopRequest
from flatout.training.trainer import Trainer

ENDLESS_STEPS = 5000
"""Steps of each env without the end of an episode that are worth a warning; most envs have a limit of 1,000 or fewer."""
GIVE_A_LIMIT = (
    """episodes need an end: --env-kwargs '{"max_episode_steps": 500}' for a registered env, gymnasium's TimeLimit for one """
    "of your own"
)


def train(
    trainer: Trainer,
    *,
    until: int,
    recorder: Recorder,
    stop: StopRequest,
    checkpoints: CheckpointFolder | None = None,
    callback: OnIteration | None = None,
) -> str:
    """Iterate to `until` env steps, the target return or a stop; returns the run's status."""
    n_threads, already = torch.get_num_threads(), trainer.state.wall_seconds
    began = perf_counter() - already  # before the lanes' clocks, whose phases add up to the wall time
    trainer.begin_lanes(spans=recorder.traces)
    recorder.observe(lambda: trainer.pipeline.lanes, offset=already, device=str(trainer.policy.device))
    try:
        return _Loop(trainer, until, recorder, checkpoints, callback, began).run(stop)
    except BaseException as error:
        # A callback's error breaks nothing, unless other ranks go on.
        if trainer.pipeline.is_broken or trainer.ranks is not None or not isinstance(error, Exception):
            trainer.cut_off()
        if isinstance(error, Interrupted) or (isinstance(error, KeyboardInterrupt) and stop.requested):
            return "stopped"
        raise
    finally:
        stop.saving = True
        trainer.state.wall_seconds = perf_counter() - began
        trainer.state.lanes = trainer.pipeline.read_lanes()
        torch.set_num_threads(n_threads)


@dataclass(slots=True)
class _Loop:
    """One call of `train`."""

    _trainer: Trainer
    _until: int
    _recorder: Recorder
    _checkpoints: CheckpointFolder | None
    _callback: OnIteration | None
    _began: float
    _n_cut: int = 0
    """Episodes that were cut in the last evaluation."""
    _time_left: TimeLeft = field(default_factory=TimeLeft)

    def run(self, stop: StopRequest) -> str:
        """Iterate to the end; returns the run's status."""
        trainer, state = self._trainer, self._trainer.state
        while state.env_steps < self._until:
            steps_before = state.env_steps
            metrics = trainer.pipeline.iterate(self._until, stop)
            state.wall_seconds = perf_counter() - self._began
            for note in trainer.pipeline.take_notes():
                self._recorder.note(note)
            self._warn_if_endless(steps_before)
            self._evaluate_if_due(steps_before, metrics, stop)
            reached = self._reached_target(metrics)
            is_last = state.env_steps >= self._until or reached or stop.requested
            goes_on = self._record(metrics, always=is_last or "eval/mean_reward" in metrics)
            self._checkpoint_if_due(steps_before)
            trainer.clock.cut()
            if reached:
                break
            if trainer.agreed(stop.requested or not goes_on):
                return "stopped"
        return "finished"

    def _warn_if_endless(self, steps_before: int) -> None:
        """Tell once that no episode has ended, after ENDLESS_STEPS in each env."""
        state, n_envs = self._trainer.state, self._trainer.config.n_envs
        if not state.n_episodes and steps_before < ENDLESS_STEPS * n_envs <= state.env_steps:
            self._recorder.note(
                f"no episode has ended in {state.env_steps:,} env steps, {state.env_steps // n_envs:,} in each env, so there "
                f"is no return to show; {GIVE_A_LIMIT}"
            )

    def _reached_target(self, metrics: dict[str, float]) -> bool:
        state, target = self._trainer.state, self._trainer.config.target_return
        if target is None:
            return False
        if not state.returns.reached(target) and not metrics.get("eval/mean_reward", -inf) >= target:
            return False
        if state.target_reached_steps is None:
            state.target_reached_steps, state.target_reached_seconds = state.env_steps, state.wall_seconds
        return True

    def _record(self, metrics: dict[str, float], *, always: bool) -> bool:
        """Call the callback, write records, update the display; false when the callback wants to stop."""
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
        state, lanes = self._trainer.state, self._trainer.pipeline.read_lanes()
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
            return_mean=state.returns.mean,
            return_std=state.returns.std,
            length_mean=state.lengths.mean,
            metrics=metrics,
            phases=phases,
            learner_busy=busy_seconds(lanes) / wall,
            seconds_left=self._time_left.estimate(state.env_steps, self._until, state.wall_seconds),
        )

    def _evaluate_if_due(self, steps_before: int, metrics: dict[str, float], stop: StopRequest) -> None:
        trainer, state = self._trainer, self._trainer.state
        if not _crossed(trainer.config.eval_every, steps_before, state.env_steps):
            return
        trainer.clock.enter(Phase.EVALUATE)
        ranks = trainer.ranks
        result = self._evaluated(stop) if ranks is None else ranks.from_first(lambda: self._evaluated(stop))
        if result is None:
            return
        if result.n_cut != self._n_cut:
            self._n_cut, limit = result.n_cut, trainer.config.eval_max_steps
            if self._n_cut:
                self._recorder.note(
                    f"evaluation: {self._n_cut} of {len(result.returns)} episodes were cut after {limit:,} steps "
                    "(--eval-max-steps)"
                )
        metrics |= {"eval/mean_reward": result.return_mean, "eval/mean_ep_length": result.length_mean}
        state.eval_returns = LastEpisodes(result.returns)
        self._save_if_best(result.return_mean)

    def _evaluated(self, stop: StopRequest) -> Evaluation | None:
        """The result of an evaluation; None if it failed, or a signal came."""
        try:
            with stop.interruptible():
                return self._trainer.evaluate(lambda: stop.requested)
        except Interrupted:
            return None
        except Exception as error:  # the run is worth more than one evaluation
            note = f"evaluation failed: {one_line(error)}; training goes on"
            self._recorder.fault(note, "".join(format_exception(error)))
            return None

    def _checkpoint_if_due(self, steps_before: int) -> None:
        trainer, state = self._trainer, self._trainer.state
        if not _crossed(trainer.config.checkpoint_every, steps_before, state.env_steps):
            return
        trainer.clock.enter(Phase.CHECKPOINT)
        if (folder := self._checkpoints) is not None:
            checkpoint = trainer.checkpoint()
            self._recorder.attempt("checkpoints", lambda: folder.save(checkpoint, state.env_steps))
        if not trainer.config.eval_every and state.returns.mean is not None:
            self._save_if_best(state.returns.mean)

    def _save_if_best(self, value: float) -> None:
        state = self._trainer.state
        if state.best_return is None or value > state.best_return:
            before, state.best_return = state.best_return, value
            if (folder := self._checkpoints) is not None:
                checkpoint = self._trainer.checkpoint()
                is_saved = self._recorder.attempt("best.flatout", lambda: folder.save_best(checkpoint))
                if not is_saved and self._trainer.ranks is None:  # ranks must all know the same best return
                    state.best_return = before


def _crossed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of `every` env steps was passed; 0: never."""
    return every > 0 and now // every > before // every
