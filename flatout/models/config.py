"""Settings of the network. Does not import torch, so that a command line parses quickly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flatout.envs.loader import Code
from flatout.errors import FlatoutError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """The policy and value networks."""

    network: Code | None = None
    """Your own network before the hidden layers, FILE.py:NAME: observation in, features out."""
    network_arch: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers, such as 1024,512,256; pi=256,256;vf=512,512 for policy and critic; none: no hidden
    layers, after images or a network of your own."""
    vf_arch: tuple[int, ...] | None = None
    """Widths of the critic's hidden layers; none: those of network_arch."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Non-linearity between hidden layers."""
    trunk: Literal["auto", "shared", "encoder", "separate"] = "auto"
    """Hidden layers of policy and value: shared, separate, or separate after one encoder; auto: shared for images."""
    log_std_init: float = 0.0
    """Logarithm of the initial standard deviation of continuous actions."""
    squash: bool = False
    """Squash bounded continuous actions with tanh; without it they are clipped."""

    def __post_init__(self) -> None:
        for name in ("network_arch", "vf_arch"):
            arch = getattr(self, name)
            if arch is not None and any(width < 1 for width in arch):
                flag, widths = name.replace("_", "-"), ",".join(map(str, arch))
                raise FlatoutError(f"--{flag} is '{widths}'; it must be widths such as 64,64")
        if self.vf_arch is not None and self.trunk == "shared":
            raise FlatoutError("--trunk shared has one set of hidden layers; leave out --vf-arch")


def split_arch(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose `network_arch` may be `pi=…;vf=…` or a dict of both, with `network_arch` and `vf_arch` instead."""
    arch = settings.get("network_arch")
    if isinstance(arch, str) and "=" in arch:
        arch = dict(part.partition("=")[::2] for part in arch.split(";"))
    if not isinstance(arch, Mapping):
        return dict(settings)
    names = {"pi": "network_arch", "vf": "vf_arch", "qf": "vf_arch"}
    for name in arch:
        if str(name).strip() not in names:
            near = did_you_mean(str(name), names)
            raise FlatoutError(
                f"--network-arch names '{name}'; it must be pi and vf, as in pi=64,64;vf=256,256{near}"
            )
    rest = {name: value for name, value in settings.items() if name != "network_arch"}
    return rest | {names[str(name).strip()]: widths for name, widths in arch.items()}
