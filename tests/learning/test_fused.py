"""PPO's fused update equals the eager one with autograd."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flatout.algorithms.ppo import loss as ppo
from flatout.algorithms.ppo.config import PPOConfig
from flatout.algorithms.ppo.fused import FusedPPO, can_fuse
from flatout.algorithms.ppo.learner import PPOLearner
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.models.config import NetworkConfig
from flatout.models.policy import build
from flatout.timing import PhaseClock

N = 24
PLAIN = spaces.Box(-1, 1, (3,))
SEVERAL = spaces.Dict({"kind": spaces.Discrete(5), "place": spaces.Box(-1, 1, (2, 2))})
CHOICES = spaces.MultiDiscrete([3, 2, 4])


def masked(n_logits: int) -> spaces.Space[Any]:
    return spaces.Dict({"action_mask": spaces.MultiBinary(n_logits), "x": spaces.Box(-1, 1, (3,))})


def learner(
    obs: spaces.Space[Any], action: spaces.Space[Any], config: PPOConfig, **network: Any
) -> PPOLearner:
    layouts = ObsLayout(obs), ActionLayout(action)
    network = {"network_arch": (32, 20)} | network
    model = build(*layouts, NetworkConfig(**network), 3, normalize_obs=True)
    it = PPOLearner(model, config, n_envs=1, seed=0, clock=PhaseClock())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # as after some learning: outputs that differ, observations that are normalised
        it.params.flat.add_(torch.randn(len(it.params.flat), generator=generator) * 0.2)
        for i in model.vector_indices:
            model.get_buffer(f"obs_mean_{i}").fill_(0.3)
            model.get_buffer(f"obs_scale_{i}").fill_(1.7)
    return it


def random_batch(it: PPOLearner, n_rows: int = N) -> ppo.PPOMinibatch:
    rng, model = np.random.default_rng(7), it.model
    batch = it.example_batch(n_rows)
    arrays = list(batch.obs)
    for i, leaf in enumerate(model.obs.specs):
        if leaf.kind == "vector":
            arrays[i] = torch.from_numpy(rng.normal(size=arrays[i].shape).astype(np.float32))
        elif leaf.kind == "discrete":
            arrays[i] = torch.from_numpy(rng.integers(5, size=arrays[i].shape))
        elif leaf.kind == "mask":
            arrays[i] = torch.from_numpy(rng.random(arrays[i].shape) < 0.6)
            starts = np.cumsum([0, *model.action.nvec[:-1]])
            arrays[i][:, starts] = True
    obs = tuple(arrays)
    with torch.no_grad():
        noise = torch.from_numpy(rng.gumbel(size=(n_rows, model.action.noise_size)).astype(np.float32))
        action, log_prob = model.sample(obs, noise)
        value = model.value(obs)
    spread = [torch.from_numpy(rng.normal(size=n_rows).astype(np.float32)) for _ in range(4)]
    return ppo.PPOMinibatch(
        obs, action, log_prob + 0.4 * spread[0], spread[1], value + spread[2], value + 0.5 * spread[3]
    )


def both_ways(it: PPOLearner, batch: ppo.PPOMinibatch) -> tuple[FusedPPO, torch.Tensor]:
    """The fused backend after it computed the gradient, which must be autograd's; and the loss's metrics."""
    fused = it.make_fused()
    assert fused is not None
    it.update.begin(3e-4, 0.2)
    total, metrics = ppo.loss(it.model, ppo.prepare(batch, it.config), it.update.coefficient, it.config)
    want = it.params.flatten(torch.autograd.grad(total, it.params.tensors))
    fused.differentiate(batch)
    torch.testing.assert_close(fused.gradient, want, rtol=1e-3, atol=2e-6)
    return fused, metrics


CASES = {
    "plain": (PLAIN, spaces.Discrete(4)),
    "masked": (masked(4), spaces.Discrete(4)),
    "groups": (PLAIN, CHOICES),
    "masked groups": (masked(9), CHOICES),
    "many choices": (PLAIN, spaces.Discrete(40)),
    "wide": (spaces.Box(-1, 1, (40,)), spaces.Discrete(2)),
    "continuous": (PLAIN, spaces.Box(-1, 1, (2,))),
    "several arrays": (SEVERAL, spaces.Discrete(3)),
}


@pytest.mark.parametrize("n_inputs", [3, 40])
@pytest.mark.parametrize("n_choices", [4, 40])
@pytest.mark.parametrize("widths", [(32,), (32, 20, 24), (32, 20, 24, 16)])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_gradient_equals_autograds_at_any_depth(
    n_inputs: int, n_choices: int, widths: tuple[int, ...], activation: str
) -> None:
    config = PPOConfig(batch_size=N, n_steps=N)
    spaces_ = spaces.Box(-1, 1, (n_inputs,)), spaces.Discrete(n_choices)
    it = learner(*spaces_, config, network_arch=widths, activation=activation)
    both_ways(it, random_batch(it))


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("clip_range_vf", [None, 0.4])
def test_the_gradient_equals_autograds(
    activation: str, case: str, normalizes: bool, clip_range_vf: float | None
) -> None:
    config = PPOConfig(
        batch_size=N,
        n_steps=N,
        ent_coef=0.03,
        normalize_advantage=normalizes,
        clip_range_vf=clip_range_vf,
    )
    it = learner(*CASES[case], config, activation=activation)
    batch = random_batch(it)
    fused, metrics = both_ways(it, batch)
    torch.testing.assert_close(torch.from_numpy(fused.means), metrics, rtol=1e-4, atol=1e-6)
    assert 0 < metrics[-1] < 1  # some were clipped, some were not
    then = ppo.log_ratio(it.model, batch.obs, batch.action, batch.log_prob)
    now = fused.log_prob(batch.obs, batch.action) - batch.log_prob
    torch.testing.assert_close(now, then, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(fused.values(batch.obs), it.model.value(batch.obs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target_kl", [None, 0.06])
def test_fused_steps_equal_eager_steps(target_kl: float | None) -> None:
    config = PPOConfig(batch_size=N, n_steps=N, target_kl=target_kl)
    pair = [learner(PLAIN, spaces.Discrete(4), config) for _ in range(2)]
    assert pair[0].use_fused()
    batch = random_batch(pair[0])
    broken = replace(batch, advantage=batch.advantage * math.nan)
    for it in pair:
        it.update.begin(1e-2, 0.2)
        for part in (batch, broken, batch, batch, batch):
            it.update.step(part)
    ours, generic = (it.update for it in pair)
    assert (ours.backend, generic.backend) == ("fused", "eager")
    assert generic.n_bad == ours.n_bad == 1
    assert generic.stopped == ours.stopped == (target_kl is not None)
    assert generic.n_taken == ours.n_taken
    assert generic.n_steps == ours.n_steps
    torch.testing.assert_close(ours.metrics, generic.metrics, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(pair[0].params.flat, pair[1].params.flat, rtol=1e-3, atol=1e-4)


def test_a_minibatch_of_another_size_is_accepted() -> None:
    it = learner(PLAIN, spaces.Discrete(4), PPOConfig(batch_size=N, n_steps=N))
    assert it.use_fused()
    it.update.begin(1e-3, 0.2)
    it.update.step(random_batch(it, N - 3))
    assert it.update.n_taken == 1


def test_only_plain_mlps_are_fused() -> None:
    config, cpu = PPOConfig(batch_size=N, n_steps=N), torch.device("cpu")
    image = spaces.Box(0, 255, (20, 20, 3), np.uint8)
    action = spaces.Discrete(2)
    for it in (
        learner(image, action, config),
        learner(PLAIN, action, config, trunk="shared"),
        learner(PLAIN, action, config, activation="silu"),
        learner(PLAIN, spaces.Box(-1, 1, (2,)), config, squash=True),
    ):
        assert not can_fuse(it.model, cpu)
        assert not it.use_fused()
        assert it.update.backend == "eager"
