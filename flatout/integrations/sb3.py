"""Flatout's executors for Stable-Baselines3: `make_vec_env` returns an SB3 `VecEnv`.

Episode statistics are in the infos as SB3's Monitor puts them, so its logs and `evaluate_policy` work unchanged.
Stable-Baselines3 is imported when the first one is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from importlib import import_module
from operator import methodcaller
from time import perf_counter
from typing import Any

import gymnasium as gym
import numpy as np

from flatout.envs.make import EnvSource
from flatout.envs.spaces import Array
from flatout.errors import FlatoutError
from flatout.executors.base import Step, step
from flatout.vector import OpenEnvs, lost_as_truncated, open_envs


def make_vec_env(
    env: EnvSource,
    n_envs: int = 1,
    seed: int | None = None,
    *,
    executor: str = "auto",
    env_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A Stable-Baselines3 `VecEnv` of `n_envs` copies of an env; `options` go to the executor."""
    return _vec_env_type()(open_envs(env, n_envs, executor, seed or 0, env_kwargs, options), seed)


@cache
def _vec_env_type() -> Any:
    # Imported by name: SB3 is not a dependency, and types must check with and without it.
    try:
        base = import_module("stable_baselines3.common.vec_env").VecEnv
    except ModuleNotFoundError as error:
        raise FlatoutError(
            "this needs Stable-Baselines3, which is not installed; pip install stable-baselines3"
        ) from error
    return type("ExecutorVecEnv", (_ExecutorVecEnv, base), {"__doc__": _ExecutorVecEnv.__doc__})


class _ExecutorVecEnv:
    """An executor with the interface of Stable-Baselines3; mixed with its VecEnv class."""

    num_envs: int
    render_mode: str | None
    reset_infos: list[dict[str, Any]]
    _seeds: list[int | None]
    _options: list[dict[str, Any]]

    def __init__(self, envs: OpenEnvs, seed: int | None) -> None:
        self.executor, self._layout = envs.executor, envs.layout
        self.kind, self._notes = envs.kind, envs.notes
        self._began = perf_counter()
        self._actions: Array = np.zeros(0)
        sample = envs.sample
        super().__init__(envs.executor.n_envs, sample.observation_space, sample.action_space)  # type: ignore[call-arg]
        self.metadata = sample.metadata
        self.seed(seed)  # type: ignore[attr-defined]

    @property
    def notes(self) -> list[str]:
        """One line each: why `auto` chose this executor, which ones could not start, which envs were rebuilt."""
        return [*self._notes, *self.executor.notes]

    def reset(self) -> Any:
        """Begin new episodes, with the seeds and options of `seed` and `set_options`."""
        now = self.executor.reset_envs(self._seeds, self._options)
        self.reset_infos = self._infos()
        self._seeds = [None] * self.num_envs
        self._options = [{} for _ in range(self.num_envs)]
        return self._layout.build([leaf.copy() for leaf in now.obs])

    def step_async(self, actions: Array) -> None:
        """Keep the actions for `step_wait`."""
        self._actions = np.asarray(actions)

    def step_wait(self) -> tuple[Any, Array, Array, list[dict[str, Any]]]:
        """One step of all envs: observations, rewards, dones, and an info for each env."""
        now = lost_as_truncated(step(self.executor, self._actions))
        # Copies: the env may return the same dict again.
        infos = [{**info, "TimeLimit.truncated": False} for info in self._infos()]
        dones = now.terminated | now.truncated
        if dones.any():
            self._end_episodes(now, np.flatnonzero(dones).tolist(), infos)
        obs = self._layout.build([leaf.copy() for leaf in now.obs])
        return obs, now.reward.astype(np.float32), dones, infos

    def _infos(self) -> list[dict[str, Any]]:
        return list(self.executor.infos) or [{} for _ in range(self.num_envs)]

    def _end_episodes(self, now: Step, env_indices: list[int], infos: list[dict[str, Any]]) -> None:
        """Put the ended episodes into the infos, and the infos of the next episodes' resets into `reset_infos`."""
        reset_infos = self._infos()
        for i in env_indices:
            self.reset_infos[i] = reset_infos[i]
            infos[i] = {
                **self.executor.final_infos.get(i, {}),
                "TimeLimit.truncated": bool(now.truncated[i] and not now.terminated[i]),
                "terminal_observation": self._layout.build([leaf[i].copy() for leaf in now.final_obs]),
            }
        seconds = round(perf_counter() - self._began, 6)
        for episode in now.ended:
            statistics = {"r": round(episode.total_reward, 6), "l": episode.length, "t": seconds}
            infos[episode.env_id].setdefault("episode", statistics)

    def close(self) -> None:
        """Close every env."""
        self.executor.close()

    def get_attr(self, attr_name: str, indices: int | Iterable[int] | None = None) -> list[Any]:
        """The attribute of each env."""
        return self.executor.apply(methodcaller("get_wrapper_attr", attr_name), _places(indices))

    def set_attr(self, attr_name: str, value: Any, indices: int | Iterable[int] | None = None) -> None:
        """Set the attribute of each env, where it is, or on the outermost wrapper."""
        self.executor.apply(methodcaller("set_wrapper_attr", attr_name, value), _places(indices))

    def env_method(
        self, method_name: str, *method_args: Any, indices: int | Iterable[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        """The result of the method for each env."""
        return self.executor.apply(partial(_call_method, method_name, method_args, kwargs), _places(indices))

    def env_is_wrapped(self, wrapper_class: type, indices: int | Iterable[int] | None = None) -> list[bool]:
        """Whether each env has the wrapper; always true for Monitor, whose statistics are in the infos."""
        is_monitor = wrapper_class.__module__ == "stable_baselines3.common.monitor"
        found = self.executor.apply(partial(_has_wrapper, wrapper_class), _places(indices))
        return [is_monitor or has for has in found]

    def get_images(self) -> list[Any]:
        """A frame of each env; None unless the render mode is rgb_array."""
        if self.render_mode != "rgb_array":
            return [None] * self.num_envs
        return self.env_method("render")


def _places(indices: int | Iterable[int] | None) -> list[int] | None:
    if indices is None:
        return None
    return [indices] if isinstance(indices, int) else list(indices)


def _call_method(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], env: gym.Env[Any, Any]) -> Any:
    return env.get_wrapper_attr(name)(*args, **kwargs)


def _has_wrapper(wrapper: type, env: gym.Env[Any, Any]) -> bool:
    while isinstance(env, gym.Wrapper):
        if isinstance(env, wrapper):
            return True
        env = env.env
    return False
