"""An executor of a user: all envs step at once in a pool of threads. docs/executors.md shows this file."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from flatout.executors.base import EnvSet, Executor, Step, alloc_step
from flatout.executors.episodes import EpisodeStatistics, env_seed


class PoolExecutor(Executor):
    """Steps all envs at once in a pool of threads."""

    def __init__(self, envs: EnvSet, *, n_threads: int = 2) -> None:
        self.n_envs, self.env_ids = len(envs.env_ids), envs.env_ids
        self._layout, self._seed = envs.obs, envs.seed
        self._envs = [envs.factory() for _ in envs.env_ids]
        self.current = alloc_step(envs.obs, self.n_envs)
        self._statistics = EpisodeStatistics(envs.env_ids)
        self._pool = ThreadPoolExecutor(n_threads)
        self._steps: list[Future[None]] = []

    def reset(self) -> Step:
        for i, env in enumerate(self._envs):
            obs, _ = env.reset(seed=env_seed(self._seed, int(self.env_ids[i]), 0))
            self._layout.write(self.current.obs, i, obs)
        self._statistics.clear()
        return self.current.begin()

    def send(self, actions: Any, env_indices: Any) -> None:
        pairs = zip(env_indices.tolist(), actions, strict=True)
        self._steps = [self._pool.submit(self._step, i, action) for i, action in pairs]

    def recv(self) -> Step:
        now = self.current
        for step in self._steps:
            step.result()
        self._statistics.add(now.reward)
        now.ended = self._statistics.end(np.flatnonzero(now.terminated | now.truncated))
        return now

    def _step(self, i: int, action: Any) -> None:
        env, now = self._envs[i], self.current
        obs, reward, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            self._layout.write(now.final_obs, i, obs)
            obs, _ = env.reset()
        self._layout.write(now.obs, i, obs)
        now.reward[i], now.terminated[i], now.truncated[i] = reward, terminated, truncated

    def close(self) -> None:
        self._pool.shutdown()
        for env in self._envs:
            env.close()
