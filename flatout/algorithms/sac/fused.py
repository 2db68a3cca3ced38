"""SAC's loss and its gradient written out for plain ReLU MLPs on the CPU; tests hold them equal to `loss.py`.

A minibatch is computed in two halves, in two threads where there are two cores; what is computed does not depend on that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.algorithms.sac.config import SACConfig
from flatout.algorithms.sac.loss import SACMinibatch, TargetCritics, target_entropy
from flatout.algorithms.sac.model import LOG_STD_MAX, LOG_STD_MIN, SACModel
from flatout.algorithms.sac.noise import MIX1, MIX2, WEYL
from flatout.device.jit import compiled
from flatout.device.machine import usable_cores
from flatout.envs.spaces import Array
from flatout.learning.fused import FusedBackend, FusedMLP, Layer, is_plain, layers_in
from flatout.learning.update import Update
from flatout.models.heads import LOG_SQRT_2PI
from flatout.models.kernel import tanh
from flatout.models.params import FlatParams

_MIN, _MAX, _HALF_LOG_2PI = np.float32(LOG_STD_MIN), np.float32(LOG_STD_MAX), np.float32(LOG_SQRT_2PI)
_LOG_2 = np.float32(math.log(2))
_ZERO, _HALF, _ONE, _TWO = np.float32(0), np.float32(0.5), np.float32(1), np.float32(2)

NARROW = 4
"""Inputs or outputs of a layer up to which a loop is faster than a matrix product."""
DRAWN_AT_ONCE = 8
"""Updates whose noise is drawn together."""
Samples = tuple[Array, ...]
"""A minibatch's features of observations and next observations, action, reward, discount, weight and noise."""


@compiled
def put(features: Array, action: Array, squashed: Array, out: Array) -> None:
    """Observations and squashed actions side by side, (B, features + size)."""
    n = features.shape[1]
    for b in range(len(out)):
        for j in range(n):
            out[b, j] = features[b, j]
        for j in range(len(squashed)):
            out[b, n + j] = tanh(action[b, j]) if squashed[j] else action[b, j]


@compiled
def draw(raw: Array, noise: Array, squashed: Array, action: Array, log_prob: Array) -> None:
    """`SquashedNormalHead.draw`: actions before squashing, and their log-probabilities.

    `noise` has rows of numbers for an observation, then for the next one, which is so many rows further.
    """
    n, half = len(squashed), len(noise)
    for b in range(len(raw)):
        total, first = _ZERO, n * (b // half)
        for j in range(n):
            log_std, size = min(max(raw[b, n + j], _MIN), _MAX), noise[b % half, first + j]
            value = raw[b, j] + size * np.exp(log_std)
            total += -_HALF * size * size - log_std - _HALF_LOG_2PI
            if squashed[j]:  # log(1 - tanh²(x)), which is the same for x and -x
                far = abs(value)
                total -= _TWO * (_LOG_2 - far - np.log1p(np.exp(-_TWO * far)))
            action[b, j] = value
        log_prob[b] = total


@compiled
def td_gradient(
    samples: tuple[Array, ...],
    q_values: tuple[Array, ...],
    log_prob: Array,
    ent_coef: float,
    share: float,
    out: tuple[Array, ...],
) -> None:
    """The critics' loss: its gradient w.r.t. both Q-values, absolute TD errors, and sums of loss, value and error.

    `share`: of each sample in the mean.
    """
    reward, discount, weight = samples
    q_1, q_2, next_1, next_2 = q_values
    grad_1, grad_2, error_out, sums_out = out
    alpha, part = np.float32(ent_coef), np.float32(share)
    total, values, sizes = 0.0, 0.0, 0.0
    for b in range(len(reward)):
        a, c = next_1[b, 0], next_2[b, 0]
        least = a if a < c or a != a else c  # NaN stays NaN
        target = reward[b] + discount[b] * (least - alpha * log_prob[b])
        error_1, error_2 = q_1[b, 0] - target, q_2[b, 0] - target
        grad_1[b, 0], grad_2[b, 0] = weight[b] * error_1 * part, weight[b] * error_2 * part
        error_out[b] = _HALF * (abs(error_1) + abs(error_2))
        total += np.float64(_HALF * weight[b] * (error_1 * error_1 + error_2 * error_2))
        values += np.float64(_HALF * (q_1[b, 0] + q_2[b, 0]))
        sizes += np.float64(error_out[b])
    sums_out[0], sums_out[1], sums_out[2] = total, values, sizes


@compiled
def sort_rows(q_1: Array, q_2: Array, rows: Array) -> tuple[int, float]:
    """Put the rows whose first Q-value is the lower one to the front of `rows`, the others to its end.

    Returns how many are in front, and the sum of the lower values.
    """
    front, back, total = 0, len(rows) - 1, 0.0
    for b in range(len(rows)):
        a, c = q_1[b, 0], q_2[b, 0]
        first = a < c or a != a
        total += np.float64(a if first else c)
        if first:
            rows[front] = b
            front += 1
        else:
            rows[back] = b
            back -= 1
    return front, total


@compiled
def output_gradient(rows: Array, hidden: Array, weight: Array, share: float, out: Array) -> None:
    """The gradient of `share` times a critic's Q-value w.r.t. its last hidden layer before the activation."""
    size = np.float32(share)
    for i in range(len(rows)):
        row, seen = out[i], hidden[rows[i]]
        for j in range(len(row)):
            row[j] = size * weight[0, j] if seen[j] > 0 else _ZERO


@compiled
def relu_gradient(rows: Array, hidden: Array, grad: Array) -> None:
    """Backward through the activation of these rows' hidden layer, in place."""
    for i in range(len(rows)):
        row, seen = grad[i], hidden[rows[i]]
        for j in range(len(row)):
            row[j] = row[j] if seen[j] > 0 else _ZERO


@compiled
def put_rows(rows: Array, grad: Array, out: Array) -> None:
    """out[rows] = grad."""
    for i in range(len(rows)):
        for j in range(out.shape[1]):
            out[rows[i], j] = grad[i, j]


@compiled
def policy_gradient(
    raw: Array, noise: Array, squashed: Array, action: Array, action_grad: Array, share: float, out: Array
) -> None:
    """The actor's loss: its gradient w.r.t. the network's outputs, from that of the critics w.r.t. squashed actions.

    `share`: of each sample in the mean, times the temperature.
    """
    n, size = len(squashed), np.float32(share)
    for b in range(len(out)):
        for j in range(n):
            value, grad = action[b, j], action_grad[b, j]
            if squashed[j]:
                inside = tanh(value)
                grad = grad * (_ONE - inside * inside) + size * _TWO * inside
            log_std = raw[b, n + j]
            free = log_std >= _MIN and log_std <= _MAX
            out[b, j] = grad
            out[b, n + j] = grad * noise[b, j] * np.exp(log_std) - size if free else _ZERO


class FusedCritic(FusedMLP):
    """A critic of `n` taken actions, which it learns from, and of as many chosen actions in the rows after them."""

    def __init__(self, layers: Sequence[Layer], n: int, grads: Sequence[Layer]) -> None:
        super().__init__(layers, 2 * n, "relu", grads, n, NARROW)
        self.taken, self.chosen = self.out[:n], self.out[n:]
        self._chosen_hidden = [out[n:].numpy() for out in self._outputs[:-1]]
        self._last_weight = self._layers[-1][0].numpy()

    def action_gradient(self, rows: Array, share: float, out: Array) -> None:
        """Write the gradient of `share` times these chosen actions' values w.r.t. the actions to the same rows of `out`.

        It uses the buffers of `backward`, and comes after it.
        """
        layers, hidden, grads = self._layers, self._chosen_hidden, [x[: len(rows)] for x in self._grads[:-1]]
        last = len(grads) - 1
        output_gradient(rows, hidden[last], self._last_weight, share, grads[last].numpy())
        for k in range(last, 0, -1):
            torch.mm(grads[k], layers[k][0], out=grads[k - 1])
            relu_gradient(rows, hidden[k - 1], grads[k - 1].numpy())
        to_actions = torch.mm(grads[0], layers[0][0][:, -out.shape[1] :])
        put_rows(rows, to_actions.numpy(), out)


class FusedShare:
    """Some rows of each minibatch: what they add to the gradient and the means.

    Observations and next observations go through the actor together, and so do taken and chosen actions through a critic.
    """

    def __init__(
        self, networks: TargetCritics, params: FlatParams, gradient: Tensor, rows: slice, n_all: int
    ) -> None:
        """`gradient`: where theirs is written, in the order of `params`; `n_all`: rows of the whole minibatch."""
        model, n = networks.online, rows.stop - rows.start
        self._rows, self._n, self._share = rows, n, 1 / n_all
        self._size, self._squashed = model.action.size, model.action.bounded
        actor, own = model.acting_layers(), list(model.critics.parameters())
        places = {id(p): view for p, view in zip(params.tensors, params.views(gradient), strict=True)}
        grads, target = [places[id(p)] for p in own], networks.views(networks.target)
        self._actor = FusedMLP(actor, 2 * n, "relu", layers_in(params, gradient, actor), n, NARROW)
        self._critics = [FusedCritic(_critic(own, i), n, _critic(grads, i)) for i in range(2)]
        self._next = [FusedMLP(_critic(target, i), n, "relu", narrow=NARROW) for i in range(2)]
        n_features = actor[0][0].shape[1]
        self._x = torch.zeros(2 * n, n_features)
        """Inputs of the actor: observations, next observations."""
        inputs = torch.zeros(3 * n, n_features + self._size)
        self._taken, self._drawn = inputs[:n].numpy(), inputs[n:].numpy()
        self._x_taken, self._x_both, self._x_next = inputs[:n], inputs[: 2 * n], inputs[2 * n :]
        """Inputs of the critics: taken, chosen and next actions."""
        self._action, self._log_prob = np.zeros((2 * n, self._size), np.float32), np.zeros(2 * n, np.float32)
        self._order, self._action_grad = np.zeros(n, np.int64), np.zeros((n, self._size), np.float32)
        self.sums = np.zeros(5)
        """Of the critics' losses, values and TD errors, of log-probabilities and values of chosen actions."""

    def differentiate(self, samples: Samples, ent_coef: float, errors: Array) -> None:
        """Fill in the gradient, the sums and these rows of the TD errors."""
        obs, next_obs, action, reward, discount, weight, noise = (x[self._rows] for x in samples)
        self._forward(obs, next_obs, action, noise)
        self._critics_backward((reward, discount, weight), ent_coef, errors[self._rows])
        self._actor_backward(noise, ent_coef)

    def _forward(self, obs: Array, next_obs: Array, action: Array, noise: Array) -> None:
        x, n = self._x.numpy(), self._n
        x[:n], x[n:] = obs, next_obs
        self._actor.forward(self._x)
        draw(self._actor.out, noise, self._squashed, self._action, self._log_prob)
        put(x, action, self._squashed, self._taken)
        put(x, self._action, self._squashed, self._drawn)
        for critic in self._critics:
            critic.forward(self._x_both)
        for target in self._next:
            target.forward(self._x_next)

    def _critics_backward(self, rewards: tuple[Array, ...], ent_coef: float, errors: Array) -> None:
        (one, two), (next_one, next_two) = self._critics, self._next
        q_values = one.taken, two.taken, next_one.out, next_two.out
        out = one.grad, two.grad, errors, self.sums
        td_gradient(rewards, q_values, self._log_prob[self._n :], ent_coef, self._share, out)
        for critic in self._critics:
            critic.backward(self._x_taken)

    def _actor_backward(self, noise: Array, ent_coef: float) -> None:
        (one, two), actor, n = self._critics, self._actor, self._n
        n_first, self.sums[4] = sort_rows(one.chosen, two.chosen, self._order)
        for critic, rows in ((one, self._order[:n_first]), (two, self._order[n_first:])):
            critic.action_gradient(rows, -self._share, self._action_grad)
        how = self._squashed, self._action, self._action_grad, ent_coef * self._share
        policy_gradient(actor.out, noise, *how, actor.grad)
        actor.backward(self._x[:n])
        self.sums[3] = self._log_prob[:n].sum(dtype=np.float64)


class FusedSAC(FusedBackend[SACMinibatch]):
    """`sac.loss` and its gradient, for minibatches of one size."""

    def __init__(
        self, networks: TargetCritics, params: FlatParams, config: SACConfig, update: Update[SACMinibatch]
    ) -> None:
        model = networks.online
        super().__init__(model, params, update)
        self._n, self._tunes = update.own_rows, config.tune_ent_coef
        self._target_entropy = target_entropy(config, model.action)
        places = zip(params.tensors, params.views(self.gradient), strict=True)
        self._log_ent_coef = model.log_ent_coef.detach()
        (self._ent_coef_grad,) = (view for p, view in places if p is model.log_ent_coef)
        self._others = torch.zeros_like(self.gradient)
        """The gradient of the second half."""
        cuts = sorted({0, self._n // 2, self._n})
        self._shares = [
            FusedShare(networks, params, gradient, slice(*cut), self._n)
            for gradient, cut in zip((self.gradient, self._others), pairwise(cuts), strict=False)
        ]
        self._thread = ThreadPoolExecutor(1, "flatout-update") if usable_cores() > 1 else None

    def differentiate(self, batch: SACMinibatch) -> None:
        """Fill in the gradient, the TD errors and the means."""
        features = self._features(batch.obs), self._features(batch.next_obs)
        rest = batch.action, batch.reward, batch.discount, batch.weight, batch.noise
        samples = tuple([x.numpy() for x in (*features, *rest)])
        ent_coef, errors = math.exp(self._log_ent_coef.item()), self._update.sample_output.numpy()
        first, *others = self._shares
        ends = [self._begin(partial(share.differentiate, samples, ent_coef, errors)) for share in others]
        first.differentiate(samples, ent_coef, errors)
        for end in ends:
            end()
            self.gradient.add_(self._others)
        self._set_means(np.sum([share.sums for share in self._shares], 0) / self._n, ent_coef)

    def _begin(self, work: Callable[[], None]) -> Callable[[], None]:
        """Begin work in the other thread, with as many threads as this one has; returns what ends it."""
        if self._thread is None:
            return work
        return self._thread.submit(_with_threads, torch.get_num_threads(), work).result

    def _set_means(self, sums: Array, ent_coef: float) -> None:
        """Fill in the metrics, and the gradient of the temperature."""
        critic_loss, value, error, log_prob, chosen_value = sums
        actor_loss, excess = ent_coef * log_prob - chosen_value, log_prob + self._target_entropy
        ent_coef_loss = -self._log_ent_coef.item() * excess * self._tunes
        total = critic_loss + actor_loss + ent_coef_loss
        self.means[:] = total, critic_loss, actor_loss, ent_coef, -log_prob, value, error
        self._ent_coef_grad[0] = -excess * self._tunes

    def close(self) -> None:
        """End the other thread."""
        if self._thread is not None:
            self._thread.shutdown()


def _with_threads(n_threads: int, work: Callable[[], None]) -> None:
    if torch.get_num_threads() != n_threads:
        torch.set_num_threads(n_threads)  # of operations in this thread
    work()


def _critic(tensors: Sequence[Tensor], i: int) -> list[Layer]:
    """The layers of one critic in tensors shaped like the critics' parameters; without images these are all."""
    weights, biases = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    return [(weight[i].t(), bias[i].view(-1)) for weight, bias in zip(weights, biases, strict=True)]


_U_WEYL, _U_MIX1, _U_MIX2 = (np.uint64(word % 2**64) for word in (WEYL, MIX1, MIX2))
_U27, _U30, _U31, _U41 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(41)
_FINEST = np.float32(2.0**-22)


@compiled
def _mixed(x: Any) -> Any:
    x = (x ^ (x >> _U30)) * _U_MIX1
    x = (x ^ (x >> _U27)) * _U_MIX2
    return x ^ (x >> _U31)


@compiled
def fill_signed(key: Any, first: int, out: Array) -> None:
    """Uniform numbers between -1 and 1 for each update from number `first` on; the bits are those of `noise.normal`."""
    for i in range(len(out)):
        own = _mixed(np.uint64(first + i) * _U_WEYL + key)
        for j in range(out.shape[1]):
            bits = _mixed(own + np.uint64(j + 1) * _U_WEYL)
            out[i, j] = (np.float32(np.int64(bits >> _U41)) + _HALF) * _FINEST - _ONE


class UpdateNoise:
    """`noise.normal` for one update after another, drawn for several at once."""

    def __init__(self, key: int) -> None:
        self._key, self._drawn = np.uint64(key % 2**64), (0, torch.zeros(0, 0))

    def draw(self, first: int, n: int, size: int) -> Tensor:
        """For `n` updates from number `first` on, (n, size); not to be changed."""
        begins, block = self._drawn
        if not begins <= first <= begins + len(block) - n or block.shape[1] != size:
            block = torch.empty(max(n, DRAWN_AT_ONCE), size)
            fill_signed(self._key, first, block.numpy())
            block.erfinv_().mul_(2**0.5)
            self._drawn = begins, block = first, block
        return block[first - begins :][:n]


def can_fuse(model: SACModel, config: SACConfig, device: torch.device) -> bool:
    """Whether the fused code covers these networks."""
    plain = not config.layer_norm and not config.dropout and model.activation == "relu"
    return plain and is_plain(model, device)
