"""The collector over envs that step together: closed-form transitions only, in every autoreset mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from flatout.buffers.rollout import Rollout
from flatout.collect.collector import Collector
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.executors.batched import BatchedExecutor
from flatout.models.config import NetworkConfig
from flatout.models.policy import ActorCritic, build
from flatout.timing import PhaseClock
from tests.executors.test_batched import Counters

N_STEPS = 7


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_transition_never_spans_two_episodes(mode: AutoresetMode) -> None:
    """Env i counts to LENGTHS[i] and earns its count; it observes `count` and `episode`."""
    envs = Counters(mode)
    obs, action = ObsLayout(envs.single_observation_space), ActionLayout(envs.single_action_space)
    model = build(obs, action, NetworkConfig(network_arch=(8,)), seed=1)
    executor = BatchedExecutor(envs, obs, np.arange(3), seed=5)
    collector = Collector(executor, model, device=torch.device("cpu"), seed=7, clock=PhaseClock())
    collector.reset()
    rollout = Rollout.alloc(obs, action, N_STEPS, 3)
    episodes = []
    for _ in range(6):
        episodes += collector.collect(rollout)
        before, after = rollout.obs[0][:-1, :, 0], rollout.obs[0][1:, :, 0]
        ended = before + 1 == envs.LENGTHS
        assert (rollout.reward == before + 1).all()
        assert (rollout.terminated == (ended & ~envs.TRUNCATES)).all()
        assert (rollout.truncated == (ended & envs.TRUNCATES)).all()
        assert (after[~ended] == before[~ended] + 1).all()
        assert (after[:-1][ended[:-1]] == 0).all()
        cut = rollout.truncated
        assert (rollout.final_obs[0][cut][:, 0] == before[cut] + 1).all()
        same_episode = rollout.obs[1][1:, :] == rollout.obs[1][:-1, :]
        assert same_episode[~ended].all()
        _check_log_probs(collector, rollout)
    assert {(e.env_id, e.total_reward, e.length) for e in episodes} == {(0, 3, 2), (1, 6, 3), (2, 15, 5)}
    assert collector.n_steps == 6 * N_STEPS


def _check_log_probs(collector: Collector, rollout: Rollout) -> None:
    """Each action's log-probability is that of the observation it is stored with."""
    model = collector.model
    assert isinstance(model, ActorCritic)
    obs = tuple(torch.from_numpy(leaf[:-1]).flatten(0, 1) for leaf in rollout.obs)
    with torch.no_grad():
        log_prob = model.evaluate(obs, torch.from_numpy(rollout.action).flatten(0, 1))[0]
    assert np.allclose(log_prob.numpy(), rollout.log_prob.reshape(-1), atol=1e-5)
