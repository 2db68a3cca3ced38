"""What benchmarks of subprocess collectors share."""

from __future__ import annotations

import numpy as np

from flatout.agent import PPO
from flatout.collect.subprocess import CollectorJob
from flatout.executors.base import EnvSet


def collector_job(agent: PPO) -> CollectorJob:
    """The job of subprocess collectors that collect for this agent."""
    config, policy = agent.config, agent.policy
    factory, env_ids = agent.env_info().factory, np.arange(config.n_envs)
    return CollectorJob(
        envs=EnvSet(factory, policy.obs, env_ids, config.seed, action=policy.action),
        make_model=config.learner_spec(policy.obs, policy.action).make_model,
    )
