"""Proximal policy optimisation (Schulman et al. 2017): advantages, loss and its metrics.

Comes in: tensors of one rollout. Goes out: a loss to differentiate. No env, no I/O, no host sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flatout.algorithms.ppo.config import PPOConfig
from flatout.learning.minibatch import Rows
from flatout.learning.returns import gae
from flatout.learning.transitions import Transitions, values_and_next
from flatout.models.policy import ActorCritic

METRICS = (
    "train/loss",
    "train/policy_gradient_loss",
    "train/value_loss",
    "train/entropy_loss",
    "train/approx_kl",
    "train/clip_fraction",
)
"""What each entry of the loss's metrics vector is, under Stable-Baselines3's names."""
KL = METRICS.index("train/approx_kl")
DRIFT = ("train/lag_kl", "train/lag_ratio_max", "train/lag_effective_share")
"""What `drift` tells: the KL divergence, the largest ratio, and the share of the sample that still counts."""


@dataclass(frozen=True, slots=True)
class Minibatch(Rows):
    """Rows to learn from, in any order."""

    obs: tuple[Tensor, ...]
    action: Tensor
    log_prob: Tensor
    advantage: Tensor
    returns: Tensor
    value: Tensor

    def tensors(self) -> list[Tensor]:
        """All of its tensors, in a fixed order."""
        return [self.action, self.log_prob, self.advantage, self.returns, self.value, *self.obs]

    def like(self, tensors: Sequence[Tensor]) -> Minibatch:
        """A minibatch of these tensors."""
        return Minibatch(tuple(tensors[5:]), *tensors[:5])


@torch.no_grad()
def log_ratio(model: ActorCritic, obs: tuple[Tensor, ...], action: Tensor, log_prob: Tensor) -> Tensor:
    """How much likelier each row's action has become since it was taken, as a logarithm."""
    now, _ = model.head.evaluate(model.policy(obs), action, model.mask(obs))
    return now - log_prob


@torch.no_grad()
def drift(log_ratios: Tensor) -> Tensor:
    """DRIFT as one vector: how far the policy has moved from the one that collected a rollout."""
    ratio = log_ratios.exp()
    kl = ((ratio - 1) - log_ratios).mean()
    effective = ratio.sum().square() / (ratio.square().sum() * ratio.numel())
    return torch.stack([kl, ratio.max(), effective])


@torch.no_grad()
def advantages(
    value_of: Callable[[tuple[Tensor, ...]], Tensor],
    data: Transitions,
    config: PPOConfig,
    ratio_tn: Tensor | None = None,
) -> Minibatch:
    """Values of the whole rollout by the current critic, and GAE; time and env flattened.

    With the logarithms of ratios the sums are cut by V-trace's weights (Espeholt et al. 2018), 1 where the policy is the same.
    """
    n_rows = data.reward_tn.numel()
    flat_obs = tuple(leaf.flatten(0, 1) for leaf in data.obs_tn)
    value_tn, next_value_tn = values_and_next(value_of, data)
    advantage_tn = gae(
        data.reward_tn,
        value_tn,
        next_value_tn,
        data.terminated_tn,
        data.truncated_tn,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        weight_tn=None if ratio_tn is None else ratio_tn.clamp(max=0.0).exp(),
    )
    return Minibatch(
        obs=flat_obs,
        action=data.action_tn.reshape(n_rows, -1),
        log_prob=data.log_prob_tn.reshape(-1),
        advantage=advantage_tn.reshape(-1),
        returns=(advantage_tn + value_tn).reshape(-1),
        value=value_tn.reshape(-1),
    )


def prepare(batch: Minibatch, config: PPOConfig) -> Minibatch:
    """What a whole minibatch needs before its rows can be learned from in any parts."""
    if not config.normalize_advantage or len(batch) == 1:
        return batch
    advantage = batch.advantage
    return replace(batch, advantage=(advantage - advantage.mean()) / (advantage.std() + 1e-8))


def loss(
    model: ActorCritic, batch: Minibatch, clip_range: Tensor, config: PPOConfig
) -> tuple[Tensor, Tensor]:
    """PPO's mean loss over the rows of a prepared minibatch, and its METRICS, means as well, as one vector."""
    log_prob, entropy, value = model.evaluate(batch.obs, batch.action)
    advantage = batch.advantage
    log_ratio = log_prob - batch.log_prob
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()

    if config.clip_range_vf is not None:
        moved = (value - batch.value).clamp(-config.clip_range_vf, config.clip_range_vf)
        value = batch.value + moved
    value_loss = (value - batch.returns).square().mean()
    entropy_loss = -entropy.mean()
    total = policy_loss + config.ent_coef * entropy_loss + config.vf_coef * value_loss

    with torch.no_grad():
        # Low-variance, never negative estimate: http://joschu.net/blog/kl-approx.html
        approx_kl = ((ratio - 1) - log_ratio).mean()
        clip_fraction = ((ratio - 1).abs() > clip_range).float().mean()
    parts = (total, policy_loss, value_loss, entropy_loss, approx_kl, clip_fraction)
    return total, torch.stack([part.detach() for part in parts])
