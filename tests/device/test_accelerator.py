"""Precision by compute capability, and devices by name."""

from __future__ import annotations

import pytest
import torch

from flatout.device.accelerator import Gpu, choose_precision, precision_for_capability, resolve_device
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
    assert precision_for_capability("auto", capability, n_params) == want


def test_a_precision_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(FlatoutError, match="--precision bf16 needs compute capability"):
        precision_for_capability("bf16", (7, 5), SMALL)
    for wanted in ("tf32", "fp16"):
        with pytest.raises(FlatoutError, match="is for CUDA devices"):
            choose_precision(wanted, torch.device("cpu"), SMALL)
    assert precision_for_capability("fp16", (7, 5), SMALL) == "fp16"
    assert choose_precision("bf16", torch.device("cpu"), SMALL) == "bf16"
    assert choose_precision("auto", torch.device("cpu"), LARGE) == "fp32"


CARDS = [
    Gpu(name="NVIDIA GeForce RTX 4070", memory_bytes=12 * 2**30, compute_capability="8.9"),
    Gpu(name="Tesla T4", memory_bytes=16 * 2**30, compute_capability="7.5"),
]


@pytest.mark.parametrize(
    ("text", "gpus", "device"),
    [
        ("auto", [], "cpu"),
        ("auto", CARDS, "cuda:0"),
        ("cpu", CARDS, "cpu"),
        (" CUDA ", CARDS, "cuda:0"),
        ("cuda:1", CARDS, "cuda:1"),
    ],
)
def test_existing_devices_are_found(text: str, gpus: list[Gpu], device: str) -> None:
    assert resolve_device(text, gpus) == device


@pytest.mark.parametrize(
    ("text", "gpus", "words"),
    [
        ("cuda", [], ["--device cuda: no CUDA device found; this torch build (", "use --device cpu"]),
        ("cuda:7", CARDS, ["cuda:0 (NVIDIA GeForce RTX 4070), cuda:1 (Tesla T4)"]),
        ("gpu", CARDS, ["did you mean 'cuda'?"]),
        ("cdua", [], ["did you mean 'cuda'"]),
        ("mps", [], ["--device mps: no MPS device found", "use --device cpu"]),
        ("xpu", CARDS, ["no XPU device found; this machine has cuda; use --device cuda"]),
        ("cuda1", CARDS, ["did you mean 'cuda:1'?"]),
        ("cuda:-1", CARDS, ["did you mean 'cuda'"]),
        ("", [], ["auto, cpu, cuda or cuda:N"]),
    ],
)
def test_missing_devices_are_explained_in_one_line(text: str, gpus: list[Gpu], words: list[str]) -> None:
    with pytest.raises(FlatoutError) as caught:
        resolve_device(text, gpus)
    message = str(caught.value)
    assert all(word in message for word in words)
    assert "\n" not in message


def test_torch_is_asked_for_devices_by_default() -> None:
    import torch

    assert resolve_device("auto") == ("cuda:0" if torch.cuda.is_available() else "cpu")
