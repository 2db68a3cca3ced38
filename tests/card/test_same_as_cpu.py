"""Runs on the card end with the parameters of the CPU's eager run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flatout
from examples.attention import Attention, Gather
from flatout.collect.groups import GroupedCollector
from flatout.collect.tensors import TensorCollector
from tests.card.runs import (
    ALGORITHMS,
    DQN,
    ITERATION,
    PPO,
    PQN,
    SAC,
    act_on,
    agent,
    backend,
    difference,
    n_updates,
    on_cpu,
    state,
    trained,
)
from tests.card.walk import Walk
from tests.known import Match

pytestmark = pytest.mark.card

CLOSE = 1e-5
BACKENDS = {"off": "eager", "auto": "graph"}
NORMALIZED = {"normalize_obs": True, "normalize_reward": True}


def is_same(settings: dict[str, Any], env: Any = Match, device: str = "sim:0", **more: Any) -> None:
    """The eager and the captured run on the card end as the CPU's, after 20 updates at least."""
    expected = on_cpu(settings, env, **more)
    assert n_updates(expected) >= 20
    for compile, name in BACKENDS.items():
        run = trained(device, settings, env, compile=compile, **more)
        assert backend(run) == name
        assert n_updates(run) == n_updates(expected)
        assert difference(run, expected) <= CLOSE


@pytest.mark.parametrize("device", ["sim:0", "sim:1"])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_twenty_updates_on_either_device_leave_the_parameters_of_the_cpu(algo: str, device: str) -> None:
    is_same(ALGORITHMS[algo], device=device)


@pytest.mark.parametrize("memory", ["lstm:16", "gru:16"])
def test_a_memory_learns_on_the_card_as_on_the_cpu(memory: str) -> None:
    is_same(PPO | {"memory": memory})


def test_observations_and_rewards_are_normalized_as_on_the_cpu() -> None:
    is_same(PPO, Walk, device="sim:1", **NORMALIZED)


@pytest.mark.parametrize("algo", ["pqn", "prioritized"])
def test_q_learning_normalizes_observations_as_on_the_cpu(algo: str) -> None:
    is_same(ALGORITHMS[algo], Walk, normalize_obs=True)


def test_continuous_actions_are_learned_as_on_the_cpu() -> None:
    is_same(PPO, Walk, env_kwargs={"action_kind": "box"})


@pytest.mark.parametrize(
    "more", [{}, {"layer_norm": True, "dropout": 0.1, "multi_step": 3}], ids=["plain", "droq"]
)
def test_sac_draws_its_noise_on_the_card_as_on_the_cpu(more: dict[str, Any]) -> None:
    is_same(SAC, Walk, env_kwargs={"action_kind": "box"}, **more)


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_truncated_episodes_are_bootstrapped_as_on_the_cpu(algo: str) -> None:
    is_same(ALGORITHMS[algo], Walk)


@pytest.mark.parametrize("device", ["sim:0", "sim:1"])
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_overlapped_runs_end_as_on_the_cpu(algo: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ALGORITHMS[algo] | {"overlap": "on"}
    expected = on_cpu(settings, Walk)
    for acting in ("cpu", device):
        act_on(monkeypatch, acting)
        assert difference(trained(device, settings, Walk), expected) <= CLOSE


def test_two_collectors_in_processes_beside_the_card_end_as_on_the_cpu() -> None:
    settings = PPO | {"executor": "auto", "n_collectors": 2, "overlap": "on"}
    expected = on_cpu(settings, Walk)
    run = trained("sim:1", settings, Walk)
    assert run.trainer().plan.in_subprocesses
    assert difference(run, expected) <= CLOSE


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_large_policy_that_acts_on_the_card_in_two_groups_ends_as_on_the_cpu(
    overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PPO | {"network_arch": "512,512", "n_envs": 16, "n_steps": 8, "overlap": overlap}
    expected = on_cpu(settings, Walk)
    act_on(monkeypatch, "sim:1")
    run = trained("sim:1", settings, Walk)
    assert isinstance(run.trainer().collector, GroupedCollector)
    assert difference(run, expected) <= CLOSE


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_bf16_stays_finite(algo: str) -> None:
    run = trained("sim:0", ALGORITHMS[algo], Walk, precision="bf16")
    assert backend(run) == "graph"
    assert all(bool(tensor.isfinite().all()) for tensor in state(run).values() if tensor.is_floating_point())
    assert n_updates(run) >= 20


@pytest.mark.parametrize(
    "settings",
    [PPO | NORMALIZED, PPO | {"overlap": "on"}, PQN, DQN | {"save_replay": True}],
    ids=["ppo", "overlap", "pqn", "dqn"],
)
def test_a_resumed_run_ends_as_the_one_that_went_on(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = agent("sim:1", settings, Walk, timesteps=6 * ITERATION).learn()
    half = agent("sim:1", settings, Walk, timesteps=6 * ITERATION)
    half.learn(callback=lambda progress: progress.env_steps < 3 * ITERATION)
    half.save(tmp_path / "half.flatout")
    resumed = flatout.load(tmp_path / "half.flatout", Walk).learn()
    assert resumed.trainer().state.env_steps == whole.trainer().state.env_steps
    assert difference(resumed, whole) <= CLOSE


@pytest.mark.parametrize("settings", [PPO | {"overlap": "on"}, DQN], ids=["ppo", "dqn"])
def test_learning_goes_on_while_this_thread_uses_the_other_device(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = on_cpu(settings, Walk)
    act_on(monkeypatch, "sim:1")
    run = agent("sim:1", settings, Walk, timesteps=6 * ITERATION)
    run.trainer()
    torch.accelerator.set_device_index(0)
    run.learn()
    assert difference(run, expected) <= CLOSE


@pytest.mark.parametrize("algo", ["ppo", "dqn", "prioritized"])
def test_snake_on_the_card_ends_as_on_the_cpu_with_and_without_graphs(algo: str) -> None:
    settings = ALGORITHMS[algo] | {"executor": "auto"}
    runs = [trained("sim:1", settings, "snake", compile=compile) for compile in BACKENDS]
    expected = on_cpu(settings, "snake", env_kwargs={"compiled": False})
    assert all(difference(run, expected) <= CLOSE for run in runs)
    assert all(isinstance(run.trainer().collector, TensorCollector) for run in runs)
    for what in ("episodes", "return_mean", "return_std"):
        assert all(run.summary[what] == expected.summary[what] for run in runs)


LEARNS: dict[str, dict[str, Any]] = {
    "ppo": {"n_envs": 8, "n_steps": 64, "batch_size": 128, "gamma": 0.0},
    "pqn": {"n_envs": 8, "n_steps": 32, "batch_size": 64, "gamma": 0.0},
    "dqn": {"n_envs": 8, "batch_size": 64, "gamma": 0.0, "buffer_size": "5000", "learning_starts": 200},
}


@pytest.mark.parametrize(("algo", "device"), [(a, d) for a in LEARNS for d in ("sim:0", "sim:1")])
def test_the_known_answer_is_learned_on_the_card(algo: str, device: str) -> None:
    settings = LEARNS[algo] | {"algo": algo, "learning_rate": 3e-3, "seed": 1, "network_arch": "64,64"}
    run = agent(device, settings).learn(4_000)
    assert run.evaluate(20).return_mean >= 7.2
    answer = run.predict(np.eye(4, dtype=np.float32), deterministic=True)[0]
    assert answer.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("settings", [PPO, DQN], ids=["ppo", "dqn"])
def test_a_network_of_ones_own_ends_as_on_the_cpu(settings: dict[str, Any]) -> None:
    settings = settings | {"network": Attention}
    expected = on_cpu(settings, Gather)
    for compile in BACKENDS:
        run = trained("sim:1", settings, Gather, compile=compile)
        assert difference(run, expected) <= CLOSE
    assert backend(trained("sim:1", settings, Gather)) == "graph"


def test_an_optimizer_of_ones_own_ends_as_on_the_cpu() -> None:
    settings = PPO | {"optimizer": torch.optim.RMSprop}
    run = trained("sim:1", settings, Walk)
    assert backend(run) == "eager"
    assert difference(run, on_cpu(settings, Walk)) <= CLOSE
