"""Batched envs as torch tensors on any device.

For training no observation, reward or action is copied to the host (`TensorExecutor`). Evaluation copies every step
(`HostEnvs`), because speed matters less there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from flatout.envs.make import EnvFactory, TensorEnvs, batched_kind
from flatout.envs.spaces import Array, ObsLayout
from flatout.errors import EnvError, FlatoutError
from flatout.executors.base import EnvSet, Executor
from flatout.executors.batched import BatchedExecutor, WrappedEnvs


@dataclass(slots=True)
class TensorStep:
    """One step of all envs, on the envs' device; valid until the next step."""

    obs: tuple[Tensor, ...]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: tuple[Tensor, ...]
    """Valid only where an episode ended."""


class TensorExecutor(WrappedEnvs):
    """Steps `TensorEnvs`: like an Executor, but with tensors. All envs step at once, so its primitive is `step`."""

    def __init__(
        self, envs: TensorEnvs, layout: ObsLayout, env_ids: Array, seed: int, *, keep_open: bool = False
    ) -> None:
        super().__init__(envs, layout, env_ids, seed, keep_open=keep_open)
        self.device = torch.device(envs.device)
        self.current: TensorStep
        """The current state of all envs, once they were reset."""
        self.capturable = bool(getattr(envs, "capturable", False))
        """Whether steps may be captured as a graph; see `TensorEnvs`."""

    def reset(self) -> TensorStep:
        obs = self._obs(self._reset(), "observation")
        reward = torch.zeros(self.n_envs, device=self.device)
        no = torch.zeros(self.n_envs, dtype=torch.bool, device=self.device)
        self.current = TensorStep(obs, reward, no, no, obs)
        return self.current

    def step(self, actions: Tensor) -> TensorStep:
        """Step every env once."""
        obs, reward, terminated, truncated, info = self._step(actions)
        for name, values in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            self._check_shape(name, values.shape, (self.n_envs,))
        # Required at every step, because only the device knows whether an episode ended.
        if "final_obs" not in info:
            raise EnvError("the batched env gives no info['final_obs']; it must, at every step")
        final_obs = self._obs(info["final_obs"], "final observation")
        self.current = TensorStep(self._obs(obs, "observation"), reward, terminated, truncated, final_obs)
        return self.current

    def _obs(self, obs: Any, what: str) -> tuple[Tensor, ...]:
        arrays: list[Tensor] = [spec.pick(obs) for spec in self._layout.specs]
        for array, spec in zip(arrays, self._layout.specs, strict=True):
            self._check_shape(what, array.shape, (self.n_envs, *spec.shape))
        return tuple(arrays)


class HostEnvs(VectorEnv[Any, Any, Any]):
    """`TensorEnvs` for callers that need arrays; every step is copied to the host and back."""

    def __init__(self, envs: TensorEnvs) -> None:
        self.num_envs, self._envs = envs.num_envs, envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:  # noqa: ARG002
        return _on_host(self._envs.reset(seed)[0]), {}

    def step(self, actions: Array) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        *values, info = self._envs.step(torch.from_numpy(actions).to(self._envs.device))
        obs, reward, terminated, truncated = (_on_host(value) for value in values)
        return obs, reward, terminated, truncated, {"final_obs": _on_host(info["final_obs"])}

    def close(self, **_: Any) -> None:
        self._envs.close()  # type: ignore[attr-defined]  # not every one has it


def _on_host(value: Any) -> Any:
    """A tensor, or tensors in dicts and tuples, as arrays."""
    if isinstance(value, dict):
        return {name: _on_host(part) for name, part in value.items()}
    return tuple(map(_on_host, value)) if isinstance(value, tuple) else value.cpu().numpy()


def open_batched(envs: EnvSet, *, on_host: bool = False) -> BatchedExecutor | TensorExecutor:
    """The batched env that the factory makes, or the user's own, as tensors where it has them, or in NumPy."""
    factory = envs.factory
    assert isinstance(factory, EnvFactory), "only an EnvFactory makes batched envs"
    made: Any = factory.make(len(envs.env_ids))
    if batched_kind(made) is None:
        raise FlatoutError(f"env '{factory.name}' made a batched env at first and now {type(made).__name__}")
    if on_host and not isinstance(made, VectorEnv):
        made = HostEnvs(made)
    kind = BatchedExecutor if isinstance(made, VectorEnv) else TensorExecutor
    # Not always as many as asked for: evaluation takes a batched env as it is.
    env_ids = envs.env_ids if len(envs.env_ids) == made.num_envs else np.arange(made.num_envs)
    return kind(made, envs.obs, env_ids, envs.seed, keep_open=factory.is_instance)


def batched_executor(envs: EnvSet) -> Executor:
    """An executor in NumPy over a batched env."""
    executor = open_batched(envs, on_host=True)
    assert isinstance(executor, BatchedExecutor), "in NumPy"
    return executor
