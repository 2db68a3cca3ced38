"""Which number format an update should use on a device, by what the device can do.

fp32: as it is. tf32: matrix products round their inputs to 10 bits. bf16 and fp16: forward passes in 16 bits,
parameters and gradients in 32; fp16 scales the loss, because its range is small.
"""

from __future__ import annotations

import torch

from flatout.errors import FlatoutError

LARGE_NETWORK = 1_000_000
"""Parameters from which 16 bits pay for the conversions they cost."""


def choose_precision(wanted: str, device: torch.device, n_params: int) -> tuple[str, str]:
    """The format for what was asked for, and why; raises where the device cannot do it."""
    if device.type != "cuda":
        return _on_cpu(wanted, device)
    return by_capability(wanted, torch.cuda.get_device_capability(device), n_params)


def by_capability(wanted: str, capability: tuple[int, int], n_params: int) -> tuple[str, str]:
    """The same for a CUDA device of this compute capability."""
    major, minor = capability
    name = f"compute capability {major}.{minor}"
    if wanted in ("tf32", "bf16") and major < 8:
        raise FlatoutError(
            f"--precision {wanted} needs compute capability 8.0, this device has {major}.{minor}"
        )
    if wanted != "auto":
        return wanted, "asked for"
    if n_params >= LARGE_NETWORK and major >= 7:
        return ("bf16" if major >= 8 else "fp16"), f"{name}, {n_params:,} parameters"
    if major >= 8:
        return "tf32", f"{name}, a small network"
    return "fp32", f"{name}, a small network"


def _on_cpu(wanted: str, device: torch.device) -> tuple[str, str]:
    if wanted in ("tf32", "fp16"):
        raise FlatoutError(
            f"--precision {wanted} is for CUDA devices, this is {device.type}; use fp32 or bf16"
        )
    return ("fp32", "a CPU") if wanted == "auto" else (wanted, "asked for")


def use_matmul_precision(precision: str) -> None:
    """Let float32 matrix products on CUDA use TF32, or not; bf16's few float32 ones may as well."""
    torch.set_float32_matmul_precision("high" if precision in ("tf32", "bf16") else "highest")
