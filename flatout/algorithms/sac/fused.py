"""SAC's loss and its gradient written out for plain ReLU MLPs on the CPU; tests hold them equal to `loss.py`.

The gradients of the critics and of the actor do not depend on each other. They are computed in two threads where there
are two cores; what is computed does not depend on that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from flatout.algorithms.sac.config import SACConfig
from flatout.algorithms.sac.loss import SACMinibatch, TargetCritics, target_entropy
from flatout.algorithms.sac.model import LOG_STD_MAX, LOG_STD_MIN, SACModel
from flatout.device.jit import compiled
from flatout.device.machine import usable_cores
from flatout.envs.spaces import Array
from flatout.learning.fused import FusedBackend, FusedMLP, Layer, is_plain, layers_in
from flatout.learning.update import Update
from flatout.models.heads import LOG_SQRT_2PI
from flatout.models.params import FlatParams

_MIN, _MAX, _HALF_LOG_2PI = np.float32(LOG_STD_MIN), np.float32(LOG_STD_MAX), np.float32(LOG_SQRT_2PI)
_LOG_2 = np.float32(math.log(2))
_ZERO, _HALF, _ONE, _TWO = np.float32(0), np.float32(0.5), np.float32(1), np.float32(2)


@compiled
def put(features: Array, action: Array, squashed: Array, out: Array) -> None:
    """Observations and squashed actions side by side, (B, features + size)."""
    n = features.shape[1]
    for b in range(len(out)):
        for j in range(n):
            out[b, j] = features[b, j]
        for j in range(len(squashed)):
            out[b, n + j] = math.tanh(action[b, j]) if squashed[j] else action[b, j]


@compiled
def draw(raw: Array, noise: Array, squashed: Array, action: Array, log_prob: Array) -> None:
    """`SquashedNormalHead.draw`: actions before squashing, and their log-probabilities."""
    n = len(squashed)
    for b in range(len(raw)):
        total = _ZERO
        for j in range(n):
            log_std, size = min(max(raw[b, n + j], _MIN), _MAX), noise[b, j]
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
    out: tuple[Array, ...],
) -> None:
    """The critics' loss: its gradient w.r.t. both Q-values, absolute TD errors, and means of loss, value and error."""
    reward, discount, weight = samples
    q_1, q_2, next_1, next_2 = q_values
    grad_1, grad_2, error_out, means_out = out
    n, alpha = len(reward), np.float32(ent_coef)
    total, values, sizes = 0.0, 0.0, 0.0
    for b in range(n):
        a, c = next_1[b, 0], next_2[b, 0]
        least = a if a < c or a != a else c  # NaN stays NaN
        target = reward[b] + discount[b] * (least - alpha * log_prob[b])
        error_1, error_2 = q_1[b, 0] - target, q_2[b, 0] - target
        grad_1[b, 0], grad_2[b, 0] = weight[b] * error_1 / n, weight[b] * error_2 / n
        error_out[b] = _HALF * (abs(error_1) + abs(error_2))
        total += np.float64(_HALF * weight[b] * (error_1 * error_1 + error_2 * error_2))
        values += np.float64(_HALF * (q_1[b, 0] + q_2[b, 0]))
        sizes += np.float64(error_out[b])
    means_out[1], means_out[5], means_out[6] = total / n, values / n, sizes / n


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
    raw: Array, noise: Array, squashed: Array, action: Array, action_grad: Array, ent_coef: float, out: Array
) -> None:
    """The actor's loss: its gradient w.r.t. the network's outputs, from that of the critics w.r.t. squashed actions."""
    n, share = len(squashed), np.float32(ent_coef / len(raw))
    for b in range(len(raw)):
        for j in range(n):
            value, grad = action[b, j], action_grad[b, j]
            if squashed[j]:
                inside = np.float32(math.tanh(value))
                grad = grad * (_ONE - inside * inside) + share * _TWO * inside
            log_std = raw[b, n + j]
            free = log_std >= _MIN and log_std <= _MAX
            out[b, j] = grad
            out[b, n + j] = grad * noise[b, j] * np.exp(log_std) - share if free else _ZERO


class ChosenCritic(FusedMLP):
    """A critic's value of chosen actions, and its gradient w.r.t. them for some of the rows."""

    def action_gradient(self, rows: Array, share: float, n_actions: int, out: Array) -> None:
        """Write the gradient of `share` times the value to those rows of `out`, (B, size)."""
        n, outputs, layers = len(rows), self._outputs, self._layers
        grads = [buffer[:n] for buffer in self._grads[:-1]]
        last = len(grads) - 1
        output_gradient(rows, outputs[-2].numpy(), layers[-1][0].numpy(), share, grads[last].numpy())
        for k in range(last, 0, -1):
            torch.mm(grads[k], layers[k][0], out=grads[k - 1])
            relu_gradient(rows, outputs[k - 1].numpy(), grads[k - 1].numpy())
        to_actions = torch.mm(grads[0], layers[0][0][:, -n_actions:])
        put_rows(rows, to_actions.numpy(), out)


class FusedSAC(FusedBackend[SACMinibatch]):
    """`sac.loss` and its gradient, for minibatches of one size."""

    def __init__(
        self, networks: TargetCritics, params: FlatParams, config: SACConfig, update: Update[SACMinibatch]
    ) -> None:
        model = networks.online
        super().__init__(model, params, update)
        self._n, self._size, self._tunes = update.own_rows, model.action.size, config.tune_ent_coef
        self._target_entropy = target_entropy(config, model.action)
        self._squashed = model.action.bounded
        actor, places = model.acting_layers(), zip(params.tensors, params.views(self.gradient), strict=True)
        self._actor = FusedMLP(actor, self._n, "relu", layers_in(params, self.gradient, actor))
        self._actor_next = FusedMLP(actor, self._n, "relu")
        grads = {id(p): grad for p, grad in places}
        own = list(model.critics.parameters())
        by_critic = (
            [_critic(own, i) for i in range(2)],
            [_critic([grads[id(p)] for p in own], i) for i in range(2)],
        )
        self._taken = [
            FusedMLP(layers, self._n, "relu", grad) for layers, grad in zip(*by_critic, strict=True)
        ]
        self._chosen = [
            ChosenCritic(layers, self._n, "relu", grad) for layers, grad in zip(*by_critic, strict=True)
        ]
        target = networks.views(networks.target)
        self._next = [FusedMLP(_critic(target, i), self._n, "relu") for i in range(2)]
        self._log_ent_coef, self._ent_coef_grad = model.log_ent_coef.detach(), grads[id(model.log_ent_coef)]
        n_inputs = actor[0][0].shape[1] + self._size
        self._x_taken, self._x_chosen, self._x_next = (torch.zeros(self._n, n_inputs) for _ in range(3))
        self._action, self._action_next, self._action_grad = np.zeros((3, self._n, self._size), np.float32)
        self._log_prob, self._log_prob_next = np.zeros((2, self._n), np.float32)
        self._rows = np.zeros(self._n, np.int64)
        self._thread = ThreadPoolExecutor(1, "flatout-critics", _one_thread) if usable_cores() > 1 else None

    def differentiate(self, batch: SACMinibatch) -> None:
        """Fill in the gradient, the TD errors and the means."""
        x, ent_coef = self._features(batch.obs), math.exp(self._log_ent_coef.item())
        begun = self._beside(lambda: self._value_next(batch))
        put(x.numpy(), batch.action.numpy(), self._squashed, self._x_taken.numpy())
        for critic in self._taken:
            critic.forward(self._x_taken)
        critics = self._beside(lambda: self._critics_backward(batch, ent_coef))
        self._actor_backward(batch, x, ent_coef)
        begun.result()
        critics.result()
        means = self.means
        excess = self._target_entropy - float(means[4])
        self._ent_coef_grad[0] = -excess * self._tunes
        means[0] = means[1] + means[2] - self._log_ent_coef.item() * excess * self._tunes

    def _beside(self, work: Callable[[], None]) -> Future[None]:
        """Do it in the other thread, after what it was given before, or here and now if there is none."""
        if self._thread is not None:
            return self._thread.submit(work)
        done: Future[None] = Future()
        work()
        done.set_result(None)
        return done

    def _value_next(self, batch: SACMinibatch) -> None:
        """The target critics' values of the next observations, with actions of the policy."""
        x, noise = self._features(batch.next_obs), batch.noise.numpy()[:, self._size :]
        self._actor_next.forward(x)
        action, log_prob = self._action_next, self._log_prob_next
        draw(self._actor_next.out, noise, self._squashed, action, log_prob)
        put(x.numpy(), action, self._squashed, self._x_next.numpy())
        for critic in self._next:
            critic.forward(self._x_next)

    def _critics_backward(self, batch: SACMinibatch, ent_coef: float) -> None:
        (one, two), (next_one, next_two) = self._taken, self._next
        samples = batch.reward.numpy(), batch.discount.numpy(), batch.weight.numpy()
        q_values = one.out, two.out, next_one.out, next_two.out
        out = one.grad, two.grad, self._update.sample_output.numpy(), self.means
        td_gradient(samples, q_values, self._log_prob_next, ent_coef, out)
        for critic in self._taken:
            critic.backward(self._x_taken)

    def _actor_backward(self, batch: SACMinibatch, x: Tensor, ent_coef: float) -> None:
        actor, noise, action, size = self._actor, batch.noise.numpy(), self._action, self._size
        actor.forward(x)
        draw(actor.out, noise, self._squashed, action, self._log_prob)
        put(x.numpy(), action, self._squashed, self._x_chosen.numpy())
        for critic in self._chosen:
            critic.forward(self._x_chosen)
        one, two = self._chosen
        n_first, total = sort_rows(one.out, two.out, self._rows)
        for critic, rows in ((one, self._rows[:n_first]), (two, self._rows[n_first:])):
            critic.action_gradient(rows, -1 / self._n, size, self._action_grad)
        policy_gradient(actor.out, noise, self._squashed, action, self._action_grad, ent_coef, actor.grad)
        actor.backward(x)
        mean_log_prob = float(self._log_prob.mean())
        self.means[2] = ent_coef * mean_log_prob - total / self._n
        self.means[3], self.means[4] = ent_coef, -mean_log_prob

    def close(self) -> None:
        """End the other thread."""
        if self._thread is not None:
            self._thread.shutdown()


def _one_thread() -> None:
    torch.set_num_threads(1)  # of operations in this thread


def _critic(tensors: Sequence[Tensor], i: int) -> list[Layer]:
    """The layers of one critic in tensors shaped like the critics' parameters; without images these are all."""
    weights, biases = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    return [(weight[i].t(), bias[i].view(-1)) for weight, bias in zip(weights, biases, strict=True)]


def can_fuse(model: SACModel, config: SACConfig, device: torch.device) -> bool:
    """Whether the fused code covers these networks."""
    plain = not config.layer_norm and not config.dropout and model.activation == "relu"
    return plain and is_plain(model, device)
