"""Rollouts: T time steps of N envs, allocated once and written in place, in RAM or on a device.

In RAM, NumPy arrays and torch tensors share their memory, so neither side copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from flatout.buffers.batch import torch_dtype
from flatout.device.shared import Spec
from flatout.envs.spaces import ActionLayout, Array, ObsLayout


class Staging:
    """Copies a rollout's arrays to the learner's device; on the CPU the learner reads the rollout's own memory.

    For CUDA, every array has two pinned copies, used in turn: one may still be in transfer while the other is filled.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned: list[dict[int, Tensor]] = [{}, {}]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def to_device(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The arrays as tensors on the device; on CUDA the copies may still be in transfer, in stream order."""
        if self.device.type != "cuda":
            return [torch.from_numpy(array).to(self.device) for array in arrays]
        self._turn ^= 1
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()  # two rollouts ago: long done
        out = [self._send(i, array) for i, array in enumerate(arrays)]
        event = torch.cuda.Event()
        event.record()
        self._sent[self._turn] = event
        return out

    def _send(self, i: int, array: Array) -> Tensor:
        pinned = self._pinned[self._turn].get(i)
        if pinned is None or pinned.shape != array.shape:
            pinned = torch.empty(array.shape, dtype=torch_dtype(array.dtype), pin_memory=True)
            self._pinned[self._turn][i] = pinned
        pinned.copy_(torch.from_numpy(array))
        return pinned.to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Transitions:
    """A rollout as tensors on the learner's device; T time steps, N envs."""

    obs_tn: tuple[Tensor, ...]
    action_tn: Tensor
    log_prob_tn: Tensor
    reward_tn: Tensor
    terminated_tn: Tensor
    truncated_tn: Tensor
    last_obs_n: tuple[Tensor, ...]
    """The observations after the rollout."""
    final_obs: tuple[Tensor, ...]
    """Last observations of the episodes that were truncated and not terminated, (K, …)."""
    final_index: Tensor
    """Where those are in the rollout: t · N + n, (K,)."""

    def flat_obs(self) -> tuple[Tensor, ...]:
        """The observations (T · N, ...)."""
        return tuple(array.flatten(0, 1) for array in self.obs_tn)

    def values(self, value_of: Callable[[tuple[Tensor, ...]], Tensor]) -> tuple[Tensor, Tensor]:
        """Values (T, N) of all observations and of the ones that followed: final ones where episodes were truncated."""
        n_steps, n_envs = self.reward_tn.shape
        value_tn = value_of(self.flat_obs()).view(n_steps, n_envs)
        pairs = zip(self.last_obs_n, self.final_obs, strict=True)
        tail_value = value_of(tuple(torch.cat([last, final]) for last, final in pairs))
        next_value = torch.cat([value_tn[1:].reshape(-1), tail_value[:n_envs]])
        next_value = next_value.index_copy(0, self.final_index, tail_value[n_envs:])
        return value_tn, next_value.view(n_steps, n_envs)


class Learnable(Protocol):
    """What the learner needs of a rollout, in RAM or on a device."""

    def tensors(self, staging: Staging) -> Transitions:
        """The rollout as tensors on the staging's device."""


def rollout_spec(obs: ObsLayout, action: ActionLayout, n_steps: int, n_envs: int) -> Spec:
    """Shapes and dtypes of a rollout's arrays; `obs` has one time step more, for the observations after the rollout."""
    shape = (n_steps, n_envs)
    specs = list(enumerate(obs.specs))
    return {
        **{f"obs.{i}": ((n_steps + 1, n_envs, *spec.shape), spec.dtype) for i, spec in specs},
        **{f"final_obs.{i}": ((*shape, *spec.shape), spec.dtype) for i, spec in specs},
        "action": ((*shape, action.size), action.dtype),
        "log_prob": (shape, np.float32),
        "reward": (shape, np.float32),
        "terminated": (shape, np.bool_),
        "truncated": (shape, np.bool_),
    }


Values = TypeVar("Values", bound=Array | Tensor)


class _Fields(Generic[Values]):
    """Transitions of `n_steps` × `n_envs`, as attributes, from arrays or tensors of `rollout_spec`'s names and shapes."""

    def __init__(self, by_name: Mapping[str, Values]) -> None:
        self.by_name = by_name
        self.n_steps: int = by_name["reward"].shape[0]
        self.n_envs: int = by_name["reward"].shape[1]
        n_obs = sum(name.startswith("obs.") for name in by_name)
        self.obs = tuple(by_name[f"obs.{i}"] for i in range(n_obs))
        self.final_obs = tuple(by_name[f"final_obs.{i}"] for i in range(n_obs))
        """Valid only where an episode was truncated; in RAM, pages that are never written take no memory."""
        self.action, self.log_prob, self.reward = by_name["action"], by_name["log_prob"], by_name["reward"]
        self.terminated, self.truncated = by_name["terminated"], by_name["truncated"]
        self.columns = (self.action, self.log_prob, self.reward, self.terminated, self.truncated)
        """In the order of `_transitions`."""

    @property
    def n_transitions(self) -> int:
        """`n_steps` × `n_envs`."""
        return self.n_steps * self.n_envs


def _transitions(sent: list[Tensor], final_obs: tuple[Tensor, ...], index: Tensor) -> Transitions:
    action, log_prob, reward, terminated, truncated, *obs = sent
    obs_tn, last_obs = tuple(x[:-1] for x in obs), tuple(x[-1] for x in obs)
    return Transitions(
        obs_tn, action, log_prob, reward, terminated, truncated, last_obs, final_obs, final_index=index
    )


class Rollout(_Fields[Array]):
    """A rollout in RAM."""

    @staticmethod
    def alloc(obs: ObsLayout, action: ActionLayout, n_steps: int, n_envs: int) -> Rollout:
        """A rollout in ordinary memory."""
        spec = rollout_spec(obs, action, n_steps, n_envs)
        return Rollout({name: np.zeros(shape, dtype) for name, (shape, dtype) in spec.items()})

    def part(self, first: int, end: int) -> Rollout:
        """The envs from `first` to before `end`, in the same memory."""
        return Rollout({name: array[:, first:end] for name, array in self.by_name.items()})

    def tensors(self, staging: Staging) -> Transitions:
        """The rollout as tensors on the staging's device."""
        index = np.flatnonzero(self.truncated & ~self.terminated)
        t, n = np.divmod(index, self.n_envs)
        sent, device = staging.to_device([*self.columns, *self.obs]), staging.device
        final_obs = tuple(torch.from_numpy(x[t, n]).to(device) for x in self.final_obs)
        return _transitions(sent, final_obs, torch.from_numpy(index).to(device))


class TensorRollout(_Fields[Tensor]):
    """A rollout on a device, in tensors that never leave it."""

    def __init__(
        self, obs: ObsLayout, action: ActionLayout, n_steps: int, n_envs: int, device: torch.device
    ) -> None:
        spec = rollout_spec(obs, action, n_steps, n_envs)
        super().__init__(
            {
                name: torch.zeros(shape, dtype=torch_dtype(dtype), device=device)
                for name, (shape, dtype) in spec.items()
            }
        )
        self.obs_at = [tuple(x[t] for x in self.obs) for t in range(n_steps + 1)]
        """Views of the observations of each time step, made once."""
        self.arrays_at = [
            (tuple(x.numpy() for x in self.obs_at[t]), self.action[t].numpy(), self.log_prob[t].numpy())
            for t in range(n_steps if device.type == "cpu" else 0)
        ]
        """In RAM: observations, actions and log-probabilities of each time step, as NumPy views."""
        self._host: Rollout | None = None

    def tensors(self, staging: Staging) -> Transitions:
        """The rollout as tensors on the staging's device; nothing is copied if it is the same device."""
        # Only the device knows how many episodes were truncated: one host sync per rollout.
        device = staging.device
        index = (self.truncated & ~self.terminated).view(-1).nonzero().squeeze(1)
        sent = [x.to(device) for x in (*self.columns, *self.obs)]
        final_obs = tuple(x.flatten(0, 1)[index].to(device) for x in self.final_obs)
        return _transitions(sent, final_obs, index.to(device))

    def on_host(self) -> Rollout:
        """The rollout as arrays in RAM: views, made once, if it is there already, else a copy."""
        if self._host is None or self.reward.device.type != "cpu":
            self._host = Rollout({name: tensor.cpu().numpy() for name, tensor in self.by_name.items()})
        return self._host
