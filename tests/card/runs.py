"""Small runs on the card and on the CPU, and what is compared of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flatout
from flatout.training import trainer
from flatout.training.pipeline import Pipeline
from flatout.training.stop import StopRequest
from tests.known import Match

N_ENVS, N_STEPS = 8, 16
ITERATION = N_ENVS * N_STEPS
"""Env steps of an iteration."""
SMALL: dict[str, Any] = {
    "seed": 3,
    "n_envs": N_ENVS,
    "n_steps": N_STEPS,
    "batch_size": 64,
    "network_arch": "32,32",
    "learning_rate": 3e-3,
    "gamma": 0.9,
    "overlap": "off",
    "executor": "serial",
}
PPO = SMALL | {"algo": "ppo", "n_epochs": 2}
PQN = SMALL | {"algo": "pqn", "n_epochs": 2}
DQN = SMALL | {"algo": "dqn", "buffer_size": "2000", "learning_starts": ITERATION, "train_ratio": 0.05}
PRIORITIZED = DQN | {"prioritized": True, "multi_step": 3, "tau": 0.05}
SAC = SMALL | {"algo": "sac", "buffer_size": "2000", "learning_starts": ITERATION, "train_ratio": 0.05}
ALGORITHMS = {"ppo": PPO, "pqn": PQN, "dqn": DQN, "prioritized": PRIORITIZED}


def agent(device: str, settings: dict[str, Any], env: Any = Match, **more: Any) -> flatout.Agent:
    return flatout.Agent(env, device=device, **(settings | more))


def trained(
    device: str, settings: dict[str, Any], env: Any = Match, *, n_iterations: int = 6, **more: Any
) -> flatout.Agent:
    """An agent after some iterations: 24 updates and more."""
    return agent(device, settings, env, **more).learn(n_iterations * ITERATION)


def on_cpu(settings: dict[str, Any], env: Any = Match, **more: Any) -> flatout.Agent:
    """The same on the CPU, operation by operation."""
    return trained("cpu", settings, env, compile="off", **more)


def state(agent: flatout.Agent) -> dict[str, Tensor]:
    """Everything that was learned."""
    return {name: tensor.detach().cpu() for name, tensor in agent.trainer().learner.state().items()}


def difference(agent: flatout.Agent, other: flatout.Agent) -> float:
    """The largest difference of a parameter or a statistic of two agents; infinite if one is no number."""
    ours, theirs = state(agent), state(other)
    assert ours.keys() == theirs.keys()
    names = [name for name in ours if name.startswith(("model.", "target", "obs_moments", "reward_scaler"))]
    largest = max(float((ours[name] - theirs[name]).abs().max()) for name in names if ours[name].numel())
    return largest if np.isfinite(largest) else np.inf


def backend(agent: flatout.Agent) -> str:
    """What its updates were computed by."""
    return agent.trainer().learner.update.backend


def n_updates(agent: flatout.Agent) -> int:
    return agent.trainer().learner.n_updates


def act_on(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A policy on the card acts on this device, however long that takes."""
    here, cpu = torch.device(device), torch.device("cpu")
    monkeypatch.setattr(trainer, "faster_device", lambda policy, _: cpu if policy.device == cpu else here)


def watch_iterations(monkeypatch: pytest.MonkeyPatch, watch: Callable[[int, Callable[[], Any]], Any]) -> None:
    """`watch(k, iterate)` runs iteration number k, counted from 0."""
    iterate = Pipeline.iterate

    def watched(self: Pipeline[Any], total_steps: int, stop: StopRequest) -> Any:
        return watch(self._state.iteration, lambda: iterate(self, total_steps, stop))

    monkeypatch.setattr(Pipeline, "iterate", watched)
