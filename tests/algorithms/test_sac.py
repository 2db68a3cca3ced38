"""SAC's distribution, targets and losses against closed forms, the fused gradient against autograd, and rules for any device."""

from __future__ import annotations

import gc
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from flatout.algorithms.sac import loss as sac
from flatout.algorithms.sac.config import SACConfig
from flatout.algorithms.sac.fused import UpdateNoise, can_fuse
from flatout.algorithms.sac.learner import SACLearner
from flatout.algorithms.sac.model import SquashedNormalHead, make_model
from flatout.algorithms.sac.noise import kept, noise_key, normal
from flatout.device.semaphores import new_semaphore
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.errors import FlatoutError
from flatout.models.actor import KernelActor
from flatout.models.config import NetworkConfig
from flatout.timing import PhaseClock

PLAIN = spaces.Box(-1, 1, (3,))
WIDE = spaces.Box(-1, 1, (40,))
MIXED = spaces.Dict({"kind": spaces.Discrete(3), "x": PLAIN})
BOUNDED = spaces.Box(-2, 2, (2,))
HALF_BOUNDED = spaces.Box(np.array([-1, -np.inf], np.float32), np.array([3, np.inf], np.float32))


def learner(
    config: SACConfig,
    obs: spaces.Space[Any] = PLAIN,
    action: spaces.Box = BOUNDED,
    device: str = "cpu",
    activation: Any = "relu",
    arch: tuple[int, ...] = (32, 24),
) -> SACLearner:
    network = NetworkConfig(network_arch=arch, activation=activation, log_std_init=-0.5)
    model = make_model(ObsLayout(obs), ActionLayout(action), network, config, 1).to(device)
    out = SACLearner(model, config, n_envs=2, seed=0, clock=PhaseClock())
    if device == "cpu":
        with torch.no_grad():  # outputs of size 1, and target critics that differ
            g = generator(7)
            out.params.flat.add_(torch.randn(out.params.flat.shape, generator=g) * 0.1)
            out.networks.target.add_(torch.randn(out.networks.target.shape, generator=g) * 0.1)
    return out


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_batch(it: SACLearner, n: int, seed: int = 0) -> sac.SACMinibatch:
    g = generator(n + seed)
    batch = it.example_batch(n)
    for leaf in (*batch.obs, *batch.next_obs):
        if leaf.is_floating_point():
            leaf.normal_(generator=g)
        else:
            leaf.random_(0, 3, generator=g)
    for leaf in (batch.action, batch.reward, batch.noise):
        leaf.normal_(generator=g)
    batch.weight.uniform_(generator=g)
    batch.discount.fill_(0.9)
    batch.discount[::3] = 0
    return batch


def test_log_probabilities_are_those_of_a_normal_after_tanh() -> None:
    head = SquashedNormalHead(ActionLayout(BOUNDED))
    out, noise = torch.randn(50, 4, generator=generator(1)) / 2, torch.randn(50, 2, generator=generator(2))
    actions, log_prob = head.draw(out, noise)
    torch.testing.assert_close(actions, out[:, :2] + noise * out[:, 2:].exp())
    inside = actions.double().tanh()
    want = Independent(
        TransformedDistribution(Normal(out[:, :2].double(), out[:, 2:].double().exp()), [TanhTransform()]), 1
    ).log_prob(inside)
    torch.testing.assert_close(log_prob, want.float(), rtol=1e-4, atol=1e-4)


def test_unbounded_dimensions_are_not_squashed() -> None:
    head = SquashedNormalHead(ActionLayout(HALF_BOUNDED))
    out, noise = torch.randn(50, 4, generator=generator(1)) / 2, torch.randn(50, 2, generator=generator(2))
    actions, log_prob = head.draw(out, noise)
    plain = Normal(out[:, 1], out[:, 3].exp()).log_prob(actions[:, 1])
    first = (
        Normal(out[:, 0], out[:, 2].exp()).log_prob(actions[:, 0])
        - torch.log(1 - actions[:, 0].double().tanh() ** 2).float()
    )
    torch.testing.assert_close(log_prob, plain + first, rtol=1e-4, atol=1e-4)
    squashed = head.squash(actions)
    torch.testing.assert_close(squashed[:, 0], actions[:, 0].tanh())
    assert torch.equal(squashed[:, 1], actions[:, 1])


def test_actions_reach_the_envs_bounds() -> None:
    layout = ActionLayout(spaces.Box(np.array([-3, 0], np.float32), np.array([1, 10], np.float32)))
    head = SquashedNormalHead(layout)
    u = torch.tensor([[-50.0, 50.0], [0.0, 0.0]])
    np.testing.assert_allclose(layout.to_env(head.squash(u).numpy()), [[-3, 10], [-1, 5]], atol=1e-5)


def test_actions_before_learning_are_uniform_within_the_bounds() -> None:
    head = SquashedNormalHead(ActionLayout(BOUNDED))
    noise = torch.randn(100_000, 2, generator=generator(1))
    u, _ = head.sample(torch.ones(100_000, 4), noise, None)
    shares = torch.histc(head.squash(u), 10, -1, 1) / 200_000
    assert (shares - 0.1).abs().max() < 0.01


@pytest.mark.parametrize("random", [0.0, 1.0])
@pytest.mark.parametrize("action", [BOUNDED, HALF_BOUNDED], ids=["bounded", "half"])
def test_the_compiled_policy_acts_like_the_model(random: float, action: spaces.Box) -> None:
    it = learner(SACConfig(), action=action)
    it.model.head.random.fill_(random)
    obs, noise = torch.randn(9, 3, generator=generator(1)), torch.randn(9, 2, generator=generator(2))
    want, _ = it.model.sample((obs,), noise)
    got, log_prob = np.zeros((9, 2), np.float32), np.ones(9, np.float32)
    KernelActor(it.model).begin((obs.numpy(),), noise.numpy(), got, log_prob)
    np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert not log_prob.any()


def q_values(it: SACLearner, obs: tuple[Tensor, ...], action: Tensor) -> list[Tensor]:
    """Both critics by hand."""
    critics, out = it.model.critics, []
    for i in range(2):
        x = torch.cat([it.model.normalized(obs)[0], action], 1)
        for k, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
            x = x @ weight[i] + bias[i]
            x = x.relu() if k + 1 < len(critics.weights) else x
        out.append(x[:, 0])
    return out


def test_targets_are_the_lower_target_value_and_entropy() -> None:
    it = learner(SACConfig(batch_size=30, ent_coef=0.3))
    batch = random_batch(it, 30)
    got = sac.targets(it.networks, batch)
    with torch.no_grad():
        action, log_prob = it.model.head.draw(it.model.policy(batch.next_obs), batch.noise[:, 2:])
        kept_flat = it.params.flat.clone()
        for own, view in zip(
            it.model.critics.parameters(), it.networks.views(it.networks.target), strict=True
        ):
            own.copy_(view)
        low = torch.minimum(*q_values(it, batch.next_obs, action.tanh()))
        it.params.flat.copy_(kept_flat)
        ent_coef = it.model.log_ent_coef.exp()
    torch.testing.assert_close(got, batch.reward + batch.discount * (low - ent_coef * log_prob))
    assert torch.equal(got[::3], batch.reward[::3])  # terminated: nothing is bootstrapped


def test_each_loss_has_a_gradient_for_its_own_parameters_alone() -> None:
    config = SACConfig(batch_size=30, ent_coef=0.3, target_entropy=-1.5)
    it = learner(config)
    batch, model = random_batch(it, 30), it.model
    total, metrics, errors = sac.loss(it.networks, batch, config)
    td_target = sac.targets(it.networks, batch)
    pairs = q_values(it, batch.obs, batch.action.tanh())
    critic_loss = 0.5 * torch.stack([(batch.weight * (q - td_target) ** 2).mean() for q in pairs]).sum()
    action, log_prob = model.head.draw(model.policy(batch.obs), batch.noise[:, :2])
    ent_coef = model.log_ent_coef.exp().item()
    actor_loss = (ent_coef * log_prob - torch.minimum(*q_values(it, batch.obs, action.tanh()))).mean()
    temperature = -(model.log_ent_coef * (log_prob.detach() - 1.5)).mean()
    torch.testing.assert_close(total, critic_loss + actor_loss + temperature)
    torch.testing.assert_close(metrics[1:3], torch.stack([critic_loss, actor_loss]).detach())
    torch.testing.assert_close(errors, sum((q - td_target).abs() for q in pairs) / 2)
    for part, wanted in (
        (critic_loss, model.critics.parameters()),
        (actor_loss, [*model.pi_body.parameters(), *model.pi_out.parameters()]),
        (temperature, [model.log_ent_coef]),
    ):
        params = list(wanted)
        got = torch.autograd.grad(total, params, retain_graph=True)
        for a, b in zip(got, torch.autograd.grad(part, params, retain_graph=True), strict=True):
            torch.testing.assert_close(a, b)
    (grad,) = torch.autograd.grad(total, [model.log_ent_coef])
    assert float(grad) == pytest.approx(-(float(log_prob.detach().mean()) - 1.5), rel=1e-5)


def test_a_fixed_temperature_stays() -> None:
    it = learner(SACConfig(batch_size=24, ent_coef=0.2, tune_ent_coef=False))
    before = it.model.log_ent_coef.clone()
    for fused in (False, True):
        assert not fused or it.use_fused()
        step(it, random_batch(it, 24))
    assert torch.equal(it.model.log_ent_coef, before)


def test_the_target_critics_follow_the_critics_alone() -> None:
    it = learner(SACConfig(tau=0.25))
    older = [view.clone() for view in it.networks.views(it.networks.target)]
    it.after_step()
    now = it.networks.views(it.networks.target)
    for before, after, own in zip(older, now, it.model.critics.parameters(), strict=True):
        torch.testing.assert_close(after, before + 0.25 * (own - before))
    assert it.networks.target.numel() < it.params.flat.numel()


CASES = [(PLAIN, BOUNDED), (WIDE, BOUNDED), (MIXED, HALF_BOUNDED), (PLAIN, spaces.Box(-1, 1, (20,)))]


@pytest.mark.parametrize("arch", [(32,), (32, 24), (24, 32, 16)], ids=str)
@pytest.mark.parametrize(("obs", "action"), CASES, ids=["plain", "wide", "mixed", "many actions"])
def test_the_fused_gradient_equals_autograds(
    arch: tuple[int, ...], obs: spaces.Space[Any], action: spaces.Box
) -> None:
    config = SACConfig(batch_size=24, normalize_obs=True, ent_coef=0.3)
    it = learner(config, obs, action, arch=arch)
    with torch.no_grad():
        i = it.model.vector_indices[0]
        it.model.get_buffer(f"obs_mean_{i}").fill_(0.3)
        it.model.get_buffer(f"obs_scale_{i}").fill_(1.7)
        it.model.pi_out.bias[action.shape[0]] = 3.0  # beyond the bound of log_std
    fused = it.make_fused()
    assert fused is not None
    for seed in range(3):
        batch = random_batch(it, 24, seed)
        total, metrics, errors = sac.loss(it.networks, batch, config)
        want = it.params.flatten(torch.autograd.grad(total, it.params.tensors))
        fused.differentiate(batch)
        torch.testing.assert_close(fused.gradient, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.from_numpy(fused.means), metrics, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(it.update.sample_output, errors, rtol=1e-4, atol=1e-5)
    fused.close()


@pytest.mark.parametrize("n", [1, 2, 25, 256])
def test_the_fused_gradient_is_that_of_any_batch_and_of_any_number_of_threads(n: int) -> None:
    config = SACConfig(batch_size=n, ent_coef=0.3)
    it = learner(config)
    fused, batch = it.make_fused(), random_batch(it, n)
    assert fused is not None
    total, _, errors = sac.loss(it.networks, batch, config)
    want, got = it.params.flatten(torch.autograd.grad(total, it.params.tensors)), []
    for calls in ((None, None), (new_semaphore(), new_semaphore()) if n > 1 else (None, None)):
        fused._calls = calls
        fused.differentiate(batch)
        torch.testing.assert_close(fused.gradient, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(it.update.sample_output, errors, rtol=1e-4, atol=1e-5)
        got.append((fused.gradient.clone(), fused.means.copy()))
    assert torch.equal(got[0][0], got[1][0])
    assert np.array_equal(got[0][1], got[1][1])
    fused.close()


@pytest.mark.parametrize("way", ["closed", "forgotten"])
def test_the_other_thread_ends_with_the_backend(way: str) -> None:
    it = learner(SACConfig(batch_size=8))
    fused = it.make_fused()
    assert fused is not None
    fused._calls = new_semaphore(), new_semaphore()
    fused.differentiate(random_batch(it, 8))
    assert fused._partner is not None
    thread = fused._partner._thread
    assert thread.is_alive()
    if way == "closed":
        fused.close()
    del fused
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def step(it: SACLearner, batch: sac.SACMinibatch) -> tuple[Tensor, Tensor]:
    it.update.begin(1e-2)
    it.update.step(batch)
    it.after_step()
    return it.params.flat.clone(), it.networks.target.clone()


def test_the_fused_step_equals_the_eager_step() -> None:
    config = SACConfig(batch_size=24, max_grad_norm=0.5)
    fused, eager = learner(config), learner(config)
    assert fused.use_fused()
    for seed in range(5):
        batch = random_batch(fused, 24, seed)
        (a, target), (b, other) = step(fused, batch), step(eager, batch)
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)
        torch.testing.assert_close(target, other, rtol=1e-3, atol=2e-5)
        torch.testing.assert_close(fused.update.metrics, eager.update.metrics, rtol=1e-3, atol=1e-4)


def test_only_plain_relu_mlps_are_fused() -> None:
    for config in (SACConfig(layer_norm=True), SACConfig(dropout=0.1)):
        assert not can_fuse(learner(config).model, config, torch.device("cpu"))
    plain = SACConfig()
    assert not can_fuse(learner(plain, activation="tanh").model, plain, torch.device("cpu"))
    images = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    assert not can_fuse(learner(plain, images).model, plain, torch.device("cpu"))


@pytest.mark.parametrize("settings", [{}, {"layer_norm": True, "dropout": 0.1}], ids=["plain", "droq"])
def test_micro_batches_give_the_same_result_as_the_whole_batch(settings: dict[str, Any]) -> None:
    config = SACConfig(batch_size=24, **settings)
    whole, parts = learner(config), learner(config)
    parts.update.parts.n_rows = 7
    for a, b in zip(*(step(it, random_batch(it, 24)) for it in (whole, parts)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(fused: bool) -> None:
    it = learner(SACConfig(batch_size=24))
    assert not fused or it.use_fused()
    before = it.params.flat.clone()
    bad = random_batch(it, 24)
    bad.reward[3] = float("nan")
    it.update.begin(1e-2)
    it.update.step(bad)
    assert torch.equal(it.params.flat, before)
    it.update.step(random_batch(it, 24))
    assert not torch.equal(it.params.flat, before)
    counts = it.update.n_bad, it.update.n_taken, it.update.n_steps
    assert [float(count) for count in counts] == [1, 1, 1]


@pytest.mark.parametrize("settings", [{}, {"layer_norm": True, "dropout": 0.1}], ids=["plain", "droq"])
def test_the_update_never_waits_for_the_device(settings: dict[str, Any]) -> None:
    """On `meta` a host sync or a device mix-up raises."""
    it = learner(SACConfig(batch_size=8, **settings), MIXED, device="meta")
    assert not it.use_fused()
    it.update.begin(1e-3)
    batch = it.before_step(it.example_batch(8))
    it.update.commit(it.update.next_state(batch))
    it.after_step()
    assert it.update.sample_output.device.type == "meta"


def test_noise_is_normal_and_another_one_in_every_update() -> None:
    key = noise_key(3)
    both = normal(key, torch.arange(2), 100_000)
    a, b = both
    assert torch.equal(b, normal(key, torch.tensor([1]), 100_000)[0])
    for x in (a, b):
        assert abs(float(x.mean())) < 0.02
        assert abs(float(x.std()) - 1) < 0.02
        assert abs(float((x < 1).float().mean()) - 0.8413) < 0.01
        assert torch.isfinite(x).all()
    corners = torch.corrcoef(torch.stack([a, b, a.roll(1)]))
    assert (corners - torch.eye(3)).abs().max() < 0.02
    assert not torch.equal(a, normal(noise_key(4), torch.tensor([0]), 100_000)[0])


def test_noise_of_the_fused_backend_is_that_of_tensors_however_many_updates_are_drawn_at_once() -> None:
    for key in (noise_key(3), noise_key(-4)):
        ahead = UpdateNoise(key)
        for first, n in ((0, 1), (1, 1), (2, 20), (21, 2), (1, 3), (10**9, 4)):
            assert torch.equal(ahead.draw(first, n, 100), normal(key, torch.arange(first, first + n), 100))


def test_dropout_drops_its_share_of_each_critics_units_and_keeps_the_mean() -> None:
    bits = torch.arange(400)[:, None]
    factor = kept(bits, 300, 1, 0.2)
    assert factor.shape == (2, 400, 300)
    assert factor.unique().tolist() == pytest.approx([0, 1.25])
    assert float(factor.mean()) == pytest.approx(1, abs=0.01)
    assert not torch.equal(factor[0], factor[1])
    assert not torch.equal(factor, kept(bits, 300, 2, 0.2))


def test_discrete_actions_are_refused_with_what_to_use() -> None:
    with pytest.raises(FlatoutError, match="use PPO"):
        make_model(ObsLayout(PLAIN), ActionLayout(spaces.Discrete(3)), NetworkConfig(), SACConfig(), 0)


@pytest.mark.parametrize(
    ("name", "value"), [("tau", 0.0), ("dropout", 1.0), ("ent_coef", 0.0), ("exploration_hold", 0)]
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(FlatoutError, match=f"--{name.replace('_', '-')} is {value}"):
        SACConfig(**{name: value})  # type: ignore[arg-type]


def test_the_initial_temperature_is_the_one_asked_for() -> None:
    it = learner(SACConfig(ent_coef=0.25))
    model = make_model(ObsLayout(PLAIN), ActionLayout(BOUNDED), NetworkConfig(), it.config, 1)
    assert float(model.log_ent_coef.detach().exp()) == pytest.approx(0.25)
    assert math.isclose(sac.target_entropy(it.config, it.model.action), -2)
