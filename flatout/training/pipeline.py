"""The training pipeline: collect a rollout and learn from it, in turn (lag 0) or at the same time (lag 1).

With lag 1, rollout k+1 is collected while the learner trains on rollout k, with the parameters the learner had when it
started on k. The lag is therefore exactly one policy version and results are reproducible. Between two iterations the
next rollout is complete, so checkpoints and evaluation need no special case. Envs that wait may by then have started
the rollout after it; a checkpoint discards that part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from flatout.buffers.rollout import Learnable, Rollout
from flatout.collect.collector import Collects
from flatout.errors import FlatoutError
from flatout.executors.base import Episode
from flatout.learning.learner import Learner
from flatout.timing import Lane, Phase, PhaseClock
from flatout.training.state import TrainState
from flatout.training.stop import StopRequest

MAX_BAD_ITERATIONS = 3
KL_BOUND = 0.1
"""Largest KL divergence between the collecting and the learning policy at which lagged data is still useful."""
FAR_IN_A_ROW = 3
"""Consecutive iterations beyond KL_BOUND that end the overlap. One large step, as in the first updates, does not."""
CANCEL_SECONDS = 4.0
"""How long a rollout that is collected in the background may take to stop before its collector is closed …"""
CANCEL_LATER_SECONDS = 2.0
"""… and if the collector was asked to stop before."""


class TrainingDivergedError(FlatoutError):
    """The loss stayed NaN or infinite; the parameters are those of the last good update."""

    exit_code = 1


class SizedRollout(Learnable, Protocol):
    """A rollout that knows its size, on the host or on a device."""

    @property
    def n_transitions(self) -> int:
        """`n_steps` × `n_envs`."""


R = TypeVar("R", bound=SizedRollout)


@dataclass(slots=True)
class CollectedRollout:
    """A collected rollout that the learner has not trained on yet."""

    slot: int
    """Its index in `Pipeline.rollouts`."""
    episodes: list[Episode]
    lag: int


class Pipeline(Generic[R]):
    """Runs iterations; with lag 1 it collects on a background thread and needs two rollouts."""

    def __init__(
        self,
        collector: Collects[R],
        learner: Learner[Any],
        rollouts: Sequence[R],
        state: TrainState,
        *,
        clock: PhaseClock,
        lag: int,
        collect_threads: int,
        learn_threads: int,
    ) -> None:
        self._collector, self._learner, self._state, self._clock = collector, learner, state, clock
        self.rollouts, self._lag = rollouts, lag
        self._n_transitions = rollouts[0].n_transitions
        self._collect_threads, self.learn_threads = collect_threads, learn_threads
        self._background = _Background(collector, learner.stage) if lag else None
        self._bad_in_a_row = 0
        self.ready: CollectedRollout | None = None
        """The next rollout, if it was collected ahead."""
        self.is_broken = False
        """Whether an iteration has failed, so that the collector may be in the middle of a rollout."""
        self.notes: list[str] = []
        """For the user, one line each."""
        self._lanes_before: dict[str, dict[str, float]] = {}

    def iterate(self, total_steps: int, stop: StopRequest) -> dict[str, float]:
        """Learn from one rollout, with lag 1 while the next is collected; returns the learner's metrics.

        Whatever it raises, no rollout is being collected afterwards, unless an env in this process hangs.
        """
        try:
            return self._iterate(total_steps, stop)
        except BaseException:
            self.is_broken = True
            seconds = CANCEL_LATER_SECONDS if stop.now() else CANCEL_SECONDS
            if self._background is not None and not self._background.cancel(seconds):
                with suppress(Exception):  # the thread may be using what is closed
                    self._collector.close()
            raise

    def _iterate(self, total_steps: int, stop: StopRequest) -> dict[str, float]:
        state = self._state
        now, self.ready = self.ready or self._collect(stop), None
        rollout = self.rollouts[now.slot]
        background = None if state.fell_back else self._background
        if state.env_steps + self._n_transitions >= total_steps:
            background = None
        if background is not None:
            self._publish()
            background.start(self.rollouts[1 - now.slot], stop.now)
        torch.set_num_threads(self.learn_threads)
        metrics = self._learner.learn(
            rollout,
            iteration=state.iteration,
            progress=(state.env_steps - state.schedule_start) / (total_steps - state.schedule_start),
            lag=now.lag,
            stop=stop.now,
        )
        self._count(now)
        if self._lag:
            self._fall_back_if_far(metrics)
        if background is not None:
            if not state.fell_back and state.env_steps + self._n_transitions < total_steps:
                self._collector.offer_next(rollout)  # the learner is done with it
            self.ready = CollectedRollout(1 - now.slot, self._wait(background.result, stop), 1)
        self._count_bad(metrics)
        return metrics

    def _publish(self) -> None:
        self._clock.enter(Phase.PUBLISH)
        self._collector.publish()

    def _collect(self, stop: StopRequest) -> CollectedRollout:
        """Collect the first rollout with the current parameters."""
        rollout, background = self.rollouts[0], self._background
        torch.set_num_threads(self._collect_threads)
        self._publish()
        if background is None:
            episodes = self._wait(lambda: self._collector.collect(rollout, stop.now), stop)
        else:  # on the same thread as all others, because some envs need that
            background.start(rollout, stop.now)
            episodes = self._wait(background.result, stop)
        return CollectedRollout(0, episodes, 0)

    def _wait(self, collect: Callable[[], list[Episode]], stop: StopRequest) -> list[Episode]:
        self._clock.enter(Phase.WAIT)
        with stop.interruptible():
            return collect()

    @property
    def is_collecting(self) -> bool:
        """Whether a rollout is being collected in the background."""
        return self._background is not None and self._background.is_busy

    def close(self) -> None:
        """End the collecting thread and close the collector."""
        if self._background is not None:
            self._background.close()
        self._collector.close()

    @property
    def lanes(self) -> list[Lane]:
        """The clocks of the learner, the collectors and the device."""
        device = self._learner.device_clock
        return [self._clock, *self._collector.lanes, *([device] if device is not None else [])]

    def begin_lanes(self, *, spans: bool) -> None:
        """Restart the clocks; `read_lanes` adds what an earlier part of the run has spent."""
        self._lanes_before = self._state.lanes
        self._clock.traced = spans
        self._clock.restart(self._lanes_before.get(self._clock.lane, {}))
        self._collector.trace(spans)

    def read_lanes(self) -> dict[str, dict[str, float]]:
        """Seconds per phase of every lane since the run began."""
        out = {name: dict(seconds) for name, seconds in self._lanes_before.items()}
        out[self._clock.lane] = self._clock.read()
        for lane in self.lanes[1:]:
            total = out.setdefault(lane.lane, {})
            for phase, seconds in lane.read().items():
                total[phase] = total.get(phase, 0.0) + seconds
        return out

    def take_notes(self) -> list[str]:
        """What happened since the last call, one line each."""
        notes = self._learner.take_notes() + self._collector.take_notes() + self.notes
        self.notes.clear()
        return notes

    def saved_rollout(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The rollout that was collected ahead, as tensors and JSON for a checkpoint."""
        if self.ready is None:
            return None
        rollout = self.rollouts[self.ready.slot]
        if not isinstance(rollout, Rollout):
            return None
        tensors = {name: torch.from_numpy(array.copy()) for name, array in rollout.by_name.items()}
        episodes = [[e.env_id, e.total_reward, e.length] for e in self.ready.episodes]
        return tensors, {"episodes": episodes, "lag": self.ready.lag}

    def restore_rollout(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bool:
        """Load what `saved_rollout` returned; false in lockstep, which has no use for it."""
        rollout = self.rollouts[0]
        if not self._lag or not isinstance(rollout, Rollout):
            return False
        for name, array in rollout.by_name.items():
            array[...] = tensors[name].numpy()
        self.ready = CollectedRollout(0, [Episode(*fields) for fields in about["episodes"]], about["lag"])
        return True

    def _count(self, collected: CollectedRollout) -> None:
        """Count one iteration."""
        state, episodes = self._state, collected.episodes
        state.env_steps += self._n_transitions
        state.iteration += 1
        state.n_updates = self._learner.n_updates
        state.n_episodes += len(episodes)
        state.returns.extend(episode.total_reward for episode in episodes)
        state.lengths.extend(episode.length for episode in episodes)
        state.lag_sum += collected.lag
        state.lag_max = max(state.lag_max, collected.lag)

    def _fall_back_if_far(self, metrics: Mapping[str, float]) -> None:
        state, kl = self._state, metrics.get("train/lag_kl", 0.0)
        state.far_in_a_row = state.far_in_a_row + 1 if kl > KL_BOUND else 0
        if state.far_in_a_row >= FAR_IN_A_ROW and not state.fell_back:
            state.fell_back = True
            self.notes.append(
                f"the policy changes too fast to learn from the previous policy's data (KL {kl:.2f}, "
                f"bound {KL_BOUND}): overlap is off from now on"
            )

    def _count_bad(self, metrics: dict[str, float]) -> None:
        """Count skipped updates; raise after several iterations in which every update was skipped."""
        n_taken, n_bad = int(metrics.pop("train/n_taken")), int(metrics.pop("train/nan_skips"))
        self._state.nan_skips += n_bad
        self._bad_in_a_row = self._bad_in_a_row + 1 if n_bad > 0 and n_taken == 0 else 0
        if self._bad_in_a_row >= MAX_BAD_ITERATIONS:
            raise TrainingDivergedError(
                f"the loss was NaN or infinite in every update of {MAX_BAD_ITERATIONS} iterations "
                f"({self._state.nan_skips} updates skipped); lower --learning-rate or pass "
                "--normalize-reward; the last good parameters are saved"
            )


class _Background(Generic[R]):
    """Collects one rollout at a time on its own thread."""

    def __init__(self, collector: Collects[R], stage: Callable[[R, Callable[[], bool]], None]) -> None:
        """`stage`: begins to copy a rollout to the learner's device."""
        self._collector, self._stage = collector, stage
        self._tasks: SimpleQueue[tuple[R, Callable[[], bool]] | None] = SimpleQueue()
        self._results: SimpleQueue[list[Episode] | BaseException] = SimpleQueue()
        self._cancelled = threading.Event()
        # A daemon thread, so that an env that blocks forever does not keep the program from exiting.
        self._thread = threading.Thread(target=self._work, name="flatout collecting", daemon=True)
        self.is_busy = False
        """Whether a rollout was started whose result nobody has taken."""

    def start(self, rollout: R, stop: Callable[[], bool]) -> None:
        """Start collecting."""
        if not self._thread.is_alive():
            self._thread.start()
        self.is_busy = True
        self._tasks.put((rollout, stop))

    def result(self) -> list[Episode]:
        """Wait for the rollout: the episodes that ended; raises what the collector raised."""
        result = self._results.get()
        self.is_busy = False
        if isinstance(result, BaseException):
            raise result
        return result

    def cancel(self, seconds: float) -> bool:
        """Drop the rollout under way, if there is one; false if it does not stop within so many seconds."""
        if self.is_busy:
            self._cancelled.set()
            try:
                self._results.get(timeout=seconds)
            except Empty:
                return False
            self._cancelled.clear()
            self.is_busy = False
        return True

    def close(self) -> None:
        """End the thread; one in which an env hangs is left behind."""
        self.cancel(0.0)
        self._tasks.put(None)
        if self._thread.is_alive() and not self.is_busy:
            self._thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            rollout, stop = task
            try:
                stop = self._or_cancelled(stop)
                episodes = self._collector.collect(rollout, stop)
                self._stage(rollout, stop)
                self._results.put(episodes)
            except BaseException as error:
                self._results.put(error)
            del task, rollout, stop

    def _or_cancelled(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        is_cancelled = self._cancelled.is_set
        return lambda: is_cancelled() or stop()
