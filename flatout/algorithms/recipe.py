"""What a recipe is: the settings that decide what is learned from, for one env or one kind of machine."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.algorithms.dqn.config import DQNConfig, PQNConfig
from flatout.algorithms.ppo.config import PPOConfig
from flatout.models.config import NetworkConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Defaults that any flag overrides."""

    n_envs: int
    algorithm: PPOConfig | DQNConfig | PQNConfig
    network: NetworkConfig
    timesteps: int = 1_000_000
    n_cores: int = 1
    """Cores it wants; a machine with fewer is warned about."""

    @property
    def ppo(self) -> PPOConfig:
        """The settings of a recipe for PPO."""
        assert isinstance(self.algorithm, PPOConfig), "a recipe for PPO"
        return self.algorithm
