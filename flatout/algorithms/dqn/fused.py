"""DQN's loss and its gradient written out for plain MLPs on the CPU; tests hold them equal to `loss.py`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from flatout.algorithms.dqn.config import DQNConfig
from flatout.algorithms.dqn.loss import DQNMinibatch, TargetNetwork
from flatout.device.jit import compiled
from flatout.envs.spaces import Array
from flatout.learning.fused import FusedBackend, FusedMLP, is_plain, layers_in
from flatout.learning.update import Update
from flatout.models.params import FlatParams
from flatout.models.policy import QNetwork


@compiled
def loss_gradient(
    squared: bool,
    mask: Array,
    samples: tuple[Array, ...],
    q_values: tuple[Array, Array, Array],
    out: tuple[Array, ...],
) -> None:
    """TD errors (B,), the mean loss's gradient w.r.t. Q-values (B, A), and means of loss, Q-value and error.

    `target_q` and `online_q` are of the next observations; a mask without rows: all actions are allowed.
    """
    action, reward, discount, weight = samples
    q, target_q, online_q = q_values
    error_out, q_grad, means_out = out
    n, n_actions = q.shape
    total, values, sizes = 0.0, 0.0, 0.0
    for b in range(n):
        best, most = -1, np.float32(0)
        for a in range(n_actions):
            if (not len(mask) or mask[b, a]) and (best < 0 or online_q[b, a] > most):
                best, most = a, online_q[b, a]
        taken = action[b, 0]
        error = q[b, taken] - (reward[b] + discount[b] * target_q[b, max(best, 0)])
        size = abs(error)
        if squared:
            loss, grad = error * error, error + error
        elif size < 1:
            loss, grad = np.float32(0.5) * error * error, error
        else:  # NaN comes here too, and stays NaN
            loss, grad = size - np.float32(0.5), np.float32(np.sign(error))
        for a in range(n_actions):
            q_grad[b, a] = 0
        q_grad[b, taken] = grad * weight[b] / n
        error_out[b] = size
        total += np.float64(weight[b] * loss)
        values += np.float64(q[b, taken])
        sizes += np.float64(size)
    means_out[0], means_out[1], means_out[2] = total / n, values / n, sizes / n


class FusedDQN(FusedBackend[DQNMinibatch]):
    """`dqn.loss` and its gradient, for minibatches of one size."""

    def __init__(
        self, networks: TargetNetwork, params: FlatParams, config: DQNConfig, update: Update[DQNMinibatch]
    ) -> None:
        model = networks.online
        super().__init__(model, params, update)
        self._config = config
        n, activation, layers = update.own_rows, model.activation, model.acting_layers()
        grads = layers_in(params, self.gradient, layers)
        target = layers_in(params, networks.target, layers)
        self._online = FusedMLP(layers, n, activation, grads)
        self._target = FusedMLP(target, n, activation)
        self._online_next = FusedMLP(layers, n, activation)
        self._many_targets = lru_cache(2)(lambda n: FusedMLP(target, n, activation))
        self._outputs: tuple[Array, ...] = update.sample_output.numpy(), self._online.grad, self.means

    def target_q(self, batches: DQNMinibatch) -> Tensor:
        """The target network's Q-values of the next observations of several minibatches; valid until the next call."""
        network: FusedMLP = self._many_targets(len(batches))
        return torch.from_numpy(network.forward(self._features(batches.next_obs)))

    def differentiate(self, batch: DQNMinibatch) -> None:
        """Fill in the gradient, the TD errors and the means."""
        x_next = self._features(batch.next_obs)
        target_q = self._target.forward(x_next) if batch.target_q is None else batch.target_q.numpy()
        online_q = self._online_next.forward(x_next) if self._config.double else target_q
        x = self._features(batch.obs)
        self._online.forward(x)
        rewards = batch.reward.numpy(), batch.discount.numpy()
        samples = batch.action.numpy(), *rewards, batch.weight.numpy()
        q_values = self._online.out, target_q, online_q
        mask = self._mask(batch.next_obs)
        loss_gradient(self._config.loss == "mse", mask, samples, q_values, self._outputs)
        self._online.backward(x)


def can_fuse(model: QNetwork, device: torch.device) -> bool:
    """Whether the fused code covers this network."""
    return model.v_out is None and is_plain(model, device)
