"""Any executor as a `gymnasium.vector.VectorEnv`, for loops of the user's own.

Comes in: what names an env. Goes out: batched observations in the space's own structure and dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from flatout.envs.make import EnvSource
from flatout.envs.spaces import Array, ObsArrays
from flatout.errors import FlatoutError
from flatout.executors.base import Step, step
from flatout.executors.build import OpenEnvs, lost_as_truncated, open_envs
from flatout.perf.choose import rank_kinds


class Received(NamedTuple):
    """What `recv` returns: one row for each env in `rows`, in that order; infos go by env as in `step`."""

    rows: Array
    obs: Any
    rewards: Array
    terminations: Array
    truncations: Array
    infos: dict[str, Any]


class VecEnv(VectorEnv[Any, Any, Array]):
    """A VectorEnv with SAME_STEP autoreset over an executor, plus `send` and `recv`.

    With `copy=False` the arrays returned by `reset` and `step` are the executor's own and change with the next step.
    """

    def __init__(self, envs: OpenEnvs, *, copy: bool = True) -> None:
        executor, env = envs.executor, envs.sample
        self.kind, self._notes = envs.kind, envs.notes
        self.executor, self._layout, self._copy = executor, envs.layout, copy
        self.num_envs = executor.n_envs
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(env.observation_space, self.num_envs)
        self.action_space = batch_space(env.action_space, self.num_envs)
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.spec, self.render_mode = env.spec, env.render_mode
        self._all = np.arange(self.num_envs)
        self._has_begun = False

    @property
    def notes(self) -> list[str]:
        """Why `auto` took this kind, which kinds could not start, which envs were rebuilt; one line each."""
        return [*self._notes, *self.executor.notes]

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes; an int seeds env i with `seed + i`, None goes on with each env's randomness."""
        rows = _masked_rows(options, self.num_envs)
        if options is not None:
            options = {key: value for key, value in options.items() if key != "reset_mask"}
        if seed is None and options is None and not self._has_begun:
            now = self.executor.reset()  # with the seed that make_vec was given
        else:
            now = self.executor.begin(self._seeds(seed), [options] * self.num_envs, rows)
        self._has_begun = True
        infos: dict[str, Any] = {}
        for i in range(self.num_envs) if rows is None else rows:
            infos = self._add_info(infos, self.executor.infos[i], i)
        return self._obs(now.obs), infos

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """One step of all envs; where an episode ended, `infos["final_obs"]` is its last observation."""
        now = lost_as_truncated(step(self.executor, np.asarray(actions)))
        infos = self._infos(now)
        obs = self._obs(now.obs)
        if not self._copy:
            return obs, now.reward, now.terminated, now.truncated, infos
        return obs, now.reward.copy(), now.terminated.copy(), now.truncated.copy(), infos

    def send(self, actions: Any, rows: Array | None = None) -> None:
        """Hand actions to the envs in the places named, or to all; they are stepped until `recv`."""
        self.executor.send(np.asarray(actions), self._all if rows is None else rows)

    def recv(self) -> Received:
        """Wait for envs to finish their step: all of them, or with a waiting executor those that are ready."""
        now = lost_as_truncated(self.executor.recv())
        rows = now.rows
        obs = self._layout.build([leaf[rows] for leaf in now.obs])
        return Received(
            rows.copy(), obs, now.reward[rows], now.terminated[rows], now.truncated[rows], self._infos(now)
        )

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Each env's attribute of this name, called with the arguments if it can be."""
        return tuple(self.executor.apply(_Call(name, args, kwargs)))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Each env's attribute of this name."""
        return tuple(self.executor.apply(methodcaller("get_wrapper_attr", name)))

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env, from a list with a value for each or to one value."""
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise FlatoutError(f"set_attr got {len(values)} values for {self.num_envs} envs")
        for i, value in enumerate(values):
            self.executor.apply(methodcaller("set_wrapper_attr", name, value), [i])

    def render(self) -> tuple[Any, ...]:
        """Each env's rendered frame."""
        return self.call("render")

    def close_extras(self) -> None:
        """Close every env."""
        self.executor.close()

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int | np.integer):
            return [int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise FlatoutError(f"reset got {len(seed)} seeds for {self.num_envs} envs")
        return list(seed)

    def _obs(self, leaves: ObsArrays) -> Any:
        return self._layout.build([leaf.copy() for leaf in leaves] if self._copy else leaves)

    def _infos(self, now: Step) -> dict[str, Any]:
        """The envs' infos by key, each with a mask of the envs that gave it."""
        infos: dict[str, Any] = {}
        finals = self.executor.final_infos
        if finals and len(now.rows) < self.num_envs:  # others may have ended before, and wait for an action
            finals = {i: finals[i] for i in now.rows.tolist() if i in finals}
        if now.restarted:
            finals = finals | {i: {"restarted": True} for i in now.restarted}
        if finals:
            infos = self._final(now.final_obs, finals)
        if any(self.executor.infos):  # most envs tell nothing, and that is cheap to see
            for i in now.rows.tolist():
                infos = self._add_info(infos, self.executor.infos[i], i)
        return infos

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        """What Gymnasium's own makes of one env's info, without an array of all envs for each of its keys."""
        others: dict[str, Any] = {}
        for key, value in env_info.items():
            mask = vector_infos.get(f"_{key}") if key in vector_infos else None
            if mask is None or key == "final_obs" or isinstance(value, dict):
                others[key] = value
            else:
                vector_infos[key][env_num] = value
                mask[env_num] = True
        return super()._add_info(vector_infos, others, env_num) if others else vector_infos

    def _final(self, leaves: ObsArrays, finals: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """What `_add_info` would make of the ended episodes, without its cost for each of them."""
        obs = np.empty(self.num_envs, np.object_)  # of None
        mask = np.zeros(self.num_envs, np.bool_)
        told: dict[str, Any] = {}
        for i, info in finals.items():
            mask[i] = True
            obs[i] = self._layout.build([leaf[i].copy() for leaf in leaves])
            if info:
                told = self._add_info(told, info, i)
        return {"final_obs": obs, "_final_obs": mask, "final_info": told, "_final_info": mask.copy()}


class _Call:
    """Gets or calls an env's attribute; picklable, so that it reaches envs in other processes."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._name, self._args, self._kwargs = name, args, kwargs

    def __call__(self, env: gym.Env[Any, Any]) -> Any:
        attribute = env.get_wrapper_attr(self._name)
        return attribute(*self._args, **self._kwargs) if callable(attribute) else attribute


def _masked_rows(options: Mapping[str, Any] | None, n_envs: int) -> list[int] | None:
    """Gymnasium's `options["reset_mask"]` as places, None for all."""
    mask = (options or {}).get("reset_mask")
    if mask is None:
        return None
    if not (isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (n_envs,)):
        raise FlatoutError(f"options['reset_mask'] must be an array of {n_envs} bools")
    return [int(i) for i in np.flatnonzero(mask)]


def make_vec(
    env: EnvSource,
    n_envs: int = 1,
    executor: str = "auto",
    *,
    seed: int = 0,
    env_kwargs: Mapping[str, Any] | None = None,
    copy: bool = True,
    **options: Any,
) -> VecEnv:
    """`n_envs` copies of an env as one `gymnasium.vector.VectorEnv`; `options` are the executor's own."""
    return VecEnv(open_envs(env, n_envs, executor, seed, env_kwargs, options, rank_kinds), copy=copy)
