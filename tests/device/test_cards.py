"""Batch sizes by card are those that are documented; `make test-gpu` needs a card."""

from __future__ import annotations

import pytest

from benchmarks.on_a_card import main
from flatout.device.accelerator import accelerators
from flatout.device.cards import replay_batch_size


@pytest.mark.parametrize(
    ("name", "gigabytes", "size"),
    [
        ("NVIDIA GeForce RTX 3060", 12, 128),
        ("NVIDIA GeForce RTX 3070 Ti", 8, 128),
        ("NVIDIA GeForce RTX 3080", 10, 256),
        ("NVIDIA GeForce RTX 3090", 24, 512),
        ("NVIDIA GeForce RTX 4090", 24, 512),
        ("NVIDIA A100-SXM4-40GB", 40, 1024),
        ("NVIDIA A100-SXM4-80GB", 80, 2048),
        ("Tesla T4", 15.8, 128),
        ("NVIDIA GeForce GTX 1650", 4, 64),
        ("NVIDIA GeForce RTX 4070", 12, 128),
        ("AMD Instinct MI300X", 192, 2048),
        ("Intel Arc A770", 16, 256),
    ],
)
def test_the_batch_of_off_policy_learning_goes_by_the_card(name: str, gigabytes: float, size: int) -> None:
    assert replay_batch_size(name, int(gigabytes * 1e9)) == size


def test_without_a_card_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if accelerators():
        pytest.skip("there is a card")
    assert main([]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "no card: torch sees no CUDA, ROCm, XPU or MPS device on this machine"
    ]
