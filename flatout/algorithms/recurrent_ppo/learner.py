"""Recurrent PPO's learner: PPO's, with rows of a minibatch that are sequences of one env.

A sequence begins with the state that was stored when it was collected, so in the first update the network computes
what it computed then. Steps that begin an episode begin with zeros. Values and, with overlap, the policy's lag are
those of single steps with their stored states. T: time steps of a rollout, N: envs, L: steps of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.algorithms.ppo import loss as ppo
from flatout.algorithms.ppo.learner import PPOLearner
from flatout.algorithms.recurrent_ppo.config import RecurrentPPOConfig
from flatout.learning.rollouts import Transitions
from flatout.learning.update import Update
from flatout.models.memory import RecurrentActorCritic, run_steps


class RecurrentPPOLearner(PPOLearner):
    """PPO's update over sequences."""

    model: RecurrentActorCritic
    config: RecurrentPPOConfig

    def samples(self, data: Transitions, lag: int) -> ppo.PPOMinibatch:
        """Sequences with their advantages by the current critic."""
        ended = data.terminated_tn | data.truncated_tn
        keep = torch.cat([torch.ones_like(ended[:1]), ~ended[:-1]])
        return sequences(super().samples(data, lag), keep, self.config.length)

    def make_fused(self) -> FusedSequences | None:  # type: ignore[override]
        """The fused backend: sequences by compiled loops."""
        return FusedSequences(self.model, self.update)

    def _fused_for(self, n: int) -> None:
        """None: single steps are computed by the model."""

    def example_batch(self, n: int) -> ppo.PPOMinibatch:
        """As many whole sequences as `n` transitions make, at least one."""
        length, n_rows = self.config.length, -(-n // self.config.length)
        flat = super().example_batch(n_rows * length)
        keep = torch.ones(length, n_rows, dtype=torch.bool, device=self.device)
        return sequences(flat, keep, length)


def sequences(flat: ppo.PPOMinibatch, keep_tn: Tensor, length: int) -> ppo.PPOMinibatch:
    """The samples of a rollout, time and env flattened, as sequences (T / L · N, L, …).

    Of the states only those before the first steps are kept; after them comes which steps go on with the state before.
    """
    n_envs = keep_tn.shape[1]

    def by_sequence(x: Tensor) -> Tensor:
        out: Tensor = x.unflatten(0, (-1, length, n_envs)).transpose(1, 2).flatten(0, 1)
        return out

    parts = flat.like([by_sequence(x) for x in flat.tensors()])
    *obs, states = parts.obs
    keep = by_sequence(keep_tn.flatten())
    rest = parts.action, parts.log_prob, parts.advantage, parts.returns, parts.value
    return ppo.PPOMinibatch((*obs, states[:, 0], keep), *rest)


class FusedSequences:
    """The eager step, with the memories' sequences by compiled loops and a gradient written out."""

    name = "fused"

    def __init__(self, model: RecurrentActorCritic, update: Update[ppo.PPOMinibatch]) -> None:
        from flatout.models.memory_kernel import run_fused  # imports Numba, which takes a moment

        self._model, self._update, self._run = model, update, run_fused

    def step(self, batch: ppo.PPOMinibatch) -> None:
        """Learn from one minibatch."""
        self._model.run_memory = self._run
        try:
            self._update.eager_step(batch)
        finally:
            self._model.run_memory = run_steps
