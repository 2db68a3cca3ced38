"""Multi-layer perceptrons, initialised orthogonally as PPO wants them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}
HIDDEN_GAIN = 2**0.5


def linear(n_in: int, n_out: int, gain: float) -> nn.Linear:
    """A linear layer with orthogonal weights and zero bias."""
    layer = nn.Linear(n_in, n_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(n_in: int, widths: Sequence[int], activation: str, *, layer_norm: bool = False) -> nn.Sequential:
    """Hidden layers of the given widths, each followed by its normalisation, if any, and the activation."""
    layers: list[nn.Module] = []
    for a, b in pairwise([n_in, *widths]):
        layers.append(linear(a, b, HIDDEN_GAIN))
        if layer_norm:
            layers.append(nn.LayerNorm(b))
        layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers)
