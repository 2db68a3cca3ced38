"""A convolutional encoder for images of any size, channels first or last, uint8 or float."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatout.models.mlp import HIDDEN_GAIN, linear

NATURE_MIN = 36
"""Smallest side the strided Atari stack (Mnih et al. 2015) can take; smaller boards get 3x3 layers."""


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether the last axis of an image holds its channels: it is the shortest one."""
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
