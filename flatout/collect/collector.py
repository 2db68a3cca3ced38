"""Executor + policy → rollout. Three verbs a step: act, step the envs, store."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flatout.buffers.rollout import Rollout
from flatout.collect.noise import ActionNoise
from flatout.envs.spaces import ActionLayout
from flatout.executors.base import Episode, Executor, step
from flatout.models.policy import ActorCritic
from flatout.trace.phases import PhaseClock


class Interrupted(BaseException):
    """Collecting was given up in the middle of a rollout, which then counts for nothing.

    Like KeyboardInterrupt no Exception: neither an env nor an executor may take it for a fault.
    """


class Collector:
    """Fills rollouts with what the policy does in the executor's envs."""

    def __init__(
        self,
        executor: Executor,
        model: ActorCritic,
        layout: ActionLayout,
        *,
        device: torch.device,
        seed: int,
        clock: PhaseClock,
    ) -> None:
        self.executor, self._model, self._layout = executor, model, layout
        self._device, self._clock = device, clock
        self._noise = ActionNoise(layout, executor.env_ids, seed)
        self.n_steps = 0
        """Steps each env has taken for finished rollouts: where its noise stream stands."""

    @torch.inference_mode()
    def collect(self, rollout: Rollout, stop: Callable[[], bool] = lambda: False) -> list[Episode]:
        """Fill the rollout from where the envs stand; returns the episodes that ended."""
        clock, executor, model, device = self._clock, self.executor, self._model, self._device
        episodes: list[Episode] = []
        now = executor.current
        clock.enter("act")
        noise = self._noise.draw(self.n_steps, rollout.n_steps).to(device)
        for leaf, obs in zip(rollout.obs, now.obs, strict=True):
            leaf[0] = obs
        for t in range(rollout.n_steps):
            rows, log_prob = model.sample(tuple(leaf.to(device) for leaf in rollout.obs_rows[t]), noise[t])
            rollout.action_rows[t].copy_(rows)
            rollout.log_prob_rows[t].copy_(log_prob)
            actions = self._layout.to_env(model.head.to_action(rollout.action_rows[t]).numpy())
            clock.enter("env")
            now = step(executor, actions)
            clock.enter("store")
            rollout.reward[t] = now.reward
            rollout.terminated[t] = now.terminated
            rollout.truncated[t] = now.truncated
            for leaf, obs in zip(rollout.obs, now.obs, strict=True):
                leaf[t + 1] = obs
            if now.ended:
                episodes += now.ended
                for n in now.truncated.nonzero()[0]:
                    for leaf, final in zip(rollout.final_obs, now.final_obs, strict=True):
                        leaf[t, n] = final[n]
            if stop():
                raise Interrupted
            clock.enter("act")
        self.n_steps += rollout.n_steps
        executor.mark()
        return episodes
