"""Deep Q-learning (Mnih et al. 2015), double (van Hasselt et al. 2016), over several steps: targets, loss and its metrics.

Comes in: sampled transitions. Goes out: a loss to differentiate, and how wrong each row was. No env, no I/O, no host sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatout.algorithms.dqn.config import DQNConfig, Loss
from flatout.learning.minibatch import Rows
from flatout.models.heads import MASKED
from flatout.models.policy import QNetwork

METRICS = ("train/loss", "train/q_mean", "train/td_error")
"""What each entry of the loss's metrics vector is."""


@dataclass(slots=True)
class Minibatch(Rows):
    """Transitions to learn from, in any order; see `ReplayBatch` for what the columns mean."""

    obs: tuple[Tensor, ...]
    next_obs: tuple[Tensor, ...]
    action: Tensor
    reward: Tensor
    discount: Tensor
    weight: Tensor
    later: Tensor | None = None
    """The older network's values of `next_obs`, where they are known already."""

    def tensors(self) -> list[Tensor]:
        """All of its tensors, in a fixed order."""
        return [self.action, self.reward, self.discount, self.weight, *self.obs, *self.next_obs]

    def like(self, tensors: Sequence[Tensor]) -> Minibatch:
        """A minibatch of these tensors."""
        n = (len(tensors) - 4) // 2
        return Minibatch(tuple(tensors[4 : 4 + n]), tuple(tensors[4 + n :]), *tensors[:4])


class Twins(nn.Module):
    """The network that learns, and the parameters of an older one, as one flat tensor that changes in place."""

    target: Tensor

    def __init__(self, online: QNetwork, flat: Tensor, views: Callable[[Tensor], Sequence[Tensor]]) -> None:
        """`flat`: the network's own parameters; `views`: those that lie in such a tensor."""
        super().__init__()
        self.online = online
        self._flat, self._views = flat, views
        self._names = [name for name, _ in online.named_parameters()]
        self.register_buffer("target", flat.clone())

    def target_values(self, obs: Sequence[Tensor]) -> Tensor:
        """Values of all actions by the older parameters."""
        older = dict(zip(self._names, self._views(self.target), strict=True))
        out: Tensor = torch.func.functional_call(self.online, older, (obs,))
        return out.float()

    @torch.no_grad()
    def follow(self, share: float = 1.0) -> None:
        """Move the older parameters towards the present ones."""
        if share >= 1:
            self.target.copy_(self._flat)
        else:
            self.target.lerp_(self._flat, share)


@torch.no_grad()
def targets(twins: Twins, batch: Minibatch, *, double: bool) -> Tensor:
    """What the values of the actions taken should have been: rewards, then the best that can follow."""
    mask = twins.online.mask(batch.next_obs)
    later = twins.target_values(batch.next_obs)
    chooses = twins.online(batch.next_obs).float() if double else later
    if mask is not None:
        chooses = chooses.masked_fill(~mask, MASKED)
    best = later.gather(1, chooses.argmax(1, keepdim=True)).squeeze(1)
    return batch.reward + batch.discount * best


def loss(twins: Twins, batch: Minibatch, config: DQNConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted mean loss over rows, its METRICS as one vector, and each row's error, which is its new priority."""
    wanted = targets(twins, batch, double=config.double)
    value = twins.online(batch.obs).float().gather(1, batch.action).squeeze(1)
    total = (batch.weight * row_losses(value, wanted, config.loss)).mean()
    with torch.no_grad():
        error = (wanted - value).abs()
        parts = torch.stack([total, value.mean(), error.mean()])
    return total, parts, error


def row_losses(value: Tensor, wanted: Tensor, kind: Loss) -> Tensor:
    """How much each row's error counts."""
    if kind == "mse":
        return nn.functional.mse_loss(value, wanted, reduction="none")
    return nn.functional.smooth_l1_loss(value, wanted, reduction="none")
