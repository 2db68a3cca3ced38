"""Encoders: observation arrays become one feature vector, through CNNs for images; MLPs follow.

Weights are initialised orthogonally (Engstrom et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn

from flatout.envs.spaces import ArraySpec

Obs: TypeAlias = Sequence[Tensor]

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}
HIDDEN_GAIN = 2**0.5
NATURE_MIN = 36
"""Smallest side of an image for the strided Atari CNN (Mnih et al. 2015); smaller ones get 3x3 layers."""


def linear(n_in: int, n_out: int, gain: float) -> nn.Linear:
    """A linear layer with orthogonal weights and zero bias."""
    layer = nn.Linear(n_in, n_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(n_in: int, widths: Sequence[int], activation: str, *, layer_norm: bool = False) -> nn.Sequential:
    """Hidden layers of the given widths, each with layer normalisation, if asked for, and the activation."""
    layers: list[nn.Module] = []
    for a, b in pairwise([n_in, *widths]):
        layers.append(linear(a, b, HIDDEN_GAIN))
        if layer_norm:
            layers.append(nn.LayerNorm(b))
        layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers)


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether an image has its channels in the last dimension: the shorter one."""
    return shape[-1] < shape[0]


class ImageEncoder(nn.Module):
    """Images (B, C, H, W) or (B, H, W, C) → features (B, 512)."""

    n_features = 512

    def __init__(self, shape: tuple[int, ...], *, scale: bool) -> None:
        super().__init__()
        self._last = channels_last(shape)
        self._scale = 1 / 255 if scale else 1.0
        channels, height, width = (shape[2], *shape[:2]) if self._last else shape
        if min(height, width) >= NATURE_MIN:
            layers = [(32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)]
        else:
            layers = [(32, 3, 1, 1), (64, 3, 2, 1), (64, 3, 1, 1)]
        stack: list[nn.Module] = []
        for n_out, kernel, stride, padding in layers:
            conv = nn.Conv2d(channels, n_out, kernel, stride, padding)
            nn.init.orthogonal_(conv.weight, HIDDEN_GAIN)
            nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
            stack += [conv, nn.ReLU()]
            channels = n_out
        self.conv = nn.Sequential(*stack, nn.Flatten())
        with torch.no_grad():
            n_flat = self.conv(torch.zeros(1, *((shape[2], *shape[:2]) if self._last else shape))).shape[1]
        self.out = nn.Sequential(linear(n_flat, self.n_features, HIDDEN_GAIN), nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        if self._last:
            image = image.permute(0, 3, 1, 2)
        out: Tensor = self.out(self.conv(image.float() * self._scale))
        return out


class Encoder(nn.Module):
    """Encodes each observation array but the mask by its kind and concatenates the features."""

    def __init__(self, specs: Sequence[ArraySpec]) -> None:
        super().__init__()
        self._parts = [(i, spec) for i, spec in enumerate(specs) if spec.kind != "mask"]
        self.images = nn.ModuleDict()
        self.n_features = 0
        for i, spec in self._parts:
            if spec.kind == "image":
                self.images[str(i)] = ImageEncoder(spec.shape, scale=spec.dtype == "uint8")
                self.n_features += ImageEncoder.n_features
            elif spec.kind == "discrete":
                self.n_features += sum(spec.nvec)
                ends = torch.tensor([sum(spec.nvec[:k]) for k in range(len(spec.nvec))])
                self.register_buffer(f"_offset_{i}", ends - torch.tensor(spec.start), persistent=False)
            else:
                self.n_features += math.prod(spec.shape)

    def forward(self, obs: Obs) -> Tensor:
        features = [self._encode(i, spec, obs[i]) for i, spec in self._parts]
        return features[0] if len(features) == 1 else torch.cat(features, -1)

    def _encode(self, i: int, spec: ArraySpec, value: Tensor) -> Tensor:
        if spec.kind == "image":
            out: Tensor = self.images[str(i)](value)
            return out
        flat = value.reshape(len(value), -1)
        if spec.kind == "discrete":  # one-hot of every element, side by side
            hot = torch.zeros(len(value), sum(spec.nvec), device=value.device)
            return hot.scatter_(1, flat + self.get_buffer(f"_offset_{i}"), 1.0)
        return flat.float()
