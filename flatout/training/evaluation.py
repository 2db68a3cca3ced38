"""Evaluation: the returns of a policy over whole episodes, in separate envs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from flatout.collect.noise import ActionNoise
from flatout.collect.ragged import Interrupted
from flatout.envs.check import EnvInfo
from flatout.envs.spaces import ObsLayout
from flatout.executors.base import EnvSet, Episode, Executor, make_executor, step
from flatout.models.actor import env_actions
from flatout.models.policy import Policy


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Returns and lengths of the evaluated episodes."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def return_mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def return_std(self) -> float:
        """Standard deviation of the returns."""
        return float(np.std(self.returns))

    @property
    def length_mean(self) -> float:
        """Mean episode length in env steps."""
        return float(np.mean(self.lengths))


def eval_executor(env: EnvInfo, layout: ObsLayout, n_envs: int, seed: int) -> Executor:
    """New envs to evaluate in, or the user's own batched env where there is only that."""
    kind = "batched" if env.batched else "async" if env.is_async else "serial"
    return make_executor(kind, EnvSet(env.factory, layout, np.arange(n_envs), seed, replayable=False))


# No inference mode: a batched env could not change tensors elsewhere that it made there.
@torch.no_grad()
def evaluate(
    executor: Executor,
    policy: Policy,
    *,
    n_episodes: int,
    seed: int,
    deterministic: bool = True,
    on_episode: Callable[[int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Play `n_episodes` from new resets; each env plays a fixed share, so that short episodes are not favoured.

    Raises Interrupted when `stop` returns true.
    """
    n_envs = executor.n_envs
    quota = [n_episodes // n_envs + (i < n_episodes % n_envs) for i in range(n_envs)]
    noise = ActionNoise(policy.action, executor.env_ids, seed)
    now = executor.reset()
    episodes: list[Episode] = []
    t = 0
    while len(episodes) < n_episodes:
        if stop():
            raise Interrupted
        drawn = None if deterministic else noise.draw(t, 1)[0].to(policy.device)
        now = step(executor, env_actions(policy, now.obs, drawn))
        t += 1
        for episode in now.ended:
            if quota[episode.env_id] > 0:
                quota[episode.env_id] -= 1
                episodes.append(episode)
                if on_episode is not None:
                    on_episode(len(episodes))
    return Evaluation(tuple(e.total_reward for e in episodes), tuple(e.length for e in episodes))
