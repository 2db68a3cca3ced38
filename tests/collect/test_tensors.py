"""Envs as tensors: the collector's rollout against one collected step by step, its statistics, and learning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from flatout.algorithms.ppo.config import PPOConfig
from flatout.algorithms.ppo.learner import PPOLearner
from flatout.buffers.rollout import Rollout, Staging, TensorRollout
from flatout.collect.ragged import Interrupted
from flatout.collect.tensors import DeviceNoise, TensorActions, TensorCollector, episode_sums
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.errors import EnvError
from flatout.executors.tensors import TensorExecutor
from flatout.models.config import NetworkConfig
from flatout.models.policy import ActorCritic, build
from flatout.timing import PhaseClock
from tests.known import action_space

CPU = torch.device("cpu")
LENGTH = 8
CHOICES = 4


class Targets:  # arrays in the order of the Dict space: count, target
    """N games at once: each shows a target, and the action that matches it earns 1. Reuses its observation buffer.

    Env i's episodes have LENGTH + i % 3 steps; those of every other env are truncated.
    """

    single_observation_space = spaces.Dict(
        {"target": spaces.Box(0, 1, (CHOICES,)), "count": spaces.Discrete(2 * LENGTH)}
    )
    single_action_space = spaces.Discrete(CHOICES)

    def __init__(self, n_envs: int, device: torch.device = CPU) -> None:
        self.num_envs, self.device = n_envs, device
        self._generator = torch.Generator(device) if device.type != "meta" else None
        index = torch.arange(n_envs, device=device)
        self._lengths, self._truncates = LENGTH + index % 3, index % 2 == 1
        self._shown = torch.zeros(n_envs, CHOICES, device=device)

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None and self._generator is not None:
            self._generator.manual_seed(seed)
        self._count = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._draw()
        return self._obs(), {}

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        reward = (actions == self._target).float()
        self._count += 1
        ended = self._count == self._lengths
        self._draw()
        final = {key: value.clone() for key, value in self._obs().items()}
        self._count.masked_fill_(ended, 0)
        self._draw()
        return self._obs(), reward, ended & ~self._truncates, ended & self._truncates, {"final_obs": final}

    def _draw(self) -> None:
        self._target = torch.randint(CHOICES, (self.num_envs,), generator=self._generator, device=self.device)

    def _obs(self) -> dict[str, Tensor]:
        self._shown.zero_().scatter_(1, self._target[:, None], 1.0)
        return {"target": self._shown, "count": self._count}


OBS, ACTION = ObsLayout(Targets.single_observation_space), ActionLayout(Targets.single_action_space)


def model(**settings: Any) -> ActorCritic:
    return build(OBS, ACTION, NetworkConfig(network_arch=(32,)), seed=1, **settings)


def collector(n_envs: int, policy: ActorCritic, envs: Targets | None = None) -> TensorCollector:
    executor = TensorExecutor(envs or Targets(n_envs), OBS, np.arange(n_envs), seed=3)
    out = TensorCollector(executor, policy, seed=7, clock=PhaseClock())
    out.reset()
    return out


@pytest.mark.parametrize("kernel_rows", [0, 512], ids=["torch", "kernel"])
def test_a_rollout_equals_one_collected_step_by_step(
    kernel_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rollouts of 13 steps, repeated step by step with another copy of the envs."""
    monkeypatch.setattr("flatout.collect.tensors.KERNEL_ROWS", kernel_rows)
    policy = model()
    collected = collector(5, policy)
    reference = TensorExecutor(Targets(5), OBS, np.arange(5), seed=3)
    now = reference.reset()
    noise = DeviceNoise(ACTION, 5, 7, CPU)
    rollout = TensorRollout(OBS, ACTION, 13, 5, CPU)
    for first in (0, 13):
        collected.collect(rollout)
        drawn = noise.draw(first, 13)
        for t in range(13):
            for leaf, obs in zip(rollout.obs, now.obs, strict=True):
                assert torch.equal(leaf[t], obs)
            with torch.no_grad():
                rows, log_prob = policy.sample(now.obs, drawn[t])
            assert torch.equal(rollout.action[t], rows)
            torch.testing.assert_close(rollout.log_prob[t], log_prob)
            now = reference.step(rows[:, 0])
            assert torch.equal(rollout.reward[t], now.reward)
            assert torch.equal(rollout.terminated[t], now.terminated)
            assert torch.equal(rollout.truncated[t], now.truncated)
            for leaf, final in zip(rollout.final_obs, now.final_obs, strict=True):
                assert torch.equal(leaf[t][now.truncated], final[now.truncated])
        for leaf, obs in zip(rollout.obs, now.obs, strict=True):
            assert torch.equal(leaf[13], obs)
    assert collected.n_steps == 26


def test_ended_episodes_are_counted_over_rollout_borders() -> None:
    policy = model()
    collected = collector(5, policy)
    rollout = TensorRollout(OBS, ACTION, 7, 5, CPU)
    episodes, rewards = [], []
    for _ in range(12):  # 84 steps: an episode of 8 steps ends with a rollout, after 56
        episodes += collected.collect(rollout)
        rewards.append(rollout.reward.clone())
    reward = torch.cat(rewards)
    for i in range(5):
        length = LENGTH + i % 3
        mine = [e for e in episodes if e.env_id == i]
        assert [e.length for e in mine] == [length] * (84 // length)
        expected = reward[: len(mine) * length, i].view(-1, length).sum(1)
        assert [e.total_reward for e in mine] == expected.tolist()


def test_episode_sums_continue_from_the_previous_rollout() -> None:
    reward = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    ended = torch.tensor([[False], [True], [True], [False]])
    returns, lengths = episode_sums(
        reward, ended, torch.tensor([100.0], dtype=torch.float64), torch.tensor([9])
    )
    assert returns[:, 0].tolist() == [101.0, 103.0, 4.0, 8.0]
    assert lengths[:, 0].tolist() == [10, 11, 1, 1]


def test_tensor_and_array_rollouts_give_identical_parameters() -> None:
    """The same transitions as tensors and as arrays: identical parameters after learning from them."""
    results = []
    for on_tensors in (True, False):
        policy = model(normalize_obs=True)
        config = PPOConfig(n_steps=24, batch_size=60, n_epochs=2, normalize_obs=True, normalize_reward=True)
        learner = PPOLearner(policy, config, n_envs=5, seed=0, clock=PhaseClock())
        tensors = TensorRollout(OBS, ACTION, 24, 5, CPU)
        collector(5, policy).collect(tensors)
        assert tensors.tensors(Staging(CPU)).final_index.numel() > 0
        arrays = Rollout.alloc(OBS, ACTION, 24, 5)
        for name in ("action", "log_prob", "reward", "terminated", "truncated"):
            getattr(arrays, name)[:] = getattr(tensors, name).numpy()
        for name in ("obs", "final_obs"):
            for array, tensor in zip(getattr(arrays, name), getattr(tensors, name), strict=True):
                array[:] = tensor.numpy()
        learner.learn(tensors if on_tensors else arrays, iteration=0, progress=0.0)
        results.append(learner.params.flat.clone())
    assert torch.equal(*results)


def test_a_batched_game_is_learned() -> None:
    policy = model()
    config = PPOConfig(n_steps=16, batch_size=256, n_epochs=4, learning_rate=3e-3, gamma=0.0)
    learner = PPOLearner(policy, config, n_envs=64, seed=0, clock=PhaseClock())
    collected = collector(64, policy)
    rollout = TensorRollout(OBS, ACTION, 16, 64, CPU)
    first: list[float] = []
    for k in range(40):
        episodes = collected.collect(rollout)
        first = first or [e.total_reward / e.length for e in episodes]
        learner.learn(rollout, iteration=k, progress=0.0)
    assert np.mean(first) < 0.4
    assert np.mean([e.total_reward / e.length for e in episodes]) >= 0.9


class ZeroNoise:
    """`meta` has no random generator."""

    def __init__(self, layout: ActionLayout, n_envs: int, seed: int, device: torch.device, _: object) -> None:
        self._shape = (n_envs, layout.noise_size)

    def draw(self, first_step: int, n_steps: int) -> Tensor:
        return torch.zeros(n_steps, *self._shape, device="meta")


def test_the_acting_path_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On `meta` a host sync raises; all of a rollout but the reading of its episodes runs there."""
    monkeypatch.setattr("flatout.collect.tensors.DeviceNoise", ZeroNoise)
    read: list[TensorRollout] = []
    monkeypatch.setattr(TensorCollector, "_read_episodes", lambda self, rollout: read.append(rollout))
    meta = torch.device("meta")
    collected = collector(5, model().to(meta), Targets(5, meta))
    rollout = TensorRollout(OBS, ACTION, 6, 5, meta)
    collected.collect(rollout)
    assert read == [rollout]
    with pytest.raises((RuntimeError, NotImplementedError)):
        rollout.reward.sum().item()


@pytest.mark.parametrize(
    "kind", ["discrete", "discrete_from_3", "multidiscrete", "multibinary", "box", "box_unbounded"]
)
def test_actions_on_the_device_equal_those_on_the_host(kind: str) -> None:
    layout = ActionLayout(action_space(kind))
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(50, layout.size)).astype(np.float32) * 2
    if not layout.continuous:
        rows = np.stack([rng.integers(n, size=50) for n in layout.nvec], 1)
    expected = layout.to_env(rows)
    got = TensorActions(layout, CPU).to_env(torch.from_numpy(rows)).numpy()
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize(("space", "mean", "std"), [("discrete", 0.5772, 1.2825), ("box", 0.0, 1.0)])
def test_noise_is_gumbel_or_normal_and_new_in_each_rollout(space: str, mean: float, std: float) -> None:
    layout = ActionLayout(action_space(space))
    noise = DeviceNoise(layout, 100, 5, CPU)
    drawn = noise.draw(0, 500)
    assert drawn.shape == (500, 100, layout.noise_size)
    assert drawn.mean().item() == pytest.approx(mean, abs=0.02)
    assert drawn.std().item() == pytest.approx(std, abs=0.02)
    later = noise.draw(500, 500)
    assert not torch.equal(drawn, later)
    assert torch.equal(drawn, noise.draw(0, 500))
    assert abs(torch.corrcoef(torch.stack([drawn.flatten(), later.flatten()]))[0, 1].item()) < 0.02


class Broken(Targets):
    """Does one thing wrong at its third step."""

    def __init__(self, fault: str) -> None:
        super().__init__(5)
        self._fault, self._t = fault, 0

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(actions)
        self._t += 1
        if self._t == 3 and self._fault == "raise":
            raise ValueError("no more")
        if self._t == 3 and self._fault == "shape":
            reward = reward[:, None]
        if self._t == 3 and self._fault == "nan reward":
            reward[2] = torch.nan
        if self._t == 3 and self._fault == "nan obs":
            obs["target"][4, 1] = torch.inf
        if self._fault == "nan final":
            info["final_obs"]["target"][truncated] = torch.nan
        if self._fault == "no final":
            info = {}
        return obs, reward, terminated, truncated, info


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "the batched env raised in step at step 3: ValueError: no more"),
        ("shape", "the batched env's reward has shape \\(5, 1\\) at step 3; its 5 envs make \\(5,\\)"),
        ("nan reward", "env 2 gave a NaN reward at step 3"),
        ("nan obs", "env 4 gave a NaN observation at step 3"),
        ("nan final", "env 3 gave a NaN observation at step 8"),
        ("no final", "gives no info\\['final_obs'\\]"),
    ],
)
def test_a_fault_is_one_line(fault: str, message: str) -> None:
    collected = collector(5, model(), Broken(fault))
    with pytest.raises(EnvError, match=message):
        collected.collect(TensorRollout(OBS, ACTION, 10, 5, CPU))


def test_a_stop_request_ends_the_rollout() -> None:
    collected = collector(5, model())
    with pytest.raises(Interrupted):
        collected.collect(TensorRollout(OBS, ACTION, 10, 5, CPU), stop=lambda: True)
    assert collected.n_steps == 0


def test_a_restored_collector_begins_other_episodes() -> None:
    collected = collector(5, model())
    rollout = TensorRollout(OBS, ACTION, 3, 5, CPU)
    collected.collect(rollout)
    started = rollout.obs[1][0].clone()
    snapshot = collected.snapshot()
    resumed = collector(5, model())
    assert resumed.restore(snapshot) == list(range(5))
    resumed.collect(rollout)
    assert rollout.obs[0][0].tolist() == [0] * 5
    assert not torch.equal(rollout.obs[1][0], started)
