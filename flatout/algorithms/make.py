"""The learner of an algorithm, from its settings."""

from __future__ import annotations

from typing import Any

from flatout.algorithms.dqn.config import DQNConfig, PQNConfig
from flatout.algorithms.ppo.config import PPOConfig
from flatout.algorithms.ppo.learner import PPOLearner
from flatout.algorithms.pqn.learner import PQNLearner
from flatout.learning.learner import Learner
from flatout.models.policy import ActorCritic, PolicyNet, QNetwork
from flatout.timing import PhaseClock


def make_learner(
    model: PolicyNet,
    config: PPOConfig | DQNConfig | PQNConfig,
    *,
    n_envs: int,
    seed: int,
    clock: PhaseClock,
    precision: str = "fp32",
) -> Learner[Any]:
    """A learner that improves this model with this algorithm."""
    if isinstance(config, PPOConfig):
        assert isinstance(model, ActorCritic), "PPO learns a policy and its critic"
        return PPOLearner(model, config, n_envs=n_envs, seed=seed, clock=clock, precision=precision)
    assert isinstance(model, QNetwork), "this algorithm learns action values"
    if isinstance(config, DQNConfig):
        from flatout.algorithms.dqn.learner import (
            DQNLearner,  # here, because its compiled loops take a moment to load
        )

        return DQNLearner(model, config, n_envs=n_envs, seed=seed, clock=clock, precision=precision)
    return PQNLearner(model, config, n_envs=n_envs, seed=seed, clock=clock, precision=precision)
