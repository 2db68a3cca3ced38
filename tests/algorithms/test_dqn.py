"""DQN's targets and loss against closed forms, the fused gradient against autograd, and rules for any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from flatout.algorithms.dqn import loss as dqn
from flatout.algorithms.dqn import make_q_network
from flatout.algorithms.dqn.config import DQNConfig
from flatout.algorithms.dqn.fused import can_fuse
from flatout.algorithms.dqn.learner import DQNLearner
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.errors import FlatoutError
from flatout.models.config import NetworkConfig
from flatout.models.policy import QNetwork
from flatout.timing import PhaseClock

PLAIN = spaces.Box(-1, 1, (3,))
MASKED = spaces.Dict({"action_mask": spaces.MultiBinary(4), "x": PLAIN})
ACTION = ActionLayout(spaces.Discrete(4))


def learner(
    config: DQNConfig,
    obs: spaces.Space[Any] = PLAIN,
    device: str = "cpu",
    activation: Any = "relu",
) -> DQNLearner:
    network = NetworkConfig(network_arch=(16, 8), activation=activation)
    model = make_q_network(ObsLayout(obs), ACTION, network, config, 1).to(device)
    assert isinstance(model, QNetwork)
    out = DQNLearner(model, config, n_envs=2, seed=0, clock=PhaseClock())
    if device == "cpu":
        out.networks.target.add_(torch.randn(out.networks.target.shape, generator=generator(7)) * 0.1)
    return out


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_batch(it: DQNLearner, n: int) -> dqn.DQNMinibatch:
    g = generator(n)
    batch = it.example_batch(n)
    for leaf in (*batch.obs, *batch.next_obs):
        if leaf.dtype == torch.bool:
            leaf.copy_(torch.rand(leaf.shape, generator=g) < 0.5)
            leaf[:, 1] = True
        else:
            leaf.normal_(generator=g)
    batch.action.random_(0, 4, generator=g)
    batch.reward.normal_(generator=g).mul_(3)
    batch.weight.uniform_(generator=g)
    batch.discount.fill_(0.9)
    batch.discount[::3] = 0
    return batch


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("obs", [PLAIN, MASKED], ids=["plain", "masked"])
def test_targets_equal_the_formula(double: bool, obs: spaces.Space[Any]) -> None:
    it = learner(DQNConfig(batch_size=30, double=double), obs)
    batch = random_batch(it, 30)
    got = dqn.targets(it.networks, batch, double=double)
    online = it.model(batch.next_obs).detach()
    kept = it.params.flat.clone()
    with torch.no_grad():
        it.params.flat.copy_(it.networks.target)
        older = it.model(batch.next_obs)
        it.params.flat.copy_(kept)
    mask = it.model.mask(batch.next_obs)
    for i in range(30):
        allowed = [a for a in range(4) if mask is None or mask[i, a]]
        by = online if double else older
        choice = max(allowed, key=lambda a: float(by[i, a]))
        want = batch.reward[i] + batch.discount[i] * older[i, choice]
        assert float(got[i]) == pytest.approx(float(want), abs=1e-5)


def test_dueling_values_are_a_value_plus_centred_advantages() -> None:
    it = learner(DQNConfig(dueling=True))
    obs = (torch.randn(5, 3, generator=generator(1)),)
    body = it.model.pi_body(it.model.features(obs))
    assert it.model.v_out is not None
    advantages, value = it.model.pi_out(body), it.model.v_out(body)
    torch.testing.assert_close(it.model(obs), value + advantages - advantages.mean(1, keepdim=True))


@pytest.mark.parametrize("kind", ["huber", "mse"])
def test_the_loss_is_the_weighted_mean_and_td_errors_are_returned(kind: Any) -> None:
    config = DQNConfig(batch_size=20, loss=kind)
    it = learner(config)
    batch = random_batch(it, 20)
    total, metrics, errors = dqn.loss(it.networks, batch, config)
    error = dqn.targets(it.networks, batch, double=True) - it.model(batch.obs).gather(1, batch.action)[:, 0]
    size = error.abs()
    rows = error.square() if kind == "mse" else torch.where(size < 1, error.square() / 2, size - 0.5)
    torch.testing.assert_close(total, (batch.weight * rows).mean())
    torch.testing.assert_close(errors, size)
    torch.testing.assert_close(metrics[2], size.mean())


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["huber", "mse"])
@pytest.mark.parametrize("obs", [PLAIN, MASKED], ids=["plain", "masked"])
def test_the_fused_gradient_equals_autograds(
    activation: str, double: bool, kind: Any, obs: spaces.Space[Any]
) -> None:
    config = DQNConfig(batch_size=24, double=double, loss=kind, normalize_obs=True)
    it = learner(config, obs, activation=activation)
    fused = it.make_fused()
    assert fused is not None
    with torch.no_grad():
        i = it.model.vector_indices[0]
        it.model.get_buffer(f"obs_mean_{i}").fill_(0.3)
        it.model.get_buffer(f"obs_scale_{i}").fill_(1.7)
    batch = random_batch(it, 24)
    total, metrics, errors = dqn.loss(it.networks, batch, config)
    want = it.params.flatten(torch.autograd.grad(total, it.params.tensors))
    fused.differentiate(batch)
    torch.testing.assert_close(fused.gradient, want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.from_numpy(fused.means), metrics)
    torch.testing.assert_close(it.update.sample_output, errors)
    seen_before = fused.target_q(random_batch(it, 72))  # of other rows: must not stay
    batch.target_q = fused.target_q(batch)
    assert batch.target_q is not seen_before
    fused.gradient.zero_()
    fused.differentiate(batch)
    torch.testing.assert_close(fused.gradient, want, rtol=1e-4, atol=1e-6)


def test_a_wide_input_is_fused_like_a_narrow_one() -> None:
    it = learner(DQNConfig(batch_size=24), spaces.Box(-1, 1, (40,)))
    fused = it.make_fused()
    assert fused is not None
    batch = random_batch(it, 24)
    total, _, _ = dqn.loss(it.networks, batch, it.config)
    fused.differentiate(batch)
    want = it.params.flatten(torch.autograd.grad(total, it.params.tensors))
    torch.testing.assert_close(fused.gradient, want, rtol=1e-4, atol=1e-6)


def test_only_plain_mlps_are_fused() -> None:
    assert not can_fuse(learner(DQNConfig(dueling=True)).model, torch.device("cpu"))
    assert not can_fuse(learner(DQNConfig(), activation="silu").model, torch.device("cpu"))
    images = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    assert not can_fuse(learner(DQNConfig(), images).model, torch.device("cpu"))


def step(it: DQNLearner, batch: dqn.DQNMinibatch) -> tuple[Tensor, Tensor]:
    it.update.begin(1e-2)
    it.update.step(batch)
    return it.params.flat.clone(), it.update.sample_output.clone()


@pytest.mark.parametrize("dueling", [False, True])
def test_micro_batches_give_the_same_result_as_the_whole_batch(dueling: bool) -> None:
    config = DQNConfig(batch_size=24, dueling=dueling)
    whole, parts = learner(config), learner(config)
    parts.update.parts.n_rows = 7
    (a, errors), (b, others) = (step(it, random_batch(it, 24)) for it in (whole, parts))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(errors, others)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(fused: bool) -> None:
    it = learner(DQNConfig(batch_size=24))
    assert not fused or it.use_fused()
    batch = random_batch(it, 24)
    before = it.params.flat.clone()
    bad = random_batch(it, 24)
    bad.reward[3] = float("nan")
    it.update.begin(1e-2)
    it.update.step(bad)
    assert torch.equal(it.params.flat, before)
    it.update.step(batch)
    assert not torch.equal(it.params.flat, before)
    counts = it.update.n_bad, it.update.n_taken, it.update.n_steps
    assert [float(count) for count in counts] == [1, 1, 1]
    assert torch.isfinite(it.update.metrics).all()


def test_the_fused_step_equals_the_eager_step() -> None:
    config = DQNConfig(batch_size=24, max_grad_norm=0.1)
    fused, eager = learner(config), learner(config)
    assert fused.use_fused()
    for seed in range(5):
        batch = random_batch(fused, 24)
        batch.reward.add_(seed)
        (a, errors), (b, others) = step(fused, batch), step(eager, batch)
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(errors, others, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(fused.update.metrics, eager.update.metrics, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dueling", [False, True])
def test_the_update_never_waits_for_the_device(dueling: bool) -> None:
    """On `meta` a host sync or a device mix-up raises."""
    it = learner(DQNConfig(batch_size=8, dueling=dueling, tau=0.1), MASKED, device="meta")
    assert not it.use_fused()
    it.update.begin(1e-3)
    state = it.update.next_state(it.example_batch(8))
    it.update.commit(state)
    it.networks.soft_update(0.1)
    assert it.update.sample_output.device.type == "meta"


def test_the_target_network_is_updated_hard_and_softly() -> None:
    it = learner(DQNConfig())
    older = it.networks.target.clone()
    it.networks.soft_update(0.25)
    torch.testing.assert_close(it.networks.target, older + 0.25 * (it.params.flat - older))
    it.networks.soft_update()
    assert torch.equal(it.networks.target, it.params.flat)


def test_epsilon_falls_to_its_final_value() -> None:
    config = DQNConfig(exploration_fraction=0.5, exploration_initial_eps=0.8, exploration_final_eps=0.2)
    assert [config.epsilon(x) for x in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([0.8, 0.5, 0.2, 0.2])


def test_epsilon_falls_over_a_fraction_of_a_short_run_and_over_a_number_of_steps_of_a_long_one() -> None:
    config = DQNConfig(exploration_fraction=0.1, exploration_steps=50_000, exploration_final_eps=0.0)
    for total, falls_over in ((100_000, 10_000), (500_000, 50_000), (10_000_000, 50_000)):
        epsilons = [config.epsilon_after(n, n / total) for n in (0, falls_over // 2, falls_over, total)]
        assert epsilons == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert DQNConfig(exploration_fraction=0.0).epsilon_after(0, 0.0) == pytest.approx(0.05)


@pytest.mark.parametrize("ratio", [0.1, 0.29, 0.25, 1 / 3, 2.5, 0.0])
def test_the_train_ratio_is_exact(ratio: float) -> None:
    config = DQNConfig(train_ratio=ratio)
    assert config.updates_after(-5) == 0
    if ratio == 0.29:
        assert config.updates_after(100) == 29  # 0.29 * 100 is less than 29 in floats
    whole = config.updates_after(12_345)
    parts = sum(config.updates_after(n + 7) - config.updates_after(n) for n in range(0, 12_345 - 7, 7))
    assert 0 <= whole - parts <= 7 * ratio + 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tau", 0.0),
        ("train_ratio", -1.0),
        ("multi_step", 0),
        ("batch_size", 0),
        ("exploration_fraction", 2.0),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(FlatoutError, match=f"--{name.replace('_', '-')} is {value}"):
        DQNConfig(**{name: value})  # type: ignore[arg-type]
