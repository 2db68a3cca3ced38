"""Memory: torch's own statistics and errors, a limit, and failures on request."""

from __future__ import annotations

import pytest
import torch

import simcard

pytestmark = pytest.mark.card

MEBIBYTE = 1 << 20


def test_the_statistics_are_torchs() -> None:
    before = torch.accelerator.memory_allocated()
    x = torch.zeros(MEBIBYTE, device="sim")
    assert torch.accelerator.memory_allocated() - before == 4 * MEBIBYTE
    free, total = torch.accelerator.get_memory_info()
    assert total == 1 << 30
    assert total - free == torch.accelerator.memory_reserved()
    del x
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() >= before + 4 * MEBIBYTE
    torch.accelerator.empty_cache()
    assert torch.accelerator.get_memory_info()[0] > free


def test_memory_that_is_freed_is_used_again_at_once() -> None:
    first = torch.zeros(1000, device="sim").data_ptr()
    assert torch.zeros(1000, device="sim").data_ptr() == first


def test_too_large_a_tensor_is_torchs_out_of_memory_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 GiB"):
        torch.zeros(1 << 29, device="sim")
    assert torch.accelerator.memory_stats()["num_ooms"] >= 1


def test_cached_memory_is_given_back_before_memory_runs_out() -> None:
    x = torch.zeros(150 * MEBIBYTE, device="sim")
    del x
    y = torch.zeros(200 * MEBIBYTE, device="sim")
    assert y.sum().item() == 0


def test_blocks_that_a_stream_still_uses_are_waited_for_before_memory_runs_out() -> None:
    side = torch.Stream("sim")
    x = torch.zeros(200 * MEBIBYTE, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        total = x.sum()
    x.record_stream(side)
    del x
    torch.zeros(200 * MEBIBYTE, device="sim")
    assert total.item() == 0


def test_memory_is_given_back_only_after_the_work_that_uses_it() -> None:
    x = torch.ones(16 * MEBIBYTE, device="sim")
    y = x + 1
    z = y * 2
    del y
    torch.accelerator.empty_cache()
    assert z[12345].item() == 4
    y = x + 2
    z = y * 2
    del y
    simcard.fail_allocation(1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(4, device="sim")
    assert z[12345].item() == 6


def test_the_limit_is_each_devices_own() -> None:
    simcard.set_memory_limit(8 * MEBIBYTE, device=1)
    torch.zeros(16 * MEBIBYTE, device="sim:0")
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(16 * MEBIBYTE, device="sim:1")


def test_every_allocation_can_be_made_to_fail_once() -> None:
    def work() -> float:
        x = torch.ones(10, 10, device="sim")
        return float((x @ x + x).sum().item())

    simcard.reset()
    expected = work()
    count = simcard.counters().allocations
    assert count == 4
    for nth in range(1, count + 1):
        simcard.fail_allocation(nth)
        with pytest.raises(torch.OutOfMemoryError):
            work()
        assert work() == expected
