"""SAC's targets, loss and metrics: the definition of the algorithm. No env, no I/O, no host sync.

The loss is the sum of three, each of which has a gradient w.r.t. its own parameters alone: of the critics, the actor
and the temperature. So one step improves all of them, each by the others as they were before the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatout.algorithms.sac.config import SACConfig
from flatout.algorithms.sac.model import SACModel
from flatout.envs.spaces import ActionLayout
from flatout.learning.update import Minibatch
from flatout.models.params import FlatParams
from flatout.models.policy import Obs

METRICS = (
    "train/loss",
    "train/critic_loss",
    "train/actor_loss",
    "train/ent_coef",
    "train/entropy",
    "train/q_mean",
    "train/td_error",
)
"""Entries of the loss's metrics vector."""
NEXT, TAKEN, CHOSEN = 0, 1, 2
"""Of which actions a critic's value is; dropout differs between them."""


@dataclass(slots=True)
class SACMinibatch(Minibatch):
    """Sampled transitions, in any order; see `ReplayBatch` for the other fields."""

    obs: tuple[Tensor, ...]
    next_obs: tuple[Tensor, ...]
    action: Tensor
    """Before squashing."""
    reward: Tensor
    discount: Tensor
    weight: Tensor
    noise: Tensor
    """Normal noise for the actions of `obs`, then for those of `next_obs`, (B, 2 · size)."""

    def bits(self) -> Tensor:
        """Random bits of each sample, (B, 1)."""
        return self.noise[:, :1].contiguous().view(torch.int32).long()


class TargetCritics(nn.Module):
    """The model, and its target critics' parameters as one flat tensor that changes in place."""

    target: Tensor

    def __init__(self, online: SACModel, params: FlatParams) -> None:
        """`params`: the model's."""
        super().__init__()
        self.online, self._params = online, params
        learned = [(name, p) for name, p in online.critics.named_parameters() if p.requires_grad]
        self._names, wanted = map(list, zip(*learned, strict=True))
        places = {id(p): view for p, view in zip(params.tensors, params.views(params.flat), strict=True)}
        views = [places[id(p)] for p in wanted]
        begin = views[0].storage_offset()
        end = max(view.storage_offset() + view.numel() for view in views)
        self._range = slice(begin, end)
        self._places = [(view.storage_offset() - begin, view.shape) for view in views]
        self.register_buffer("target", params.flat[self._range].clone())

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of such a flat tensor, shaped like the critics' parameters."""
        return [flat[start : start + shape.numel()].view(shape) for start, shape in self._places]

    def target_q(self, obs: Obs, action: Tensor, bits: Tensor) -> Tensor:
        """Q-values (2, B) by the target critics."""
        params = dict(zip(self._names, self.views(self.target), strict=True))
        out: Tensor = torch.func.functional_call(self.online.critics, params, (obs, action, bits, NEXT))
        return out

    @torch.no_grad()
    def soft_update(self, tau: float) -> None:
        """Move the target critics' parameters towards the online ones."""
        self.target.lerp_(self._params.flat[self._range], tau)


def target_entropy(config: SACConfig, action: ActionLayout) -> float:
    """The entropy that the temperature is tuned for."""
    return -float(action.size) if config.target_entropy is None else config.target_entropy


@torch.no_grad()
def targets(networks: TargetCritics, batch: SACMinibatch) -> Tensor:
    """TD targets: rewards, then the discounted soft value of the next observation: the lower Q-value, and entropy."""
    model, size = networks.online, batch.action.shape[1]
    action, log_prob = model.head.draw(model.policy(batch.next_obs).float(), batch.noise[:, size:])
    next_obs = model.normalized(batch.next_obs)
    q = networks.target_q(next_obs, model.head.squash(action), batch.bits()).amin(0)
    return batch.reward + batch.discount * (q - model.log_ent_coef.exp() * log_prob)


def loss(networks: TargetCritics, batch: SACMinibatch, config: SACConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss of a minibatch, its METRICS as one vector, and each sample's absolute TD error."""
    model, size, bits = networks.online, batch.action.shape[1], batch.bits()
    head, obs, log_ent_coef = model.head, model.normalized(batch.obs), model.log_ent_coef.squeeze()
    ent_coef = log_ent_coef.detach().exp()

    q = model.critics(obs, head.squash(batch.action), bits, TAKEN)
    error = q - targets(networks, batch)
    critic_loss = 0.5 * (batch.weight * error.square()).sum(0).mean()

    action, log_prob = head.draw(model.policy(batch.obs).float(), batch.noise[:, :size])
    value = model.critics(obs, head.squash(action), bits, CHOSEN, frozen=True).amin(0)
    actor_loss = (ent_coef * log_prob - value).mean()

    excess = log_prob.detach().mean() + target_entropy(config, model.action)
    ent_coef_loss = -log_ent_coef * excess * float(config.tune_ent_coef)

    total = critic_loss + actor_loss + ent_coef_loss
    with torch.no_grad():
        errors = error.abs().mean(0)
        sizes = [ent_coef, -log_prob.mean(), q.mean(), errors.mean()]
        metrics = torch.stack([total, critic_loss, actor_loss, *sizes])
    return total, metrics, errors
