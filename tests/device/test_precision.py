"""Number formats by what a device can do."""

from __future__ import annotations

import pytest
import torch

from flatout.device.precision import by_capability, choose_precision
from flatout.errors import FlatoutError

LARGE, SMALL = 5_000_000, 9_000


@pytest.mark.parametrize(
    ("capability", "n_params", "want"),
    [
        ((8, 9), SMALL, "tf32"),
        ((8, 9), LARGE, "bf16"),
        ((12, 0), LARGE, "bf16"),
        ((7, 5), LARGE, "fp16"),
        ((7, 5), SMALL, "fp32"),
        ((6, 1), LARGE, "fp32"),
    ],
)
def test_auto_follows_the_compute_capability(capability: tuple[int, int], n_params: int, want: str) -> None:
    assert by_capability("auto", capability, n_params)[0] == want


def test_what_the_device_cannot_do_is_refused() -> None:
    with pytest.raises(FlatoutError, match="--precision bf16 needs compute capability"):
        by_capability("bf16", (7, 5), SMALL)
    for wanted in ("tf32", "fp16"):
        with pytest.raises(FlatoutError, match="is for CUDA devices"):
            choose_precision(wanted, torch.device("cpu"), SMALL)
    assert by_capability("fp16", (7, 5), SMALL)[0] == "fp16"
    assert choose_precision("bf16", torch.device("cpu"), SMALL)[0] == "bf16"
    assert choose_precision("auto", torch.device("cpu"), LARGE)[0] == "fp32"
