"""Replay on a device: the same rings as in RAM, in torch tensors that never leave it, and no wait for the device.

B: batch, T: time steps, N: envs, M: slots of each; slot i = n · M + t.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.buffers.batch import ReplayBatch, torch_dtype
from flatout.buffers.replay_kernels import EMPTY, GOES_ON, TERMINATED, TRUNCATED
from flatout.buffers.rings import check_saved, n_used, ring_spec, slots_per_env
from flatout.buffers.rollout import Rollout, TensorRollout
from flatout.envs.spaces import ActionLayout, Array, ObsLayout

Tensors = tuple[Tensor, ...]


class TensorReplay:
    """The newest `capacity` steps of `n_envs` envs on a device; a truncation takes the room of one step."""

    def __init__(
        self, obs: ObsLayout, action: ActionLayout, n_envs: int, capacity: int, device: torch.device
    ) -> None:
        self.obs_layout, self.action_layout, self.n_envs, self.device = obs, action, n_envs, device
        self.n_slots = slots_per_env(capacity, n_envs)
        self.capacity = (self.n_slots - 1) * n_envs
        self.size = size = self.n_slots * n_envs
        self._spec = ring_spec(obs, action)
        rings = {name: self._room(dtype, size, *shape) for name, (shape, dtype) in self._spec.items()}
        self._rings = rings
        self.obs: Tensors = tuple(rings[f"obs.{i}"] for i in range(len(obs.specs)))
        self.action, self.reward, self.end = rings["action"], rings["reward"], rings["end"]
        self.end.fill_(EMPTY)
        self.head = self._room(np.int64, n_envs)
        """Number of the slot with each env's newest observation, from which it has not acted yet."""
        self.start = self._room(np.int64, n_envs)
        """Number of the slot with the first observation of each env's present episode."""
        self.n_steps = self.reach = 0
        """Steps that all envs took together, and slots that none can have gone beyond: what the host knows of them."""
        self._held: set[int] = set()
        self._all = torch.arange(n_envs, device=device)

    def _room(self, dtype: Any, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch_dtype(dtype), device=self.device)

    def slots(self, rows: Tensor, number: Tensor) -> Tensor:
        """The slots that these envs' slot numbers stand for."""
        return rows * self.n_slots + number % self.n_slots

    def begin(self, obs: Tensors, rows: Tensor | None = None) -> None:
        """The observations from which these envs act next; a new one cuts the episode before, which ends there."""
        rows = self._all if rows is None else rows
        head, start = self.head[rows], self.start[rows]
        at = self.slots(rows, head)
        changed = head == 0
        for known, new in zip(self.obs, obs, strict=True):
            changed = changed | (_bytes(known[at]) != _bytes(new)).any(1)
        cut = changed & (head > start)
        last = self.slots(rows, head - 1)
        self.end[last] = torch.where(cut, TRUNCATED, self.end[last])
        head = head + cut
        at = self.slots(rows, head)
        for known, new in zip(self.obs, obs, strict=True):
            known[at] = new
        self.end[at] = EMPTY
        self.head[rows], self.start[rows] = head, torch.where(cut, head, start)
        self.reach += 1

    def add(
        self,
        action: Tensor,
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        obs: Tensors,
        final_obs: Tensors,
        rows: Tensor | None = None,
    ) -> None:
        """One step of each env in `rows` (all if none are named); see `Replay.add`."""
        rows = self._all if rows is None else rows
        leaves, finals = (tuple(leaf[None] for leaf in x) for x in (obs, final_obs))
        self._add(rows, action[None], reward[None], terminated[None], truncated[None], leaves, finals)

    def add_rollout(self, rollout: TensorRollout | Rollout) -> None:
        """All steps of a rollout; an env that did not go on where it stood has begun a new episode."""
        rolled = (rollout.action, rollout.reward, rollout.terminated, rollout.truncated)
        action, reward, terminated, truncated = (self._here(x) for x in rolled)
        obs = tuple(self._here(leaf) for leaf in rollout.obs)
        finals = tuple(leaf[1:] for leaf in obs)
        if isinstance(rollout, TensorRollout) or rollout.truncated.any():
            finals = tuple(self._here(leaf) for leaf in rollout.final_obs)
        self.begin(tuple(leaf[0] for leaf in obs))
        # So few at a time that no ring is gone around: then no slot is written twice.
        span = max(1, (self.n_slots - 1) // 2)
        for t in range(0, len(reward), span):
            now, then = slice(t, t + span), slice(t + 1, t + span + 1)
            ends = terminated[now], truncated[now]
            followed, final = (
                tuple(leaf[then] for leaf in obs),
                tuple(leaf[now] for leaf in finals),
            )
            self._add(self._all, action[now], reward[now], *ends, followed, final)

    def _here(self, x: Tensor | Array) -> Tensor:
        return torch.as_tensor(x).to(self.device)

    def _add(
        self,
        rows: Tensor,
        action: Tensor,
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        obs: Tensors,
        final_obs: Tensors,
    ) -> None:
        n_steps = len(reward)
        cut = truncated & ~terminated
        n_cut = cut.cumsum(0)
        t = torch.arange(n_steps, device=self.device)[:, None]
        acted = self.head[rows] + t + n_cut - cut.long()
        now, followed = acted + 1, acted + 1 + cut
        here, final_at, obs_at = (self.slots(rows, number) for number in (acted, now, followed))
        for known, leaf, final in zip(self.obs, obs, final_obs, strict=True):
            known[final_at] = torch.where(_as(cut, leaf), final, leaf)
            known[obs_at] = leaf
        self.end[final_at] = EMPTY
        self.end[obs_at] = EMPTY
        how = torch.where(cut, TRUNCATED, terminated.to(torch.uint8) * TERMINATED)
        self.end[here] = how.to(torch.uint8)
        self.action[here] = action.view(n_steps, len(rows), -1).to(self.action.dtype)
        self.reward[here] = reward.float()
        began = torch.where(terminated | truncated, followed, 0).amax(0)
        self.start[rows] = torch.maximum(self.start[rows], began)
        self.head[rows] = followed[-1]
        self.n_steps += n_steps if rows is self._all else 0
        self.reach += 2 * n_steps

    def serials(self, index: Tensor) -> Tensor:
        """Numbers of the steps that these slots hold now."""
        head = self.head[index // self.n_slots]
        return head - (head - index) % self.n_slots

    def sample(
        self, index: Tensor, *, gamma: float, n_step: int = 1, weight: Tensor | None = None
    ) -> ReplayBatch:
        """The transitions in these slots, over up to `n_step` steps; see `Replay.sample`. A slot without one is not noticed."""
        row, serial = index // self.n_slots, self.serials(index)
        newest = self.head[row]
        total = torch.zeros(index.shape, dtype=torch.float64, device=self.device)
        discount, goes_on = torch.ones_like(total), torch.ones_like(index, dtype=torch.bool)
        number, slot = serial, index
        for _ in range(n_step):
            how = self.end[slot]
            total = total + torch.where(goes_on, discount * self.reward[slot], 0)
            discount = torch.where(goes_on, discount * gamma * (how != TERMINATED), discount)
            number = number + goes_on
            slot = self.slots(row, number)
            goes_on = goes_on & (how == GOES_ON) & (number < newest)
        return ReplayBatch(
            obs=tuple(leaf[index] for leaf in self.obs),
            action=self.action[index].to(torch_dtype(self.action_layout.dtype)),
            reward=total.float(),
            next_obs=tuple(leaf[slot] for leaf in self.obs),
            discount=discount.float(),
            weight=torch.ones_like(total, dtype=torch.float32) if weight is None else weight,
            index=index,
            serial=serial,
        )

    def ranges(self, n_step: int) -> tuple[Tensor, Tensor]:
        """Each env's range of slot numbers whose whole n-step window is stored, some of them empty."""
        first = (self.head - self.n_slots + 1).clamp(min=0)
        return first, torch.maximum(torch.maximum(first, self.start), self.head - n_step + 1)

    def holds(self, n_step: int) -> bool:
        """Whether some whole n-step window is stored, which then stays so.

        The device is asked only while the host cannot know: before there are as many steps of all envs together.
        """
        if self.n_steps < n_step and n_step not in self._held:
            first, last = self.ranges(n_step)
            if not bool((last > first).any()):
                return False
        self._held.add(n_step)
        return True

    def arrays(self) -> dict[str, Array]:
        """All it holds by name, copied to RAM, in the form that `Replay` has too."""
        head = self.head.cpu().numpy()
        used = n_used(head, self.n_slots)
        rings = {name: x[:, :used].cpu().numpy() for name, x in self._by_env().items()}
        return {**rings, "head": head, "start": self.start.cpu().numpy()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Become what `arrays` was taken from, here or in RAM."""
        check_saved(arrays, self._spec, self.n_envs, self.n_slots)
        self.end.fill_(EMPTY)
        for name, x in self._by_env().items():
            x[:, : arrays[name].shape[1]] = self._here(arrays[name])
        self.head.copy_(self._here(arrays["head"]))
        self.start.copy_(self._here(arrays["start"]))
        self.n_steps, self.reach = 0, int(arrays["head"].max())
        self._held.clear()

    def _by_env(self) -> dict[str, Tensor]:
        return {name: x.view(self.n_envs, self.n_slots, *x.shape[1:]) for name, x in self._rings.items()}


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(len(x), -1).view(torch.uint8)


def _as(mask_tb: Tensor, leaf: Tensor) -> Tensor:
    return mask_tb.view(*mask_tb.shape, *(1,) * (leaf.ndim - 2))
