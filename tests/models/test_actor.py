"""The compiled and the torch actor against the model; an env's output does not depend on the batch."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from flatout.envs.spaces import ActionLayout, ObsArrays, ObsLayout
from flatout.models.actor import KernelActor, TorchActor, make_actor
from flatout.models.config import NetworkConfig
from flatout.models.policy import ActorCritic, build

CPU = torch.device("cpu")
BOX = spaces.Box(-3, 3, (7,))
ACTIONS: list[gym.Space[Any]] = [
    spaces.Discrete(2),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([2, 5, 3]),
    spaces.MultiBinary(4),
    spaces.Box(-2, 2, (3,)),
    spaces.Box(np.array([-1, -np.inf], np.float32), np.array([1, np.inf], np.float32)),
]


def random_model(
    obs: gym.Space[Any], action: gym.Space[Any], config: NetworkConfig, *, normalize: bool = False
) -> ActorCritic:
    """A model with random parameters and buffers."""
    model = build(ObsLayout(obs), ActionLayout(action), config, seed=1, normalize_obs=normalize)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.4)
        for i in model.vector_indices:
            model.get_buffer(f"obs_mean_{i}").normal_(generator=g)
            model.get_buffer(f"obs_scale_{i}").uniform_(0.5, 20.0, generator=g)
    return model


def random_inputs(model: ActorCritic, n: int) -> tuple[ObsArrays, Any]:
    rng = np.random.default_rng(2)
    model.obs.space.seed(3)
    arrays = model.obs.alloc(n)
    for i in range(n):
        model.obs.write(arrays, i, model.obs.space.sample())
    return arrays, rng.gumbel(size=(n, model.action.noise_size)).astype(np.float32)


def empty_outputs(model: ActorCritic, n: int) -> tuple[Any, Any]:
    kind = np.float32 if model.action.continuous else np.int64
    return np.zeros((n, model.action.size), kind), np.zeros(n, np.float32)


def check_equals_model(model: ActorCritic, actor: KernelActor | TorchActor, n: int) -> None:
    obs, noise = random_inputs(model, n)
    rows, log_prob = empty_outputs(model, n)
    actor.begin(obs, noise, rows, log_prob)
    with torch.no_grad():
        want = model.sample(tuple(map(torch.from_numpy, obs)), torch.from_numpy(noise))
    np.testing.assert_allclose(rows, want[0].numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(log_prob, want[1].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("action", ACTIONS, ids=str)
@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "silu"])
def test_the_compiled_and_the_torch_actor_equal_the_model(action: gym.Space[Any], activation: Any) -> None:
    config = NetworkConfig(network_arch=(33, 18, 5), activation=activation, squash=True)
    model = random_model(BOX, action, config)
    check_equals_model(model, KernelActor(model), 29)
    check_equals_model(model, TorchActor(model, 29, CPU), 29)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    "obs",
    [
        BOX,
        spaces.Box(-1, 1, (3, 4)),
        spaces.Discrete(6, start=2),
        spaces.Dict(a=BOX, b=spaces.MultiBinary(3), c=spaces.Discrete(4)),
        spaces.Dict(action_mask=spaces.MultiBinary(4), x=BOX),
    ],
    ids=["box", "matrix", "discrete", "dict", "mask"],
)
def test_every_observation_without_an_image(obs: gym.Space[Any], normalize: bool) -> None:
    model = random_model(obs, spaces.Discrete(4), NetworkConfig(), normalize=normalize)
    check_equals_model(model, KernelActor(model), 24)


@pytest.mark.parametrize("width", [24, 200])
@pytest.mark.parametrize("action", ACTIONS, ids=str)
def test_an_envs_output_does_not_depend_on_the_rest_of_the_batch(action: gym.Space[Any], width: int) -> None:
    model = random_model(BOX, action, NetworkConfig(network_arch=(width, width)))
    obs, noise = random_inputs(model, 40)
    for actor in (KernelActor(model), TorchActor(model, 40, CPU)):
        rows, log_prob = empty_outputs(model, 40)
        actor.begin(obs, noise, rows, log_prob)
        for first, end in ((0, 40), (0, 1), (5, 16), (31, 40)):
            part, part_log_prob = empty_outputs(model, end - first)
            actor.begin(tuple(leaf[first:end] for leaf in obs), noise[first:end], part, part_log_prob)
            np.testing.assert_array_equal(part, rows[first:end])
            np.testing.assert_array_equal(part_log_prob, log_prob[first:end])


def test_new_parameters_are_seen_after_bind() -> None:
    model = random_model(BOX, spaces.Box(-1, 1, (2,)), NetworkConfig(), normalize=True)
    actor = KernelActor(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dtype == torch.float32:
                tensor.mul_(1.5)
    actor.bind()
    check_equals_model(model, actor, 16)


def test_the_network_decides_which_actor_is_used() -> None:
    small = random_model(BOX, spaces.Discrete(2), NetworkConfig())
    large = random_model(BOX, spaces.Discrete(2), NetworkConfig(network_arch=(1024, 512)))
    image = random_model(spaces.Box(0, 255, (9, 9, 3), np.uint8), spaces.Discrete(2), NetworkConfig())
    assert isinstance(make_actor(small, 8, CPU), KernelActor)
    assert isinstance(make_actor(large, 8, CPU), TorchActor)
    assert isinstance(make_actor(image, 8, CPU), TorchActor)
