"""A module that moves to the card keeps its parameters, as on CUDA.

For a device type that is not torch's own, `module.to(device)` makes new parameters, and an optimizer that was made before would go on
with the old ones. torch can exchange the contents instead; that is switched on here for moves from and to the card.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def keep_when_modules_move() -> None:
    """Changes `nn.Module` for this process."""
    original: Callable[..., Any] = nn.Module._apply

    @functools.wraps(original)
    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(swaps or _moves(self, fn))
        try:
            return original(self, fn, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)

    nn.Module._apply = apply  # type: ignore[method-assign]


def _moves(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether `fn` moves the module's own parameters from or to the card."""
    own = next((p for p in module._parameters.values() if p is not None), None)
    if own is None:
        return False
    probe = torch.empty(0, dtype=own.dtype, device=own.device)
    types = {probe.device.type, fn(probe).device.type}
    return len(types) > 1 and "sim" in types
