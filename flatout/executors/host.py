"""Envs as tensors behind the executor protocol, in NumPy on the host: for evaluation, where speed matters less."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from flatout.envs.spaces import Array, ObsLayout
from flatout.executors.base import Episode, Step, alloc_step
from flatout.executors.tensors import TensorExecutor, TensorStep


class HostExecutor:
    """A TensorExecutor for callers that want arrays; every step is copied to the host and back."""

    steps_together = True
    """Every `send` must name all envs: none of them can wait for the others."""

    def __init__(self, tensors: TensorExecutor, layout: ObsLayout) -> None:
        self.n_envs, self.env_ids = tensors.n_envs, tensors.env_ids
        self._tensors = tensors
        self._step = alloc_step(layout, self.n_envs)
        self._actions: Array = np.zeros(0)
        self._returns = np.zeros(self.n_envs)
        self._lengths = np.zeros(self.n_envs, np.int64)

    def reset(self) -> Step:
        """Begin a seeded episode in every env."""
        self._returns[:], self._lengths[:] = 0.0, 0
        return self._on_host(self._tensors.reset())

    def send(self, actions: Array, rows: Array) -> None:
        """Take the actions of all envs; they are stepped by `recv`."""
        assert len(rows) == self.n_envs, "a batched env steps all its envs at once"
        self._actions = actions

    def recv(self) -> Step:
        """Step all envs once."""
        actions = torch.from_numpy(self._actions).to(self._tensors.device)
        out = self._on_host(self._tensors.step(actions))
        self._returns += out.reward
        self._lengths += 1
        places = np.flatnonzero(out.terminated | out.truncated).tolist()
        out.ended = [
            Episode(int(self.env_ids[n]), float(self._returns[n]), int(self._lengths[n])) for n in places
        ]
        self._returns[places], self._lengths[places] = 0.0, 0
        return out

    @property
    def current(self) -> Step:
        """The envs as they stand now."""
        return self._step

    def mark(self) -> None:
        """Nothing to remember: a batched env cannot be brought back to a moment."""

    def snapshot(self) -> dict[str, Array]:
        """How often the envs were seeded."""
        return self._tensors.snapshot()

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Begin new episodes in all envs."""
        fresh = self._tensors.restore(snapshot)
        self._returns[:], self._lengths[:] = 0.0, 0
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
