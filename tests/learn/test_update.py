"""The update against torch's own Adam and clipping; steps that must not happen leave no trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flatout.learn.params import FlatParams
from flatout.learn.update import Update


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(n: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(16, 3, generator=g) for _ in range(n)]


def make_update(model: nn.Sequential, kl_limit: float | None = None) -> Update[Tensor]:
    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        value = (model(x) - 3.0).square().mean()
        return value, torch.stack([value.detach(), x.mean()])

    return Update(FlatParams(model), loss, 2, max_grad_norm=0.5, kl_index=1, kl_limit=kl_limit)


def params(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_equals_torch_adam_with_clipping() -> None:
    ours, theirs = net(), net()
    update = make_update(ours)
    update.begin(1e-2)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=1e-2, eps=1e-5)
    for x in batches(50):
        update.step(x)
        optimizer.zero_grad()
        (theirs(x) - 3.0).square().mean().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        torch.testing.assert_close(params(ours), params(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(bad: float) -> None:
    clean, hit = net(), net()
    a, b = make_update(clean), make_update(hit)
    a.begin(1e-2)
    b.begin(1e-2)
    for i, x in enumerate(batches(6)):
        a.step(x)
        b.step(x)
        if i in (0, 3):
            b.step(torch.full_like(x, bad))
    assert torch.equal(params(clean), params(hit))
    assert b.n_bad == 2
    assert b.n_taken == 6
    assert torch.isfinite(b.metrics).all()


def test_nothing_is_applied_once_the_kl_limit_is_passed() -> None:
    model = net()
    update = make_update(model, kl_limit=1.0)
    update.begin(1e-2)
    update.step(torch.zeros(16, 3))
    kept = params(model)
    update.step(torch.full((16, 3), 2.0))  # its mean stands in for the KL
    update.step(torch.zeros(16, 3))
    assert torch.equal(params(model), kept)
    assert update.stopped
    assert update.n_taken == 1
    update.begin(1e-2)
    update.step(torch.zeros(16, 3))
    assert not torch.equal(params(model), kept)


def test_parameters_stay_views_of_the_flat_tensor() -> None:
    model = net()
    flat = FlatParams(model)
    flat.flat.zero_()
    assert all((p == 0).all() for p in model.parameters())
    with torch.no_grad():
        next(model.parameters()).fill_(2.0)
    assert (flat.flat[:24] == 2.0).all()
