"""PPO's update written out."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from flatout.algorithms.ppo.config import PPOConfig
from flatout.algorithms.ppo.loss import Minibatch
from flatout.device.jit import compiled
from flatout.envs.spaces import Array
from flatout.learning.fused import HandMadeStep, Perceptron, is_plain, layers_in
from flatout.learning.update import Update
from flatout.models.encoders import Obs
from flatout.models.heads import LOG_SQRT_2PI, MASKED, CategoricalHead, GaussianHead
from flatout.models.params import FlatParams
from flatout.models.policy import ActorCritic

_MASKED, _HALF_LOG_2PI = np.float32(MASKED), np.float32(LOG_SQRT_2PI)
_HALF, _ONE = np.float32(0.5), np.float32(1)


@compiled
def moments(advantage: Array, normalizes: bool) -> tuple[float, float]:
    """What to take from every advantage, and what to divide by."""
    n = len(advantage)
    if not normalizes or n == 1:
        return 0.0, 1.0
    mean = 0.0
    for b in range(n):
        mean += np.float64(advantage[b])
    mean /= n
    spread = 0.0
    for b in range(n):
        spread += (np.float64(advantage[b]) - mean) ** 2
    return mean, math.sqrt(spread / (n - 1)) + 1e-8


@compiled
def categorical(
    out: Array, mask: Array, nvec: Array, action: Array, log_p: Array, log_prob: Array, entropy: Array
) -> None:
    """Log-probabilities of all choices, of the rows' own, and entropies of the groups; no mask: no rows."""
    for b in range(len(out)):
        start, total = 0, np.float32(0)
        for g in range(len(nvec)):
            n, most = nvec[g], _MASKED
            for a in range(start, start + n):
                log_p[b, a] = out[b, a] if not len(mask) or mask[b, a] else _MASKED
                most = max(most, log_p[b, a])
            whole = np.float32(0)
            for a in range(start, start + n):
                log_p[b, a] -= most
                whole += np.exp(log_p[b, a])
            shift, spread = np.log(whole), np.float32(0)
            for a in range(start, start + n):
                log_p[b, a] -= shift
                spread -= np.exp(log_p[b, a]) * log_p[b, a]
            entropy[b, g] = spread
            total += log_p[b, start + action[b, g]]
            start += n
        log_prob[b] = total


@compiled
def gaussian(out: Array, log_std: Array, action: Array, noise: Array, log_prob: Array) -> None:
    """How many spreads each action lies from its mean, and the rows' log-probabilities."""
    for b in range(len(out)):
        total = np.float32(0)
        for d in range(len(log_std)):
            noise[b, d] = (action[b, d] - out[b, d]) / np.exp(log_std[d])
            total += -_HALF * noise[b, d] * noise[b, d] - log_std[d] - _HALF_LOG_2PI
        log_prob[b] = total


@compiled
def pulls(
    log_prob: Array,
    log_prob_then: Array,
    advantage: Array,
    normalizes: bool,
    clip_range: float,
    value: Array,
    value_then: Array,
    returns: Array,
    clip_range_vf: float,
    vf_coef: float,
    pull_out: Array,
    value_slope_out: Array,
    sums_out: Array,
) -> None:
    """The mean loss's slope by log-probability and by value; means of the losses, the KL and what was clipped.

    A `clip_range_vf` that is infinite clips nothing.
    """
    n, (mean, spread) = len(log_prob), moments(advantage, normalizes)
    policy, squares, kl, n_clipped = 0.0, 0.0, 0.0, 0
    clip, clip_vf, share = np.float32(clip_range), np.float32(clip_range_vf), np.float32(1 / n)
    low, high = _ONE - clip, _ONE + clip
    for b in range(n):
        gain = np.float32((np.float64(advantage[b]) - mean) / spread)
        log_ratio = log_prob[b] - log_prob_then[b]
        ratio = np.exp(log_ratio)
        free, held = ratio * gain, min(max(ratio, low), high) * gain
        # What is no number must stay one, and be seen in the loss.
        counts = not free > held
        policy -= np.float64(free if counts else held)
        pull_out[b] = -ratio * gain * share if counts else np.float32(0)
        kl += np.float64((ratio - _ONE) - log_ratio)
        n_clipped += abs(ratio - _ONE) > clip
        moved = value[b, 0] - value_then[b]
        within = abs(moved) <= clip_vf or not math.isfinite(moved)
        now = value[b, 0] if within else value_then[b] + (clip_vf if moved > 0 else -clip_vf)
        error = now - returns[b]
        squares += np.float64(error * error)
        value_slope_out[b, 0] = np.float32(2 * vf_coef) * error * share if within else np.float32(0)
    sums_out[1], sums_out[2] = policy / n, squares / n
    sums_out[4], sums_out[5] = kl / n, n_clipped / n


@compiled
def categorical_slopes(
    log_p: Array,
    mask: Array,
    nvec: Array,
    action: Array,
    pull: Array,
    entropy: Array,
    ent_coef: float,
    slope_out: Array,
) -> float:
    """The loss's slope by logit; returns the mean entropy."""
    n, total = len(pull), 0.0
    share = np.float32(ent_coef / n)
    for b in range(n):
        start = 0
        for g in range(len(nvec)):
            own, spread = start + action[b, g], entropy[b, g]
            total += np.float64(spread)
            for a in range(start, start + nvec[g]):
                p = np.exp(log_p[b, a])
                is_own = _ONE if a == own else np.float32(0)
                slope = pull[b] * (is_own - p) + share * p * (log_p[b, a] + spread)
                slope_out[b, a] = slope if not len(mask) or mask[b, a] else np.float32(0)
            start += nvec[g]
    return total / n


@compiled
def gaussian_slopes(
    noise: Array, log_std: Array, pull: Array, ent_coef: float, slope_out: Array, log_std_out: Array
) -> float:
    """The loss's slope by mean and by log of the spread; returns the entropy."""
    entropy = 0.0
    for d in range(len(log_std)):
        log_std_out[d] = -ent_coef
        entropy += 0.5 + np.float64(_HALF_LOG_2PI) + np.float64(log_std[d])
    for b in range(len(pull)):
        for d in range(len(log_std)):
            slope_out[b, d] = pull[b] * noise[b, d] / np.exp(log_std[d])
            log_std_out[d] += pull[b] * (noise[b, d] * noise[b, d] - _ONE)
    return entropy


class HandMadePPO(HandMadeStep[Minibatch]):
    """Learns from minibatches of one size, as `ppo.prepare`, `ppo.loss` and `Update` would."""

    def __init__(
        self, model: ActorCritic, params: FlatParams, config: PPOConfig, update: Update[Minibatch]
    ) -> None:
        super().__init__(model, params, update)
        self._config, n = config, config.batch_size
        bend, policy, value = model.activation, model.acting_layers(), model.value_layers()
        self._policy = Perceptron(policy, n, bend, layers_in(params, self.gradient, policy))
        self._value = Perceptron(value, n, bend, layers_in(params, self.gradient, value))
        self._all_values = lru_cache(1)(lambda n_rows: Perceptron(value, n_rows, bend))
        self._all_actions = lru_cache(1)(lambda n_rows: Perceptron(policy, n_rows, bend))
        self._log_prob, self._pull = np.zeros((2, n), np.float32)
        self._within = np.zeros_like(self._policy.out)
        """Log-probabilities of the choices, or how many spreads an action lies from its mean."""
        self._nvec = np.array(model.action.nvec)
        self._entropy = np.zeros((n, len(model.action.nvec)), np.float32)
        self._log_std: tuple[Array, Array] | None = None
        if isinstance(model.head, GaussianHead):
            places = zip(params.leaves, params.views(self.gradient), strict=True)
            slope = next(view for leaf, view in places if leaf is model.head.log_std)
            self._log_std = model.head.log_std.detach().numpy(), slope.numpy()

    def values(self, obs: Obs) -> Tensor:
        """Values of a whole rollout's observations."""
        x = self._seen(obs)
        network: Perceptron = self._all_values(len(x))
        return network.forward(x).squeeze(1).clone()

    def log_prob(self, obs: Obs, action: Tensor) -> Tensor:
        """Log-probabilities of a whole rollout's actions."""
        x = self._seen(obs)
        network: Perceptron = self._all_actions(len(x))
        network.forward(x)
        within, out = np.empty_like(network.out), np.empty(len(x), np.float32)
        self._evaluate(
            network, obs, action.numpy(), within, out, np.empty((len(x), len(self._nvec)), np.float32)
        )
        return torch.from_numpy(out)

    def _evaluate(
        self, network: Perceptron, obs: Obs, action: Array, within: Array, log_prob: Array, entropy: Array
    ) -> None:
        if self._log_std is None:
            categorical(network.out, self._allowed(obs), self._nvec, action, within, log_prob, entropy)
        else:
            gaussian(network.out, self._log_std[0], action, within, log_prob)

    def differentiate(self, batch: Minibatch) -> None:
        """Fill in the gradient and the means."""
        config, x = self._config, self._seen(batch.obs)
        self._policy.forward(x)
        self._value.forward(x)
        action, within, log_prob, pull = batch.action.numpy(), self._within, self._log_prob, self._pull
        self._evaluate(self._policy, batch.obs, action, within, log_prob, self._entropy)
        pulls(
            log_prob,
            batch.log_prob.numpy(),
            batch.advantage.numpy(),
            config.normalize_advantage,
            self._update.coefficient.item(),
            self._value.out,
            batch.value.numpy(),
            batch.returns.numpy(),
            math.inf if config.clip_range_vf is None else config.clip_range_vf,
            config.vf_coef,
            pull,
            self._value.slope,
            self.means,
        )
        slope, means = self._policy.slope, self.means
        if self._log_std is None:
            groups = self._nvec, action, pull, self._entropy
            entropy = categorical_slopes(within, self._allowed(batch.obs), *groups, config.ent_coef, slope)
        else:
            entropy = gaussian_slopes(
                within, self._log_std[0], pull, config.ent_coef, slope, self._log_std[1]
            )
        means[3] = -entropy
        means[0] = means[1] - config.ent_coef * entropy + config.vf_coef * means[2]
        self._policy.backward(x)
        self._value.backward(x)


def can_be_made_by_hand(model: ActorCritic, device: torch.device) -> bool:
    """Whether there is such code for this network."""
    head = model.head
    known = isinstance(head, CategoricalHead) or (isinstance(head, GaussianHead) and not head.squashes)
    return known and not model.shared and is_plain(model, device)
