"""All parameters of a model as views of one flat tensor: one tensor to clip, step, publish and save."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flatout.device.private import find

ALIGNMENT = 16
"""Views begin at multiples of 64 bytes, like separate tensors; kernels round differently by alignment."""


def _copy_one_by_one(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


copy_all: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = (
    find("torch._foreach_copy_") or _copy_one_by_one
)
"""Copies tensors into tensors."""


class FlatParams:
    """Rebinds a model's parameters to views of `flat`; in-place changes of either are seen by both."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[Tensor] = list(model.parameters())
        self._gaps = [p.new_zeros(_aligned(p.numel()) - p.numel()) for p in self.tensors]
        self.flat = self.flatten([p.detach() for p in self.tensors])
        for p, view in zip(self.tensors, self.views(self.flat), strict=True):
            p.data = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of such a flat tensor, shaped like the parameters."""
        return _views(flat, self.tensors)

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors shaped like the parameters, as one flat tensor; the gaps between them are zero."""
        pieces: list[Tensor] = []
        for tensor, gap in zip(tensors, self._gaps, strict=True):
            pieces.append(tensor.reshape(-1))
            if len(gap):
                pieces.append(gap)
        return torch.cat(pieces)


class ParamBlock:
    """A model's parameters and buffers as one array that processes share, with the version it holds."""

    def __init__(
        self, model: nn.Module, values: npt.NDArray[np.float32], version: npt.NDArray[np.int64]
    ) -> None:
        self._tensors = _floats(model)
        self._views = _views(torch.from_numpy(values), self._tensors)
        self._version = version

    @staticmethod
    def size(model: nn.Module) -> int:
        """Number of values in the block of this model."""
        return sum(_aligned(tensor.numel()) for tensor in _floats(model))

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """Write the model into the block, while nobody reads it."""
        copy_all(self._views, [tensor.detach() for tensor in self._tensors])
        self._version[0] = version

    def adopt(self) -> None:
        """Rebind the model's tensors to the block: from now on the model is what was last published."""
        for tensor, view in zip(self._tensors, self._views, strict=True):
            tensor.data = view

    @property
    def version(self) -> int:
        """The version of the published parameters."""
        return int(self._version[0])


def _views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    out, start = [], 0
    for tensor in like:
        out.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += _aligned(tensor.numel())
    return out


def _floats(model: nn.Module) -> list[Tensor]:
    return [t for t in (*model.parameters(), *model.buffers()) if t.dtype == torch.float32]


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
