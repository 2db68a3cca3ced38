"""Rollouts: T time steps of N envs, allocated once and written in place, in RAM or on a device.

In RAM, NumPy arrays and torch tensors share their memory, so neither side copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from flatout.buffers.batch import torch_dtype
from flatout.device.accelerator import (
    Packed,
    current_stream,
    has_streams,
    is_accelerator,
    new_event,
    new_stream,
    use_device,
)
from flatout.device.shared import Spec
from flatout.envs.spaces import ActionLayout, Array, ObsLayout

FINALS = 32
"""Truncated episodes that there is room for at least when a rollout is copied to a device."""


class Staging:
    """Copies rollouts to the learner's device; on the CPU the learner reads the rollout's own memory.

    On an accelerator there is room for one rollout, and the copies have a stream of their own: the thread that collects
    can `stage` the next rollout while the learner still trains on samples made of the one before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._turn = threading.Condition()
        self._staged: tuple[Rollout, Transitions] | None = None
        self._in_use = False
        """Whether the learner has taken a rollout and not released it."""
        self._block: Packed | None = None
        self._has_streams = has_streams(device)
        if self._has_streams:
            self._copies = new_stream(device)
            self._sent, self._read = new_event(device), new_event(device)
            self._was_sent = self._was_read = False

    def stage(self, rollout: Rollout, stop: Callable[[], bool]) -> None:
        """Begin to copy a rollout as soon as the learner has released the one before, unless stopped."""
        if not self._has_streams:
            return
        use_device(self.device)
        with self._turn:
            while self._in_use and not stop():
                self._turn.wait(0.02)
            if not self._in_use:
                self._staged = rollout, self._send(rollout)

    def take(self, rollout: Rollout) -> Transitions:
        """The rollout on the device, for work in the current stream; copied now if it was not staged."""
        if not self._has_streams:
            arrays = [torch.from_numpy(x).to(self.device) for x in (*rollout.columns, *rollout.obs)]
            index, final_obs = rollout.final_steps()
            finals = tuple(torch.from_numpy(x).to(self.device) for x in final_obs)
            return _transitions(arrays, finals, torch.from_numpy(index).to(self.device))
        with self._turn:
            if self._staged is None or self._staged[0] is not rollout:
                self._staged = rollout, self._send(rollout)
            data, self._staged, self._in_use = self._staged[1], None, True
        now = current_stream(self.device)
        now.wait_event(self._sent)
        return data

    def release(self) -> None:
        """Allow the next rollout to be staged once the work launched so far is done."""
        if self._has_streams:
            with self._turn:
                self._read.record(current_stream(self.device))
                self._was_read, self._in_use = True, False
                self._turn.notify()

    def _send(self, rollout: Rollout) -> Transitions:
        index, final_obs = rollout.final_steps()
        arrays = (index, *final_obs, *rollout.columns, *rollout.obs)
        if self._was_sent and not self._sent.query():
            self._sent.synchronize()  # the copy of the rollout before still reads the pinned memory
        block = self._block = self._room_for(arrays, 1 + len(final_obs))
        for pinned, array in zip(block.arrays, arrays, strict=True):
            pinned[: len(array)] = array
        block.arrays[0][len(index) :] = rollout.n_transitions
        with self._copies:
            if self._was_read:
                self._copies.wait_event(self._read)
            block.to_device()
        self._sent.record(self._copies)
        self._was_sent = True
        index_there, *there = block.tensors
        n = len(final_obs)
        return replace(_transitions(there[n:], tuple(there[:n]), index_there), stays=True)

    def _room_for(self, arrays: Sequence[Array], n_tail: int) -> Packed:
        """Memory for these arrays; the first `n_tail` have a row for each truncated episode, and room to spare.

        It stays the same until more episodes are truncated in a rollout than there is room for.
        """
        n_rows = len(arrays[0])
        if self._block is not None and n_rows <= len(self._block.arrays[0]):
            return self._block
        if self._was_read:
            self._read.synchronize()  # what is still queued reads the memory that is replaced
        room = _room(n_rows)
        tail = [np.zeros((room, *x.shape[1:]), x.dtype) for x in arrays[:n_tail]]
        with self._copies:
            return Packed([*tail, *arrays[n_tail:]], self.device)


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
    """Where those are in the rollout: t · N + n, (K,). Rows to spare have T · N."""
    stays: bool = False
    """Whether every rollout comes in this same memory."""

    def flat_obs(self) -> tuple[Tensor, ...]:
        """The observations (T · N, ...)."""
        return tuple(array.flatten(0, 1) for array in self.obs_tn)

    def values(self, value_of: Callable[[tuple[Tensor, ...]], Tensor]) -> tuple[Tensor, Tensor]:
        """Values (T, N) of all observations and of the ones that followed: final ones where episodes were truncated."""
        n_steps, n_envs = self.reward_tn.shape
        value_tn = value_of(self.flat_obs()).view(n_steps, n_envs)
        pairs = zip(self.last_obs_n, self.final_obs, strict=True)
        tail_value = value_of(tuple(torch.cat([last, final]) for last, final in pairs))
        spare = tail_value[:1]  # what rows to spare are written to
        next_value = torch.cat([value_tn[1:].reshape(-1), tail_value[:n_envs], spare])
        next_value = next_value.index_copy(0, self.final_index, tail_value[n_envs:])
        return value_tn, next_value[:-1].view(n_steps, n_envs)


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


def _room(n_finals: int) -> int:
    """Rows for so many truncated episodes, so that the next rollouts hardly need more."""
    return max(FINALS, 1 << n_finals.bit_length())


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


def _transitions(sent: Sequence[Tensor], final_obs: tuple[Tensor, ...], index: Tensor) -> Transitions:
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
        return staging.take(self)

    def final_steps(self) -> tuple[Array, list[Array]]:
        """Where episodes were truncated and not terminated, t · N + n, and their last observations."""
        index = np.flatnonzero(self.truncated & ~self.terminated)
        t, n = np.divmod(index, self.n_envs)
        return index, [x[t, n] for x in self.final_obs]


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
        self._finals: list[Tensor] | None = None
        """On an accelerator: where truncated episodes are, and their last observations."""
        self._any_finals = False
        """Whether there are any."""
        self.n_cut: int | None = None
        """Number of episodes that were truncated and not terminated, where the collector has read it."""

    def tensors(self, staging: Staging) -> Transitions:
        """The rollout as tensors on the staging's device; nothing is copied if it is the same device."""
        device = staging.device
        if self.n_cut is not None and device == self.reward.device and is_accelerator(device):
            return self._with_finals(self.n_cut)
        cut = self.cut()
        # Unless it was read before, only the device knows how many there are: a host sync.
        index = (cut.nonzero() if self.n_cut is None else cut.nonzero_static(size=self.n_cut)).squeeze(1)
        sent = [x.to(device) for x in (*self.columns, *self.obs)]
        final_obs = tuple(x.flatten(0, 1)[index].to(device) for x in self.final_obs)
        return _transitions(sent, final_obs, index.to(device))

    def cut(self) -> Tensor:
        """Which steps (T · N,) truncated an episode and did not terminate it."""
        return (self.truncated & ~self.terminated).view(-1)

    def _with_finals(self, n_cut: int) -> Transitions:
        """The rollout where it is, with the last observations of truncated episodes in memory that stays the same."""
        n, room = self.n_transitions, _room(n_cut)
        if self._finals is None or room > len(self._finals[0]):
            index = torch.full((room,), n, dtype=torch.int64, device=self.reward.device)
            self._finals = [index, *(x.new_zeros(room, *x.shape[2:]) for x in self.final_obs)]
        index, *finals = self._finals
        if n_cut or self._any_finals:
            index.copy_(self.cut().nonzero_static(size=len(index), fill_value=n).squeeze(1))
            rows = index.clamp(max=n - 1)
            for out, x in zip(finals, self.final_obs, strict=True):
                out.copy_(x.flatten(0, 1).index_select(0, rows))
            self._any_finals = n_cut > 0
        sent = (*self.columns, *self.obs)
        return replace(_transitions(sent, tuple(finals), index), stays=True)

    def on_host(self) -> Rollout:
        """The rollout as arrays in RAM: views, made once, if it is there already, else a copy."""
        if self._host is None or self.reward.device.type != "cpu":
            self._host = Rollout({name: tensor.cpu().numpy() for name, tensor in self.by_name.items()})
        return self._host
