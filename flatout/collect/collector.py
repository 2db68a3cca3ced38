"""Executor + policy → rollout: act, step the envs, store; all envs together.

When an executor returns fewer envs than it runs, or has lost one, ragged.py collects the rest of the rollout with each
env at its own pace. T: time steps, N: envs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from flatout.buffers.rollout import Rollout
from flatout.collect.memory import MemoryExecutor
from flatout.collect.noise import NO_EXPLORATION, ActionNoise, Exploration
from flatout.collect.ragged import Interrupted, RaggedCollection
from flatout.device.accelerator import Retries, has_streams, new_stream, use_device
from flatout.envs.spaces import Array, ObsArrays
from flatout.executors.base import Episode, Executor, Step
from flatout.models.actor import Actor, make_actor
from flatout.models.params import ParamCopy, floats
from flatout.models.policy import PolicyNet
from flatout.timing import ACT, ENV, STORE, Lane, Phase, PhaseClock

R_contra = TypeVar("R_contra", contravariant=True)


class Collects(Protocol[R_contra]):
    """What the pipeline needs of a collector, wherever it runs."""

    n_steps: int
    """Steps each env has taken for finished rollouts."""

    @property
    def lanes(self) -> Sequence[Lane]:
        """The clock of each collector."""

    def trace(self, spans: bool) -> None:
        """Restart the clocks, with or without spans; call it while nothing is being collected."""

    def publish(self) -> None:
        """Collect the next rollout with the current parameters; call it while nothing is being collected."""

    def offer_next(self, rollout: R_contra) -> None:
        """Let envs that are done with the current rollout start this one, with the learner's current parameters."""

    def reset(self) -> None:
        """Begin new episodes in every env."""

    def collect(self, rollout: R_contra, stop: Callable[[], bool]) -> list[Episode]:
        """Fill the rollout from the envs' current state; returns the episodes that ended."""

    def snapshot(self) -> dict[str, Array]:
        """What `restore` needs to bring every env back to the end of the last rollout."""

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Bring the envs back to a snapshot of any executor; returns those that began a new episode."""

    def take_notes(self) -> list[str]:
        """Messages since the last call, one line each."""

    def close(self) -> None:
        """Close every env."""


class LocalCollector:
    """What collectors in this process do alike."""

    def __init__(self, executor: Any, clock: PhaseClock, device: torch.device) -> None:
        self.executor, self.clock, self._device = executor, clock, device
        self._stream = new_stream(device, urgent=True) if has_streams(device) else None
        """The stream for acting, so that it never waits for updates that are queued."""
        self.n_steps = 0
        """Steps each env has taken for finished rollouts: the position in its noise stream."""
        self.retries = Retries(device)
        """Of acting that ran out of memory."""

    def on_stream(self) -> AbstractContextManager[Any]:
        """Inside it, this thread launches into the collector's stream."""
        if self._stream is None:
            return nullcontext()
        use_device(self._device)
        return self._stream

    @property
    def lanes(self) -> list[Lane]:
        return [self.clock]

    def trace(self, spans: bool) -> None:
        self.clock.traced = spans
        self.clock.restart({}, Phase.SLOT)

    def snapshot(self) -> dict[str, Array]:
        snapshot: dict[str, Array] = self.executor.snapshot()
        return snapshot

    def take_notes(self) -> list[str]:
        notes, self.retries.notes = self.retries.notes, []
        return notes

    def close(self) -> None:
        self.executor.close()


@dataclass(slots=True)
class _Policy:
    model: PolicyNet
    actor: Actor
    copy: ParamCopy | None
    """Brings the learner's parameters; None: the model is the learner's own."""

    def bind(self) -> None:
        """Act with the parameters that were published, in the current stream."""
        if self.copy is not None:
            self.copy.finish()
        self.actor.bind()


class Collector(LocalCollector):
    """Fills rollouts by acting in the executor's envs."""

    executor: Executor

    def __init__(
        self,
        executor: Executor,
        model: PolicyNet,
        *,
        device: torch.device,
        seed: int,
        clock: PhaseClock,
        source: PolicyNet | None = None,
        exploration: Exploration = NO_EXPLORATION,
    ) -> None:
        """`model` acts; if there is a `source`, `publish` copies its parameters to `model`."""
        if model.state_size:
            executor = MemoryExecutor(executor, model.state_size)
        super().__init__(executor, clock, device)
        self.model, self._head, self._source = model, model.head, source
        self._policy = self._acting(model)
        self._spare: _Policy | None = None
        """The policy of the next rollout, where envs may start it ahead."""
        self._to_env, self._all = model.action.to_env, np.arange(executor.n_envs)
        self._noise = ActionNoise(model.action, executor.env_ids, seed, exploration)
        self._ragged: RaggedCollection | None = None
        """Made when it is first needed."""

    def collect(self, rollout: Rollout, stop: Callable[[], bool] = lambda: False) -> list[Episode]:
        self.clock.enter(ACT)
        with self.on_stream():
            if self._ragged is not None and self._ragged.next is not None:
                episodes = self._ragged.finish_next(rollout, stop)
            else:
                (episodes,) = take_turns(self.steps(rollout, stop))
        self.complete(rollout.n_steps)
        return episodes

    def complete(self, n_steps: int) -> None:
        """A rollout of so many steps is finished."""
        self.n_steps += n_steps
        self.executor.mark()
        self.clock.enter(Phase.SLOT)
        self.clock.cut()

    def steps(self, rollout: Rollout, stop: Callable[[], bool]) -> Steps:
        """Fill the rollout, and pause each time that the policy begins to act: others may use the time that it takes.

        Envs step together, for as long as they come back together.
        """
        clock, executor, actor = self.clock, self.executor, self._policy.actor
        noise = self._noise.draw(self.n_steps, rollout.n_steps).numpy()
        self._policy.bind()
        for out, obs in zip(rollout.obs, executor.current.obs, strict=True):
            out[0] = obs
        episodes: list[Episode] = []
        for t in range(rollout.n_steps):
            action, log_prob = rollout.action[t], rollout.log_prob[t]
            actor.begin(tuple([obs[t] for obs in rollout.obs]), noise[t], action, log_prob)
            yield
            actor.finish()
            actions = self._for_envs(action)
            clock.enter(ENV)
            executor.send(actions, self._all)
            now = executor.recv()
            clock.enter(STORE)
            if len(now.env_indices) < executor.n_envs or now.restarted:
                ragged = self._own_pace()
                episodes += ragged.take_over(rollout, actor, noise, self.n_steps, t, now, stop)
                break
            _store(rollout, t, now)
            episodes += now.ended
            if stop():
                raise Interrupted
            clock.enter(ACT)
        return episodes

    def _act(
        self, actor: Actor, obs: ObsArrays, noise: Array, action_out: Array, log_prob_out: Array
    ) -> Array:
        """Sample actions, keep them with their log-probabilities, and return them in the env's own units."""
        actor.begin(obs, noise, action_out, log_prob_out)
        actor.finish()
        return self._for_envs(action_out)

    def _for_envs(self, actions: Array) -> Array:
        if self._head.squashes:
            actions = self._head.squash(torch.from_numpy(actions)).numpy()
        return self._to_env(actions)

    def _acting(self, model: PolicyNet) -> _Policy:
        """A policy that acts with this model."""
        with self.on_stream():
            next_state = getattr(self.executor, "next_state", None)
            actor = make_actor(model, self.executor.n_envs, self._device, self.retries, next_state)
        source = self._source
        return _Policy(model, actor, None if source is None else ParamCopy(source, floats(model)))

    def publish(self) -> None:
        """Act with the learner's current parameters."""
        ragged = self._ragged
        if ragged is not None and (ragged.next or ragged.offered):  # its policy was published by offer_next
            assert self._spare is not None, "offer_next has made it"
            self._policy, self._spare, ragged.offered = self._spare, self._policy, None
        elif self._policy.copy is not None:
            self._policy.copy.begin()

    def offer_next(self, rollout: Rollout) -> None:
        """Let envs that wait start this rollout, if the acting policy has its own copy of the parameters."""
        if self._source is None or not self.executor.waits:
            return
        if self._spare is None:
            self._spare = self._acting(copy.deepcopy(self._policy.model))
        assert self._spare.copy is not None, "it has a source"
        self._spare.copy.begin()
        with self.on_stream():
            self._spare.bind()
        self._own_pace().offered = rollout, self._spare.actor

    def _own_pace(self) -> RaggedCollection:
        """What collects with each env at its own pace."""
        if self._ragged is None:
            model = self._policy.model
            self._ragged = RaggedCollection(self.executor, model, self._noise, self._act, self.clock)
        return self._ragged

    def reset(self) -> None:
        self._discard_next()
        self.executor.reset()

    def _discard_next(self) -> None:
        if self._ragged is not None:
            self._ragged.discard_next()

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        self._discard_next()
        return self.executor.restore(snapshot)


Steps = Generator[None, None, list[Episode]]
"""Collects a rollout, pausing while the policy acts; returns the episodes that ended."""


def take_turns(*groups: Steps) -> list[list[Episode]]:
    """Run them in turn to their ends; what each returns."""
    results: dict[int, list[Episode]] = {}
    while len(results) < len(groups):
        for i, group in enumerate(groups):
            if i not in results:
                try:
                    next(group)
                except StopIteration as end:
                    results[i] = end.value
    return [results[i] for i in range(len(groups))]


def _store(rollout: Rollout, t: int, now: Step) -> None:
    """Store one step of all envs."""
    rollout.reward[t] = now.reward
    rollout.terminated[t] = now.terminated
    rollout.truncated[t] = now.truncated
    for out, obs in zip(rollout.obs, now.obs, strict=True):
        out[t + 1] = obs
    if now.ended:
        cut = now.truncated.nonzero()[0]
        for out, final in zip(rollout.final_obs, now.final_obs, strict=True):
            out[t, cut] = final[cut]
