"""Replay in RAM: the newest steps of N envs, each observation stored once; and uniform sampling.

Every env has its own ring of time slots. A step's next observation is in the next slot. Where an episode was
truncated, its final observation takes a slot of its own before the first observation of the next episode.
Of stacked frames a slot holds the newest, and how many frames of its episode came before it (its age). Their rings
have as many slots more as a stack has older frames, so that the oldest step stored has all of its own.
B: batch, T: time steps, N: envs, M: slots of each; slot i = n · M + t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from flatout.buffers import replay_kernels as kernel
from flatout.buffers.batch import ReplayBatch, alloc, alloc_batch, as_bytes
from flatout.buffers.capacity import amount, check_saved, n_used, slot_spec, slots_per_env
from flatout.buffers.replay_kernels import EMPTY, TRUNCATED
from flatout.buffers.rollout import Rollout, TensorRollout, Values
from flatout.envs.spaces import ActionLayout, Array, ObsLayout
from flatout.errors import FlatoutError

MINIBATCHES_AT_ONCE, ROWS_AT_ONCE = 16, 65_536
"""Limits of what `minibatches_at_once` answers: in minibatches, and in transitions of all of them."""


def minibatches_at_once(size: int) -> int:
    """How many minibatches of this size a uniform sampler draws together, in RAM and on a device alike."""
    return max(1, min(MINIBATCHES_AT_ONCE, ROWS_AT_ONCE // size))


class Rings(Generic[Values]):
    """The newest `capacity` steps of `n_envs` envs, in arrays or tensors; a truncation takes the memory of one step."""

    def __init__(
        self,
        obs: ObsLayout,
        action: ActionLayout,
        n_envs: int,
        capacity: int,
        zeros: Callable[..., Values],
        envs: Values,
    ) -> None:
        """`zeros(dtype, *shape)` allocates; `envs` counts the envs from 0."""
        self.obs_layout, self.action_layout, self.n_envs, self.zeros = obs, action, n_envs, zeros
        self.envs: Any = envs
        self.n_slots = slots_per_env(capacity, n_envs)
        self.capacity = (self.n_slots - 1) * n_envs
        self.size = size = self.n_slots * n_envs
        """Slots of all envs."""
        self._spec = slot_spec(obs, action)
        self._before = [spec.frames - 1 for spec in obs.specs]
        """For each array of an observation: slots that its ring has more than others."""
        more = {f"obs.{i}": n for i, n in enumerate(self._before)}
        rings = {
            name: zeros(dtype, size + n_envs * more.get(name, 0), *shape)
            for name, (shape, dtype) in self._spec.items()
        }
        self._rings = rings
        self.age: Any = rings.get("age")
        """Frames of the episode before each slot's, at most as many as a stack has; None without stacked frames."""
        self.obs = tuple(rings[f"obs.{i}"] for i in range(len(obs.specs)))
        self.action, self.reward, self.end = rings["action"], rings["reward"], rings["end"]
        self.end[:] = EMPTY
        self.head: Any = zeros(np.int64, n_envs)
        """Number of the slot with each env's newest observation, from which it has not acted yet."""
        self.start: Any = zeros(np.int64, n_envs)
        """Number of the slot with the first observation of each env's current episode."""
        self.reach = 0
        """An upper bound of `head`, without reading from the device; grows with every rollout."""

    def slots(self, envs: Any, number: Any) -> Any:
        """The slots of these envs' slot numbers."""
        return envs * self.n_slots + number % self.n_slots

    def _frame_slots(self, envs: Any, number: Any, n_before: int) -> Any:
        """The slots of frames in a ring that has `n_before` slots more."""
        return envs * (self.n_slots + n_before) + (number + n_before) % (self.n_slots + n_before)

    def observations(self, envs: Any, number: Any) -> list[Any]:
        """The observations in these envs' slot numbers, which are stored."""
        slot, out = self.slots(envs, number), []
        for stored, n_before in zip(self.obs, self._before, strict=True):
            if not n_before:
                out.append(stored[slot])
                continue
            xp: Any = np if isinstance(self.head, np.ndarray) else torch
            back = (
                xp.arange(n_before, -1, -1) if xp is np else xp.arange(n_before, -1, -1, device=slot.device)
            )
            back = xp.minimum(back, self.age[slot][:, None])
            frames = stored[self._frame_slots(envs[:, None], number[:, None] - back, n_before)]
            out.append(frames.reshape(len(slot), -1, *frames.shape[3:]))
        return out

    def memory(self) -> str:
        """Its size in one line: `replay: 100,000 transitions, 0.7 GB`."""
        n_bytes = sum(int(x.nbytes) for x in self._rings.values())
        once = " (each frame stored once)" if self.age is not None else ""
        return f"replay: {self.capacity:,} transitions, {amount(n_bytes)}{once}"

    def serials(self, index: Values) -> Values:
        """The slot numbers that these slots hold now."""
        head = self.head[index // self.n_slots]
        out: Values = head - (head - index) % self.n_slots
        return out

    def _begin(self, obs: Sequence[Values]) -> None:
        """Store the observations from which the envs act next.

        An env whose newest observation is a different one has started a new episode: the one before is truncated.
        """
        envs, head, start = self.envs, self.head, self.start
        changed = head == 0  # nothing stored yet
        for stored, new in zip(self.observations(envs, head), obs, strict=True):
            changed |= (as_bytes(stored, 1) != as_bytes(new, 1)).any(1)
        in_ram = isinstance(head, np.ndarray)
        if in_ram and not changed.any():  # on a device this would be a host sync
            return
        where: Any = np.where if in_ram else torch.where
        cut, last = changed & (head > start), self.slots(envs, head - 1)
        now = head + cut
        began, at = where(cut, now, start), self.slots(envs, now)
        self.end[last] = where(cut, TRUNCATED, self.end[last])
        for i, new in enumerate(obs):
            self._begin_obs(i, new, now)
        if self.age is not None:
            self.age[at] = where(changed, self.age.dtype.type(0) if in_ram else 0, self.age[at])
            if not self.reach:
                self.age[at] = self.obs_layout.frames - 1
        self.end[at] = EMPTY
        # What decides where to write changes last: if memory runs out before, all of this can be repeated.
        head[:], start[:] = now, began

    def _count(self, n_steps: int) -> None:
        """A rollout of so many steps is stored."""
        self.reach += 1 + 2 * n_steps

    def _begin_obs(self, i: int, new: Any, number: Any) -> None:
        """Write observations to these slot numbers; the very first ones with all of their frames."""
        n_before, stored = self._before[i], self.obs[i]
        size = len(new[0]) // (n_before + 1) if n_before else 0
        for back in range(n_before if not self.reach else 0, 0, -1):
            frame = new[:, (n_before - back) * size : (n_before - back + 1) * size]
            stored[self._frame_slots(self.envs, number - back, n_before)] = frame
        stored[self._frame_slots(self.envs, number, n_before)] = new[:, -size:] if size else new

    def sample(
        self, index: Values, weight: Any = 1, *, gamma: float, n_step: int = 1, out: ReplayBatch | None = None
    ) -> ReplayBatch:
        """The transitions in these slots, over up to `n_step` steps of one episode, at most to the newest step.

        In RAM they are written to `out` if it is given; on a device the slots are not checked for transitions.
        """
        raise NotImplementedError

    def by_env(self, x: Any, head: Array) -> Any:
        """What is in all slots, as (N, slots, …) without the slots that were never reached; a view."""
        n_slots = len(x) // self.n_envs
        x = x.reshape(self.n_envs, n_slots, *x.shape[1:])
        return x[:, : n_used(head, n_slots, n_slots - self.n_slots)]

    def arrays(self) -> dict[str, Array]:
        """Everything it holds by name, without the slots that were never reached; views if it is in RAM."""
        head = to_host(self.head)
        rings = {name: to_host(self.by_env(x, head)) for name, x in self._rings.items()}
        return {**rings, "head": head, "start": to_host(self.start)}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Set the contents to what `arrays` of a replay gave, in RAM or on a device.

        The number of envs, the capacity and the spaces must be the same.
        """
        slots = {name: len(x) // self.n_envs for name, x in self._rings.items()}
        check_saved(
            arrays, self._spec, self.n_envs, {name: (n, n - self.n_slots) for name, n in slots.items()}
        )
        self.end[:] = EMPTY
        views = {name: self.by_env(x, arrays["head"]) for name, x in self._rings.items()}
        self.reach = int(arrays["head"].max())
        load(arrays, {**views, "head": self.head, "start": self.start})


def load(saved: Mapping[str, Array], state: Mapping[str, Array | Tensor]) -> None:
    """Set arrays or tensors to the saved ones of the same names."""
    for name, x in state.items():
        if isinstance(x, np.ndarray):
            x[:] = saved[name]
        else:
            x.copy_(torch.tensor(saved[name]))  # not `from_numpy`: a checkpoint's arrays are read-only


def to_host(x: Array | Tensor) -> Array:
    """The values in RAM: the same memory if they are there already."""
    return x if isinstance(x, np.ndarray) else x.cpu().numpy()


class Replay(Rings[Array]):
    """A replay in RAM."""

    def __init__(
        self, obs: ObsLayout, action: ActionLayout, n_envs: int, capacity: int, *, pin: bool = False
    ) -> None:
        super().__init__(obs, action, n_envs, capacity, partial(alloc, pin=pin), np.arange(n_envs))
        self.pin = pin
        self._obs_bytes = [as_bytes(x, 1) for x in self.obs]
        self.state: kernel.Rings = self.n_slots, self.head, self.start, self.end
        self._data = self.action, self.reward

    def add_rollout(self, rollout: Rollout | TensorRollout) -> None:
        """Store all steps of a rollout; an env that does not continue from its newest observation was reset."""
        rollout = rollout.on_host() if isinstance(rollout, TensorRollout) else rollout
        self._begin([x[0] for x in rollout.obs])
        self._count(rollout.n_steps)
        first = self.head.copy()
        obs_at, final_at = np.empty((2, *rollout.reward.shape), np.int64)
        action = np.ascontiguousarray(rollout.action, self.action.dtype)
        others = (np.ascontiguousarray(x) for x in (rollout.reward, rollout.terminated, rollout.truncated))
        kernel.advance((action, *others), self.state, self._data, obs_at, final_at)
        if self.age is not None:
            ended, max_age = rollout.terminated | rollout.truncated, self.obs_layout.frames - 1
            kernel.put_ages(first, obs_at, final_at, ended, self.n_slots, max_age, self.age)
        arrays = zip(rollout.obs, rollout.final_obs, self._obs_bytes, self._before, strict=True)
        for obs, final, out, n_before in arrays:
            new, last = (as_bytes(np.ascontiguousarray(x), 2) for x in (obs[1:], final))
            kernel.put(obs_at, new, final_at, last, out, n_before)

    def sample(
        self, index: Array, weight: Any = 1, *, gamma: float, n_step: int = 1, out: ReplayBatch | None = None
    ) -> ReplayBatch:
        if out is None:
            out = alloc_batch(self.obs_layout, self.action_layout, len(index), pin=self.pin)
        to = out.arrays
        assert to is not None, "a batch in RAM has arrays"
        to.index[:], to.weight[:] = index, weight
        bad = kernel.windows(to.index, gamma, n_step, self.state, self._data, to.windows)
        if bad >= 0:
            raise IndexError(f"slot {int(index[bad])} of the replay holds no transition")
        arrays = zip(self._obs_bytes, to.obs, to.next_obs, self._before, strict=True)
        for stored, obs, next_obs, n_before in arrays:
            if n_before:
                for slots, stack in ((to.index, obs), (to.next_index, next_obs)):
                    kernel.take_frames(stored, self.age, slots, self.state, n_before, stack)
            else:
                kernel.take_two(stored, to.index, to.next_index, obs, next_obs)
        return out


Replayed = TypeVar("Replayed", bound=Rings[Any])


class Sampler(Generic[Replayed]):
    """Draws n-step transitions from a replay.

    Draw number k depends on the seed, k, and what was stored and updated before it, on nothing else.
    """

    def __init__(self, replay: Replayed, *, gamma: float, n_step: int = 1, seed: int = 0) -> None:
        if n_step < 1:
            raise FlatoutError(f"n_step is {n_step}; use 1 or more")
        if replay.n_slots - 1 <= n_step:
            raise FlatoutError(
                f"{n_step}-step returns of {replay.n_envs} envs need a buffer of at least "
                f"{(n_step + 1) * replay.n_envs} transitions"
            )
        self.replay, self._gamma, self._n_step, self._seed = replay, gamma, n_step, seed
        self.n_draws = 0

    def sample(self, size: int, beta: Any = 0.4, out: ReplayBatch | None = None) -> ReplayBatch:
        """Draw `size` transitions; in RAM into `out`, if it is given.

        Prioritized samplers set weights (n · P)^-beta relative to the largest of the batch; uniform ones set 1.
        """
        drawn = self._draw(size, beta)
        if drawn is None:
            raise FlatoutError(
                f"the replay holds no {self._n_step}-step transition yet; collect more before sampling"
            )
        sample = self.replay.sample(*drawn, gamma=self._gamma, n_step=self._n_step, out=out)
        self.n_draws += 1
        return sample

    def _draw(self, size: int, beta: Any) -> tuple[Any, Any] | None:
        """Slots of `size` transitions and their weights; None: nothing can be drawn."""
        raise NotImplementedError

    def update(self, index: Tensor, serial: Tensor, priority: Tensor) -> None:
        """Set new priorities (|TD error|) of drawn transitions, except those that were overwritten since.

        Uniform samplers ignore it.
        """

    def arrays(self) -> dict[str, Array]:
        """Its state by name, to be saved with the replay's own arrays."""
        return {"n_draws": np.array([self.n_draws])}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Set the state from what `arrays` gave, once the replay is restored."""
        self.n_draws = int(arrays["n_draws"][0])


class Uniform(Sampler[Replay]):
    """Draws every transition whose n-step window is stored with the same probability."""

    def _draw(self, size: int, beta: float) -> tuple[Array, int] | None:  # noqa: ARG002
        index, key = np.empty(size, np.int64), kernel.draw_key(self._seed, self.n_draws)
        return (index, 1) if kernel.draw_uniform(key, self._n_step, self.replay.state, index) else None
