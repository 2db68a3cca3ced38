"""All parameters of a model as views of one flat tensor: one tensor to clip, step, publish and save; and copies of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flatout.device.accelerator import current_stream, has_streams, is_accelerator, new_event
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


def _zero_one_by_one(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


zero_all: Callable[[Sequence[Tensor]], None] = find("torch._foreach_zero_") or _zero_one_by_one
"""Sets tensors to zero."""


class FlatParams:
    """Rebinds a model's trainable parameters to views of `flat`; in-place changes of either are seen by both."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._gaps = [p.new_zeros(_aligned(p.numel()) - p.numel()) for p in self.tensors]
        self.flat = self.flatten([p.detach() for p in self.tensors])
        for p, view in zip(self.tensors, self.views(self.flat), strict=True):
            p.data = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of such a flat tensor, shaped like the parameters."""
        return _views(flat, self.tensors)

    def flatten(self, tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """Tensors shaped like the parameters, as one flat tensor; the gaps between them are zero.

        `out`: where to write it; memory that is new every time costs more than the copy.
        """
        pieces: list[Tensor] = []
        for tensor, gap in zip(tensors, self._gaps, strict=True):
            pieces.append(tensor.reshape(-1))
            if len(gap):
                pieces.append(gap)
        if all(piece.dtype == pieces[0].dtype for piece in pieces):
            return torch.cat(pieces) if out is None else torch.cat(pieces, out=out)
        flat = torch.empty_like(self.flat)  # some have 16 bits: one kernel converts them
        copy_all(flat.split([len(piece) for piece in pieces]), pieces)
        return flat


class ParamCopy:
    """Copies a model's parameters and buffers to tensors elsewhere.

    From an accelerator to the host they go as one flat copy through pinned memory, which nobody waits for but `finish`.
    """

    def __init__(self, model: nn.Module, targets: Sequence[Tensor]) -> None:
        """`targets`: one for each tensor of `floats(model)`, on the host or on the model's device."""
        self._tensors = [tensor.detach() for tensor in floats(model)]
        self._targets = [tensor.detach() for tensor in targets]
        self._device = self._tensors[0].device
        self._to_host = is_accelerator(self._device) and not is_accelerator(self._targets[0].device)
        self._copied = new_event(self._device) if has_streams(self._device) else None
        if self._to_host:
            size = sum(_aligned(tensor.numel()) for tensor in self._tensors)
            self._flat = self._tensors[0].new_zeros(size)
            self._pinned = torch.zeros(size, pin_memory=has_streams(self._device))
            self._views = [_views(flat, self._tensors) for flat in (self._flat, self._pinned)]

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the values that the model has at this point of the current stream."""
        if self._to_host:
            copy_all(self._views[0], self._tensors)
            self._pinned.copy_(self._flat, non_blocking=True)
        else:
            copy_all(self._targets, self._tensors)
        if self._copied is not None:
            self._copied.record(current_stream(self._device))

    @torch.no_grad()
    def finish(self) -> None:
        """Before the targets are used: on the host wait for the copy, on the device let the current stream wait."""
        if not self._to_host:
            if self._copied is not None:
                current_stream(self._device).wait_event(self._copied)
            return
        if self._copied is not None:
            self._copied.synchronize()
        copy_all(self._targets, self._views[1])


class ParamBlock:
    """A model's parameters and buffers as one array that processes share, with the version it holds."""

    def __init__(
        self, model: nn.Module, values: npt.NDArray[np.float32], version: npt.NDArray[np.int64]
    ) -> None:
        self._tensors = floats(model)
        self._views = _views(torch.from_numpy(values), self._tensors)
        self._copy = ParamCopy(model, self._views)
        self._version = version

    @staticmethod
    def size(model: nn.Module) -> int:
        """Number of values in the block of this model."""
        return sum(_aligned(tensor.numel()) for tensor in floats(model))

    def begin(self) -> None:
        """Begin to write the model's current values into the block, while nobody reads it."""
        self._copy.begin()

    def finish(self, version: int) -> None:
        """Wait until they are there."""
        self._copy.finish()
        self._version[0] = version

    def adopt(self) -> None:
        """Rebind the model's tensors to the block: from now on the model is what was last published."""
        for tensor, view in zip(self._tensors, self._views, strict=True):
            tensor.data = view

    @property
    def version(self) -> int:
        """The version of the published parameters."""
        return int(self._version[0])


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    out, start = [], 0
    for tensor in like:
        out.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += _aligned(tensor.numel())
    return out


def floats(model: nn.Module) -> list[Tensor]:
    """A model's float32 parameters and buffers: all that changes."""
    return [t for t in (*model.parameters(), *model.buffers()) if t.dtype == torch.float32]


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
