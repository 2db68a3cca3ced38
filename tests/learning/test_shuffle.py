"""Orders of minibatches drawn in one call are those of torch."""

from __future__ import annotations

import pytest
import torch

from flatout.learning.shuffle import draw_orders


@pytest.mark.parametrize("seed", [0, 7, 3_000_009, 2**32 + 5, 9_999_999_999_999])
@pytest.mark.parametrize(("n_epochs", "n"), [(1, 1), (3, 2), (4, 1000), (2, 4096)])
def test_orders_are_those_of_torch(seed: int, n_epochs: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    expected = torch.stack([torch.randperm(n, generator=generator) for _ in range(n_epochs)])
    assert torch.equal(torch.from_numpy(draw_orders(seed, n_epochs, n)), expected)
