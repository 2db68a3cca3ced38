"""SAC's loss and its gradient written out for plain ReLU MLPs on the CPU; tests hold them equal to `loss.py`.

A minibatch is computed in two halves, in two threads where there are two cores; what is computed does not depend on that.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from itertools import pairwise
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.algorithms.sac.config import SACConfig
from flatout.algorithms.sac.loss import SACMinibatch, TargetCritics, target_entropy
from flatout.algorithms.sac.model import LOG_STD_MAX, LOG_STD_MIN, SACModel
from flatout.algorithms.sac.noise import MIX1, MIX2, WEYL
from flatout.device.blas import product
from flatout.device.jit import compiled
from flatout.device.machine import usable_cores
from flatout.device.semaphores import new_semaphore, post, wait
from flatout.envs.spaces import Array
from flatout.learning.fused import (
    FusedBackend,
    FusedMLP,
    Layer,
    Net,
    backward,
    forward,
    is_plain,
    layers_in,
)
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


Network = tuple[Net, Array, Array]
"""An MLP, its layers' outputs, and the last of them."""
Learned = tuple[Net, Array, Array, Array, Array, Array]
"""The same, and gradients w.r.t. the outputs, of the parameters, and w.r.t. the last outputs."""


@compiled
def action_gradient(
    critic: Learned, rows: Array, n: int, share: float, to_actions: Array, out: Array
) -> None:
    """Write the gradient of `share` times the values of these chosen actions w.r.t. the actions to the same rows of `out`.

    The chosen actions are a critic's samples from `n` on. It uses the buffers of `backward`, and comes after it.
    """
    net, outputs, _, grads, _, _ = critic
    params, places = net[0], net[1]
    last, count, size, total = len(places) - 2, len(rows), np.float32(share), 0
    for k in range(last):
        total += places[k, 1]
    width, weight = places[last, 1], params[places[last + 1, 2] :]
    grad, hidden = grads[n * total :], outputs[2 * n * total :]
    for i in range(count):
        row, seen = grad[i * width :], hidden[(n + rows[i]) * width :]
        for j in range(width):
            row[j] = size * weight[j] if seen[j] > 0 else _ZERO
    for k in range(last, 0, -1):
        before_width = places[k, 0]
        total -= before_width
        before, hidden = grads[n * total :], outputs[2 * n * total :]
        product(count, before_width, width, grad, False, params[places[k, 2] :], True, before)
        width = before_width
        for i in range(count):
            row, seen = before[i * width :], hidden[(n + rows[i]) * width :]
            for j in range(width):
                row[j] = row[j] if seen[j] > 0 else _ZERO
        grad = before
    n_actions = out.shape[1]
    weight = params[places[0, 2] + (places[0, 0] - n_actions) * width :]
    product(count, n_actions, width, grad, False, weight, True, to_actions)
    for i in range(count):
        for j in range(n_actions):
            out[rows[i], j] = to_actions[i * n_actions + j]


@compiled
def differentiate(
    samples: Samples,
    actor: Learned,
    critics: tuple[Learned, Learned],
    targets: tuple[Network, Network],
    buffers: tuple[Array, ...],
    squashed: Array,
    ent_coef: float,
    share: float,
    errors: Array,
    sums: Array,
) -> None:
    """The gradient, the TD errors and the sums of some rows of a minibatch, each with this share in the mean.

    Observations and next observations go through the actor together, and so do taken and chosen actions through a critic.
    """
    obs, next_obs, taken, reward, discount, weight, noise = samples
    x, inputs, action, log_prob, order, action_grad, flat_x, flat_inputs, to_actions = buffers
    (one, two), n, width = critics, len(obs), inputs.shape[1]
    x[:n] = obs
    x[n:] = next_obs
    forward(flat_x, actor[0], actor[1])
    raw = actor[2]
    draw(raw, noise, squashed, action, log_prob)
    put(x, taken, squashed, inputs[:n])
    put(x, action, squashed, inputs[n:])
    for critic in critics:
        forward(flat_inputs[: 2 * n * width], critic[0], critic[1])
    for target in targets:
        forward(flat_inputs[2 * n * width :], target[0], target[1])
    q_1, q_2 = one[2], two[2]
    values = q_1[:n], q_2[:n], targets[0][2], targets[1][2]
    out = one[5], two[5], errors, sums
    td_gradient((reward, discount, weight), values, log_prob[n:], ent_coef, share, out)
    for critic in critics:
        backward(flat_inputs, critic[0], critic[1], critic[3], critic[4])
    n_first, sums[4] = sort_rows(q_1[n:], q_2[n:], order)
    action_gradient(one, order[:n_first], n, -share, to_actions, action_grad)
    action_gradient(two, order[n_first:], n, -share, to_actions, action_grad)
    policy_gradient(raw, noise, squashed, action, action_grad, ent_coef * share, actor[5])
    backward(flat_x, actor[0], actor[1], actor[3], actor[4])
    sums[3] = 0.0
    for b in range(n):
        sums[3] += np.float64(log_prob[b])


@compiled
def work_along(
    calls: tuple[Array, Array, Array],
    samples: Samples,
    actor: Learned,
    critics: tuple[Learned, Learned],
    targets: tuple[Network, Network],
    buffers: tuple[Array, ...],
    squashed: Array,
    scale: Array,
    errors: Array,
    sums: Array,
) -> None:
    """`differentiate` whenever `calls` ask for it, until they say that it was the last time."""
    begin, end, is_over = calls
    while True:
        wait(begin)
        if is_over[0]:
            return
        differentiate(samples, actor, critics, targets, buffers, squashed, scale[0], scale[1], errors, sums)
        post(end)


class FusedShare:
    """Some rows of each minibatch: what they add to the gradient and the means."""

    def __init__(
        self, networks: TargetCritics, params: FlatParams, gradient: Tensor, samples: Samples, scale: Array
    ) -> None:
        """`gradient`: where theirs is written, in the order of `params`; `scale`: of entropy, and each row's in the mean."""
        model, n = networks.online, len(samples[0])
        size = model.action.size
        actor, own = model.acting_layers(), list(model.critics.parameters())
        places = {id(p): view for p, view in zip(params.tensors, params.views(gradient), strict=True)}
        grads, target = [places[id(p)] for p in own], networks.views(networks.target)
        acting = FusedMLP(actor, 2 * n, "relu", layers_in(params, gradient, actor), n, NARROW)
        critics = [
            FusedMLP(_critic(own, i), 2 * n, "relu", _critic(grads, i), n, NARROW, flipped=True)
            for i in (0, 1)
        ]
        targets = [FusedMLP(_critic(target, i), n, "relu", narrow=NARROW, flipped=True) for i in (0, 1)]
        n_features, real = actor[0][0].shape[1], np.float32
        x = np.zeros((2 * n, n_features), real)  # inputs of the actor: observations, next observations
        inputs = np.zeros((3 * n, n_features + size), real)  # of the critics: taken, chosen and next actions
        action, log_prob = np.zeros((2 * n, size), real), np.zeros(2 * n, real)
        order, grad, to_actions = np.zeros(n, np.int64), np.zeros((n, size), real), np.zeros(n * size, real)
        buffers = x, inputs, action, log_prob, order, grad, x.reshape(-1), inputs.reshape(-1), to_actions
        learned = [
            (it.net, it.outputs, it.out, it.grads, it.param_grads, it.grad) for it in (acting, *critics)
        ]
        nexts = tuple([(it.net, it.outputs, it.out) for it in targets])
        actor_parts, *critic_parts = learned
        self.sums = np.zeros(5)
        """Of the critics' losses, values and TD errors, of log-probabilities and values of chosen actions."""
        self.errors = np.zeros(n, real)
        """TD errors."""
        self._scale = scale
        self._fixed: Any = samples, actor_parts, tuple(critic_parts), nexts, buffers, model.action.bounded

    def differentiate(self) -> None:
        """Fill in the gradient, the sums and the errors."""
        own: Any = *self._fixed, *self._scale, self.errors, self.sums
        differentiate(*own)

    def work_along(self, calls: tuple[Array, Array, Array]) -> None:
        """The same whenever another thread asks for it."""
        own: Any = *self._fixed, self._scale, self.errors, self.sums
        work_along(calls, *own)


class Partner:
    """A thread that computes one share of every minibatch while the caller computes another.

    It stays in compiled code: waking it does not take Python's lock, for which the two would wait in turn.
    """

    def __init__(self, share: FusedShare, begin: Array, end: Array, n_threads: int) -> None:
        """`n_threads`: of each of its matrix products."""
        self._begin, self._end, self._is_over = begin, end, np.ones(1, np.bool_)
        self.n_threads, self._share = n_threads, share
        self.begin()
        self._work_along()  # ends at once, and is compiled from here on: nobody waits for a thread that could not begin
        self._is_over[0] = False
        self._thread = Thread(target=self._run, name="flatout-update", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(self.n_threads)  # of operations in this thread
        self._work_along()

    def _work_along(self) -> None:
        self._share.work_along((self._begin, self._end, self._is_over))

    def begin(self) -> None:
        """Begin with what the samples hold now."""
        post(self._begin)

    def finish(self) -> None:
        """Wait for the end of it."""
        wait(self._end)

    def close(self) -> None:
        """End the thread."""
        self._is_over[0] = True
        self.begin()
        self._thread.join()


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
        n, size, n_features = self._n, model.action.size, model.acting_layers()[0][0].shape[1]
        shapes: list[tuple[int, ...]] = [(n, n_features), (n, n_features), (n, size), (n,), (n,), (n,)]
        self._samples = tuple([np.zeros(shape, np.float32) for shape in (*shapes, (n, 2 * size))])
        self._scale = np.array([0.0, 1 / n])
        cuts = sorted({0, n // 2, n})
        self._shares = [
            FusedShare(
                networks, params, gradient, tuple([x[slice(*cut)] for x in self._samples]), self._scale
            )
            for gradient, cut in zip((self.gradient, self._others), pairwise(cuts), strict=False)
        ]
        self._calls = (new_semaphore(), new_semaphore()) if usable_cores() > 1 and n > 1 else (None, None)
        self._partner: Partner | None = None

    def differentiate(self, batch: SACMinibatch) -> None:
        """Fill in the gradient, the TD errors and the means."""
        features = self._features(batch.obs), self._features(batch.next_obs)
        rest = batch.action, batch.reward, batch.discount, batch.weight, batch.noise
        for to, given in zip(self._samples, (*features, *[x.numpy() for x in rest]), strict=True):
            to[:] = given
        self._scale[0] = ent_coef = math.exp(self._log_ent_coef.item())
        first, *others = self._shares
        partner = self._with_partner()
        if partner is not None:
            partner.begin()
        try:
            first.differentiate()
        finally:  # a Ctrl-C here must not leave an end behind that the next minibatch would take for its own
            if partner is not None:
                partner.finish()
        for share in others:
            if partner is None:
                share.differentiate()
            self.gradient.add_(self._others)
        np.concatenate(
            [share.errors for share in self._shares], out=self._update.sample_output.numpy()[: self._n]
        )
        self._set_means(np.sum([share.sums for share in self._shares], 0) / self._n, ent_coef)

    def _with_partner(self) -> Partner | None:
        """The other thread, each of whose products has as many threads as those of this one; None: there is none."""
        begin, end = self._calls
        if begin is None or end is None:
            return None
        n_threads = torch.get_num_threads()
        if self._partner is None or self._partner.n_threads != n_threads:
            self.close()
            self._partner = Partner(self._shares[1], begin, end, n_threads)
            self._end_of_partner = weakref.finalize(self, self._partner.close)
        return self._partner

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
        if self._partner is not None:
            self._end_of_partner()
            self._partner = None


def _critic(tensors: Sequence[Tensor], i: int) -> list[Layer]:
    """The layers of one critic in tensors shaped like the critics' parameters; without images these are all.

    Weights are (inputs, outputs).
    """
    weights, biases = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    return [(weight[i], bias[i].view(-1)) for weight, bias in zip(weights, biases, strict=True)]


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
