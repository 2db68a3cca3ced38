"""PPO's loss and its gradient written out for plain MLPs on the CPU; tests hold them equal to `loss.py`."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from flatout.algorithms.ppo.config import PPOConfig
from flatout.algorithms.ppo.loss import PPOMinibatch
from flatout.device.jit import compiled
from flatout.envs.spaces import Array
from flatout.learning.fused import FusedBackend, FusedMLP, is_plain, layers_in
from flatout.learning.update import Update
from flatout.models.heads import LOG_SQRT_2PI, MASKED, CategoricalHead, GaussianHead
from flatout.models.params import FlatParams
from flatout.models.policy import ActorCritic, Obs

_MASKED, _HALF_LOG_2PI = np.float32(MASKED), np.float32(LOG_SQRT_2PI)
_HALF, _ONE = np.float32(0.5), np.float32(1)


Settings = tuple[bool, float, float, float]
"""normalize_advantage, clip_range, clip_range_vf (infinite: clips nothing), vf_coef."""


@compiled
def moments(advantage: Array, normalize: bool) -> tuple[float, float]:
    """The mean to subtract from every advantage, and the standard deviation to divide it by."""
    n = len(advantage)
    if not normalize or n == 1:
        return 0.0, 1.0
    mean = 0.0
    for b in range(n):
        mean += np.float64(advantage[b])
    mean /= n
    squares = 0.0
    for b in range(n):
        squares += (np.float64(advantage[b]) - mean) ** 2
    return mean, math.sqrt(squares / (n - 1)) + 1e-8


@compiled
def categorical(
    out: Array, mask: Array, nvec: Array, action: Array, log_p: Array, log_prob: Array, entropy: Array
) -> None:
    """Log-probabilities of all actions and of those taken, and each component's entropy; a mask without rows: none."""
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
    """Each action's distance from its mean in standard deviations, and the log-probabilities of the actions."""
    for b in range(len(out)):
        total = np.float32(0)
        for d in range(len(log_std)):
            noise[b, d] = (action[b, d] - out[b, d]) / np.exp(log_std[d])
            total += -_HALF * noise[b, d] * noise[b, d] - log_std[d] - _HALF_LOG_2PI
        log_prob[b] = total


@compiled
def loss_gradient(
    log_prob: Array, value: Array, samples: tuple[Array, ...], settings: Settings, out: tuple[Array, ...]
) -> None:
    """The mean loss's gradient w.r.t. log-probabilities and values, and its metrics but for the entropy."""
    old_log_prob, advantage, returns, old_value = samples
    normalize, clip_range, clip_range_vf, vf_coef = settings
    log_prob_grad, value_grad, means_out = out
    n, (mean, std) = len(log_prob), moments(advantage, normalize)
    policy, squares, kl, n_clipped = 0.0, 0.0, 0.0, 0
    clip, clip_vf, share = np.float32(clip_range), np.float32(clip_range_vf), np.float32(1 / n)
    low, high = _ONE - clip, _ONE + clip
    for b in range(n):
        adv = np.float32((np.float64(advantage[b]) - mean) / std)
        log_ratio = log_prob[b] - old_log_prob[b]
        ratio = np.exp(log_ratio)
        unclipped, clipped = ratio * adv, min(max(ratio, low), high) * adv
        # `not >` instead of `<=`: NaN must reach the loss.
        is_free = not unclipped > clipped
        policy -= np.float64(unclipped if is_free else clipped)
        log_prob_grad[b] = -ratio * adv * share if is_free else np.float32(0)
        kl += np.float64((ratio - _ONE) - log_ratio)
        n_clipped += abs(ratio - _ONE) > clip
        change = value[b, 0] - old_value[b]
        within = abs(change) <= clip_vf or not math.isfinite(change)
        now = value[b, 0] if within else old_value[b] + (clip_vf if change > 0 else -clip_vf)
        error = now - returns[b]
        squares += np.float64(error * error)
        value_grad[b, 0] = np.float32(2 * vf_coef) * error * share if within else np.float32(0)
    means_out[1], means_out[2] = policy / n, squares / n
    means_out[4], means_out[5] = kl / n, n_clipped / n


@compiled
def categorical_gradient(
    groups: tuple[Array, ...], mask: Array, log_prob_grad: Array, ent_coef: float, logits_grad: Array
) -> float:
    """The loss's gradient w.r.t. logits; returns the mean entropy."""
    log_p, nvec, action, entropy = groups
    n, total = len(log_prob_grad), 0.0
    share = np.float32(ent_coef / n)
    for b in range(n):
        start = 0
        for g in range(len(nvec)):
            taken, group_entropy = start + action[b, g], entropy[b, g]
            total += np.float64(group_entropy)
            for a in range(start, start + nvec[g]):
                p = np.exp(log_p[b, a])
                is_taken = _ONE if a == taken else np.float32(0)
                grad = log_prob_grad[b] * (is_taken - p) + share * p * (log_p[b, a] + group_entropy)
                logits_grad[b, a] = grad if not len(mask) or mask[b, a] else np.float32(0)
            start += nvec[g]
    return total / n


@compiled
def gaussian_gradient(
    noise: Array, log_std: Array, log_prob_grad: Array, ent_coef: float, mean_grad: Array, log_std_grad: Array
) -> float:
    """The loss's gradient w.r.t. means and log standard deviations; returns the entropy."""
    entropy = 0.0
    for d in range(len(log_std)):
        log_std_grad[d] = -ent_coef
        entropy += 0.5 + np.float64(_HALF_LOG_2PI) + np.float64(log_std[d])
    for b in range(len(log_prob_grad)):
        for d in range(len(log_std)):
            mean_grad[b, d] = log_prob_grad[b] * noise[b, d] / np.exp(log_std[d])
            log_std_grad[d] += log_prob_grad[b] * (noise[b, d] * noise[b, d] - _ONE)
    return entropy


class FusedPPO(FusedBackend[PPOMinibatch]):
    """`ppo.prepare`, `ppo.loss` and their gradient, for minibatches of one size and for whole rollouts."""

    def __init__(
        self, model: ActorCritic, params: FlatParams, config: PPOConfig, update: Update[PPOMinibatch]
    ) -> None:
        super().__init__(model, params, update)
        self._config, n = config, update.own_rows
        activation, policy, value = model.activation, model.acting_layers(), model.value_layers()
        self._policy = FusedMLP(policy, n, activation, layers_in(params, self.gradient, policy))
        self._value = FusedMLP(value, n, activation, layers_in(params, self.gradient, value))
        self._all_values = lru_cache(1)(lambda n: FusedMLP(value, n, activation))
        self._all_actions = lru_cache(1)(lambda n: FusedMLP(policy, n, activation))
        self._log_prob, self._log_prob_grad = np.zeros((2, n), np.float32)
        self._details = np.zeros_like(self._policy.out)
        """Log-probabilities of all actions, or an action's distance from its mean in standard deviations."""
        self._nvec = np.array(model.action.nvec)
        self._entropy = np.zeros((n, len(model.action.nvec)), np.float32)
        self._log_std: tuple[Array, Array] | None = None
        if isinstance(model.head, GaussianHead):
            places = zip(params.tensors, params.views(self.gradient), strict=True)
            grad = next(view for leaf, view in places if leaf is model.head.log_std)
            self._log_std = model.head.log_std.detach().numpy(), grad.numpy()

    def values(self, obs: Obs) -> Tensor:
        """Values of a whole rollout's observations."""
        x = self._features(obs)
        network: FusedMLP = self._all_values(len(x))
        return torch.from_numpy(network.forward(x)[:, 0].copy())

    def log_prob(self, obs: Obs, action: Tensor) -> Tensor:
        """Log-probabilities of a whole rollout's actions."""
        x = self._features(obs)
        network: FusedMLP = self._all_actions(len(x))
        network.forward(x)
        details, out = np.empty_like(network.out), np.empty(len(x), np.float32)
        self._evaluate(
            network, obs, action.numpy(), details, out, np.empty((len(x), len(self._nvec)), np.float32)
        )
        return torch.from_numpy(out)

    def _evaluate(
        self, network: FusedMLP, obs: Obs, action: Array, details: Array, log_prob: Array, entropy: Array
    ) -> None:
        if self._log_std is None:
            categorical(network.out, self._mask(obs), self._nvec, action, details, log_prob, entropy)
        else:
            gaussian(network.out, self._log_std[0], action, details, log_prob)

    def differentiate(self, batch: PPOMinibatch) -> None:
        config, x = self._config, self._features(batch.obs)
        self._policy.forward(x)
        self._value.forward(x)
        action, details, log_prob = batch.action.numpy(), self._details, self._log_prob
        self._evaluate(self._policy, batch.obs, action, details, log_prob, self._entropy)
        log_prob_grad, means = self._log_prob_grad, self.means
        targets = batch.advantage.numpy(), batch.returns.numpy()
        samples = batch.log_prob.numpy(), *targets, batch.value.numpy()
        clip_range_vf = math.inf if config.clip_range_vf is None else config.clip_range_vf
        clip_range = self._update.coefficient.item()
        # Other ranks have parts of the minibatch: then it came normalized.
        normalize = config.normalize_advantage and self._update.ranks is None
        settings = normalize, clip_range, clip_range_vf, config.vf_coef
        out = log_prob_grad, self._value.grad, means
        loss_gradient(log_prob, self._value.out, samples, settings, out)
        if self._log_std is None:
            groups, mask = (details, self._nvec, action, self._entropy), self._mask(batch.obs)
            entropy = categorical_gradient(groups, mask, log_prob_grad, config.ent_coef, self._policy.grad)
        else:
            entropy = gaussian_gradient(
                details, self._log_std[0], log_prob_grad, config.ent_coef, self._policy.grad, self._log_std[1]
            )
        means[3] = -entropy
        means[0] = means[1] - config.ent_coef * entropy + config.vf_coef * means[2]
        self._policy.backward(x)
        self._value.backward(x)


def can_fuse(model: ActorCritic, device: torch.device) -> bool:
    """Whether the fused code covers this network."""
    head = model.head
    known = isinstance(head, CategoricalHead) or (isinstance(head, GaussianHead) and not head.squashes)
    return known and not model.shared and is_plain(model, device)
