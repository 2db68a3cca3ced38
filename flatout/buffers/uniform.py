"""Uniform replay in RAM: every transition whose n-step window is stored is as likely as any other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from flatout.buffers.batch import ReplayBatch
from flatout.buffers.replay import Replay
from flatout.buffers.replay_kernels import draw_key, draw_uniform
from flatout.buffers.rings import check_window, nothing_stored
from flatout.envs.spaces import Array


class Uniform:
    """Draws transitions of a replay; draw number k is a function of the seed, k, and what was stored before it."""

    def __init__(self, replay: Replay, *, gamma: float, n_step: int = 1, seed: int = 0) -> None:
        check_window(replay.n_slots, n_step, replay.n_envs)
        self.replay, self._gamma, self._n_step, self._seed = replay, gamma, n_step, seed
        self._upto = np.zeros(replay.n_envs, np.int64)
        self.n_draws = 0

    def sample(self, size: int, beta: float = 0.0, out: ReplayBatch | None = None) -> ReplayBatch:  # noqa: ARG002
        """Draw `size` transitions, each with weight 1 whatever `beta`."""
        it, index = self.replay, np.empty(size, np.int64)
        if out is not None:
            out.weight.fill_(1)
        key = draw_key(self._seed, self.n_draws)
        if not draw_uniform(key, self._n_step, it.n_slots, it.head, it.start, it.end, self._upto, index):
            raise nothing_stored(self._n_step)
        self.n_draws += 1
        return it.sample(index, gamma=self._gamma, n_step=self._n_step, out=out)

    def update(self, index: Tensor, serial: Tensor, priority: Tensor) -> None:
        """Nothing: priorities do not matter here."""

    def arrays(self) -> dict[str, Array]:
        """Its counter by name; with the replay's own arrays all that is needed to go on."""
        return {"n_draws": np.array([self.n_draws])}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Become what `arrays` was taken from."""
        self.n_draws = int(arrays["n_draws"][0])
