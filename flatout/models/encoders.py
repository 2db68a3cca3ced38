"""Encoders of images: convolutions that suit the size of the image, then one linear layer.

Images come channels first, as bytes or floats, and become floats only here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, relu, relu_

from flatout.models.shared_layer import SharedLinear

GAIN = 2**0.5


class Conv(NamedTuple):
    """A convolution, followed by a ReLU."""

    n_out: int
    kernel: int
    stride: int
    padding: int = 0


TINY = (Conv(16, 3, 1, 1), Conv(32, 3, 2, 1)), 64
"""Layers and features for sides below 14, such as a MiniGrid's 7x7."""
SMALL = (Conv(32, 4, 2, 1), Conv(64, 3, 2, 1), Conv(64, 3, 2, 1)), 256
"""For sides below 36."""
NATURE = (Conv(32, 8, 4), Conv(64, 4, 2), Conv(64, 3, 1)), 512
"""For Atari's 84x84 (Mnih et al. 2015), and up to 127."""
LARGE = (Conv(32, 8, 4), Conv(64, 4, 2), Conv(64, 3, 2)), 512
"""For larger ones: the last layer halves the image once more, so that the linear layer stays of a similar size."""


def image_layers(height: int, width: int) -> tuple[tuple[Conv, ...], int]:
    """Convolutions for images of this size, and the number of features after them."""
    side = min(height, width)
    return TINY if side < 14 else SMALL if side < 36 else NATURE if side < 128 else LARGE


class ImageEncoder(nn.Module):
    """Images (B, C, H, W) → features (B, n_features)."""

    def __init__(self, shape: tuple[int, ...], *, scale: bool) -> None:
        """`scale`: whether pixels are bytes, to be divided by 255."""
        super().__init__()
        self._scale = 1 / 255 if scale else 1.0
        channels, height, width = shape
        layers, self.n_features = image_layers(height, width)
        self.convs = nn.ModuleList()
        self.n_multiplies = 0
        """Multiplications of the convolutions for one image."""
        for it in layers:
            conv = nn.Conv2d(channels, it.n_out, it.kernel, it.stride, it.padding)
            height, width = ((side + 2 * it.padding - it.kernel) // it.stride + 1 for side in (height, width))
            self.n_multiplies += conv.weight.numel() * height * width
            channels = it.n_out
            self.convs.append(_initialised(conv))
        self.out = _initialised(SharedLinear(channels * height * width, self.n_features))

    def forward(self, image: Tensor) -> Tensor:
        # Channels last in memory: on a CPU, convolutions and their gradients take about half the time.
        order = torch.channels_last if image.device.type == "cpu" else torch.contiguous_format
        x = _floats_channels_last(image) if image.device.type == "cpu" else image.float()
        scale = self._scale
        for conv in self.convs:
            assert isinstance(conv, nn.Conv2d)
            weight: Tensor = conv.weight
            if scale != 1.0:  # the same as scaled pixels, but far fewer
                weight = weight * scale
            weight = weight.contiguous(memory_format=order)
            x, scale = relu_(conv2d(x, weight, conv.bias, conv.stride, conv.padding)), 1.0
        return relu(self.out(x.flatten(1)))


def _floats_channels_last(image: Tensor) -> Tensor:
    """The image as floats, channels last in memory; interleaving bytes takes half the time of interleaving floats."""
    return torch.stack(image.unbind(1), -1).float().permute(0, 3, 1, 2)


def _initialised(layer: nn.Conv2d | nn.Linear) -> nn.Module:
    """The layer with orthogonal weights and zero bias."""
    nn.init.orthogonal_(layer.weight, GAIN)
    assert layer.bias is not None, "it has a bias"
    nn.init.zeros_(layer.bias)
    return layer
