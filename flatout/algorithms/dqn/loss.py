"""DQN's targets, loss and metrics: the definition of the algorithm. No env, no I/O, no host sync."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flatout.algorithms.dqn.config import DQNConfig, Loss
from flatout.learning.update import Minibatch
from flatout.models.params import FlatParams
from flatout.models.policy import QNetwork

METRICS = ("train/loss", "train/q_mean", "train/td_error")
"""Entries of the loss's metrics vector."""


@dataclass(slots=True)
class DQNMinibatch(Minibatch):
    """Sampled transitions, in any order; see `ReplayBatch` for the fields."""

    obs: tuple[Tensor, ...]
    next_obs: tuple[Tensor, ...]
    action: Tensor
    reward: Tensor
    discount: Tensor
    weight: Tensor
    target_q: Tensor | None = field(init=False, default=None)
    """The target network's Q-values of `next_obs`, where they are computed already."""


class TargetNetwork(nn.Module):
    """The online network, and the target network's parameters as one flat tensor that changes in place."""

    target: Tensor

    def __init__(self, online: QNetwork, params: FlatParams) -> None:
        """`params`: the online network's."""
        super().__init__()
        self.online, self._params = online, params
        self._names = [name for name, tensor in online.named_parameters() if tensor.requires_grad]
        self.register_buffer("target", params.flat.clone())
        self._bound = (self.target, self._copy_of(online)) if online.independent_rows else None
        """A network whose parameters are views of this tensor, for several threads at once; not a submodule."""

    def _copy_of(self, online: QNetwork) -> QNetwork:
        """The network with the target's parameters, and the same buffers, such as observation statistics."""
        copied = copy.deepcopy(online)
        for module, original in zip(copied.modules(), online.modules(), strict=True):
            module._buffers = original._buffers
        learned = [tensor for tensor in copied.parameters() if tensor.requires_grad]
        for tensor, view in zip(learned, self._params.views(self.target), strict=True):
            tensor.requires_grad_(False).data = view
        return copied

    def target_q(self, obs: Sequence[Tensor]) -> Tensor:
        """Q-values of all actions by the target network."""
        if self._bound is not None and self._bound[0] is self.target:
            out: Tensor = self._bound[1](obs)
        else:  # the target is replaced for a call, as a compiled step does; or a user's network, which one thread computes
            params = dict(zip(self._names, self._params.views(self.target), strict=True))
            out = torch.func.functional_call(self.online, params, (obs,))
        return out.float()

    @torch.no_grad()
    def soft_update(self, tau: float = 1.0) -> None:
        """Move the target network's parameters towards the online ones; 1 copies them."""
        if tau >= 1:
            self.target.copy_(self._params.flat)
        else:
            self.target.lerp_(self._params.flat, tau)


@torch.no_grad()
def targets(networks: TargetNetwork, batch: DQNMinibatch, *, double: bool) -> Tensor:
    """TD targets: rewards, then the discounted Q-value of the best next action."""
    target_q = networks.target_q(batch.next_obs)
    online_q = networks.online(batch.next_obs).float() if double else target_q
    best_action = networks.online.head.mode(online_q, networks.online.mask(batch.next_obs))
    best = target_q.gather(1, best_action).squeeze(1)
    return batch.reward + batch.discount * best


def loss(networks: TargetNetwork, batch: DQNMinibatch, config: DQNConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted mean loss over a minibatch, its METRICS as one vector, and each sample's absolute TD error."""
    td_target = targets(networks, batch, double=config.double)
    q = networks.online(batch.obs).float().gather(1, batch.action).squeeze(1)
    total = (batch.weight * sample_losses(q, td_target, config.loss)).mean()
    with torch.no_grad():
        error = (td_target - q).abs()
        metrics = torch.stack([total, q.mean(), error.mean()])
    return total, metrics, error


def sample_losses(q: Tensor, td_target: Tensor, kind: Loss) -> Tensor:
    """The loss of each sample's TD error."""
    if kind == "mse":
        return nn.functional.mse_loss(q, td_target, reduction="none")
    return nn.functional.smooth_l1_loss(q, td_target, reduction="none")
