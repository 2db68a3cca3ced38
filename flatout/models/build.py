"""The network that an algorithm learns, from spaces, settings and the algorithm's wishes."""

from __future__ import annotations

import torch

from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.models.config import NetworkConfig, Traits
from flatout.models.policy import PolicyNet, build
from flatout.models.q import QNetwork


def build_model(
    obs: ObsLayout, action: ActionLayout, config: NetworkConfig, traits: Traits, seed: int
) -> PolicyNet:
    """A network whose first parameters depend on nothing but the seed."""
    if traits.kind == "policy":
        return build(obs, action, config, seed, normalize_obs=traits.normalize_obs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return QNetwork(
            obs,
            action,
            config,
            normalize_obs=traits.normalize_obs,
            dueling=traits.dueling,
            layer_norm=traits.layer_norm,
        )
