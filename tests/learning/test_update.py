"""The update against torch's own Adam and clipping; skipped steps change nothing."""

from __future__ import annotations

import math
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.algorithms.dqn.config import DQNConfig
from flatout.algorithms.dqn.learner import DQNLearner
from flatout.algorithms.ppo.config import PPOConfig
from flatout.algorithms.ppo.learner import PPOLearner
from flatout.envs.loader import Code
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.learning import fused
from flatout.learning.learner import bytes_per_row, rows_that_fit
from flatout.learning.update import Minibatch, Update, adam
from flatout.models.config import NetworkConfig
from flatout.models.params import FlatParams
from flatout.models.policy import QNetwork, build
from flatout.perf.planner import on_threads
from flatout.timing import PhaseClock


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(n: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(16, 3, generator=g) for _ in range(n)]


@dataclass(frozen=True)
class Inputs(Minibatch):
    """A minibatch of one tensor."""

    x: Tensor


def make_update(model: nn.Sequential, kl_limit: float | None = None, **options: Any) -> Update[Inputs]:
    def loss(batch: Inputs, coefficient: Tensor) -> tuple[Tensor, Tensor]:
        value = (model(batch.x) - 3.0).square().mean()
        return value, torch.stack([value.detach(), batch.x.mean()])

    params = FlatParams(model)
    options = {"max_grad_norm": 0.5, "batch_size": 16, "kl_index": 1} | options
    return Update(model, params, loss, 2, kl_limit=kl_limit, **options)


def params(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_equals_torch_adam_with_clipping() -> None:
    ours, theirs = net(), net()
    update = make_update(ours)
    update.begin(1e-2)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=1e-2, eps=1e-5)
    for x in batches(50):
        update.step(Inputs(x))
        optimizer.zero_grad()
        (theirs(x) - 3.0).square().mean().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        torch.testing.assert_close(params(ours), params(theirs), rtol=1e-4, atol=1e-5)


def test_every_form_of_adam_equals_the_reference() -> None:
    """PyTorch's fused kernel in the eager step and the compiled loop of the fused backend, against `adam`."""
    generator = torch.Generator().manual_seed(3)
    n, rate = 40, 1e-2
    flat, momentum, variance = torch.randn(3, n, generator=generator)
    variance = variance.square()
    loop = [x.numpy().copy() for x in (flat, momentum, variance)]
    model = nn.Linear(n, 1, bias=False)
    update = make_update(nn.Sequential(model), max_grad_norm=1e9)
    own = update.inputs(Inputs(torch.zeros(16, n)))[0][:3]
    for tensor, value in zip(own, (flat, momentum, variance), strict=True):
        tensor[:n] = value
    update.begin(rate)
    counts = [np.zeros(1, np.float32) for _ in range(4)]
    for step in range(1, 6):
        grad = torch.randn(n, generator=generator)
        flat, momentum, variance = adam(
            flat, momentum, variance, grad, torch.tensor(float(step)), torch.tensor(rate)
        )
        state = loop[0], grad.numpy(), *loop[1:], np.zeros(1, np.float32), *counts, np.zeros(2, np.float32)
        fused.adam(float(grad.norm()), 1e9, rate, 0.0, math.inf, state)
        padded = torch.zeros_like(own[0])
        padded[:n] = grad
        update._adam_in_place(padded, torch.ones(()), torch.zeros(()), torch.tensor(float(step)), rate)
        for want, by_loop, by_torch in zip((flat, momentum, variance), loop, own, strict=True):
            torch.testing.assert_close(torch.from_numpy(by_loop), want, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(by_torch[:n].detach(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(bad: float) -> None:
    clean, hit = net(), net()
    a, b = make_update(clean), make_update(hit)
    a.begin(1e-2)
    b.begin(1e-2)
    for i, x in enumerate(batches(6)):
        a.step(Inputs(x))
        b.step(Inputs(x))
        if i in (0, 3):
            b.step(Inputs(torch.full_like(x, bad)))
    assert torch.equal(params(clean), params(hit))
    assert b.n_bad == 2
    assert b.n_taken == 6
    assert torch.isfinite(b.metrics).all()


def test_nothing_is_applied_once_the_kl_limit_is_passed() -> None:
    model = net()
    update = make_update(model, kl_limit=1.0)
    update.begin(1e-2)
    update.step(Inputs(torch.zeros(16, 3)))
    kept = params(model)
    update.step(Inputs(torch.full((16, 3), 2.0)))  # its mean stands in for the KL
    update.step(Inputs(torch.zeros(16, 3)))
    assert torch.equal(params(model), kept)
    assert update.stopped
    assert update.n_taken == 1
    update.begin(1e-2)
    update.step(Inputs(torch.zeros(16, 3)))
    assert not torch.equal(params(model), kept)


def test_parameters_stay_views_of_the_flat_tensor() -> None:
    model = net()
    flat = FlatParams(model)
    flat.flat.zero_()
    assert all((p == 0).all() for p in model.parameters())
    with torch.no_grad():
        next(model.parameters()).fill_(2.0)
    assert (flat.flat[:24] == 2.0).all()


def learned(n_rows: int, hit: OutOfMemoryAt | None = None, **options: Any) -> tuple[Tensor, Update[Inputs]]:
    """Parameters after three steps in micro-batches of `n_rows`; `hit` interferes with the second."""
    model = net()
    update = make_update(model, **options)
    update.parts.n_rows = n_rows
    update.scale.clamp_(max=256.0)  # fits from the start
    update.begin(1e-2)
    for i, x in enumerate(batches(3)):
        with hit if hit is not None and i == 1 else nullcontext():
            update.step(Inputs(x))
    return params(model), update


@pytest.mark.parametrize("n_rows", [8, 5, 1])
def test_micro_batches_give_the_same_result_as_the_whole_minibatch(n_rows: int) -> None:
    whole, update = learned(16)
    parts, in_parts = learned(n_rows)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(in_parts.metrics, update.metrics, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_threads_that_share_a_minibatch_give_the_same_result(*, fails: bool) -> None:
    """Also where memory runs out in one of them."""
    whole, alone = learned(16)
    model, failed = net(), list[int]()
    update = make_update(model)
    update.splits, loss = True, update._loss

    def of_a_share(batch: Inputs, coefficient: Tensor) -> tuple[Tensor, ...]:
        if fails and len(batch) < 16 and not failed:
            failed.append(threading.get_ident())
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss(batch, coefficient)

    update._loss = of_a_share
    update.begin(1e-2)
    with on_threads(2):
        for x in batches(3):
            update.step(Inputs(x))
    torch.testing.assert_close(params(model), whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(update.metrics, alone.metrics, rtol=1e-5, atol=1e-6)
    assert update.parts.n_backoffs == fails
    assert not fails or failed[0] != threading.get_ident()
    update.close()
    assert not [it for it in threading.enumerate() if it.name.startswith("flatout update")]


@pytest.mark.parametrize("algo", ["PPO", "DQN"])
@pytest.mark.parametrize(("side", "n_threads"), [(20, 2), (84, 2), (84, 4)])
def test_threads_learn_the_same_from_images_every_time(algo: str, side: int, n_threads: int) -> None:
    """As one thread does, to rounding; among themselves to the bit. The larger one has a layer that they compute together."""
    shape = (2, side, side)
    obs, action = ObsLayout(spaces.Box(0, 255, shape, np.uint8)), ActionLayout(spaces.Discrete(3))
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(0, 256, (4, 32, *shape), generator=generator, dtype=torch.uint8)

    def after_steps(n_threads: int) -> Tensor:
        torch.manual_seed(0)
        options: dict[str, Any] = {"n_envs": 2, "seed": 0, "clock": PhaseClock()}
        learner: Any
        if algo == "PPO":
            learner = PPOLearner(
                build(obs, action, NetworkConfig(), seed=0), PPOConfig(batch_size=32), **options
            )
        else:
            learner = DQNLearner(QNetwork(obs, action, NetworkConfig()), DQNConfig(batch_size=32), **options)
        assert learner.update.splits
        learner.update.begin(1e-3, 0.2)
        with on_threads(n_threads):
            for shown in images:
                batch = learner.example_batch(32)
                for tensor in batch.obs + getattr(batch, "next_obs", ()):
                    tensor.copy_(shown)
                learner.update.step(batch)
                if algo == "DQN":
                    learner.networks.soft_update(0.5)
        learner.close()
        flat: Tensor = learner.params.flat
        return flat.detach().clone()

    one, more = after_steps(1), after_steps(n_threads)
    torch.testing.assert_close(more, one, rtol=1e-4, atol=1e-6)
    for _ in range(3):
        assert torch.equal(after_steps(n_threads), more)


class Tanh(nn.Module):
    """A user's network; the longer it takes, the likelier its threads meet in it."""

    independent_rows = True

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_features, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.layers(features)
        return out


def test_threads_do_not_see_the_target_network_of_another_thread_in_a_network_of_the_users() -> None:
    obs, action = ObsLayout(spaces.Box(-1, 1, (8,), np.float32)), ActionLayout(spaces.Discrete(3))

    def after_steps(n_threads: int) -> Tensor:
        torch.manual_seed(0)
        config = NetworkConfig(network=Code.of(Tanh), network_arch=())
        learner = DQNLearner(
            QNetwork(obs, action, config),
            DQNConfig(batch_size=512, target_update_interval=10**6),
            n_envs=2,
            seed=0,
            clock=PhaseClock(),
        )
        learner.networks.target.mul_(2.0)  # far from the online network
        learner.update.begin(1e-3)
        with on_threads(n_threads):
            for _ in range(30):
                learner.update.step(learner.example_batch(512))
        learner.close()
        return learner.params.flat.detach().clone()

    torch.testing.assert_close(after_steps(2), after_steps(1), rtol=1e-3, atol=1e-4)


class OutOfMemoryAt(TorchDispatchMode):
    """Raises an out-of-memory error once, at the n-th operation."""

    def __init__(self, n: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left, self.n_seen = n, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_seen += 1
        if self.n_seen == self.left:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_out_of_memory_at_any_operation_ends_in_the_same_parameters() -> None:
    clean, _ = learned(16)
    count = OutOfMemoryAt(-1)
    learned(16, count)
    assert count.n_seen > 40  # forward, backward, clipping, Adam
    for n in range(1, count.n_seen - 1):  # the last two, Adam and the counters, work in place, without memory
        after, update = learned(16, OutOfMemoryAt(n))
        torch.testing.assert_close(after, clean, rtol=1e-6, atol=1e-6)
        assert update.parts.n_backoffs == 1
        assert update.parts.n_rows == 8  # remembered
        assert update.n_taken == 3


def test_memory_too_small_for_one_sample_is_an_error() -> None:
    update = make_update(net())
    update.begin(1e-2)
    always = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory: 8 bytes"
    )

    def fail() -> None:
        raise always

    with pytest.raises(RuntimeError, match="not enough memory"):
        update.parts.attempt(fail)
    assert update.parts.n_rows == 1
    assert "out of memory with 16 samples at once; continuing with 8, same result" in update.parts.notes[0]


def test_other_errors_are_not_taken_for_full_memory() -> None:
    update = make_update(net())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        update.step(Inputs(torch.zeros(16, 4)))
    assert update.parts.n_backoffs == 0


def test_memory_per_sample_is_measured_and_the_number_that_fits_is_found() -> None:
    model = nn.Sequential(nn.Linear(3, 100), nn.Tanh(), nn.Linear(100, 1))
    x = torch.randn(32, 3)
    per_row = bytes_per_row(lambda: model(x).square().mean(), 32)
    assert 4 * (3 + 100) <= per_row <= 4 * (3 + 2 * 100 + 4)
    assert rows_that_fit(10**9, per_row, 4096) == 4096
    n_rows = rows_that_fit(1_000_000, per_row, 4096)
    assert n_rows * per_row <= 500_000 < 2 * n_rows * per_row


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_full_precision(kind: torch.dtype) -> None:
    whole, _ = learned(16)
    half, update = learned(16, autocast=kind)
    torch.testing.assert_close(half, whole, rtol=0.05, atol=0.02)
    assert not torch.equal(half, whole)
    assert update.n_bad == 0


def test_a_scale_that_overflows_fp16_is_halved_until_it_fits() -> None:
    model = net()
    update = make_update(model, autocast=torch.float16)
    update.scale.fill_(2.0**30)
    before = params(model)
    update.begin(1e-2)
    for x in batches(30):
        update.step(Inputs(x))
    assert update.scale < 2.0**20
    assert update.n_bad == 0
    assert 0 < update.n_taken < 30
    assert not torch.equal(params(model), before)
    assert torch.isfinite(params(model)).all()


def test_a_minibatch_that_cannot_fit_is_split_from_the_start() -> None:
    obs, action = ObsLayout(spaces.Box(-1, 1, (4,))), ActionLayout(spaces.Discrete(2))
    model = build(obs, action, NetworkConfig(), seed=0)
    learner = PPOLearner(model, PPOConfig(batch_size=4096), n_envs=32, seed=0, clock=PhaseClock())
    learner.fit_into(10**10)
    assert learner.update.parts.n_rows == 4096
    assert not learner.take_notes()
    learner.fit_into(10**6)
    assert learner.update.parts.n_rows < 1024
    assert "computed in parts of" in learner.take_notes()[0]
