"""Noise of actions: a function of seed, env and step, however it is drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flatout.collect.noise import ActionNoise, Exploration
from flatout.envs.spaces import ActionLayout

SPACES = [spaces.Box(-1, 1, (3,)), spaces.Discrete(4)]


@pytest.mark.parametrize("space", SPACES, ids=["normal", "gumbel"])
@pytest.mark.parametrize("hold", [1, 7])
def test_noise_is_the_same_however_many_steps_are_drawn_at_once(space: spaces.Space, hold: int) -> None:  # type: ignore[type-arg]
    def make() -> ActionNoise:
        return ActionNoise(ActionLayout(space), np.arange(2), 5, Exploration(None, hold))

    whole, steps = make().draw(0, 2000), make()
    for first, n in ((0, 1), (1, 1), (2, 300), (200, 5), (302, 1500), (0, 2000)):
        assert torch.equal(steps.draw(first, n), whole[first : first + n])
