"""Executor + policy → rollout: act, step the envs, store; all envs together.

When an executor returns fewer envs than it runs, or has lost one, ragged.py collects the rest of the rollout with each
env at its own pace. T: time steps, N: envs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from flatout.buffers.rollout import Rollout
from flatout.collect.noise import NO_EXPLORATION, ActionNoise, Exploration
from flatout.collect.ragged import Interrupted, RaggedCollection
from flatout.envs.spaces import Array, ObsArrays
from flatout.executors.base import Episode, Executor, Step
from flatout.models.actor import Actor, make_actor
from flatout.models.policy import PolicyNet, copy_parameters
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

    def close(self) -> None:
        """Close every env."""


class LocalCollector:
    """What collectors in this process do alike."""

    def __init__(self, executor: Any, clock: PhaseClock) -> None:
        self.executor, self._clock = executor, clock
        self.n_steps = 0
        """Steps each env has taken for finished rollouts: the position in its noise stream."""

    @property
    def lanes(self) -> list[Lane]:
        return [self._clock]

    def trace(self, spans: bool) -> None:
        self._clock.traced = spans
        self._clock.restart({}, Phase.SLOT)

    def snapshot(self) -> dict[str, Array]:
        snapshot: dict[str, Array] = self.executor.snapshot()
        return snapshot

    def close(self) -> None:
        self.executor.close()


@dataclass(slots=True)
class _Policy:
    model: PolicyNet
    actor: Actor


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
        super().__init__(executor, clock)
        self.model, self._head, self._source, self._device = model, model.head, source, device
        self._policy = _Policy(model, make_actor(model, executor.n_envs, device))
        self._spare: _Policy | None = None
        """The policy of the next rollout, where envs may start it ahead."""
        self._to_env, self._all = model.action.to_env, np.arange(executor.n_envs)
        self._noise = ActionNoise(model.action, executor.env_ids, seed, exploration)
        self._ragged: RaggedCollection | None = None
        """Made when it is first needed."""

    def collect(self, rollout: Rollout, stop: Callable[[], bool] = lambda: False) -> list[Episode]:
        clock, executor = self._clock, self.executor
        clock.enter(ACT)
        if self._ragged is not None and self._ragged.next is not None:
            episodes = self._ragged.finish_next(rollout, stop)
        else:
            episodes = self._collect_together(rollout, stop)
        self.n_steps += rollout.n_steps
        executor.mark()
        clock.enter(Phase.SLOT)
        clock.cut()
        return episodes

    def _collect_together(self, rollout: Rollout, stop: Callable[[], bool]) -> list[Episode]:
        """Step all envs together, for as long as they come back together."""
        clock, executor, actor = self._clock, self.executor, self._policy.actor
        noise = self._noise.draw(self.n_steps, rollout.n_steps).numpy()
        actor.bind()
        for out, obs in zip(rollout.obs, executor.current.obs, strict=True):
            out[0] = obs
        episodes: list[Episode] = []
        for t in range(rollout.n_steps):
            obs_t = tuple([obs[t] for obs in rollout.obs])
            actions = self._act(actor, obs_t, noise[t], rollout.action[t], rollout.log_prob[t])
            clock.enter(ENV)
            executor.send(actions, self._all)
            now = executor.recv()
            clock.enter(STORE)
            if len(now.env_indices) < executor.n_envs or now.restarted:
                ragged = self._own_pace()
                return episodes + ragged.take_over(rollout, actor, noise, self.n_steps, t, now, stop)
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
        actor.act(obs, noise, action_out, log_prob_out)
        if self._head.squashes:
            action_out = self._head.squash(torch.from_numpy(action_out)).numpy()
        return self._to_env(action_out)

    def publish(self) -> None:
        """Act with the learner's current parameters."""
        ragged = self._ragged
        if ragged is not None and (ragged.next or ragged.offered):  # its policy was published by offer_next
            assert self._spare is not None, "offer_next has made it"
            self._policy, self._spare, ragged.offered = self._spare, self._policy, None
        elif self._source is not None:
            copy_parameters(self._source, self._policy.model)

    def offer_next(self, rollout: Rollout) -> None:
        """Let envs that wait start this rollout, if the acting policy has its own copy of the parameters."""
        if self._source is None or not self.executor.waits:
            return
        if self._spare is None:
            model = copy.deepcopy(self._policy.model)
            self._spare = _Policy(model, make_actor(model, self.executor.n_envs, self._device))
        copy_parameters(self._source, self._spare.model)
        self._spare.actor.bind()
        self._own_pace().offered = rollout, self._spare.actor

    def _own_pace(self) -> RaggedCollection:
        """What collects with each env at its own pace."""
        if self._ragged is None:
            model = self._policy.model
            self._ragged = RaggedCollection(self.executor, model, self._noise, self._act, self._clock)
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
