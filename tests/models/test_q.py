"""Epsilon-greedy actions: how often each env explores, in torch and in the compiled function, with masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flatout.collect.noise import ActionNoise, Exploration
from flatout.collect.tensors import DeviceNoise
from flatout.envs.spaces import ActionLayout, Array, ObsLayout
from flatout.errors import FlatoutError
from flatout.models.actor import Actor, KernelActor, TorchActor
from flatout.models.config import NetworkConfig
from flatout.models.policy import QNetwork, seeded

CPU = torch.device("cpu")
N_ACTIONS = 5
MASKED = spaces.Dict({"action_mask": spaces.MultiBinary(N_ACTIONS), "x": spaces.Box(-1, 1, (3,))})


def network(obs: spaces.Space[Any] = MASKED, **options: Any) -> QNetwork:
    action = ActionLayout(spaces.Discrete(N_ACTIONS))
    config = NetworkConfig(network_arch=(12,), activation="relu")
    with seeded(3):
        return QNetwork(ObsLayout(obs), action, config, **options)


def inputs(model: QNetwork, n: int) -> tuple[tuple[Array, ...], Array]:
    rng = np.random.default_rng(1)
    arrays = model.obs.alloc(n)
    for array in arrays:
        array[...] = rng.random(array.shape) < 0.4 if array.dtype == bool else rng.normal(size=array.shape)
        if array.dtype == bool:
            array[:, 2] = True
    return arrays, ActionNoise(model.action, np.arange(n), 7).draw(0, 1)[0].numpy()


@pytest.mark.parametrize("kind", ["plain", "dueling", "layer_norm"])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_the_compiled_greedy_action_equals_torchs_and_is_allowed(kind: str, epsilon: float) -> None:
    options: dict[str, Any] = {} if kind == "plain" else {kind: True}
    model = network(MASKED, **options)
    for tensor in (tensor for pair in model.acting_norms() for tensor in pair):
        tensor.data += torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3))
    model.greedy.epsilon.fill_(epsilon)
    n = 4000
    obs, noise = inputs(model, n)
    rows = [np.full((n, 1), -1) for _ in range(2)]
    actors: list[Actor] = [KernelActor(model), TorchActor(model, n, CPU)]
    for actor, out in zip(actors, rows, strict=True):
        actor.begin(obs, noise, out, np.ones(n, np.float32))
    assert np.array_equal(rows[0], rows[1])
    mask = obs[model.obs.mask_index or 0]
    assert mask[np.arange(n), rows[0][:, 0]].all()
    with torch.no_grad():
        best = model.mode(tuple(map(torch.from_numpy, obs))).numpy()
    wandered = (rows[0] != best)[:, 0]
    others = 1 - 1 / mask.sum(1)  # a random choice may be the best one too
    want = epsilon * others.mean()
    assert wandered.mean() == pytest.approx(want, abs=4 * np.sqrt(0.25 / n) if epsilon else 0)


def test_random_actions_are_uniform_and_independent_of_when_they_are_taken() -> None:
    model = network(spaces.Box(-1, 1, (3,)))
    model.greedy.epsilon.fill_(0.5)
    n = 40_000
    noise = ActionNoise(model.action, np.arange(n), 9).draw(3, 1)[0]
    values = torch.zeros(n, N_ACTIONS)
    values[:, 0] = 1
    rows, _ = model.head.sample(values, noise, None)
    counts = np.bincount(rows[:, 0].numpy(), minlength=N_ACTIONS) / n
    assert counts[1:] == pytest.approx([0.1] * 4, abs=0.01)


@pytest.mark.parametrize("where", ["host", "device"])
def test_every_env_has_its_own_epsilon(where: str) -> None:
    n_envs, n_steps, spread = 4, 20_000, 3.0
    layout = ActionLayout(spaces.Discrete(N_ACTIONS))
    shift = np.log1p(spread * np.linspace(0, 1, n_envs)).astype(np.float32)
    noise = (
        ActionNoise(layout, np.arange(n_envs), 1, Exploration(shift)).draw(0, n_steps)
        if where == "host"
        else DeviceNoise(layout, n_envs, 1, CPU, Exploration(shift)).draw(0, n_steps)
    )
    head = network().greedy
    head.epsilon.fill_(0.5)
    values = torch.zeros(n_envs * n_steps, N_ACTIONS)
    values[:, 0] = 1
    rows, _ = head.sample(values, noise.flatten(0, 1), None)
    wandered = (rows.view(n_steps, n_envs) != 0).float().mean(0) / (1 - 1 / N_ACTIONS)
    assert wandered.tolist() == pytest.approx([0.5 ** (1 + spread * i / 3) for i in range(4)], abs=0.02)


@pytest.mark.parametrize(
    "space", [spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)]
)
def test_other_actions_than_discrete_ones_are_refused(space: spaces.Space[Any]) -> None:
    obs = ObsLayout(spaces.Box(-1, 1, (3,)))
    with pytest.raises(FlatoutError, match="use PPO"):
        QNetwork(obs, ActionLayout(space), NetworkConfig())


def test_exploration_hold_does_not_depend_on_the_length_of_rollouts() -> None:
    layout = ActionLayout(spaces.Discrete(N_ACTIONS))
    noise = ActionNoise(layout, np.arange(3), 1, Exploration(hold=4))
    whole = noise.draw(0, 20)
    assert torch.equal(whole[8], whole[11])
    assert not torch.equal(whole[7], whole[8])
    parts = torch.cat([noise.draw(0, 6), noise.draw(6, 1), noise.draw(7, 13)])
    assert torch.equal(parts, whole)
    held = DeviceNoise(layout, 3, 1, CPU, Exploration(hold=4)).draw(0, 10)
    assert held.shape == (10, 3, N_ACTIONS)
    assert torch.equal(held[4], held[7])
    assert not torch.equal(held[3], held[4])
