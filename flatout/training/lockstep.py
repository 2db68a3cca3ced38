"""Collect, then learn, in turn: lag 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from flatout.buffers.rollout import Learnable
from flatout.collect.collector import Collects
from flatout.errors import FlatoutError
from flatout.learning.learner import Learner
from flatout.timing import Phase, PhaseClock
from flatout.training.state import TrainState
from flatout.training.stop import StopRequest

MAX_BAD_ITERATIONS = 3


class TrainingDivergedError(FlatoutError):
    """The loss stayed NaN or infinite; the parameters are those of the last good update."""

    exit_code = 1


class Counted(Learnable, Protocol):
    """A rollout that knows its size, on the host or on a device."""

    @property
    def n_transitions(self) -> int:
        """`n_steps` × `n_envs`."""
        ...


R = TypeVar("R", bound=Counted)


class Lockstep(Generic[R]):
    """One iteration after the other on the learner's own thread."""

    def __init__(
        self,
        collector: Collects[R],
        learner: Learner[Any],
        rollouts: Sequence[R],
        state: TrainState,
        *,
        clock: PhaseClock,
        collect_threads: int,
        learn_threads: int,
    ) -> None:
        self._collector, self._learner, self._clock = collector, learner, clock
        self.rollouts, self._state = rollouts, state
        self._collect_threads, self._learn_threads = collect_threads, learn_threads
        self._bad = BadIterations(state)

    def iterate(self, total_steps: int, stop: StopRequest) -> dict[str, float]:
        """Collect a rollout and learn from it; returns the learner's metrics."""
        state = self._state
        torch.set_num_threads(self._collect_threads)
        self._clock.enter(Phase.PUBLISH)
        self._collector.publish()
        self._clock.enter(Phase.WAIT)
        with stop.interruptible():
            episodes = self._collector.collect(self.rollouts[0], stop.now)
        torch.set_num_threads(self._learn_threads)
        metrics = self._learner.learn(
            self.rollouts[0],
            iteration=state.iteration,
            progress=state.env_steps / total_steps,
            stop=stop.now,
        )
        state.add(self.rollouts[0].n_transitions, episodes)
        state.n_updates = self._learner.n_updates
        self._bad.count(metrics)
        return metrics


class BadIterations:
    """Counts updates that were skipped, and ends a run in which nothing else is left."""

    def __init__(self, state: TrainState) -> None:
        self._state, self._in_a_row = state, 0

    def count(self, metrics: dict[str, float]) -> None:
        """Take an iteration's counts out of its metrics; raises after too many wholly bad ones."""
        n_taken, n_bad = int(metrics.pop("train/n_taken")), int(metrics.pop("train/nan_skips"))
        self._state.nan_skips += n_bad
        self._in_a_row = self._in_a_row + 1 if n_bad > 0 and n_taken == 0 else 0
        if self._in_a_row >= MAX_BAD_ITERATIONS:
            raise TrainingDivergedError(
                f"the loss was NaN or infinite in every update of {MAX_BAD_ITERATIONS} iterations "
                f"({self._state.nan_skips} updates skipped); lower --learning-rate or pass "
                "--normalize-reward; the last good parameters are saved"
            )
