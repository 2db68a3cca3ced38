"""All parameters of a model as views of one flat tensor: one tensor to clip, step, publish and save."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

ALIGNMENT = 16
"""Views begin at multiples of 64 bytes, as tensors of their own do; kernels round by alignment."""


class FlatParams:
    """Rebinds a model's parameters to views of `flat`; in-place changes of either are seen by both."""

    def __init__(self, model: nn.Module) -> None:
        self.leaves = list(model.parameters())
        gaps = [-p.numel() % ALIGNMENT for p in self.leaves]
        self._gaps = [p.new_zeros(gap) for p, gap in zip(self.leaves, gaps, strict=True)]
        self.flat = self.flatten([p.detach() for p in self.leaves])
        start = 0
        for p, gap in zip(self.leaves, gaps, strict=True):
            p.data = self.flat[start : start + p.numel()].view(p.shape)
            start += p.numel() + gap

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors shaped like the parameters, as one flat tensor; the gaps between them are zero."""
        pieces: list[Tensor] = []
        for tensor, gap in zip(tensors, self._gaps, strict=True):
            pieces.append(tensor.reshape(-1))
            if len(gap):
                pieces.append(gap)
        return torch.cat(pieces)
