"""What DQN learns from: a replay where the learner can reach it fast, and minibatches drawn from it.

On the CPU in RAM; for a GPU on the device where it fits, else in pinned RAM with the next batch on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from flatout.algorithms.dqn.config import DQNConfig
from flatout.algorithms.dqn.loss import Minibatch
from flatout.buffers.batch import ReplayBatch, alloc_batch
from flatout.buffers.capacity import SPARED, fitting_capacity, parse_capacity, transition_bytes
from flatout.buffers.device_replay import TensorPrioritized, TensorReplay, TensorUniform
from flatout.buffers.prefetch import Prefetch
from flatout.buffers.priority import Prioritized
from flatout.buffers.replay import Replay, Uniform
from flatout.buffers.rollout import Rollout, TensorRollout
from flatout.device.machine import free_memory
from flatout.envs.spaces import ActionLayout, Array, ObsLayout

AT_ONCE = 16
"""Batches that are drawn in one go where every transition is as likely as any other."""


class Experience:
    """The newest transitions of a run, and how they are drawn."""

    def __init__(
        self,
        obs: ObsLayout,
        action: ActionLayout,
        config: DQNConfig,
        *,
        n_envs: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self._config, self._device = config, device
        each = transition_bytes(obs, action, prioritized=config.prioritized)
        wanted = parse_capacity(config.buffer_size, each)
        how: dict[str, Any] = {"gamma": config.gamma, "n_step": config.multi_step, "seed": seed}
        if config.prioritized:
            how["alpha"] = config.priority_alpha
        on_device = device.type != "cpu" and wanted * each <= free_memory(device) * (1 - SPARED) / 2
        self.replay: Replay | TensorReplay
        self._sampler: Uniform | Prioritized | TensorUniform | TensorPrioritized
        if on_device:
            self.replay = TensorReplay(obs, action, n_envs, wanted, device)
            kind = TensorPrioritized if config.prioritized else TensorUniform
            self._sampler = kind(self.replay, **how)
        else:
            capacity = fitting_capacity(config.buffer_size, each, torch.device("cpu"))
            self.replay = Replay(obs, action, n_envs, capacity, pin=device.type == "cuda")
            self._sampler = (Prioritized if config.prioritized else Uniform)(self.replay, **how)
        self._in_ram = device.type == "cpu"
        self._rooms: dict[int, tuple[ReplayBatch, Minibatch, list[Minibatch]]] = {}
        self._prefetch = Prefetch(
            self._sampler,
            config.batch_size,
            device,
            alloc=None
            if on_device
            else lambda: alloc_batch(obs, action, config.batch_size, pin=not self._in_ram),
            background=None if device.type == "cuda" else False,
        )
        self._as_host: dict[int, Rollout] = {}

    def add(self, rollout: Rollout | TensorRollout) -> None:
        """Store a rollout's transitions."""
        if isinstance(self.replay, TensorReplay):
            self.replay.add_rollout(rollout)
        else:
            self.replay.add_rollout(rollout if isinstance(rollout, Rollout) else self._on_host(rollout))

    def _on_host(self, rollout: TensorRollout) -> Rollout:
        """The rollout as arrays: the same memory where it lies in RAM, views that are made once."""
        if not self._in_ram:
            return Rollout({name: tensor.cpu().numpy() for name, tensor in rollout.by_name.items()})
        if id(rollout) not in self._as_host:
            self._as_host[id(rollout)] = Rollout({n: t.numpy() for n, t in rollout.by_name.items()})
        return self._as_host[id(rollout)]

    def batches(
        self, n: int, beta: float, look_ahead: Callable[[Minibatch], Tensor] | None = None
    ) -> Iterator[tuple[Minibatch, ReplayBatch]]:
        """So many minibatches, each with the sample that it is a part of; a batch is valid until the next.

        `look_ahead` gives the older network's values of what follows, if that network stays as it is meanwhile.
        """
        if self._in_ram and not self._config.prioritized:
            size = self._config.batch_size
            for start in range(0, n, AT_ONCE):
                sample, whole, parts = self._room(min(AT_ONCE, n - start))
                self._sampler.sample(len(sample.reward), out=sample)
                values = look_ahead(whole) if look_ahead else None
                for i, part in enumerate(parts):
                    part.later = None if values is None else values[i * size : (i + 1) * size]
                    yield part, sample
            return
        self._prefetch.ask(beta)
        n_left = n
        try:
            while n_left:
                sample, n_left = self._prefetch.take(), n_left - 1
                if n_left:  # before this one is learned from, so that it can be on its way meanwhile
                    self._prefetch.ask(beta)
                yield _minibatch(sample), sample
        finally:
            if n_left:  # learning was cut short
                self._prefetch.take()
            self._prefetch.finish()

    def peek(self) -> Minibatch:
        """A minibatch to try things with, as if it had not been drawn."""
        n_draws = self._sampler.n_draws
        sample = self._sampler.sample(self._config.batch_size).to(self._device)
        self._sampler.n_draws = n_draws
        return _minibatch(sample)

    def _room(self, n: int) -> tuple[ReplayBatch, Minibatch, list[Minibatch]]:
        if n not in self._rooms:
            size, replay = self._config.batch_size, self.replay
            sample = alloc_batch(replay.obs_layout, replay.action_layout, n * size)
            whole = _minibatch(sample)
            self._rooms[n] = sample, whole, [whole.take(slice(i * size, (i + 1) * size)) for i in range(n)]
        return self._rooms[n]

    def surprise(self, sample: ReplayBatch, error: Tensor) -> None:
        """Tell how wrong each row of a sample was; those that surprised come again sooner."""
        if self._config.prioritized:
            self._prefetch.update(sample, error)

    def arrays(self) -> dict[str, Array]:
        """All of it by name; views where it lies in RAM."""
        return self.replay.arrays() | {f"sampler.{k}": v for k, v in self._sampler.arrays().items()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Become what `arrays` was taken from."""
        self.replay.restore(arrays)
        names = [name for name in arrays if name.startswith("sampler.")]
        self._sampler.restore({name[8:]: arrays[name] for name in names})

    def close(self) -> None:
        """End the thread that draws."""
        self._prefetch.close()


def _minibatch(sample: ReplayBatch) -> Minibatch:
    return Minibatch(
        sample.obs, sample.next_obs, sample.action, sample.reward, sample.discount, sample.weight
    )
