"""PPO's loss and gradients against a plain autograd reference, and its values against closed forms."""

from __future__ import annotations

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from flatout.algorithms.base import choose_batch_size, divisors, nearest_batch_sizes
from flatout.algorithms.ppo import loss as ppo
from flatout.algorithms.ppo.config import PPOConfig
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.errors import FlatoutError
from flatout.learning.rollouts import Transitions
from flatout.models.config import NetworkConfig
from flatout.models.policy import ActorCritic, build

OBS = ObsLayout(gym.spaces.Box(-1, 1, (3,)))
ACTION = ActionLayout(gym.spaces.Discrete(4))


def model(trunk: str = "separate") -> ActorCritic:
    return build(OBS, ACTION, NetworkConfig(network_arch=(8, 8), trunk=trunk), seed=0)  # type: ignore[arg-type]


def minibatch(n_rows: int = 64) -> ppo.PPOMinibatch:
    g = torch.Generator().manual_seed(1)
    return ppo.PPOMinibatch(
        obs=(torch.randn(n_rows, 3, generator=g),),
        action=torch.randint(0, 4, (n_rows, 1), generator=g),
        log_prob=-1.4 + 0.4 * torch.randn(n_rows, generator=g),
        advantage=torch.randn(n_rows, generator=g),
        returns=torch.randn(n_rows, generator=g),
        value=torch.randn(n_rows, generator=g),
    )


def reference_loss(net: ActorCritic, batch: ppo.PPOMinibatch, clip: float, config: PPOConfig) -> Tensor:
    """The paper's objective, sample by sample."""
    out = net.policy(batch.obs)
    value = net.value(batch.obs)
    policy = Categorical(logits=out)
    advantage = batch.advantage
    if config.normalize_advantage:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    terms = []
    for i in range(len(out)):
        ratio = torch.exp(policy.log_prob(batch.action[:, 0])[i] - batch.log_prob[i])
        a = advantage[i]
        kept = min(ratio * a, torch.clamp(ratio, 1 - clip, 1 + clip) * a, key=lambda term: term.item())
        v = value[i]
        if config.clip_range_vf is not None:
            c = config.clip_range_vf
            v = batch.value[i] + torch.clamp(v - batch.value[i], -c, c)
        terms.append(
            -kept + config.vf_coef * (v - batch.returns[i]) ** 2 - config.ent_coef * policy.entropy()[i]
        )
    return torch.stack(terms).mean()


@pytest.mark.parametrize(
    ("trunk", "normalize", "clip_vf"),
    list(itertools.product(["separate", "shared"], [True, False], [None, 0.1])),
)
def test_loss_and_gradients_equal_the_reference(trunk: str, normalize: bool, clip_vf: float | None) -> None:
    config = PPOConfig(normalize_advantage=normalize, clip_range_vf=clip_vf, ent_coef=0.03, vf_coef=0.7)
    net, batch = model(trunk), minibatch()
    got, metrics = ppo.loss(net, ppo.prepare(batch, config), torch.tensor(0.2), config)
    want = reference_loss(net, batch, 0.2, config)
    torch.testing.assert_close(got, want)
    assert metrics[ppo.METRICS.index("train/loss")].item() == pytest.approx(want.item(), rel=1e-5)
    params = list(net.parameters())
    for a, b in zip(torch.autograd.grad(got, params), torch.autograd.grad(want, params), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_kl_is_zero_for_the_policy_that_collected() -> None:
    net, batch = model(), minibatch()
    log_prob = net.evaluate(batch.obs, batch.action)[0].detach()
    same = ppo.PPOMinibatch(batch.obs, batch.action, log_prob, batch.advantage, batch.returns, batch.value)
    _, metrics = ppo.loss(net, same, torch.tensor(0.2), PPOConfig())
    values = dict(zip(ppo.METRICS, metrics.tolist(), strict=True))
    assert values["train/approx_kl"] == pytest.approx(0, abs=1e-7)
    assert values["train/clip_fraction"] == 0


def test_next_values_come_from_the_right_observations() -> None:
    """Rollout of 3 steps × 2 envs: env 0 is truncated at t=1, env 1 terminates at t=0."""
    net = model()
    obs = torch.randn(3, 2, 3)
    last, final = torch.randn(2, 3), torch.randn(1, 3)
    terminated = torch.tensor([[False, True], [False, False], [False, False]])
    truncated = torch.tensor([[False, False], [True, False], [False, False]])
    data = Transitions(
        obs_tn=(obs,),
        action_tn=torch.zeros(3, 2, 1, dtype=torch.int64),
        log_prob_tn=torch.zeros(3, 2),
        reward_tn=torch.ones(3, 2),
        terminated_tn=terminated,
        truncated_tn=truncated,
        last_obs_n=(last,),
        final_obs=(final,),
        final_index=torch.tensor([1 * 2 + 0]),
    )
    batch = ppo.advantages(net.value, data, PPOConfig(gamma=0.9, gae_lambda=0.0))

    def value(x: Tensor) -> float:
        return net.value((x.view(1, 3),)).item()

    want = np.array(
        [
            [1 + 0.9 * value(obs[1, 0]), 1.0],
            [1 + 0.9 * value(final[0]), 1 + 0.9 * value(obs[2, 1])],
            [1 + 0.9 * value(last[0]), 1 + 0.9 * value(last[1])],
        ]
    )
    np.testing.assert_allclose(batch.returns.view(3, 2).numpy(), want, rtol=1e-5)


def test_choose_batch_size_is_the_largest_divisor_not_above_the_target() -> None:
    for total, target in itertools.product(range(1, 200), range(1, 220)):
        brute = max(d for d in range(1, total + 1) if total % d == 0 and d <= target)
        assert choose_batch_size(total, target) == brute
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert nearest_batch_sizes(1024, 100) == [64, 128]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gamma", 1.5),
        ("n_steps", 0),
        ("learning_rate", 0.0),
        ("clip_range", -0.1),
        ("ent_coef", -1.0),
        ("target_kl", 0.0),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(FlatoutError, match=f"--{name.replace('_', '-')} is {value}"):
        PPOConfig(**{name: value})  # type: ignore[arg-type]
