"""Every kind of space is learned to at least 90 % of the optimum, in seconds."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import flatout
from flatout.models.policy import ActorCritic
from tests.known import LENGTH, Forever, Match, OnlyTheMaskTells

FAST: dict[str, Any] = {
    "n_envs": 8,
    "n_steps": 64,
    "batch_size": 128,
    "n_epochs": 4,
    "learning_rate": 3e-3,
    "gamma": 0.0,  # the next target has nothing to do with this one
    "network_arch": (32,),
}


@pytest.mark.parametrize(
    "kind", ["discrete", "discrete_from_3", "multidiscrete", "multibinary", "box", "box_unbounded"]
)
def test_every_action_space_is_learned(kind: str) -> None:
    agent = flatout.PPO(partial(Match, "box", kind), seed=1, **FAST)
    agent.learn(20_000)
    assert agent.evaluate(20).return_mean >= 0.9 * LENGTH


def test_squashed_actions_are_learned() -> None:
    agent = flatout.PPO(partial(Match, "box", "box"), seed=1, squash=True, ent_coef=0.001, **FAST)
    agent.learn(20_000)
    assert agent.evaluate(20).return_mean >= 0.9 * LENGTH


@pytest.mark.parametrize("kind", ["discrete", "multidiscrete", "multibinary", "dict", "tuple"])
def test_every_observation_space_is_learned(kind: str) -> None:
    agent = flatout.PPO(partial(Match, kind, "discrete"), seed=1, **FAST)
    agent.learn(15_000)
    assert agent.evaluate(20).return_mean >= 0.9 * LENGTH


@pytest.mark.parametrize("kind", ["image", "image_first"])
def test_images_are_learned(kind: str) -> None:
    settings = FAST | {"learning_rate": 1e-3, "n_steps": 16, "n_epochs": 4}
    agent = flatout.PPO(partial(Match, kind, "discrete"), seed=1, **settings)
    agent.learn(4_000)
    assert agent.evaluate(20).return_mean >= 0.9 * LENGTH


@pytest.mark.parametrize("trunk", ["shared", "separate"])
def test_both_trunks_learn(trunk: str) -> None:
    agent = flatout.PPO(partial(Match), seed=1, trunk=trunk, **FAST).learn(15_000)
    assert agent.evaluate(20).return_mean >= 0.9 * LENGTH


@pytest.mark.parametrize("where", ["obs", "info"])
def test_a_masked_action_is_never_taken(where: str) -> None:
    """Only an agent that obeys the mask has the optimal return without learning."""
    agent = flatout.PPO(partial(OnlyTheMaskTells, where), seed=1, **FAST)
    agent.learn(512)
    assert agent.summary["return_mean"] == LENGTH
    assert agent.evaluate(10, deterministic=False).return_mean == LENGTH
    obs = np.zeros(1, np.float32)
    mask = np.arange(50) == 7
    if where == "obs":
        action, _ = agent.predict({"x": obs, "action_mask": mask})
    else:
        action, _ = agent.predict(obs, action_masks=mask)
    assert action == 7


def test_normalisation_makes_badly_scaled_observations_learnable() -> None:
    class Scaled(Match):
        def _show(self) -> object:
            return super()._show() * np.float32(0.001) + np.float32(50)

    settings = FAST | {"normalize_obs": True, "normalize_reward": True}
    agent = flatout.PPO(Scaled, seed=1, **settings).learn(20_000)
    assert agent.evaluate(20).return_mean >= 0.9 * LENGTH


@pytest.mark.parametrize(("how", "value"), [("truncated", 10.0), ("terminated", None)])
def test_a_truncated_episode_is_bootstrapped_and_a_terminated_one_is_not(
    how: str, value: float | None
) -> None:
    """With γ = 0.9 a reward of 1 forever is worth 10; terminated after 5 steps it is worth less than 4.1."""
    settings = FAST | {"gamma": 0.9, "n_steps": 32, "normalize_reward": False}
    agent = flatout.PPO(partial(Forever, how), seed=1, **settings).learn(30_000)
    model = agent.policy.model
    assert isinstance(model, ActorCritic)
    with torch.inference_mode():
        got = model.value((torch.ones(1, 1),)).item()
    if value is not None:
        assert got == pytest.approx(value, rel=0.05)
    else:
        assert got < 4.1
