"""Batched envs as torch tensors on any device.

For training no observation, reward or action is copied to the host (`TensorExecutor`). Evaluation copies every step
(`HostExecutor`), because speed matters less there.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from flatout.envs.make import EnvFactory, TensorEnvs, batched_kind
from flatout.envs.spaces import Array, ObsLayout
from flatout.errors import EnvError, FlatoutError, one_line
from flatout.executors.base import EnvSet, Executor, Step, alloc_step
from flatout.executors.batched import BatchedExecutor
from flatout.executors.episodes import EpisodeStatistics, env_seed


@dataclass(slots=True)
class TensorStep:
    """One step of all envs, on the envs' device; valid until the next step."""

    obs: tuple[Tensor, ...]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: tuple[Tensor, ...]
    """Valid only where an episode ended."""


class TensorExecutor:
    """Steps `TensorEnvs`: like an Executor, but with tensors. All envs step at once, so its primitive is `step`."""

    def __init__(
        self, envs: TensorEnvs, layout: ObsLayout, env_ids: Array, seed: int, *, keep_open: bool = False
    ) -> None:
        assert envs.num_envs == len(env_ids), "a batched env comes with its number of envs"
        self.n_envs, self.env_ids = envs.num_envs, env_ids
        self.device = torch.device(envs.device)
        self._envs, self._layout, self._seed = envs, layout, seed
        self._keep_open = keep_open
        self._current: TensorStep | None = None
        self._n_steps, self._seed_count = 0, -1

    def reset(self) -> TensorStep:
        """Begin a seeded episode in every env; rewards are zero."""
        self._seed_count += 1
        try:
            obs, _ = self._envs.reset(env_seed(self._seed, int(self.env_ids[0]), self._seed_count))
        except Exception as error:
            raise self._failure("reset", error) from error
        arrays = self._arrays(obs, "observation")
        reward = torch.zeros(self.n_envs, device=self.device)
        no = torch.zeros(self.n_envs, dtype=torch.bool, device=self.device)
        self._current = TensorStep(arrays, reward, no, no, arrays)
        return self._current

    def step(self, actions: Tensor) -> TensorStep:
        """Step every env once."""
        self._n_steps += 1
        try:
            obs, reward, terminated, truncated, info = self._envs.step(actions)
        except Exception as error:
            raise self._failure("step", error) from error
        for name, values in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            if values.shape != (self.n_envs,):
                raise self._wrong_shape(name, tuple(values.shape), (self.n_envs,))
        # Required at every step, because only the device knows whether an episode ended.
        if "final_obs" not in info:
            raise EnvError("the batched env gives no info['final_obs']; it must, at every step")
        self._current = TensorStep(
            self._arrays(obs, "observation"),
            reward,
            terminated,
            truncated,
            self._arrays(info["final_obs"], "final observation"),
        )
        return self._current

    @property
    def current(self) -> TensorStep:
        """The current state of all envs."""
        assert self._current is not None, "call reset first"
        return self._current

    @property
    def n_steps(self) -> int:
        """Steps taken so far by each env."""
        return self._n_steps

    def snapshot(self) -> dict[str, Array]:
        """How often the envs were seeded, so that a resumed run does not repeat the first episodes."""
        return {"seed_counts": np.full(self.n_envs, self._seed_count)}

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Begin new episodes in all envs, because a batched env cannot be replayed."""
        self._seed_count = int(snapshot["seed_counts"][0])
        self.reset()
        return list(range(self.n_envs))

    def close(self) -> None:
        """Close the batched env, unless it belongs to the user."""
        if self._keep_open:
            return
        with suppress(Exception):
            self._envs.close()  # type: ignore[attr-defined]  # not every one has it

    def _arrays(self, obs: Any, what: str) -> tuple[Tensor, ...]:
        arrays = []
        for spec in self._layout.specs:
            value: Tensor = spec.pick(obs)
            if value.shape != (self.n_envs, *spec.shape):
                raise self._wrong_shape(what, tuple(value.shape), (self.n_envs, *spec.shape))
            arrays.append(value)
        return tuple(arrays)

    def _wrong_shape(self, what: str, got: tuple[int, ...], expected: tuple[int, ...]) -> EnvError:
        return EnvError(
            f"the batched env's {what} has shape {got} at step {self._n_steps}; "
            f"its {self.n_envs} envs make {expected}"
        )

    def _failure(self, doing: str, error: Exception) -> EnvError:
        return EnvError(f"the batched env raised in {doing} at step {self._n_steps}: {one_line(error)}")


class HostExecutor(Executor):
    """A TensorExecutor for callers that need arrays; every step is copied to the host and back."""

    steps_together = True

    def __init__(self, tensors: TensorExecutor, layout: ObsLayout) -> None:
        self.n_envs, self.env_ids = tensors.n_envs, tensors.env_ids
        self._tensors = tensors
        self._step = alloc_step(layout, self.n_envs)
        self._actions: Array = np.zeros(0)
        self._statistics = EpisodeStatistics(self.env_ids)

    def reset(self) -> Step:
        """Begin a seeded episode in every env."""
        self._statistics.clear()
        return self._on_host(self._tensors.reset())

    def send(self, actions: Array, env_indices: Array) -> None:
        """Take the actions of all envs; `recv` steps them."""
        assert len(env_indices) == self.n_envs, "a batched env steps all its envs at once"
        self._actions = actions

    def recv(self) -> Step:
        """Step all envs once."""
        actions = torch.from_numpy(self._actions).to(self._tensors.device)
        out = self._on_host(self._tensors.step(actions))
        self._statistics.add(out.reward)
        out.ended = self._statistics.end(np.flatnonzero(out.terminated | out.truncated))
        return out

    @property
    def current(self) -> Step:
        """The current state of all envs."""
        return self._step

    def snapshot(self) -> dict[str, Array]:
        """How often the envs were seeded."""
        return self._tensors.snapshot()

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Begin new episodes in all envs."""
        fresh = self._tensors.restore(snapshot)
        self._statistics.clear()
        self._on_host(self._tensors.current)
        return fresh

    def close(self) -> None:
        """Close the envs."""
        self._tensors.close()

    def _on_host(self, now: TensorStep) -> Step:
        out = self._step
        pairs = [(out.reward, now.reward), (out.terminated, now.terminated), (out.truncated, now.truncated)]
        pairs += [*zip(out.obs, now.obs, strict=True), *zip(out.final_obs, now.final_obs, strict=True)]
        for array, tensor in pairs:
            array[...] = tensor.cpu().numpy()
        out.ended = []
        return out


def open_batched(envs: EnvSet) -> BatchedExecutor | TensorExecutor:
    """The batched env that the factory makes, or the user's own, in NumPy or as tensors."""
    factory = envs.factory
    assert isinstance(factory, EnvFactory), "only an EnvFactory makes batched envs"
    made = factory.make(len(envs.env_ids))
    if batched_kind(made) is None:
        raise FlatoutError(f"env '{factory.name}' made a batched env at first and now {type(made).__name__}")
    ids = np.arange(made.num_envs)  # type: ignore[union-attr]
    if isinstance(made, VectorEnv):
        return BatchedExecutor(made, envs.obs, ids, envs.seed, keep_open=factory.is_instance)
    return TensorExecutor(made, envs.obs, ids, envs.seed, keep_open=factory.is_instance)  # type: ignore[arg-type]


def batched_executor(envs: EnvSet) -> Executor:
    """An executor in NumPy over a batched env."""
    executor = open_batched(envs)
    return executor if isinstance(executor, BatchedExecutor) else HostExecutor(executor, envs.obs)
