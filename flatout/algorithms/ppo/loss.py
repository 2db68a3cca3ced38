"""PPO's advantages, loss and metrics: the definition of the algorithm. No env, no I/O, no host sync."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flatout.algorithms.ppo.config import PPOConfig
from flatout.learning.rollouts import Transitions, gae
from flatout.learning.update import Minibatch
from flatout.models.policy import ActorCritic

METRICS = (
    "train/loss",
    "train/policy_gradient_loss",
    "train/value_loss",
    "train/entropy_loss",
    "train/approx_kl",
    "train/clip_fraction",
)
"""Entries of the loss's metrics vector, under Stable-Baselines3's names."""
KL = METRICS.index("train/approx_kl")
DRIFT = ("train/lag_kl", "train/lag_ratio_max", "train/lag_effective_share")
"""Entries of `drift`: KL divergence, largest ratio, and effective sample size as a fraction."""


@dataclass(frozen=True, slots=True)
class PPOMinibatch(Minibatch):
    """Samples of a rollout, in any order; `log_prob` and `value` are of the policy that collected them."""

    obs: tuple[Tensor, ...]
    action: Tensor
    log_prob: Tensor
    advantage: Tensor
    returns: Tensor
    value: Tensor


@torch.no_grad()
def log_ratio(model: ActorCritic, obs: tuple[Tensor, ...], action: Tensor, log_prob: Tensor) -> Tensor:
    """Log-ratio of each action's probability now and when it was taken."""
    now, _ = model.head.evaluate(model.policy(obs), action, model.mask(obs))
    return now - log_prob


@torch.no_grad()
def drift(log_ratios: Tensor) -> Tensor:
    """DRIFT as one vector: the distance of the policy from the one that collected a rollout."""
    ratio = log_ratios.exp()
    kl = ((ratio - 1) - log_ratios).mean()
    effective = ratio.sum().square() / (ratio.square().sum() * ratio.numel())
    return torch.stack([kl, ratio.max(), effective])


@torch.no_grad()
def advantages(
    value_of: Callable[[tuple[Tensor, ...]], Tensor],
    data: Transitions,
    config: PPOConfig,
    log_ratio_tn: Tensor | None = None,
) -> PPOMinibatch:
    """GAE with the current critic's values; all samples of the rollout, time and env flattened.

    With log-ratios, steps are weighted as in V-trace (Espeholt et al. 2018): by the ratio, at most 1.
    """
    n = data.reward_tn.numel()
    value_tn, next_value_tn = data.values(value_of)
    advantage_tn = gae(
        data.reward_tn,
        value_tn,
        next_value_tn,
        data.terminated_tn,
        data.truncated_tn,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        weight_tn=None if log_ratio_tn is None else log_ratio_tn.clamp(max=0.0).exp(),
    )
    return PPOMinibatch(
        obs=data.flat_obs(),
        action=data.action_tn.reshape(n, -1),
        log_prob=data.log_prob_tn.reshape(-1),
        advantage=advantage_tn.reshape(-1),
        returns=(advantage_tn + value_tn).reshape(-1),
        value=value_tn.reshape(-1),
    )


def prepare(batch: PPOMinibatch, config: PPOConfig) -> PPOMinibatch:
    """Normalize the advantages over the whole minibatch, which may then be split."""
    advantage = batch.advantage
    if not config.normalize_advantage or advantage.numel() == 1:
        return batch
    return replace(batch, advantage=(advantage - advantage.mean()) / (advantage.std() + 1e-8))


def loss(
    model: ActorCritic, batch: PPOMinibatch, clip_range: Tensor, config: PPOConfig
) -> tuple[Tensor, Tensor]:
    """The mean loss over a prepared minibatch, and its METRICS as one vector."""
    log_prob, entropy, value = model.evaluate(batch.obs, batch.action)
    advantage = batch.advantage
    log_ratio = log_prob - batch.log_prob
    ratio = log_ratio.exp()
    surrogate = ratio * advantage
    with torch.no_grad():
        clipped = ratio.clamp(1 - clip_range, 1 + clip_range) * advantage
    # The lower one. Where they are equal both have the same gradient; where the clipped one is lower it has none.
    policy_loss = -torch.where(surrogate <= clipped, surrogate, clipped).mean()

    if config.clip_range_vf is not None:
        change = (value - batch.value).clamp(-config.clip_range_vf, config.clip_range_vf)
        value = batch.value + change
    value_loss = nn.functional.mse_loss(value, batch.returns)
    total = policy_loss + config.vf_coef * value_loss
    entropy_loss = -(entropy if config.ent_coef else entropy.detach()).mean()
    if config.ent_coef:
        total = total + config.ent_coef * entropy_loss

    with torch.no_grad():
        change = ratio - 1
        # Low-variance, never negative estimate: http://joschu.net/blog/kl-approx.html
        approx_kl = (change - log_ratio).mean()
        clip_fraction = (change.abs() > clip_range).mean(dtype=torch.float32)
    parts = (total, policy_loss, value_loss, entropy_loss, approx_kl, clip_fraction)
    return total, torch.stack([part.detach() for part in parts])
