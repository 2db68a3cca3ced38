"""What any card must do: the same tests on a real one (`make test-gpu`) and on the simulated one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flatout
from flatout.device.accelerator import accelerators, no_compiler
from tests.known import Match

REAL = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)
SIMULATED = pytest.param("sim", marks=pytest.mark.card)
ROLLOUTS: dict[str, Any] = {
    "n_envs": 4,
    "n_steps": 32,
    "batch_size": 32,
    "n_epochs": 4,
    "network_arch": (32, 32),
}
KNOWN: dict[str, dict[str, Any]] = {
    "ppo": {"n_envs": 8, "n_steps": 64, "batch_size": 128, "learning_rate": 3e-3},
    "pqn": {"n_envs": 8, "n_steps": 32, "batch_size": 64, "learning_rate": 3e-3},
    "dqn": {"n_envs": 8, "n_steps": 8, "batch_size": 64, "learning_starts": 256, "learning_rate": 2e-3},
}


@pytest.fixture
def there(device: str) -> str:
    """The device, installed if it is the simulated one."""
    if device == "sim":
        import simcard

        simcard.install()
    return device


def flat(agent: flatout.Agent) -> torch.Tensor:
    return agent.trainer().learner.params.flat.detach().cpu()


@pytest.mark.parametrize("device", [REAL, SIMULATED])
@pytest.mark.parametrize("algo", ["ppo", "pqn"])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_updates_on_a_card_are_those_of_the_cpu(there: str, algo: str, overlap: str) -> None:
    """Twenty updates, as a graph and in parts; overlap stages rollouts while others are learned from."""
    how: dict[str, Any] = {"algo": algo, "seed": 3, "executor": "serial", "overlap": overlap}
    plain = flatout.Agent(Match, device="cpu", compile="off", **how, **ROLLOUTS).learn(640)
    whole = flatout.Agent(Match, device=there, precision="fp32", **how, **ROLLOUTS).learn(640)
    parts = flatout.Agent(Match, device=there, precision="fp32", accumulate=3, **how, **ROLLOUTS).learn(640)
    for agent in (whole, parts):
        assert agent.summary["backend"] == "graph"
        torch.testing.assert_close(flat(agent), flat(plain), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("device", [REAL, SIMULATED])
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_compiled_update_inside_the_graph_is_that_of_the_cpu(there: str, algo: str) -> None:
    """Where there is no compiler for the card, the run says so and goes on."""
    settings = ROLLOUTS if algo == "ppo" else {"n_envs": 4, "n_steps": 8, "learning_starts": 64}
    how: dict[str, Any] = settings | {"algo": algo, "seed": 3, "executor": "serial", "overlap": "off"}
    plain = flatout.Agent(Match, device="cpu", compile="off", **how).learn(640)
    agent = flatout.Agent(Match, device=there, precision="fp32", compile="on", **how)
    missing = no_compiler(agent.policy.device)
    note = next(note for note in agent.trainer().notes if "captured as a graph" in note)
    assert missing in note if missing else "is compiled" in note
    agent.learn(640)
    assert agent.summary["backend"] == "graph"
    if algo == "ppo":
        torch.testing.assert_close(flat(agent), flat(plain), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("device", [REAL, SIMULATED])
@pytest.mark.parametrize("algo", KNOWN)
def test_a_card_learns_the_known_answer(there: str, algo: str) -> None:
    agent = flatout.Agent(
        Match, algo=algo, device=there, seed=1, gamma=0.0, network_arch=(32, 32), **KNOWN[algo]
    )
    agent.learn(8_000)
    assert agent.evaluate(20).return_mean >= 7.0


@pytest.mark.parametrize("device", [REAL, SIMULATED])
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_games_on_the_last_card_are_captured(there: str, algo: str) -> None:
    """Snake acts, steps and learns on the last device of the machine."""
    last = f"{there}:{len(accelerators()) - 1}"
    settings: dict[str, Any] = {"learning_starts": 128} if algo == "dqn" else {}
    agent = flatout.Agent("snake", algo=algo, device=last, n_envs=32, n_steps=4, batch_size=32, **settings)
    agent.learn(10 * 128)
    assert agent.summary["device"] == last
    assert agent.summary["backend"] == "graph"
    assert agent.env_info().device == last
