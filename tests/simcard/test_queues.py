"""Exact mode: work runs late, so each kind of mistake gives wrong numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import simcard

pytestmark = pytest.mark.card


def test_nothing_runs_before_somebody_waits() -> None:
    x = torch.ones(4, device="sim")
    y = x * 2
    assert simcard.queued() == 2
    assert y.cpu().tolist() == [2, 2, 2, 2]
    assert simcard.queued() == 0


def test_a_copy_from_pinned_memory_reads_it_late() -> None:
    host = torch.zeros(4).pin_memory()
    x = host.to("sim", non_blocking=True)
    host.fill_(7)  # the mistake: the copy has not happened yet
    assert x.cpu().tolist() == [7, 7, 7, 7]


def test_a_copy_from_pageable_memory_reads_it_at_once() -> None:
    host = torch.zeros(4)
    x = host.to("sim", non_blocking=True)
    host.fill_(7)
    assert simcard.counters().syncs == 0
    assert x.cpu().tolist() == [0, 0, 0, 0]


def test_a_copy_to_pinned_memory_writes_it_late() -> None:
    host = torch.zeros(4).pin_memory()
    host.copy_(torch.ones(4, device="sim"), non_blocking=True)
    assert host.tolist() == [0, 0, 0, 0]
    torch.accelerator.current_stream().synchronize()
    assert host.tolist() == [1, 1, 1, 1]


def test_a_copy_to_pageable_memory_waits() -> None:
    host = torch.zeros(4)
    host.copy_(torch.ones(4, device="sim"), non_blocking=True)
    assert simcard.counters().sync_kinds == {"copy to the host": 1}
    assert host.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_does_not_wait_for_another_reads_old_values(waits: bool) -> None:
    x = torch.zeros(4, device="sim")
    torch.accelerator.synchronize()
    x.fill_(5)
    done = torch.accelerator.current_stream().record_event()
    side = torch.Stream("sim")
    host = torch.empty(4).pin_memory()
    with side:
        if waits:
            side.wait_event(done)
        host.copy_(x, non_blocking=True)
    side.synchronize()
    assert host.tolist() == [5 if waits else 0] * 4


@pytest.mark.parametrize("records", [True, False])
def test_memory_that_a_side_stream_still_reads_is_reused_without_record_stream(records: bool) -> None:
    side = torch.Stream("sim")
    x = torch.full((1000,), 3.0, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        total = x.sum()
    if records:
        x.record_stream(side)
    del x
    torch.full((1000,), 9.0, device="sim")
    torch.accelerator.current_stream().synchronize()
    side.synchronize()
    assert total.item() == (3000 if records else 9000)


def test_pinned_memory_that_is_freed_is_kept_until_the_copy_is_done() -> None:
    host = torch.full((1000,), 3.0).pin_memory()
    x = host.to("sim", non_blocking=True)
    address = host.data_ptr()
    del host
    other = torch.full((1000,), 9.0).pin_memory()
    assert other.data_ptr() != address
    assert x.sum().item() == 3000
    del other
    assert address in {torch.empty(1000, pin_memory=True).data_ptr() for _ in range(3)}


def test_an_event_is_a_point_in_its_stream() -> None:
    x = torch.zeros(2, device="sim")
    event = torch.Event("sim")
    event.record()
    x += 1
    event.synchronize()
    assert simcard.queued() == 1
    assert event.query()
    event.record()
    assert not event.query()
    assert event.query()  # the card went on meanwhile


def test_the_time_between_two_events_is_known_after_a_wait() -> None:
    first, last = (torch.Event("sim", enable_timing=True) for _ in range(2))
    first.record()
    torch.ones(300, 300, device="sim").sum()
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) > 0


def test_each_wait_of_the_host_is_counted_with_its_line() -> None:
    x = torch.ones(4, device="sim")
    with simcard.sync_lines() as lines:
        x.sum().item()
        x.cpu()
        x[x > 0].sum()
        torch.accelerator.synchronize()
    kinds = [line.kind for line in lines]
    assert kinds == ["item", "copy to the host", "shape of aten::nonzero", "device synchronize"]
    assert all("test_queues.py:" in line.line for line in lines)
    assert simcard.counters().syncs == 4


def test_operators_without_data_dependent_shapes_do_not_wait() -> None:
    x = torch.randn(16, 8, device="sim", requires_grad=True)
    order = torch.randperm(16, device="sim")
    y = torch.where(x > 0, x, -x)[order].sort(0).values.cumsum(0).clamp(-1, 1)
    y.log_softmax(1).gather(1, y.argmax(1, keepdim=True)).mean().backward()
    assert simcard.counters().syncs == 0


def test_copies_are_counted_by_direction() -> None:
    x = torch.zeros(100).to("sim")
    x.clone().cpu()
    counters = simcard.counters()
    assert (counters.h2d_copies, counters.h2d_bytes) == (1, 400)
    assert (counters.d2h_copies, counters.d2h_bytes) == (1, 400)
    assert (counters.d2d_copies, counters.d2d_bytes) == (1, 400)


def test_a_kernel_that_fails_is_reported_where_the_host_waits() -> None:
    x = torch.zeros(4, device="sim")
    x.index_select(0, torch.tensor([9]).to("sim", non_blocking=True))
    with pytest.raises(RuntimeError, match="launched earlier failed: aten::index_select"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def test_tensors_of_two_devices_or_of_the_host_do_not_mix() -> None:
    x = torch.zeros(4, device="sim:0")
    with pytest.raises(RuntimeError, match="sim:0 and sim:1"):
        x + torch.zeros(4, device="sim:1")
    with pytest.raises(RuntimeError, match="sim:0 and cpu"):
        x + torch.zeros(4)


def test_a_device_has_its_own_streams() -> None:
    x = torch.zeros(4, device="sim:1")
    x += 1
    torch.accelerator.synchronize(0)
    assert simcard.queued(1) == 2
    event = torch.Event("sim:0")
    event.record(torch.Stream("sim:0"))
    with pytest.raises(RuntimeError, match="device"):
        event.record(torch.Stream("sim:1"))
    assert x.to("sim:0").cpu().tolist() == [1, 1, 1, 1]


def test_the_current_device_is_the_threads_own() -> None:
    with torch.accelerator.device_index(1):
        assert torch.zeros(1, device="sim").device.index == 1
        with torch.Stream("sim:0"):
            assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_device_index() == 0


TOUCHES_DEVICE_MEMORY = """
import ctypes, torch, simcard
simcard.install()
x = torch.ones(4, device="sim")
torch.accelerator.synchronize()
ctypes.string_at(x.data_ptr(), 4)
"""

FORKS = """
import os, torch, simcard
simcard.install()
x = torch.ones(4, device="sim")
torch.accelerator.synchronize()
if os.fork() == 0:
    try:
        x + 1
    except RuntimeError as error:
        print("forked" in str(error), flush=True)
    os._exit(0)
os.wait()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_the_host_cannot_touch_device_memory() -> None:
    result = run(TOUCHES_DEVICE_MEMORY)
    assert result.returncode < 0
    assert "the host touched device memory" in result.stderr


def test_a_forked_process_cannot_use_the_card() -> None:
    assert run(FORKS).stdout == "True\n"
