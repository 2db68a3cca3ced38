"""Envs that wait: those that finish early begin the next rollout, and the data equals that of the serial executor."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch

import flatout
from flatout.buffers.rollout import Rollout
from flatout.collect.collector import Collector
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.executors.base import EnvSet
from flatout.executors.serial import SerialExecutor
from flatout.executors.waiting import ThreadExecutor
from flatout.models.config import NetworkConfig
from flatout.models.policy import build
from flatout.timing import PhaseClock
from tests.executors.slow import Counter, Script

N_ENVS, N_STEPS = 4, 8
OBS, ACTION = ObsLayout(Counter.observation_space), ActionLayout(Counter.action_space)


def collector(executor: Any) -> tuple[Collector, list[Rollout]]:
    """A collector with a policy of its own, and two rollouts."""
    source = build(OBS, ACTION, NetworkConfig(network_arch=(8,)), 0)
    model = build(OBS, ACTION, NetworkConfig(network_arch=(8,)), 0)
    made = Collector(executor, model, device=torch.device("cpu"), seed=1, clock=PhaseClock(), source=source)
    return made, [Rollout.alloc(OBS, ACTION, N_STEPS, N_ENVS) for _ in range(2)]


def change(policy: Any, by: float) -> None:
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(by)


def collect_three(executor: Any, *, early: bool, script: Script) -> tuple[list[dict[str, Any]], list[int]]:
    """Three rollouts with different policies: their arrays, and the steps that env 0 had taken after the first."""
    made, rollouts = collector(executor)
    made.reset()
    out, taken = [], []
    try:
        made.publish()
        for k in range(3):
            if early:  # what learning from the rollout before has led to
                change(made._source, 0.1)
                made.offer_next(rollouts[(k + 1) % 2])
            made.collect(rollouts[k % 2])
            out.append({name: array.copy() for name, array in rollouts[k % 2].by_name.items()})
            taken.append(script.made[0].n_steps)
            if not early:
                change(made._source, 0.1)
            made.publish()
    finally:
        made.close()
    return out, taken


def run(kind: Any, *, early: bool) -> tuple[list[dict[str, Any]], list[int]]:
    script = Script(length=5, on_step=lambda made, t: 0.02 if made == N_ENVS - 1 else 0.001)
    executor = kind(EnvSet(lambda: Counter(script), OBS, np.arange(N_ENVS), 7, replayable=False))
    return collect_three(executor, early=early, script=script)


def test_envs_that_finished_start_the_next_rollout_and_rollouts_stay_the_same() -> None:
    in_turn, taken = run(SerialExecutor, early=False)
    assert taken == [N_STEPS, 2 * N_STEPS, 3 * N_STEPS]
    ahead, taken_ahead = run(ThreadExecutor, early=True)
    assert all(n > k * N_STEPS for k, n in enumerate(taken_ahead, 1))  # it did not wait for the slow one
    assert taken_ahead[0] <= 2 * N_STEPS  # nor did it begin a third
    for a, b in zip(in_turn, ahead, strict=True):
        for name in a:
            # Last observations are written only where an episode was cut.
            where = a["truncated"] if name.startswith("final_obs") else slice(None)
            assert np.array_equal(a[name][where], b[name][where]), name


def test_no_env_starts_the_next_rollout_before_it_is_offered() -> None:
    _, taken = run(ThreadExecutor, early=False)
    assert taken == [N_STEPS, 2 * N_STEPS, 3 * N_STEPS]


class Dawdling(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole whose steps take one to four milliseconds, at random."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        time.sleep(float(np.random.default_rng().choice([0.001, 0.004])))
        return self.env.step(action)


def test_a_run_on_threads_equals_a_serial_run() -> None:
    def learned(executor: str) -> torch.Tensor:
        settings: dict[str, Any] = {"n_envs": 4, "n_steps": 8, "batch_size": 16, "n_epochs": 1}
        agent = flatout.PPO(
            Dawdling, preset="auto", **settings, seed=5, overlap="on", compile="off", executor=executor
        )
        agent.learn(4 * 8 * 6)
        assert agent.summary["env_steps"] == 4 * 8 * 6
        assert agent.summary["policy_lag_max"] == 1
        assert agent.summary["executor"]["kind"] == executor
        return torch.cat([p.detach().reshape(-1) for p in agent.policy.model.parameters()])

    assert torch.equal(learned("thread"), learned("serial"))
