"""All parameters of a model as views of one flat tensor: one tensor to clip, step, publish and save."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FlatParams:
    """Rebinds a model's parameters to views of `flat`; in-place changes of either are seen by both."""

    def __init__(self, model: nn.Module) -> None:
        self.leaves = list(model.parameters())
        self.flat = torch.cat([p.detach().reshape(-1) for p in self.leaves])
        sizes = [p.numel() for p in self.leaves]
        for p, view in zip(self.leaves, torch.split(self.flat, sizes), strict=True):
            p.data = view.view(p.shape)

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors shaped like the parameters, as one flat tensor."""
        return torch.cat([t.reshape(-1) for t in tensors])
