"""The state of a policy's memory as part of the observations: envs that return it, so that collectors need not know it.

An action goes with the state after it. An env that comes back has that state, or zeros if an episode begins; a final
observation has the state after the last action, which its value is computed with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from flatout.envs.spaces import Array
from flatout.executors.base import Executor, Step
from flatout.executors.tensors import TensorExecutor, TensorStep

KEY = "memory"
"""Name of the states in a snapshot."""


class MemoryExecutor(Executor):
    """An executor whose observations end with the state of the policy's memory."""

    def __init__(self, executor: Executor, state_size: int) -> None:
        self._executor = executor
        self.n_envs, self.env_ids = executor.n_envs, executor.env_ids
        self.steps_together, self.waits = executor.steps_together, executor.waits
        self.next_state = np.zeros((self.n_envs, state_size), np.float32)
        """Where actors write the new states, in the order of the envs that they act for; read by `send`."""
        self._after = np.zeros_like(self.next_state)
        """By env: the state after the last action that was sent."""
        self._state = np.zeros_like(self.next_state)
        """By env: the current state."""
        self._marked = self._state.copy()

    def reset(self) -> Step:
        self._state[:] = self._marked[:] = 0
        return self._with_state(self._executor.reset())

    def send(self, actions: Array, env_indices: Array) -> None:
        self._after[env_indices] = self.next_state[: len(env_indices)]
        self._executor.send(actions, env_indices)

    def recv(self) -> Step:
        now = self._executor.recv()
        came = now.env_indices
        self._state[came] = self._after[came]
        self._state[came[now.terminated[came] | now.truncated[came]]] = 0
        self._state[now.restarted] = 0
        return self._with_state(now)

    def _with_state(self, now: Step) -> Step:
        obs, final_obs = (*now.obs, self._state), (*now.final_obs, self._after)
        self.current = replace(now, obs=obs, final_obs=final_obs)
        return self.current

    def mark(self) -> None:
        self._marked[:] = self._state
        self._executor.mark()

    def snapshot(self) -> dict[str, Array]:
        snapshot = self._executor.snapshot()
        return {**snapshot, KEY: self._marked.copy()} if snapshot else {}

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        fresh = self._executor.restore({name: x for name, x in snapshot.items() if name != KEY})
        self._state[:] = snapshot.get(KEY, 0)
        self._state[fresh] = 0
        self._marked[:] = self._state
        self._with_state(self._executor.current)
        return fresh

    def close(self) -> None:
        self._executor.close()


class MemoryTensorExecutor:
    """The same for envs in tensors."""

    def __init__(self, executor: TensorExecutor, state_size: int) -> None:
        self._executor = executor
        self.n_envs, self.env_ids, self.device = executor.n_envs, executor.env_ids, executor.device
        self.capturable = executor.capturable
        self.next_state: Tensor
        """The new states; set before each step."""
        self._state_size = state_size
        self.current: TensorStep

    @property
    def n_steps(self) -> int:
        """Steps that each env has taken."""
        return self._executor.n_steps

    @n_steps.setter
    def n_steps(self, n_steps: int) -> None:
        self._executor.n_steps = n_steps

    def reset(self) -> TensorStep:
        """Begin new episodes in every env."""
        now = self._executor.reset()
        zeros = now.reward.new_zeros((self.n_envs, self._state_size))
        self.current = replace(now, obs=(*now.obs, zeros), final_obs=(*now.final_obs, zeros))
        return self.current

    def step(self, actions: Tensor) -> TensorStep:
        """Step every env once."""
        now, after = self._executor.step(actions), self.next_state
        state = after.masked_fill((now.terminated | now.truncated)[:, None], 0.0)
        self.current = replace(now, obs=(*now.obs, state), final_obs=(*now.final_obs, after))
        return self.current

    def snapshot(self) -> dict[str, Array]:
        """What `restore` needs."""
        return self._executor.snapshot()

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Begin new episodes in every env, not those with which the run began."""
        fresh: list[int] = self._executor.restore(snapshot)
        now: Any = self._executor.current
        zeros = now.reward.new_zeros((self.n_envs, self._state_size))
        self.current = replace(now, obs=(*now.obs, zeros), final_obs=(*now.final_obs, zeros))
        return fresh

    def close(self) -> None:
        """Close the envs."""
        self._executor.close()
