"""A `VecEnv` of Stable-Baselines3 as the batched env that flatout's collector steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from flatout.envs.check import EnvInfo
from flatout.envs.make import env_factory
from flatout.envs.spaces import Array
from flatout.errors import EnvError
from flatout.sb3.library import library


def wrapped(env: Any, verbose: int) -> Any:
    """An env as Stable-Baselines3 takes it, an id, a gym.Env or a VecEnv, as the VecEnv that it would make of it."""
    base = library("common.base_class")
    return base.BaseAlgorithm._wrap_env(base.maybe_make_env(env, verbose), verbose)


class VecEnvAdapter(VectorEnv[Any, Any, Array]):
    """Steps a VecEnv, and tells its listener before and after each step."""

    def __init__(self, venv: Any) -> None:
        self.venv, self.num_envs = venv, venv.num_envs
        self.single_observation_space, self.single_action_space = venv.observation_space, venv.action_space
        self.observation_space = batch_space(venv.observation_space, self.num_envs)
        self.action_space = batch_space(venv.action_space, self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[Array, Any, Array, Array, list[dict[str, Any]]], None] | None = None
        """(actions, observations, rewards, dones, infos)"""
        self.failed: Callable[[Exception], None] = lambda _: None
        """Told what the VecEnv raises in a step."""

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:  # noqa: ARG002
        """Begin new episodes; seeds are those of the VecEnv."""
        return self.venv.reset(), {}

    def step(self, actions: Array) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """One step of all envs."""
        self.before()
        try:
            obs, rewards, dones, infos = self.venv.step(actions)
        except Exception as error:
            self.failed(error)
            raise
        final: dict[str, Any] = {}
        truncated = np.zeros(self.num_envs, np.bool_)
        if dones.any():
            last = np.empty(self.num_envs, np.object_)
            for i in np.flatnonzero(dones):
                if "terminal_observation" not in infos[i]:
                    raise EnvError(
                        "the VecEnv gives no infos[i]['terminal_observation'] where an episode ended"
                    )
                last[i] = infos[i]["terminal_observation"]
                truncated[i] = infos[i].get("TimeLimit.truncated", False)
            final = {"final_obs": last, "_final_obs": dones}
        if self.after is not None:
            self.after(actions, obs, rewards, dones, infos)
        return obs, rewards, dones & ~truncated, truncated, final

    def close_extras(self, **_: Any) -> None:
        """Nothing: the VecEnv belongs to the user."""

    @property
    def name(self) -> str:
        """The id of its envs if they are in this process and registered, else the name of a class."""
        envs = getattr(self.venv, "envs", None)
        if not envs:  # asking a worker for an attribute that cannot be pickled would end it
            return type(self.venv).__name__
        env = envs[0].unwrapped
        return str(env.spec.id) if env.spec is not None else type(env).__name__

    def info(self) -> EnvInfo:
        """What flatout has to know of it."""
        return EnvInfo(
            factory=env_factory(self),
            observation_space=self.single_observation_space,
            action_space=self.single_action_space,
            batched="numpy",
            n_envs=self.num_envs,
        )
