"""Collect, then learn, in turn: lag 0."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch

from flatout.buffers.rollout import Learnable
from flatout.collect.collector import Collects
from flatout.errors import FlatoutError
from flatout.learn.learner import Learner
from flatout.pipeline.state import TrainState
from flatout.pipeline.stop import StopRequest

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
        learner: Learner,
        rollout: R,
        state: TrainState,
        *,
        collect_threads: int,
        learn_threads: int,
    ) -> None:
        self._collector, self._learner = collector, learner
        self._rollout, self._state = rollout, state
        self._collect_threads, self._learn_threads = collect_threads, learn_threads
        self._n_bad_iterations = 0

    def iterate(self, total_steps: int, stop: StopRequest) -> dict[str, float]:
        """Collect a rollout and learn from it; returns the learner's metrics."""
        state = self._state
        torch.set_num_threads(self._collect_threads)
        with stop.interruptible():
            episodes = self._collector.collect(self._rollout, stop.now)
        torch.set_num_threads(self._learn_threads)
        metrics = self._learner.learn(
            self._rollout,
            iteration=state.iteration,
            progress=state.env_steps / total_steps,
            stop=stop.now,
        )
        state.add(self._rollout.n_transitions, episodes)
        state.n_updates = self._learner.n_updates
        self._count_bad(metrics)
        return metrics

    def _count_bad(self, metrics: dict[str, float]) -> None:
        n_taken, n_bad = int(metrics.pop("train/n_taken")), int(metrics.pop("train/nan_skips"))
        self._state.nan_skips += n_bad
        all_bad = n_bad > 0 and n_taken == 0
        self._n_bad_iterations = self._n_bad_iterations + 1 if all_bad else 0
        if self._n_bad_iterations >= MAX_BAD_ITERATIONS:
            raise TrainingDivergedError(
                f"the loss was NaN or infinite in every update of {MAX_BAD_ITERATIONS} iterations "
                f"({self._state.nan_skips} updates skipped); lower --learning-rate or pass "
                "--normalize-reward; the last good parameters are saved"
            )
