"""Settings of the network; no torch here, so a command line parses in no time."""

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
    """One network with two heads, or one for the policy and one for the value; auto: shared for images."""
    log_std_init: float = 0.0
    """Logarithm of the first spread of continuous actions."""
    squash: bool = False
    """Squash continuous actions into their bounds with tanh; without it they are clipped."""

    def __post_init__(self) -> None:
        if not self.network_arch or any(width < 1 for width in self.network_arch):
            widths = ",".join(map(str, self.network_arch))
            raise FlatoutError(f"--network-arch is '{widths}'; it must be widths such as 64,64")
