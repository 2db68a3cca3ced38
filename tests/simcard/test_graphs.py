"""Graphs record at capture and run at replay, on the same addresses."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import simcard

pytestmark = pytest.mark.card


def capture(body: Callable[[], object], **options: str) -> torch.accelerator.Graph:
    graph = torch.accelerator.Graph(**options)  # type: ignore[arg-type]
    with torch.Stream("sim"), graph:
        body()
    return graph


def test_a_capture_runs_nothing_and_a_replay_everything_as_one_launch() -> None:
    x = torch.zeros(3, device="sim")
    graph = capture(lambda: x.add_(1).mul_(2))
    assert x.tolist() == [0, 0, 0]
    simcard.reset()
    graph.replay()
    graph.replay()
    counters = simcard.counters()
    assert (counters.launches, counters.replays, counters.syncs) == (2, 2, 0)
    assert x.tolist() == [6, 6, 6]


def test_a_training_step_gives_the_same_as_a_graph() -> None:
    def train(captured: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)).to("sim")
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, fused=True)
        data, batch = torch.randn(64, 6).to("sim"), torch.zeros(8, dtype=torch.long, device="sim")

        def step() -> None:
            loss = net(data.index_select(0, batch)).pow(2).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        step()  # makes the state of the optimizer and the gradients
        run = capture(step).replay if captured else step
        host = torch.empty(8, dtype=torch.long).pin_memory()
        for i in range(10):
            host.copy_(torch.arange(i, i + 8))
            batch.copy_(host, non_blocking=True)
            run()
            torch.accelerator.synchronize()
        return [p.detach().cpu() for p in net.parameters()]

    for a, b in zip(train(False), train(True), strict=True):
        assert torch.equal(a, b)


def test_random_operators_draw_anew_at_each_replay() -> None:
    x = torch.zeros(4, device="sim")
    graph = capture(lambda: x.uniform_())
    torch.manual_seed(3)
    drawn = []
    for _ in range(3):
        graph.replay()
        drawn.append(x.cpu())
    torch.manual_seed(3)
    assert all(torch.equal(a, torch.empty(4).uniform_()) for a in drawn)


def test_results_stay_where_they_were_and_their_memory_is_the_graphs() -> None:
    kept: list[torch.Tensor] = []
    x = torch.ones(1000, device="sim")
    graph = capture(lambda: kept.append((x * 2) * 3))
    address = kept[0].data_ptr()
    reserved = torch.accelerator.memory_reserved()
    other = [torch.zeros(1000, device="sim") for _ in range(20)]
    x.fill_(2)
    graph.replay()
    assert kept[0].data_ptr() == address
    assert kept[0].sum().item() == 12_000
    assert all(t.sum().item() == 0 for t in other)
    assert torch.accelerator.memory_reserved() >= reserved
    graph.reset()
    kept.clear()
    del other
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() < reserved


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: torch.accelerator.synchronize(),
        lambda x: torch.accelerator.current_stream().synchronize(),
        lambda x: torch.zeros(3).to("sim"),
        lambda x: torch.accelerator.current_stream().query(),
    ],
    ids=["item", "to host", "shape", "device", "stream", "to device", "query"],
)
def test_a_wait_during_a_capture_is_an_error_and_spoils_it(wait: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3, device="sim")
    torch.accelerator.synchronize()
    graph = torch.accelerator.Graph()
    with torch.Stream("sim"):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            wait(x)
        with pytest.raises(RuntimeError, match="the capture is invalid"):
            x + 1
        with pytest.raises(RuntimeError, match="the capture is invalid"):
            graph.capture_end()
    assert (x + 1).tolist() == [2, 2, 2]


def test_a_capture_needs_a_stream_of_its_own() -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.accelerator.Graph().capture_begin()


def test_copies_with_pinned_memory_are_repeated_by_a_replay() -> None:
    source, target = torch.zeros(3).pin_memory(), torch.zeros(3).pin_memory()
    x = torch.zeros(3, device="sim")

    def body() -> None:
        x.copy_(source, non_blocking=True)
        target.copy_(x * 2, non_blocking=True)

    graph = capture(body)
    for value in (1, 2):
        source.fill_(value)
        graph.replay()
        torch.accelerator.synchronize()
        assert target.tolist() == [2 * value] * 3


def test_a_side_stream_can_fork_and_must_join() -> None:
    x = torch.zeros(3, device="sim")
    side = torch.Stream("sim")

    def body(joins: bool) -> None:
        main = torch.accelerator.current_stream()
        side.wait_stream(main)
        with side:
            x.add_(1)
        if joins:
            main.wait_stream(side)
        x.mul_(2)

    graph = capture(lambda: body(True))
    graph.replay()
    assert x.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="not joined"):
        capture(lambda: body(False))
    assert not any(s.query() is False for s in (side,))


def test_a_capture_cannot_wait_for_work_outside_it() -> None:
    outside = torch.Stream("sim")
    x = torch.zeros(3, device="sim")
    with outside:
        x += 1
    with pytest.raises(RuntimeError, match="outside the capture"):
        capture(lambda: torch.accelerator.current_stream().wait_stream(outside))


@pytest.mark.parametrize("mode", ["thread_local", "relaxed", "global"])
def test_another_thread_may_use_the_card_during_a_capture_unless_it_is_global(mode: str) -> None:
    x = torch.zeros(3, device="sim")
    torch.accelerator.synchronize()
    results: list[object] = []

    def other() -> None:
        try:
            with torch.Stream("sim"):
                results.append(torch.ones(1000, 1000, device="sim").sum().item())
        except RuntimeError as error:
            results.append(error)

    def body() -> None:
        x.add_(1)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    if mode == "global":
        with pytest.raises(RuntimeError, match=r"the capture is invalid: .* by another thread"):
            capture(body, capture_error_mode=mode)
        assert isinstance(results[0], RuntimeError)
    else:
        capture(body, capture_error_mode=mode).replay()
        assert results == [1e6]
        assert x.tolist() == [1, 1, 1]


def test_graphs_can_share_a_pool() -> None:
    x = torch.ones(1 << 20, device="sim")
    first = capture(lambda: x * 2)
    reserved = torch.accelerator.memory_reserved()
    second = torch.accelerator.Graph(pool=first.pool())
    with torch.Stream("sim"), second:
        x * 3
    assert second.pool() == first.pool()
    assert torch.accelerator.memory_reserved() >= reserved
