"""DQN's update written out."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from flatout.algorithms.dqn.config import DQNConfig
from flatout.algorithms.dqn.loss import Minibatch, Twins
from flatout.device.jit import compiled
from flatout.envs.spaces import Array
from flatout.learning.fused import HandMadeStep, Perceptron, is_plain, layers_in
from flatout.learning.update import Update
from flatout.models.params import FlatParams
from flatout.models.policy import QNetwork


@compiled
def errors(
    squared: bool,
    mask: Array,
    action: Array,
    reward: Array,
    discount: Array,
    weight: Array,
    value: Array,
    later: Array,
    chooses: Array,
    error_out: Array,
    slope_out: Array,
    means_out: Array,
) -> None:
    """Errors (B,), the mean loss's slope by value (B, A), and means of loss, value and error; no mask: no rows."""
    n, n_actions = value.shape
    total, values, sizes = 0.0, 0.0, 0.0
    for b in range(n):
        choice, most = -1, np.float32(0)
        for a in range(n_actions):
            if (not len(mask) or mask[b, a]) and (choice < 0 or chooses[b, a] > most):
                choice, most = a, chooses[b, a]
        taken = action[b, 0]
        error = value[b, taken] - (reward[b] + discount[b] * later[b, max(choice, 0)])
        size = abs(error)
        if squared:
            loss, pull = error * error, error + error
        elif size < 1:
            loss, pull = np.float32(0.5) * error * error, error
        else:  # an error that is no number comes here too, and stays one
            loss, pull = size - np.float32(0.5), np.float32(np.sign(error))
        for a in range(n_actions):
            slope_out[b, a] = 0
        slope_out[b, taken] = pull * weight[b] / n
        error_out[b] = size
        total += np.float64(weight[b] * loss)
        values += np.float64(value[b, taken])
        sizes += np.float64(size)
    means_out[0], means_out[1], means_out[2] = total / n, values / n, sizes / n


class HandMadeDQN(HandMadeStep[Minibatch]):
    """Learns from minibatches of one size, as `dqn.loss` and `Update` would."""

    def __init__(
        self, twins: Twins, params: FlatParams, config: DQNConfig, update: Update[Minibatch]
    ) -> None:
        model = twins.online
        super().__init__(model, params, update)
        self._config = config
        n, bend, layers = config.batch_size, model.activation, model.acting_layers()
        grads = layers_in(params, self.gradient, layers)
        older = layers_in(params, twins.target, layers)
        self._online = Perceptron(layers, n, bend, grads)
        self._target = Perceptron(older, n, bend)
        self._chooser = Perceptron(layers, n, bend)
        self._ahead = lru_cache(2)(lambda n_rows: Perceptron(older, n_rows, bend))
        self._errors: tuple[Array, ...] = update.row_output.numpy(), self._online.slope, self.means

    def look_ahead(self, batches: Minibatch) -> Tensor:
        """The older network's values of what follows in several minibatches at once; valid until the next ones."""
        network: Perceptron = self._ahead(len(batches))
        return network.forward(self._seen(batches.next_obs))

    def differentiate(self, batch: Minibatch) -> None:
        """Fill in the gradient, the rows' errors and the means."""
        following = self._seen(batch.next_obs)
        later = self._target.forward(following) if batch.later is None else batch.later
        chooses = self._chooser.forward(following) if self._config.double else later
        x = self._seen(batch.obs)
        self._online.forward(x)
        errors(
            self._config.loss == "mse",
            self._allowed(batch.next_obs),
            batch.action.numpy(),
            batch.reward.numpy(),
            batch.discount.numpy(),
            batch.weight.numpy(),
            self._online.out,
            later.numpy(),
            chooses.numpy(),
            *self._errors,
        )
        self._online.backward(x)


def can_be_made_by_hand(model: QNetwork, device: torch.device) -> bool:
    """Whether there is such code for this network."""
    return model.v_out is None and is_plain(model, device)
