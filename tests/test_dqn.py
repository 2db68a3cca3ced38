"""DQN and PQN as users run them: known answers, the train ratio, overlap, stopping and resuming."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import flatout
from flatout.algorithms.dqn.learner import DQNLearner
from flatout.config.run_config import RunConfig, resolve
from flatout.training.checkpoint import read, write
from tests.batched import MatchTensors
from tests.known import LENGTH, Match, OnlyTheMaskTells

N_STATES, GAMMA = 5, 0.9


class Chain(gym.Env[Any, Any]):
    """A chain of states: right from the last one earns 1 and terminates, left from the first stays; truncated after 30 steps."""

    observation_space = spaces.Box(0, 1, (N_STATES,))
    action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._at, self._t = 0, 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        done = bool(action == 1 and self._at == N_STATES - 1)
        self._at = min(max(self._at + (1 if action else -1), 0), N_STATES - 1)
        return self._show(), float(done), done, self._t == 30 and not done, {}

    def _show(self) -> Any:
        return np.eye(N_STATES, dtype=np.float32)[self._at]


def best_values() -> torch.Tensor:
    """Values of going left and right, by state."""
    right = [GAMMA ** (N_STATES - 1 - s) for s in range(N_STATES)]
    return torch.tensor([[GAMMA * right[max(s - 1, 0)], right[s]] for s in range(N_STATES)])


SMALL: dict[str, Any] = {
    "preset": "auto",
    "network_arch": (32,),
    "n_envs": 4,
    "n_steps": 4,
    "batch_size": 32,
    "gamma": GAMMA,
    "seed": 1,
}
DQN: dict[str, Any] = SMALL | {
    "train_ratio": 0.5,
    "learning_starts": 100,
    "buffer_size": 5000,
    "target_update_interval": 64,
    "exploration_final_eps": 0.3,
    "learning_rate": 3e-3,
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"double": False, "loss": "mse"},
        {"multi_step": 3, "exploration_final_eps": 0.1},
        {"prioritized": True},
        {"dueling": True, "tau": 0.02},
        {"executor": "process", "n_workers": 2},
    ],
    ids=lambda s: "-".join(s) or "plain",
)
def test_a_known_answer_is_learned(settings: dict[str, Any]) -> None:
    agent = flatout.DQN(Chain, **(DQN | settings), learning_rate_schedule="linear")
    agent.learn(4000)
    with torch.no_grad():
        values = agent.policy.model.policy((torch.eye(N_STATES),))
    # Over several steps exploration's own detours are in the values, so only the choice is exact.
    if "multi_step" not in settings:
        torch.testing.assert_close(values, best_values(), atol=0.05, rtol=0)
    assert values.argmax(1).tolist() == [1] * N_STATES
    assert agent.evaluate(3).length_mean == N_STATES


def test_pqn_learns_a_known_answer() -> None:
    settings = {"n_steps": 32, "n_epochs": 4, "learning_rate": 3e-3, "exploration_final_eps": 0.1}
    agent = flatout.PQN(Chain, **(SMALL | settings), q_lambda=0.5)
    agent.learn(10_000)
    with torch.no_grad():
        values = agent.policy.model.policy((torch.eye(N_STATES),))
    assert values.argmax(1).tolist() == [1] * N_STATES
    torch.testing.assert_close(values[:, 1], best_values()[:, 1], atol=0.15, rtol=0)


@pytest.mark.parametrize("agent", [flatout.DQN, flatout.PQN])
@pytest.mark.parametrize("where", ["obs", "info"])
def test_a_masked_action_is_never_taken(agent: Any, where: str) -> None:
    one = agent(partial(OnlyTheMaskTells, where), **(SMALL | {"n_steps": 16}))
    one.learn(512)
    assert one.summary["return_mean"] == LENGTH
    assert one.evaluate(5).return_mean == LENGTH


def test_images_and_batched_tensors_are_learned_from() -> None:
    images = flatout.DQN(partial(Match, "image"), **(DQN | {"gamma": 0.0}))
    images.learn(600)
    assert images.summary["updates"] == (608 - 100) // 2
    settings = DQN | {"n_envs": 64, "prioritized": True}
    batched = flatout.DQN(MatchTensors, **settings)
    batched.learn(64 * 4 * 5)
    assert batched.summary["updates"] == (64 * 4 * 5 - 100) // 2


@pytest.mark.parametrize("n_envs", [1, 3, 8])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_the_train_ratio_holds_after_every_iteration(n_envs: int, overlap: str) -> None:
    seen: list[tuple[int, int]] = []
    settings = DQN | {"n_envs": n_envs, "overlap": overlap, "executor": "serial", "train_ratio": 0.29}
    agent = flatout.DQN(Chain, **settings)
    agent.learn(800, callback=lambda p: seen.append((p.env_steps, p.updates)))
    assert len(seen) == -(-800 // (4 * n_envs))
    for env_steps, updates in seen:
        assert updates == max(env_steps - 100, 0) * 29 // 100


def params(agent: Any) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in agent.policy.model.parameters()])


@pytest.mark.parametrize("prioritized", [False, True])
def test_overlap_is_deterministic_with_a_lag_of_one(prioritized: bool) -> None:
    def learned(overlap: str) -> Any:
        settings = DQN | {"prioritized": prioritized, "exploration_spread": 2.0}
        return flatout.DQN(Chain, **settings, overlap=overlap, executor="serial").learn(1000)

    first, again, lockstep = learned("on"), learned("on"), learned("off")
    assert torch.equal(params(first), params(again))
    assert first.summary["policy_lag_max"] == 1
    assert not torch.equal(params(first), params(lockstep))
    assert first.summary["updates"] == lockstep.summary["updates"]


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("prioritized", [False, True])
def test_a_run_resumed_with_its_replay_equals_the_uninterrupted_one(
    overlap: str, prioritized: bool, tmp_path: Path
) -> None:
    settings = DQN | {
        "prioritized": prioritized,
        "overlap": overlap,
        "executor": "serial",
        "normalize_obs": True,
        "save_replay": True,
        "multi_step": 2,
        "buffer_size": 400,
    }
    whole = flatout.DQN(Chain, **settings)
    whole.learn(1600)
    half = flatout.DQN(Chain, **settings)
    half.learn(1600, callback=lambda p: p.env_steps < 800)
    half.save(tmp_path / "half.flatout")
    again = flatout.load(tmp_path / "half.flatout", Chain)
    again.learn(800)
    assert again.summary["env_steps"] == 1600
    assert again.summary["updates"] == whole.summary["updates"]
    assert torch.equal(params(again), params(whole))


def test_without_its_replay_a_run_collects_before_it_learns(tmp_path: Path) -> None:
    half = flatout.DQN(Chain, **DQN)
    half.learn(800)
    half.save(tmp_path / "half.flatout")
    assert not (tmp_path / "half.replay").exists()
    again = flatout.load(tmp_path / "half.flatout", Chain)
    again.learn(400)
    assert again.summary["updates"] == (800 - 100) // 2 + (400 - 100) // 2


def test_a_replay_of_another_checkpoint_is_not_used(tmp_path: Path) -> None:
    agent = flatout.DQN(Chain, **DQN, save_replay=True)
    agent.learn(200)
    agent.save(tmp_path / "a.flatout")
    agent.learn(200)
    agent.save(tmp_path / "b.flatout")
    (tmp_path / "b.replay").rename(tmp_path / "a.replay")
    again = flatout.load(tmp_path / "a.flatout", Chain)
    again.learn(96)
    assert again.summary["updates"] == 54  # as before: it collects first


def test_checkpoints_without_replay_have_no_second_file(tmp_path: Path) -> None:
    agent = flatout.DQN(Chain, **DQN, save_replay=True)
    agent.learn(200)
    agent.save(tmp_path / "a.flatout")
    checkpoint = read(tmp_path / "a.flatout")
    assert checkpoint.replay is not None
    write(tmp_path / "copy.flatout", checkpoint)
    assert (tmp_path / "copy.replay").exists()


def test_a_buffer_that_does_not_fit_is_refused_with_the_size_that_does() -> None:
    agent = flatout.DQN(Chain, **(DQN | {"buffer_size": "900TB"}))
    with pytest.raises(flatout.FlatoutError, match="use at most"):
        agent.learn(100)
    with pytest.raises(flatout.FlatoutError, match="neither a number of transitions"):
        flatout.DQN(Chain, **(DQN | {"buffer_size": "many"})).learn(100)


def test_learning_can_start_as_soon_as_n_step_returns_exist() -> None:
    """An earlier start is refused."""
    settings = DQN | {"n_envs": 2, "n_steps": 2, "multi_step": 5}
    with pytest.raises(flatout.FlatoutError, match=r"--learning-starts 0 comes before .* use at least 8"):
        flatout.DQN(Chain, **(settings | {"learning_starts": 0}))
    agent = flatout.DQN(Chain, **(settings | {"learning_starts": 8}))
    agent.learn(40)
    assert agent.summary["updates"] == 16


def test_settings_of_another_algorithm_are_refused() -> None:
    with pytest.raises(
        flatout.FlatoutError, match="--clip-range is a setting of PPO and RECURRENT-PPO, not of DQN"
    ):
        resolve("CartPole-v1", {"algo": "dqn", "clip_range": 0.1}, device="cpu", n_cores=2)
    with pytest.raises(flatout.FlatoutError, match="--tau is a setting of DQN and SAC, not of PPO"):
        resolve("CartPole-v1", {"tau": 0.1}, device="cpu", n_cores=2)
    with pytest.raises(flatout.FlatoutError, match="--preset heavy has no settings for DQN"):
        resolve("CartPole-v1", {"algo": "dqn", "preset": "heavy"}, device="cpu", n_cores=2)
    with pytest.raises(flatout.FlatoutError, match="this is PPO; use flatout"):
        flatout.PPO("CartPole-v1", algo="dqn")


@pytest.mark.parametrize("algo", ["ppo", "dqn", "pqn"])
def test_configs_survive_json(algo: str) -> None:
    config = resolve("CartPole-v1", {"algo": algo, "gamma": 0.5}, device="cpu", n_cores=2)
    data = config.to_json()
    assert data[algo]["gamma"] == 0.5
    assert RunConfig.from_json(data, "test") == config
    others = {"ppo", "dqn", "pqn"} - {algo}
    assert not others & data.keys()
    with pytest.raises(flatout.FlatoutError, match="but its algo is"):
        RunConfig.from_json(data | {others.pop(): {}}, "test")


def test_presets_have_the_documented_values() -> None:
    for preset, batch, buffer, arch in (
        ("cpu", 32, 10_000, (128, 128)),
        ("gpu", 128, 50_000, (256, 256, 256)),
    ):
        config = resolve("X-v0", {"algo": "dqn", "preset": preset}, device="cpu", n_cores=2)
        it: Any = config.algorithm
        assert (it.batch_size, it.buffer_size, config.network.network_arch) == (batch, buffer, arch)


def test_out_of_memory_splits_the_batch_and_keeps_the_train_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update runs in micro-batches; the train ratio stays exact."""
    settings = DQN | {"dueling": True}
    agent = flatout.DQN(Chain, **settings)
    learner = agent.trainer().learner
    assert isinstance(learner, DQNLearner)
    loss = learner.update._loss

    def tight(batch: Any, coefficient: Any) -> Any:
        if len(batch) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return loss(batch, coefficient)

    monkeypatch.setattr(learner.update, "_loss", tight)
    agent.learn(320)
    assert agent.summary["oom_backoffs"] == 1
    assert agent.summary["updates"] == 110
