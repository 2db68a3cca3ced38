"""SAC's loss and its gradient written out for plain ReLU MLPs on the CPU; tests hold them equal to `loss.py`.

The work has two shares, in two threads where there are two cores; what is computed does not depend on that.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
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
"""Outputs of the actor up to which a loop goes back through its last layer faster than matrix products."""
SPINS = 2000
"""Tries to meet the other thread before this one sleeps, some 20 µs: it is seldom later than that, and waking up takes longer."""
DRAWN_AT_ONCE = 8
"""Updates whose noise is drawn together."""


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
    samples: tuple[Array, Array, Array],
    q: Array,
    next_q: tuple[Array, Array],
    log_prob: Array,
    scale: Array,
    out: tuple[Array, Array, Array],
) -> None:
    """One critic's loss: its gradient w.r.t. the Q-values, its half of the absolute TD errors, and sums of loss, value, error.

    `log_prob`: of the next actions; `scale`: of entropy, and each sample's share in the mean.
    """
    reward, discount, weight = samples
    next_1, next_2 = next_q
    grad, error_out, sums_out = out
    alpha, part = np.float32(scale[0]), np.float32(scale[1])
    total, values, sizes = 0.0, 0.0, 0.0
    for b in range(len(reward)):
        a, c = next_1[b, 0], next_2[b, 0]
        least = a if a < c or a != a else c  # NaN stays NaN
        error = q[b, 0] - (reward[b] + discount[b] * (least - alpha * log_prob[b]))
        grad[b, 0] = weight[b] * error * part
        error_out[b] = _HALF * abs(error)
        total += np.float64(_HALF * weight[b] * error * error)
        values += np.float64(_HALF * q[b, 0])
        sizes += np.float64(error_out[b])
    sums_out[0], sums_out[1], sums_out[2] = total, values, sizes


@compiled
def lower_rows(q_1: Array, q_2: Array, is_first: bool, rows: Array) -> tuple[int, float]:
    """Write the rows in which this critic's value is the lower one; returns how many, and the sum of these values."""
    count, total = 0, 0.0
    for b in range(len(rows)):
        a, c = q_1[b, 0], q_2[b, 0]
        if (a < c or a != a) == is_first:
            total += np.float64(a if is_first else c)
            rows[count] = b
            count += 1
    return count, total


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


Share = tuple[Any, ...]
"""One of two shares of the work: half of the rows of everything that the actor computes, and one critic with its target.

A minibatch's samples in these rows, the first row, the actor, the critic, the target critic, whether it is the first
critic, and buffers."""
Common = tuple[Any, ...]
"""What both shares read and write: rewards, discounts and weights; inputs of the critics for taken, chosen and next actions;
log-probabilities of chosen and next actions; Q-values of taken and chosen actions, and of next ones; the critics' gradient
w.r.t. chosen actions; which dimensions are squashed; the scale of entropy, and each row's in the mean."""


@compiled
def act(share: Share, common: Common) -> None:
    """Actions for the observations and next observations of some rows, which go through the actor together."""
    obs, next_obs, taken, noise = share[0]
    first, actor, n = share[1], share[2], len(obs)
    x, flat_x, action, own_log_prob = share[6]
    inputs, log_prob, squashed = common[1], common[3], common[7]
    n_all = len(log_prob) // 2
    if n == 0:
        return
    x[:n] = obs
    x[n:] = next_obs
    forward(flat_x, actor[0], actor[1])
    draw(actor[2], noise, squashed, action, own_log_prob)
    put(x, taken, squashed, inputs[first : first + n])
    for i in range(2):  # chosen actions, then next ones
        begin = i * n_all + first
        log_prob[begin : begin + n] = own_log_prob[i * n : (i + 1) * n]
        put(x[i * n :], action[i * n :], squashed, inputs[n_all + begin : n_all + begin + n])


@compiled
def evaluate(share: Share, common: Common) -> None:
    """One critic's values of taken and chosen actions, which go through it together, and its target's of next ones."""
    critic, target, flat_inputs = share[3], share[4], common[2]
    begin = len(flat_inputs) // 3 * 2
    forward(flat_inputs[:begin], critic[0], critic[1])
    forward(flat_inputs[begin:], target[0], target[1])


@compiled
def learn_values(share: Share, common: Common) -> None:
    """One critic's gradient, and the one w.r.t. the chosen actions that it values lower than the other."""
    critic, is_first = share[3], share[5]
    errors, sums, rows, to_actions = share[7]
    samples, _, flat_inputs, log_prob, q, next_q, action_grad, _, scale = common
    n = len(errors)
    td_gradient(samples, critic[2][:n], next_q, log_prob[n:], scale, (critic[5], errors, sums))
    backward(flat_inputs, critic[0], critic[1], critic[3], critic[4])
    count, sums[4] = lower_rows(q[0][n:], q[1][n:], is_first, rows)
    action_gradient(critic, rows[:count], n, -scale[1], to_actions, action_grad)


@compiled
def learn_actions(share: Share, common: Common) -> None:
    """What some rows add to the actor's gradient."""
    noise, first, actor = share[0][3], share[1], share[2]
    _, flat_x, action, log_prob = share[6]
    sums, n = share[7][1], len(noise)
    action_grad, squashed, scale = common[6], common[7], common[8]
    if n == 0:
        return
    grad = action_grad[first : first + n]
    policy_gradient(actor[2], noise, squashed, action, grad, scale[0] * scale[1], actor[5])
    backward(flat_x, actor[0], actor[1], actor[3], actor[4])
    sums[3] = 0.0
    for b in range(n):
        sums[3] += np.float64(log_prob[b])


@compiled
def differentiate(first: Share, second: Share, common: Common) -> None:
    """The gradient, the TD errors and the sums of a minibatch: each step needs both shares of the one before."""
    act(first, common)
    act(second, common)
    evaluate(first, common)
    evaluate(second, common)
    learn_values(first, common)
    learn_values(second, common)
    learn_actions(first, common)
    learn_actions(second, common)


@compiled
def differentiate_share(share: Share, common: Common, here: Array, there: Array) -> None:
    """One share of `differentiate`, while another thread computes the other; `here` and `there` is where they wait."""
    act(share, common)
    post(there)
    wait(here, SPINS)
    evaluate(share, common)
    post(there)
    wait(here, SPINS)
    learn_values(share, common)
    post(there)
    wait(here, SPINS)
    learn_actions(share, common)
    post(there)
    wait(here, SPINS)


@compiled
def work_along(share: Share, common: Common, here: Array, there: Array, is_over: Array) -> None:
    """The second share whenever the other thread begins, until it says that it was the last time."""
    while True:
        wait(here, 0)
        if is_over[0]:
            return
        differentiate_share(share, common, here, there)


@compiled
def work_ahead(share: Share, common: Common, here: Array, there: Array) -> None:
    """The first share, and the second one by the other thread; in one call, which no signal can cut in two."""
    post(there)
    differentiate_share(share, common, here, there)


class Partner:
    """A thread that computes the second share of every minibatch while the caller computes the first.

    It stays in compiled code: waking it does not take Python's lock, for which the two would wait in turn.
    """

    def __init__(self, second: Share, common: Common, here: Array, there: Array, n_threads: int) -> None:
        """`n_threads`: of each of its matrix products."""
        self.n_threads, self.here, self.there = n_threads, here, there
        self._is_over = np.ones(1, np.bool_)
        self._work: Any = second, common, there, here, self._is_over
        post(there)
        # It ends at once, and is compiled from here on: nobody waits for a thread that could not begin.
        work_along(*self._work)
        self._is_over[0] = False
        self._thread = Thread(target=self._run, name="flatout-update", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(self.n_threads)  # of operations in this thread
        work_along(*self._work)

    def close(self) -> None:
        """End the thread."""
        self._is_over[0] = True
        post(self.there)
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
        n, size, actor = self._n, model.action.size, model.acting_layers()
        n_features, real = actor[0][0].shape[1], np.float32
        shapes: list[tuple[int, ...]] = [(n, n_features), (n, n_features), (n, size), (n,), (n,), (n,)]
        self._samples = tuple([np.zeros(shape, real) for shape in (*shapes, (n, 2 * size))])
        obs, next_obs, taken, *rest, noise = self._samples
        self._scale = np.array([0.0, 1 / n])
        second = torch.zeros_like(self.gradient)  # of which the actor's part is used
        halves = [layers_in(params, gradient, actor) for gradient in (self.gradient, second)]
        ends = [view for layer in halves[1] for view in layer]
        begin, end = (f(ends, key=Tensor.storage_offset) for f in (min, max))
        own = slice(begin.storage_offset(), end.storage_offset() + end.numel())
        self._actor_grads = self.gradient[own], second[own]
        """The whole, and what the second half of the rows adds to it."""
        critics, targets = _critics(networks, params, self.gradient, n)
        self._shares: list[Any] = []
        for i, rows in enumerate((slice(0, (n + 1) // 2), slice((n + 1) // 2, n))):
            m = max(rows.stop - rows.start, 1)
            acting = FusedMLP(actor, 2 * m, "relu", halves[i], m, NARROW)
            x, action = np.zeros((2 * m, n_features), real), np.zeros((2 * m, size), real)
            buffers = x, x.reshape(-1), action, np.zeros(2 * m, real)
            outs = np.zeros(n, real), np.zeros(5), np.zeros(n, np.int64), np.zeros(n * size, real)
            samples = tuple([it[rows] for it in (obs, next_obs, taken, noise)])
            target = targets[i].net, targets[i].outputs, targets[i].out
            networks_of = _learned(acting), _learned(critics[i]), target
            self._shares.append((samples, rows.start, *networks_of, i == 0, buffers, outs))
        inputs = np.zeros((3 * n, n_features + size), real)
        q, next_q = (tuple([it.out for it in both]) for both in (critics, targets))
        between = np.zeros(2 * n, real), q, next_q, np.zeros((n, size), real)
        fixed = model.action.bounded, self._scale
        self._common: Any = tuple(rest), inputs, inputs.reshape(-1), *between, *fixed
        self._calls = (new_semaphore(), new_semaphore()) if usable_cores() > 1 and n > 1 else (None, None)
        """Where this thread and the other one wait for each other."""
        self._partner: Partner | None = None

    def differentiate(self, batch: SACMinibatch) -> None:
        """Fill in the gradient, the TD errors and the means."""
        features = self._features(batch.obs), self._features(batch.next_obs)
        rest = batch.action, batch.reward, batch.discount, batch.weight, batch.noise
        for to, given in zip(self._samples, (*features, *[x.numpy() for x in rest]), strict=True):
            to[:] = given
        self._scale[0] = ent_coef = math.exp(self._log_ent_coef.item())
        first, second = self._shares
        partner = self._with_partner()
        if partner is None:
            differentiate(first, second, self._common)
        else:
            work_ahead(first, self._common, partner.here, partner.there)
        whole, more = self._actor_grads
        whole.add_(more)
        (errors, sums, *_), (more_errors, more_sums, *_) = first[-1], second[-1]
        np.add(errors, more_errors, out=self._update.sample_output.numpy()[: self._n])
        self._set_means((sums + more_sums) / self._n, ent_coef)

    def _with_partner(self) -> Partner | None:
        """The other thread, each of whose products has as many threads as those of this one; None: there is none."""
        here, there = self._calls
        if here is None or there is None:
            return None
        n_threads = torch.get_num_threads()
        if self._partner is None or self._partner.n_threads != n_threads:
            self.close()
            self._partner = Partner(self._shares[1], self._common, here, there, n_threads)
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


def _critics(
    networks: TargetCritics, params: FlatParams, gradient: Tensor, n: int
) -> tuple[list[FusedMLP], list[FusedMLP]]:
    """Both critics, for taken and chosen actions of `n` samples, the first of which are learned from; and their targets."""
    own, target = list(networks.online.critics.parameters()), networks.views(networks.target)
    places = {id(p): view for p, view in zip(params.tensors, params.views(gradient), strict=True)}
    grads = [places[id(p)] for p in own]
    critics = [FusedMLP(_critic(own, i), 2 * n, "relu", _critic(grads, i), n, flipped=True) for i in (0, 1)]
    targets = [FusedMLP(_critic(target, i), n, "relu", flipped=True) for i in (0, 1)]
    return critics, targets


def _learned(it: FusedMLP) -> Learned:
    return it.net, it.outputs, it.out, it.grads, it.param_grads, it.grad


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
