"""Settings on the simulated card: accumulation, batch sizes by memory, the device of batched envs, doctor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flatout
import simcard
from flatout.advice.doctor import _on_cpu
from flatout.advice.short_benchmark import measure
from flatout.device.accelerator import free_device_memory, release_memory
from flatout.learning.learner import Learner
from flatout.perf.findings import diagnose
from tests.known import Match

pytestmark = pytest.mark.card

SETTINGS: dict[str, Any] = {"n_envs": 4, "executor": "serial", "overlap": "off", "seed": 3}
ROLLOUTS = SETTINGS | {"n_steps": 32, "batch_size": 32, "n_epochs": 2}
REPLAY = SETTINGS | {"n_steps": 8, "batch_size": 32, "learning_starts": 64}


@pytest.fixture(autouse=True)
def card() -> None:
    simcard.install()


def learned(algo: str, device: str, accumulate: int) -> tuple[torch.Tensor, Learner[Any]]:
    settings = REPLAY if algo == "dqn" else ROLLOUTS
    agent = flatout.Agent(Match, algo=algo, device=device, accumulate=accumulate, **settings)
    agent.learn(512)
    learner = agent.trainer().learner
    agent.close()
    return learner.params.flat.detach().cpu(), learner


@pytest.mark.parametrize("algo", ["ppo", "dqn", "pqn"])
def test_accumulated_gradients_on_the_card_equal_those_of_whole_minibatches(algo: str) -> None:
    whole, _ = learned(algo, "sim", 1)
    in_parts, learner = learned(algo, "sim:1", 5)
    assert learner.update.parts.n_rows == 7
    assert learner.update.backend == "graph"
    torch.testing.assert_close(in_parts, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("gigabytes", "size"), [(4, 64), (12, 128), (24, 512), (40, 1024)])
def test_the_batch_of_dqn_follows_the_memory_of_the_card(gigabytes: int, size: int) -> None:
    """The network is so small that a larger batch takes hardly longer."""
    simcard.mode("timed")
    simcard.set_memory_limit(gigabytes * 10**9, device=1)
    agent = flatout.DQN(Match, device="sim:1", batch_size="auto")
    assert agent.config.algorithm.batch_size == size
    assert f"updates of {size} per iteration" in agent.header()[1]
    assert agent.config.to_json()["dqn"]["batch_size"] == size


def test_the_batch_of_dqn_grows_for_as_long_as_it_learns_from_more_samples_a_second() -> None:
    """No batch is known for this card, so it is measured: where arithmetic is the limit, a larger one gains little."""
    simcard.mode("timed")
    simcard.set_memory_limit(96 * 10**9, device=1)
    sizes = [
        flatout.DQN(Match, device="sim:1", batch_size="auto", network_arch=net).config.algorithm.batch_size
        for net in ((32, 32), (4096, 4096, 4096))
    ]
    assert sizes == [2048, 1024]


def test_on_the_cpu_it_is_the_default_of_the_preset_or_recipe() -> None:
    auto: dict[str, Any] = {"device": "cpu", "batch_size": "auto"}
    assert flatout.DQN("Acrobot-v1", **auto).config.algorithm.batch_size == 128
    assert flatout.DQN("Acrobot-v1", "cpu", **auto).config.algorithm.batch_size == 32
    assert flatout.PPO(Match, n_envs=4, n_steps=128, **auto).config.algorithm.batch_size == 256
    assert flatout.PPO(Match, n_envs=16, n_steps=256, batch_size="auto").config.algorithm.batch_size == 2048


@pytest.mark.parametrize(
    ("algo", "device", "there"),
    [
        ("ppo", "cpu", "cpu"),
        ("pqn", "sim", "sim:0"),
        ("ppo", "sim:1", "sim:1"),
        ("dqn", "sim:1", "sim:1"),
        ("dqn", "auto", "sim:0"),
    ],
)
def test_games_are_made_on_the_device_of_the_run(algo: str, device: str, there: str) -> None:
    settings: dict[str, Any] = {"n_steps": 4, "batch_size": 32} | (
        {"learning_starts": 32} if algo == "dqn" else {}
    )
    agent = flatout.Agent("snake", algo=algo, device=device, n_envs=16, seed=1, **settings)
    agent.learn(3 * 64)
    assert agent.env_info().device == there
    assert agent.summary["device"] == there
    assert {str(p.device) for p in agent.policy.model.parameters()} == {there}
    assert agent.evaluate(2, max_steps=20).returns
    agent.close()


def test_two_agents_on_two_devices_take_turns() -> None:
    agents = [flatout.PPO(Match, device=device, **ROLLOUTS) for device in ("sim:1", "sim")]
    for _ in range(2):
        for agent in agents:
            agent.learn(256)
    first, second = (agent.trainer().learner.params.flat.detach().cpu() for agent in agents)
    torch.testing.assert_close(first, second)


def test_the_doctor_measures_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.advice.doctor.BENCHMARK_SECONDS", 0.5)
    monkeypatch.setattr("flatout.advice.short_benchmark.ENV_SECONDS", 0.5)
    simcard.reset()
    settings = ROLLOUTS | {"n_epochs": 20}
    found = flatout.doctor(Match, device="sim:1", network_arch=(16, 16), what_if="n_epochs=1", **settings)
    assert found.device == "sim:1"
    assert found.settings.on_device
    assert 0 < found.learner_busy < 1
    assert simcard.counters(1).sync_kinds
    assert simcard.counters(0).launches == 0
    assert "memory near the limit" not in {finding.kind for finding in found.findings}
    assert found.what_if is not None
    assert found.what_if["learn_rate"] > 4 * found.forecast.learn_rate


def test_a_card_that_is_slower_than_the_cpu_is_found_by_measuring() -> None:
    """The card computes by the CPU's own kernels, one after the other, so the CPU's fused update is faster."""
    agent = flatout.PPO(Match, device="sim:1", network_arch=(16, 16), **(ROLLOUTS | {"n_epochs": 20}))
    case = replace(measure(agent, 0.5), on_cpu=_on_cpu(agent))
    agent.close()
    assert case.settings.compiled
    assert case.costs.compiled is not None
    assert case.phases["update"] <= 1
    case = replace(
        case, settings=replace(case.settings, extra_seconds=0.0)
    )  # writing records is most of 0.5 s
    kinds = {finding.kind: finding for finding in diagnose(case)}
    assert kinds["GPU slower than CPU"].flags == ("--device", "cpu")


def test_the_doctor_knows_the_memory_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.advice.doctor.BENCHMARK_SECONDS", 0.5)
    monkeypatch.setattr("flatout.advice.short_benchmark.ENV_SECONDS", 0.5)
    simcard.set_memory_limit(1 << 30, device=1)
    there = torch.device("sim", 1)
    release_memory(there)
    # By another user of the card: all but 64 MiB.
    kept = torch.empty(free_device_memory(there) - (64 << 20), dtype=torch.uint8, device=there)
    found = flatout.doctor(Match, device="sim:1", network_arch=(16, 16), **ROLLOUTS)
    del kept
    simcard.install()
    (finding,) = [f for f in found.findings if f.kind == "memory near the limit"]
    assert finding.flags == ("--accumulate", "2")
