"""Exact mode: the card's results are the CPU's, to the bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simcard

pytestmark = pytest.mark.card

Case = Callable[[Tensor], Tensor | tuple[Tensor, ...] | list[Tensor]]


def rows(x: Tensor) -> Tensor:
    return torch.tensor([1, 3, 0], device=x.device)


def set_rows(x: Tensor) -> Tensor:
    x[rows(x)] = torch.ones(3, 6, device=x.device)
    return x


def set_where_positive(x: Tensor) -> Tensor:
    x[x > 0] = 0.0
    return x


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    net.to(x.device)
    net(x).pow(2).mean().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def per_sample_gradients(x: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Linear(6, 3).to(x.device)
    parameters: dict[str, Tensor] = dict(net.named_parameters())

    def loss(p: dict[str, Tensor], row: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(net, p, (row,))
        return result.pow(2).mean()

    return list(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x).values())


def random_numbers(x: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(5)
    generator = torch.Generator(x.device).manual_seed(7)
    on: Any = {"device": x.device}
    return (
        torch.rand(9, **on),
        torch.randn(33, generator=generator, **on),
        torch.randperm(20, generator=generator, **on),
        x.softmax(1).multinomial(2),
        x.sigmoid().bernoulli(),
        torch.nn.functional.dropout(x, 0.3),
        torch.randint(0, 9, (5,), **on),
        torch.rand(3, generator=generator, **on),
    )


CASES: dict[str, Case] = {
    "arithmetic": lambda x: (x * 2 + 1 - x / 3).relu(),
    "product": lambda x: x @ x.T,
    "half": lambda x: x.bfloat16() @ x.bfloat16().T,
    "reductions": lambda x: (x.sum(), x.mean(0), x.std(), x.max(1).values, x.argmax(1), x.logsumexp(1)),
    "softmax": lambda x: (x.softmax(1), x.log_softmax(0)),
    "index_select": lambda x: x.index_select(0, rows(x)),
    "index": lambda x: x[rows(x)],
    "mask": lambda x: x[x > 0],
    "set rows": set_rows,
    "set where": set_where_positive,
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "scatter": lambda x: x.scatter(0, x.argsort(0), 5.0),
    "index_copy_": lambda x: x.index_copy_(0, rows(x), x[:3] * 2),
    "sort": lambda x: tuple(x.sort(1)),
    "searchsorted": lambda x: torch.searchsorted(x.sort(1).values, x),
    "cumsum": lambda x: x.cumsum(0),
    "cat and stack": lambda x: (torch.cat([x, x], 1), torch.stack([x, x])),
    "factories": lambda x: (torch.arange(5, device=x.device), torch.eye(3, device=x.device)),
    "layer norm": lambda x: nn.functional.layer_norm(x, (6,)),
    "foreach": lambda x: [*torch._foreach_mul([x, x], 2.0), *torch._foreach_norm([x, x])],
    "views": lambda x: (x.unfold(1, 3, 1).sum(2), x.t().reshape(-1), x[:, 1].expand(2, 8), x.flip(0)),
    "one value": lambda x: x + x[0, 0].item(),
    "gradients": lambda x: gradients(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2)), x),
    "convolution": lambda x: gradients(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3)), x.view(2, 1, 4, 6)
    ),
    "per sample": per_sample_gradients,
    "random": random_numbers,
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_gives_what_the_cpu_gives(name: str) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    on_cpu, on_card = CASES[name](x.clone()), CASES[name](x.to("sim:1"))
    if isinstance(on_cpu, Tensor):
        on_cpu, on_card = (on_cpu,), (on_card,)  # type: ignore[assignment]
    for a, b in zip(on_cpu, on_card, strict=True):
        assert b.device == torch.device("sim:1")
        assert a.dtype == b.dtype
        assert torch.equal(a, b.cpu())


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_twenty_steps_of_adam_leave_the_parameters_of_the_cpu(options: Any) -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)).to(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, **options)
        x = torch.randn(64, 6).to(device)
        for _ in range(20):
            optimizer.zero_grad()
            net(x).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        return [p.detach().cpu() for p in net.parameters()]

    for a, b in zip(train("cpu"), train("sim"), strict=True):
        assert torch.equal(a, b)


def test_a_module_that_moves_keeps_its_parameters() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    before = list(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    for place in ("sim", "sim:1", "cpu", "sim:1"):
        net.to(place)
        assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
        assert all(
            p.device == p.grad.device == torch.device(place if ":" in place or place == "cpu" else "sim:0")
            for p in before
            if p.grad is not None
        )
    torch.optim.SGD(before, lr=1.0).step()
    assert all(torch.equal(p, q) for p, q in zip(before, net.parameters(), strict=True))


def test_autocast_computes_products_in_bfloat16() -> None:
    x = torch.randn(4, 6, device="sim")
    net = nn.Linear(6, 3).to("sim")
    with torch.autocast("sim", torch.bfloat16):
        y = net(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(
        y.cpu(),
        nn.functional.linear(x.cpu().bfloat16(), net.weight.cpu().bfloat16(), net.bias.cpu().bfloat16()),
    )


def test_modules_and_tensors_are_copied_and_saved(tmp_path: Path) -> None:
    net = nn.Linear(3, 3).to("sim:1")
    assert torch.equal(copy.deepcopy(net).weight.cpu(), net.weight.cpu())
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    for place in ("cpu", "sim:0", "sim:1"):
        file.seek(0)
        weight = torch.load(file, map_location=place)["weight"]
        assert weight.device == torch.device(place)
        assert torch.equal(weight.cpu(), net.weight.cpu())


def test_a_generator_goes_on_behind_what_was_launched_even_if_nothing_ran_yet() -> None:
    generator = torch.Generator("sim").manual_seed(3)
    torch.rand(10, device="sim", generator=generator)
    assert simcard.queued() > 0
    state = generator.get_state()
    reference = torch.Generator().manual_seed(3)
    torch.rand(10, generator=reference)
    assert torch.equal(state, reference.get_state())
