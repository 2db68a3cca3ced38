"""Envs that step N at once as torch tensors on any device: no observation, reward or action touches the host."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.envs.batched import TensorEnvs
from flatout.envs.spaces import Array, ObsLayout
from flatout.errors import EnvError, one_line
from flatout.executors.serial import env_seed


@dataclass(slots=True)
class TensorStep:
    """What one step of all envs gave, on the envs' device; valid until the next step."""

    obs: tuple[Tensor, ...]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: tuple[Tensor, ...]
    """Valid only where an episode ended."""


class TensorExecutor:
    """Steps `TensorEnvs`; like an Executor, but in tensors and always all envs at once, so `step` is its primitive."""

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
        leaves = self._leaves(obs, "observation")
        reward = torch.zeros(self.n_envs, device=self.device)
        no = torch.zeros(self.n_envs, dtype=torch.bool, device=self.device)
        self._current = TensorStep(leaves, reward, no, no, leaves)
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
        # Asked for at every step: whether one is needed is known on the device only.
        if "final_obs" not in info:
            raise EnvError("the batched env gives no info['final_obs']; it must, at every step")
        self._current = TensorStep(
            self._leaves(obs, "observation"),
            reward,
            terminated,
            truncated,
            self._leaves(info["final_obs"], "final observation"),
        )
        return self._current

    @property
    def current(self) -> TensorStep:
        """The envs as they stand now: what the last `reset`, `step` or `restore` left."""
        assert self._current is not None, "reset comes first"
        return self._current

    @property
    def n_steps(self) -> int:
        """Steps taken so far by each env."""
        return self._n_steps

    def snapshot(self) -> dict[str, Array]:
        """How often the envs were seeded, so that a resumed run begins with other episodes than the first."""
        return {"seed_counts": np.full(self.n_envs, self._seed_count)}

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Begin new episodes in all envs, as a batched env cannot be brought back to a moment."""
        self._seed_count = int(snapshot["seed_counts"][0])
        self.reset()
        return list(range(self.n_envs))

    def close(self) -> None:
        """Close the batched env if it can be closed and is not its user's own."""
        if self._keep_open:
            return
        with suppress(Exception):
            self._envs.close()  # type: ignore[attr-defined]  # not every one has it

    def _leaves(self, obs: Any, what: str) -> tuple[Tensor, ...]:
        leaves = []
        for leaf in self._layout.specs:
            value: Tensor = leaf.pick(obs)
            if value.shape != (self.n_envs, *leaf.shape):
                raise self._wrong_shape(what, tuple(value.shape), (self.n_envs, *leaf.shape))
            leaves.append(value)
        return tuple(leaves)

    def _wrong_shape(self, what: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> EnvError:
        return EnvError(
            f"the batched env's {what} has shape {got} at step {self._n_steps}; "
            f"its {self.n_envs} envs make {wanted}"
        )

    def _failure(self, doing: str, error: Exception) -> EnvError:
        return EnvError(f"the batched env raised in {doing} at step {self._n_steps}: {one_line(error)}")
