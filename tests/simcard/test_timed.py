"""Timed mode: nothing is computed, each launch occupies the card for as long as its work takes there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import simcard

pytestmark = pytest.mark.card

CARD = simcard.CARDS["rtx4070"]


@pytest.fixture(autouse=True)
def timed(card: None) -> None:
    simcard.mode("timed", "rtx4070")
    simcard.reset()


def busy(work: Callable[[], object]) -> float:
    """Seconds that kernels occupy the card."""
    work()
    torch.accelerator.synchronize()
    simcard.reset()
    work()
    return simcard.counters().busy_seconds


def test_a_product_takes_its_flops_over_the_peak_and_the_fixed_cost() -> None:
    x = torch.empty(2048, 1024, device="sim")
    flops = 2 * 2048 * 1024 * 2048
    assert busy(lambda: x @ x.T) == pytest.approx(flops / CARD.fp32_flops + CARD.kernel_seconds)
    y = x.bfloat16()
    assert busy(lambda: y @ y.T) == pytest.approx(flops / CARD.half_flops + CARD.kernel_seconds)


def test_a_convolution_takes_its_flops_in_both_directions() -> None:
    net = nn.Conv2d(64, 128, 3, bias=False).to("sim")
    x = torch.empty(64, 64, 34, 34, device="sim", requires_grad=True)
    flops = 2 * 64 * 32 * 32 * 64 * 9 * 128
    assert busy(lambda: net(x)) == pytest.approx(flops / CARD.fp32_flops + CARD.kernel_seconds)
    y = net(x)
    gradient = torch.empty_like(y)
    both = busy(lambda: torch.autograd.grad(y, (x, net.weight), gradient, retain_graph=True))
    assert both == pytest.approx(2 * flops / CARD.fp32_flops + CARD.kernel_seconds)


def test_an_elementwise_kernel_takes_its_bytes_over_the_bandwidth() -> None:
    x = torch.empty(1 << 24, device="sim")
    assert busy(lambda: x + x) == pytest.approx(3 * x.nbytes / CARD.memory_bandwidth + CARD.kernel_seconds)


def test_a_gather_of_rows_takes_only_their_bytes() -> None:
    table = torch.empty(1 << 18, 64, device="sim")
    rows = torch.zeros(4096, dtype=torch.long, device="sim")
    moved = 2 * 4096 * 64 * 4 + rows.nbytes
    assert busy(lambda: table[rows]) == pytest.approx(moved / CARD.memory_bandwidth + CARD.kernel_seconds)
    assert busy(lambda: table.index_select(0, rows)) == pytest.approx(
        moved / CARD.memory_bandwidth + CARD.kernel_seconds
    )


def test_rows_written_in_place_take_only_their_bytes() -> None:
    table = torch.empty(1 << 18, 64, device="sim")
    rows, values = torch.zeros(4096, dtype=torch.long, device="sim"), torch.empty(4096, 64, device="sim")
    places = rows[:, None].expand(-1, 64).contiguous()
    for index, work in (
        (rows, lambda: table.index_copy_(0, rows, values)),
        (places, lambda: table.scatter_(0, places, values)),
    ):
        moved = 2 * values.nbytes + index.nbytes
        assert busy(work) <= 1.5 * moved / CARD.memory_bandwidth + CARD.kernel_seconds


def test_the_host_runs_on_and_a_sync_waits() -> None:
    x = torch.empty(4096, 4096, device="sim")
    x @ x
    torch.accelerator.synchronize()
    simcard.reset()
    start = time.perf_counter()
    event = torch.Event("sim")
    for _ in range(20):
        x @ x
    event.record()
    launched = time.perf_counter() - start
    assert not event.query()
    torch.accelerator.synchronize()
    waited = time.perf_counter() - start
    work = simcard.counters().busy_seconds
    assert launched < work <= waited
    assert event.query()


def test_events_carry_the_cards_time() -> None:
    x = torch.empty(4096, 4096, device="sim")
    first, last = (torch.Event("sim", enable_timing=True) for _ in range(2))
    x @ x
    first.record()
    for _ in range(5):
        x @ x
    last.record()
    last.synchronize()
    one = 2 * 4096**3 / CARD.fp32_flops + CARD.kernel_seconds
    assert first.elapsed_time(last) == pytest.approx(5e3 * one, rel=1e-3)


def test_copies_overlap_kernels_and_each_other_on_streams_of_their_own() -> None:
    x = torch.empty(4096, 4096, device="sim")
    host = torch.empty(1 << 22).pin_memory()
    up, down = torch.Stream("sim"), torch.Stream("sim")
    device = torch.empty_like(host, device="sim")
    x @ x
    torch.accelerator.synchronize()
    first, last = (torch.Event("sim", enable_timing=True) for _ in range(2))
    simcard.reset()
    first.record()
    for stream in (up, down):
        stream.wait_event(first)
    for _ in range(4):
        x @ x
        with up:
            device.copy_(host, non_blocking=True)
        with down:
            host.copy_(device, non_blocking=True)
    for stream in (up, down):
        torch.accelerator.current_stream().wait_stream(stream)
    last.record()
    last.synchronize()
    counters = simcard.counters()
    one = host.nbytes / CARD.link_bandwidth + CARD.link_latency
    assert counters.copy_seconds == pytest.approx(8 * one)
    assert first.elapsed_time(last) / 1e3 < counters.busy_seconds + 0.5 * counters.copy_seconds


def test_a_graph_costs_the_sum_of_its_kernels_with_a_smaller_fixed_cost() -> None:
    x = torch.zeros(64, 64, device="sim")
    graph = torch.accelerator.Graph()
    with torch.Stream("sim"), graph:
        for _ in range(100):
            x.add_(1)
    simcard.reset()
    graph.replay()
    counters = simcard.counters()
    assert (counters.launches, counters.replays) == (1, 1)
    assert counters.busy_seconds == pytest.approx(
        100 * (CARD.graph_kernel_seconds + 2 * x.nbytes / CARD.memory_bandwidth), rel=0.5
    )


def test_utilisation_is_what_was_busy_of_what_went_by() -> None:
    x = torch.empty(4096, 4096, device="sim")
    x @ x
    torch.accelerator.synchronize()
    simcard.reset()
    start = time.perf_counter()
    for _ in range(10):
        x @ x
        torch.accelerator.synchronize()
        time.sleep(0.005)
    share = simcard.counters().busy_seconds / (time.perf_counter() - start)
    assert 0.02 < share < 0.8


def test_values_that_the_host_reads_are_zeros_or_what_it_wrote() -> None:
    simcard.mode("exact")
    left = [torch.full((64,), -1.0, device="sim") for _ in range(256)]  # memory that is used again
    del left
    simcard.mode("timed", "rtx4070")
    weights = torch.arange(4.0).to("sim")
    assert weights.tolist() == [0, 1, 2, 3]
    actions = (weights * 5).long()
    assert actions.tolist() == [0, 0, 0, 0]
    del weights, actions
    assert torch.empty(4, device="sim").tolist() == [0, 0, 0, 0]


def test_float32_products_use_tf32_where_it_is_allowed() -> None:
    simcard.mode("timed", "a100")
    x = torch.empty(2048, 2048, device="sim")
    full = busy(lambda: x @ x)
    torch.set_float32_matmul_precision("high")
    try:
        fast = busy(lambda: x @ x)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert fast < full / 4


QUEUE = """
import sys, torch, simcard
simcard.install("timed", "rtx4070", 1)
x = torch.empty(8192, 8192, device="sim")
for _ in range(900):  # half a minute of work
    torch.mm(x, x)
print("queued", flush=True)
sys.stdin.read()
"""
ONE = """
import torch, simcard
simcard.install("timed", "rtx4070", 1)
x, large = (torch.empty(n, n, device="sim") for n in (2048, 16384))
begin, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
torch.mm(x, x)  # the first call takes the host half a second
torch.mm(large, large)  # 0.3 s, in which the host queues what is timed
before = simcard.counters().busy_seconds
begin.record(); torch.mm(x, x); end.record()
seconds = simcard.counters().busy_seconds - before
end.synchronize()
print(begin.elapsed_time(end) / 1e3 / seconds)
"""


def test_processes_share_a_card_and_count_their_own_work(tmp_path: Path) -> None:
    env = os.environ | {"SIMCARD_SHARED": str(tmp_path / "card")}

    def alone() -> float:
        done = subprocess.run(
            [sys.executable, "-c", ONE], env=env, capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    def users(n: int) -> list[subprocess.Popen[str]]:
        command = [sys.executable, "-c", QUEUE]
        pipe = subprocess.PIPE
        found = [subprocess.Popen(command, env=env, text=True, stdin=pipe, stdout=pipe) for _ in range(n)]
        for process in found:
            assert process.stdout is not None
            assert process.stdout.readline() == "queued\n"
        return found

    assert alone() == pytest.approx(1, rel=0.05)
    running = users(2)
    try:
        assert alone() == pytest.approx(3, rel=0.05)
    finally:
        for process in running:
            process.kill()
            process.communicate()
