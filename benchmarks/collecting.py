"""What benchmarks of child collectors share."""

from __future__ import annotations

from flatout.agent import PPO
from flatout.collect.child import Job


def child_job(agent: PPO) -> Job:
    """The job of child collectors that collect for this agent."""
    config, policy = agent.config, agent.policy
    return Job(
        factory=agent._env_info().factory,
        obs=policy.obs,
        action=policy.action,
        make_model=config.learner_spec(policy.obs, policy.action).make_model,
        seed=config.seed,
        first=0,
        end=config.n_envs,
    )
