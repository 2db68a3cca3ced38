"""Each test of the card starts with an idle card in exact mode, with its own memory limit and counters at zero."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import simcard

MEMORY = 1 << 30


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    """The card, as good as new."""
    simcard.install("exact", "rtx4070", n_devices=2, memory_bytes=MEMORY)
    torch.accelerator.set_device_index(0)
    torch.accelerator.empty_cache()
    simcard.reset()
    yield
    for device in range(2):
        simcard.fail_allocation(0, device)
        torch.accelerator.synchronize(device)
