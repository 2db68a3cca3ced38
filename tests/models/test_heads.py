"""Heads against torch.distributions, and samples against their probabilities."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal, TanhTransform, TransformedDistribution

from flatout.collect.noise import ActionNoise
from flatout.envs.spaces import ActionLayout
from flatout.models.heads import CategoricalHead, GaussianHead


def noise_for(layout: ActionLayout, n_rows: int) -> torch.Tensor:
    return ActionNoise(layout, np.arange(1), seed=3).draw(0, n_rows)[:, 0]


@pytest.mark.parametrize("nvec", [(5,), (3, 3), (2, 5, 3)])
@pytest.mark.parametrize("masked", [False, True])
def test_categorical_log_prob_and_entropy(nvec: tuple[int, ...], masked: bool) -> None:
    g = torch.Generator().manual_seed(0)
    out = torch.randn(7, sum(nvec), generator=g)
    rows = torch.stack([torch.randint(0, n, (7,), generator=g) for n in nvec], 1)
    mask = None
    if masked:
        mask = torch.rand(7, sum(nvec), generator=g) < 0.5
        offsets = torch.tensor([sum(nvec[:i]) for i in range(len(nvec))])
        mask.scatter_(1, rows + offsets, True)  # the taken action was allowed
    log_prob, entropy = CategoricalHead(nvec).evaluate(out, rows, mask)
    logits = out if mask is None else out.masked_fill(~mask, float("-inf"))
    parts = [Categorical(logits=part) for part in torch.split(logits, list(nvec), 1)]
    want = sum(part.log_prob(rows[:, i]) for i, part in enumerate(parts))
    torch.testing.assert_close(log_prob, want)
    want_entropy = torch.zeros(7)
    for part in parts:
        p = part.probs
        want_entropy -= torch.where(p > 0, p * p.clamp(min=1e-30).log(), 0.0).sum(-1)
    torch.testing.assert_close(entropy, want_entropy)


@pytest.mark.parametrize("space", [gym.spaces.Discrete(4), gym.spaces.MultiDiscrete([2, 5, 3])])
def test_samples_follow_the_probabilities_and_are_never_masked(space: gym.Space[object]) -> None:
    layout = ActionLayout(space)
    head = CategoricalHead(layout.nvec)
    n_rows = 40_000
    logits = torch.randn(layout.n_logits, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(layout.n_logits, dtype=torch.bool)
    mask[1] = False
    out, masks = logits.expand(n_rows, -1), mask.expand(n_rows, -1)
    rows, log_prob = head.sample(out, noise_for(layout, n_rows), masks)
    start = 0
    for i, n in enumerate(layout.nvec):
        part = logits[start : start + n].masked_fill(~mask[start : start + n], float("-inf"))
        share = torch.bincount(rows[:, i], minlength=n) / n_rows
        torch.testing.assert_close(share, part.softmax(0), atol=0.015, rtol=0)
        start += n
    assert not (rows[:, 0] == 1).any()
    torch.testing.assert_close(log_prob, head.evaluate(out, rows, masks)[0])


def test_gaussian_equals_normal() -> None:
    layout = ActionLayout(gym.spaces.Box(-np.inf, np.inf, (3,)))
    head = GaussianHead(layout, -0.5, squash=False)
    out = torch.randn(5, 3)
    noise = torch.randn(5, 3)
    rows, log_prob = head.sample(out, noise, None)
    normal = Normal(out, torch.full((3,), np.exp(-0.5)))
    torch.testing.assert_close(log_prob, normal.log_prob(rows).sum(-1))
    again, entropy = head.evaluate(out, rows, None)
    torch.testing.assert_close(again, log_prob)
    torch.testing.assert_close(entropy, normal.entropy().sum(-1))


def test_squashed_gaussian_equals_the_transformed_distribution() -> None:
    layout = ActionLayout(gym.spaces.Box(-2, 2, (3,)))
    head = GaussianHead(layout, 0.3, squash=True)
    out = torch.randn(5, 3)
    rows, log_prob = head.sample(out, torch.randn(5, 3), None)
    transformed = TransformedDistribution(Normal(out, torch.full((3,), np.exp(0.3))), [TanhTransform(1)])
    torch.testing.assert_close(log_prob, transformed.log_prob(rows.tanh()).sum(-1), rtol=1e-3, atol=1e-3)
    assert (head.squash(rows).abs() <= 1).all()


def test_squashed_log_prob_stays_finite_far_out() -> None:
    layout = ActionLayout(gym.spaces.Box(-1, 1, (1,)))
    head = GaussianHead(layout, 0.0, squash=True)
    rows = torch.tensor([[-60.0], [60.0]])
    log_prob, entropy = head.evaluate(torch.zeros(2, 1), rows, None)
    assert torch.isfinite(log_prob).all()
    assert torch.isfinite(entropy).all()


def test_noise_is_uniform_per_env_and_does_not_depend_on_chunks_or_other_envs() -> None:
    layout = ActionLayout(gym.spaces.Box(-1, 1, (2,)))
    both = ActionNoise(layout, np.array([4, 9]), seed=1)
    alone = ActionNoise(layout, np.array([9]), seed=1)
    whole = both.draw(0, 100)
    parts = torch.cat([alone.draw(0, 30), alone.draw(30, 70)])
    assert torch.equal(whole[:, 1], parts[:, 0])
    assert not torch.equal(whole[:, 0], whole[:, 1])
    many = ActionNoise(layout, np.arange(50), seed=2).draw(0, 2000)
    assert abs(many.mean()) < 0.01
    assert abs(many.std() - 1) < 0.01
    flat = many.reshape(-1, 100).T
    correlation = torch.corrcoef(flat) - torch.eye(100)
    assert correlation.abs().max() < 0.15
