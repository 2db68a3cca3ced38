"""Collect the next rollout while learning from this one: two slots, lag exactly 1, the same run after run.

Rollout k+1 is collected with the parameters that learning from rollout k begins with. Between two iterations
the next rollout lies ready, so checkpoints and evaluation need no care. Where envs wait, some of them may by then
have begun the rollout after it, which a checkpoint forgets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic

import torch

from flatout.collect.collector import Collects
from flatout.executors.base import Episode
from flatout.learning.learner import Learner
from flatout.timing import Phase, PhaseClock
from flatout.training.lockstep import BadIterations, R
from flatout.training.state import TrainState
from flatout.training.stop import StopRequest

KL_BOUND = 0.1
"""How far the policy may have moved from the one that collected; beyond it data of the last policy misleads."""
FAR_IN_A_ROW = 3
"""So many iterations beyond the bound end overlap; a single leap, as in the first updates, does not."""


@dataclass(slots=True)
class Ready(Generic[R]):
    """A collected rollout that was not learned from yet."""

    slot: int
    episodes: list[Episode]
    lag: int


class Overlap(Generic[R]):
    """Collects on a thread of its own, which for child collectors only waits."""

    def __init__(
        self,
        collector: Collects[R],
        learner: Learner[Any],
        rollouts: Sequence[R],
        state: TrainState,
        *,
        clock: PhaseClock,
        learn_threads: int,
        lag: int = 1,
    ) -> None:
        self._collector, self._learner, self._state, self._clock = collector, learner, state, clock
        self.rollouts = rollouts
        self._learn_threads, self._lag = learn_threads, lag
        self._bad = BadIterations(state)
        self._background = _Background(collector)
        self.ready: Ready[R] | None = None
        """The next rollout, if it was collected ahead."""
        self.notes: list[str] = []

    def iterate(self, total_steps: int, stop: StopRequest) -> dict[str, float]:
        """Learn from one rollout while the next is collected; returns the learner's metrics."""
        state = self._state
        torch.set_num_threads(self._learn_threads)
        if self.ready is None:
            self._begin(0, stop)
            self._finish(0, 0, stop)
        now = self.ready
        assert now is not None
        self.ready = None
        rollout = self.rollouts[now.slot]
        lag = 0 if state.fell_back else self._lag
        last = state.env_steps + rollout.n_transitions >= total_steps
        ahead = lag == 1 and not last
        if ahead:
            self._begin(1 - now.slot, stop)
        metrics = self._learner.learn(
            rollout,
            iteration=state.iteration,
            progress=state.env_steps / total_steps,
            lag=now.lag,
            stop=stop.now,
        )
        state.add(rollout.n_transitions, now.episodes)
        state.n_updates = self._learner.n_updates
        state.lag_sum += now.lag
        state.lag_max = max(state.lag_max, now.lag)
        self._fall_back_if_far(metrics)
        if ahead:
            if not state.fell_back and state.env_steps + rollout.n_transitions < total_steps:
                self._collector.offer(rollout)  # which was learned from, and is free
            self._finish(1 - now.slot, 1, stop)
        self._bad.count(metrics)
        return metrics

    def _begin(self, slot: int, stop: StopRequest) -> None:
        self._clock.enter(Phase.PUBLISH)
        self._collector.publish()
        self._background.begin(self.rollouts[slot], stop.now)

    def _finish(self, slot: int, lag: int, stop: StopRequest) -> None:
        self._clock.enter(Phase.WAIT)
        with stop.interruptible():
            episodes = self._background.result()
        self.ready = Ready(slot, episodes, lag)

    def _fall_back_if_far(self, metrics: dict[str, float]) -> None:
        kl = metrics.get("train/lag_kl", 0.0)
        self._state.far_in_a_row = self._state.far_in_a_row + 1 if kl > KL_BOUND else 0
        if self._state.far_in_a_row >= FAR_IN_A_ROW and not self._state.fell_back:
            self._state.fell_back = True
            self.notes.append(
                f"the policy moves too fast to learn from the last one's data (KL {kl:.2f}, bound {KL_BOUND}): "
                "going on in lockstep"
            )


class _Background(Generic[R]):
    """Collects one rollout at a time on a thread of its own."""

    def __init__(self, collector: Collects[R]) -> None:
        self._collector = collector
        self._tasks: SimpleQueue[tuple[R, Callable[[], bool]]] = SimpleQueue()
        self._results: SimpleQueue[tuple[list[Episode], BaseException | None]] = SimpleQueue()
        # A daemon, so that an env that blocks for ever does not keep a program from ending.
        self._thread = threading.Thread(target=self._work, name="flatout collecting", daemon=True)

    def begin(self, rollout: R, stop: Callable[[], bool]) -> None:
        """Start collecting."""
        if not self._thread.is_alive():
            self._thread.start()
        self._tasks.put((rollout, stop))

    def result(self) -> list[Episode]:
        """Wait for it: the episodes that ended; raises what collecting raised."""
        episodes, error = self._results.get()
        if error is not None:
            raise error
        return episodes

    def _work(self) -> None:
        while True:
            rollout, stop = self._tasks.get()
            episodes: list[Episode] = []
            problem: BaseException | None = None
            try:
                episodes = self._collector.collect(rollout, stop)
            except BaseException as error:
                problem = error
            self._results.put((episodes, problem))
            del rollout, stop
