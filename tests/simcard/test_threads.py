"""Several threads use the card at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import simcard

pytestmark = pytest.mark.card


def train(seed: int, device: str, steps: int = 15) -> list[torch.Tensor]:
    net = nn.Linear(6, 3)
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        nn.init.normal_(parameter, generator=generator)
    x = torch.randn(32, 6, generator=generator).to(device)
    net.to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, foreach=False)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        loss.item()
    return [p.detach().cpu() for p in net.parameters()]


@pytest.mark.parametrize("mode", ["exact", "timed"])
def test_threads_with_streams_of_their_own_do_not_disturb_each_other(mode: str) -> None:
    simcard.mode(mode)

    def work(seed: int) -> list[torch.Tensor]:
        with torch.Stream(f"sim:{seed % 2}"):
            return train(seed, f"sim:{seed % 2}")

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(work, range(8)))
    simcard.mode("exact")
    if mode == "exact":
        for seed, result in enumerate(results):
            assert all(map(torch.equal, result, train(seed, "cpu")))


def test_the_gil_is_free_while_the_card_works() -> None:
    simcard.mode("timed")
    x = torch.zeros(4096, 4096, device="sim")
    ticks: list[int] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    for _ in range(20):
        x @ x
    torch.accelerator.synchronize()
    stop.set()
    thread.join()
    assert len(ticks) > 3
