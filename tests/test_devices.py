"""Other devices: on `meta` a host sync or a device mix-up raises; `cuda` runs where there is a GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import flatout
from flatout.algorithms.ppo import loss as ppo
from flatout.algorithms.ppo.config import PPOConfig
from flatout.algorithms.ppo.learner import PPOLearner
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.learning.rollouts import Transitions
from flatout.learning.update import GraphBackend, Update
from flatout.models.config import NetworkConfig
from flatout.models.params import FlatParams
from flatout.models.policy import build
from flatout.timing import PhaseClock
from tests.known import Match

META = torch.device("meta")
N_STEPS, N_ENVS = 4, 8


@pytest.mark.parametrize(
    "action_space",
    [spaces.Discrete(3), spaces.MultiDiscrete([2, 5]), spaces.Box(-1, 1, (2,)), spaces.MultiBinary(3)],
)
def test_acting_and_the_update_never_wait_for_the_device(action_space: gym.Space[object]) -> None:
    obs_layout, action = ObsLayout(spaces.Box(-1, 1, (5,))), ActionLayout(action_space)
    model = build(obs_layout, action, NetworkConfig(squash=True), seed=0, normalize_obs=True).to(META)
    config = PPOConfig(target_kl=0.01, clip_range_vf=0.2)

    obs = (torch.zeros(N_STEPS, N_ENVS, 5, device=META),)
    rows, log_prob = model.sample((obs[0][0],), torch.zeros(N_ENVS, action.noise_size, device=META))
    assert rows.shape == (N_ENVS, action.size)
    flags = torch.zeros(N_STEPS, N_ENVS, dtype=torch.bool, device=META)
    data = Transitions(
        obs_tn=obs,
        action_tn=rows.expand(N_STEPS, -1, -1),
        log_prob_tn=log_prob.expand(N_STEPS, -1),
        reward_tn=torch.zeros(N_STEPS, N_ENVS, device=META),
        terminated_tn=flags,
        truncated_tn=flags,
        last_obs_n=(obs[0][0],),
        final_obs=(torch.zeros(2, 5, device=META),),
        final_index=torch.zeros(2, dtype=torch.int64, device=META),
    )
    batch = ppo.advantages(model.value, data, config)
    update: Update[ppo.PPOMinibatch] = Update(
        model,
        FlatParams(model),
        lambda batch, clip_range: ppo.loss(model, batch, clip_range, config),
        len(ppo.METRICS),
        max_grad_norm=0.5,
        batch_size=N_STEPS * N_ENVS,
        prepare=partial(ppo.prepare, config=config),
        kl_index=ppo.KL,
        kl_limit=0.015,
    )
    update.begin(1e-3)
    update.step(batch)
    assert update.metrics.device == META


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_learns_the_known_answer(tmp_path: Path) -> None:
    settings = {"n_envs": 8, "n_steps": 64, "batch_size": 128, "learning_rate": 3e-3, "gamma": 0.0}
    agent = flatout.PPO(Match, seed=1, device="cuda", **settings).learn(20_000)  # type: ignore[arg-type]
    assert agent.evaluate(20).return_mean >= 7.2
    agent.save(tmp_path / "a.flatout")
    obs = np.eye(4, dtype=np.float32)
    assert flatout.load(tmp_path / "a.flatout").predict(obs, deterministic=True)[0].tolist() == [0, 1, 2, 3]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_learns_like_the_update_and_sees_new_weights() -> None:
    device = torch.device("cuda")
    obs_layout, action = ObsLayout(spaces.Box(-1, 1, (5,))), ActionLayout(spaces.Discrete(3))
    learners = []
    for _ in range(2):
        model = build(obs_layout, action, NetworkConfig(), seed=0).to(device)
        learners.append(PPOLearner(model, PPOConfig(batch_size=32), n_envs=4, seed=0, clock=PhaseClock()))
    plain, captured = learners
    batch = plain.example_batch(32)
    for learner in learners:
        learner.update.begin(1e-3, 0.2)
    graph = GraphBackend(captured.update, lambda: batch, batch)
    for i in range(5):
        plain.update.step(batch)
        graph.replay()
        torch.testing.assert_close(captured.params.flat, plain.params.flat)
        if i == 2:  # what others change in place is seen by the next replay
            for learner in learners:
                learner.params.flat.mul_(0.9)
    assert captured.update.n_taken == 5


def test_nothing_in_the_hot_paths_waits_for_the_device() -> None:
    """Nothing in the update and the acting path reads a value back to the host."""
    root = Path(flatout.__file__).parent
    files = ["learning/update.py", "learning/rollouts.py", "algorithms/ppo/loss.py", "algorithms/dqn/loss.py"]
    files += ["algorithms/pqn/loss.py", "models/heads.py", "models/policy.py"]
    for name in files:
        text = (root / name).read_text()
        for call in (".item()", ".cpu()", ".numpy()", ".tolist()", "synchronize()"):
            assert call not in text, f"{name} calls {call}"
