"""Settings of the network. Does not import torch, so that a command line parses quickly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flatout.errors import FlatoutError


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """The policy and value networks."""

    network_arch: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers, such as 1024,512,256."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Non-linearity between hidden layers."""
    trunk: Literal["auto", "shared", "separate"] = "auto"
    """Hidden layers of policy and value: shared or separate; auto: shared for images."""
    log_std_init: float = 0.0
    """Logarithm of the initial standard deviation of continuous actions."""
    squash: bool = False
    """Squash bounded continuous actions with tanh; without it they are clipped."""

    def __post_init__(self) -> None:
        if not self.network_arch or any(width < 1 for width in self.network_arch):
            widths = ",".join(map(str, self.network_arch))
            raise FlatoutError(f"--network-arch is '{widths}'; it must be widths such as 64,64")
