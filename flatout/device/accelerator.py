"""CUDA devices: which are there, which one a name means, their free memory and number formats; data sheets of common cards.

Torch is imported inside functions, so that a command line parses without it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.errors import FlatoutError, did_you_mean

if TYPE_CHECKING:
    import torch

_MEANT = {"gpu": "cuda", "nvidia": "cuda", "cuda0": "cuda:0", "cuda1": "cuda:1"}
LARGE_NETWORK = 1_000_000
"""Parameters from which 16-bit forward passes are worth the conversions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One CUDA device."""

    name: str
    """The driver's name, such as `NVIDIA GeForce RTX 4070`."""
    memory_bytes: int
    compute_capability: str
    """Such as `8.9`; decides which number formats the device supports."""


def cuda_devices() -> list[Gpu]:
    """The CUDA devices torch can use; empty without a CUDA build or a driver."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        Gpu(name=it.name, memory_bytes=it.total_memory, compute_capability=f"{it.major}.{it.minor}")
        for it in found
    ]


def resolve_device(text: str, gpus: Sequence[Gpu] | None = None) -> str:
    """Turn `auto`, `cpu`, `cuda` or `cuda:N` into a device that exists; `gpus` defaults to torch's devices."""
    name = text.strip().lower()
    if name == "cpu":
        return name
    index = re.fullmatch(r"cuda(?::(\d+))?", name)
    if name != "auto" and index is None:
        hint = did_you_mean(name, ("auto", "cpu", "cuda"))
        if name in _MEANT:
            hint = f"; did you mean {_MEANT[name]!r}?"
        raise FlatoutError(f"--device {text!r}: no such device{hint} (auto, cpu, cuda or cuda:N)")
    if gpus is None:
        gpus = cuda_devices()
    if index is None:
        return "cuda" if gpus else "cpu"
    if not gpus:
        raise FlatoutError(f"--device {name}: no CUDA device found; {_torch_build()}; use --device cpu")
    if index[1] is not None and int(index[1]) >= len(gpus):
        there = ", ".join(f"cuda:{nth} ({gpu.name})" for nth, gpu in enumerate(gpus))
        raise FlatoutError(f"--device {name}: this machine has {there}")
    return name


def _torch_build() -> str:
    import torch

    if torch.version.cuda is None:
        return f"this torch build ({torch.__version__}) has no CUDA"
    return f"this torch build ({torch.__version__}, CUDA {torch.version.cuda}) sees no usable driver"


def choose_precision(wanted: str, device: torch.device, n_params: int) -> str:
    """The number format of updates for `--precision wanted`; raises if the device does not support it.

    fp32: plain. tf32: matrix products round their inputs to 10 bits. bf16 and fp16: forward passes in 16 bits,
    parameters and gradients in 32; fp16 scales the loss, because its range is small.
    """
    import torch

    if device.type == "cuda":
        return precision_for_capability(wanted, torch.cuda.get_device_capability(device), n_params)
    if wanted in ("tf32", "fp16"):
        raise FlatoutError(
            f"--precision {wanted} is for CUDA devices, this is {device.type}; use fp32 or bf16"
        )
    return "fp32" if wanted == "auto" else wanted


def precision_for_capability(wanted: str, capability: tuple[int, int], n_params: int) -> str:
    """The number format for a CUDA device of this compute capability."""
    major, minor = capability
    if wanted in ("tf32", "bf16") and major < 8:
        raise FlatoutError(
            f"--precision {wanted} needs compute capability 8.0, this device has {major}.{minor}"
        )
    if wanted != "auto":
        return wanted
    if n_params >= LARGE_NETWORK and major >= 7:
        return "bf16" if major >= 8 else "fp16"
    return "tf32" if major >= 8 else "fp32"


def use_matmul_precision(precision: str) -> None:
    """Allow TF32 in float32 matrix products for tf32 and bf16, forbid it otherwise."""
    import torch

    torch.set_float32_matmul_precision("high" if precision in ("tf32", "bf16") else "highest")


TERAFLOPS = {
    "t4": 8.1,
    "rtx3060": 12.7,
    "rtx3070": 20.3,
    "rtx3080": 29.8,
    "rtx3090": 35.6,
    "rtx4070": 29.1,
    "rtx4090": 82.6,
    "rtx5080": 56.3,
    "a100": 19.5,
    "h100": 66.9,
}
"""Peak single precision by data sheet, for `--what-if gpu=NAME`: cards that this machine does not have."""


def card_teraflops(name: str) -> float:
    """A card's peak; case, spaces, hyphens and a leading `nvidia` do not matter."""
    key = name.lower().replace(" ", "").replace("-", "").replace("_", "").removeprefix("nvidia")
    if key not in TERAFLOPS:
        known = ", ".join(TERAFLOPS)
        raise FlatoutError(f"--what-if gpu={name}: unknown card{did_you_mean(key, TERAFLOPS)} ({known})")
    return TERAFLOPS[key]
