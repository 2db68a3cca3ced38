"""An optimizer of the user's own in place of Adam: `optimizer(params, lr=…)`, a torch.optim class or what behaves like one.

It steps in plain PyTorch, so updates are neither fused nor compiled nor captured, and each one waits for its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from flatout.envs.loader import Code
from flatout.errors import FlatoutError, one_line
from flatout.models.params import FlatParams

WANTED = "a torch.optim class or a function (params, lr) that makes an optimizer"
PREFIX = "own."
NUMBER = ":number"
"""Marks state that is a Python number, not a tensor."""


class OwnOptimizer:
    """Steps a model's parameters with gradients that are clipped already."""

    def __init__(self, code: Code, params: FlatParams, learning_rate: float) -> None:
        self._params, self._learning_rate = params, learning_rate
        try:
            self._optimizer = code.load("optimizer", torch.optim.Optimizer, WANTED)(
                params.tensors, lr=learning_rate
            )
            self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        except FlatoutError:
            raise
        except Exception as error:
            raise FlatoutError(
                f"optimizer '{code}' failed: {one_line(error)}; it must be {WANTED}"
            ) from error

    def step(self, grad: Tensor, learning_rate: float) -> None:
        """Step with this flat gradient; groups keep the ratio of their learning rates."""
        factor = learning_rate / self._learning_rate
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        for tensor, view in zip(self._params.tensors, self._params.views(grad), strict=True):
            tensor.grad = view
        self._optimizer.step()
        for tensor in self._params.tensors:
            tensor.grad = None

    def snapshot(self) -> dict[str, Any]:
        """What `restore` takes; a copy."""
        return deepcopy(self._optimizer.state_dict())

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go back to a snapshot."""
        self._optimizer.load_state_dict(dict(snapshot))

    def state(self) -> dict[str, Tensor]:
        """Its state of each parameter, for a checkpoint."""
        out = {}
        for i, entries in self._optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                is_tensor = isinstance(value, Tensor)
                if not is_tensor and not isinstance(value, int | float):
                    continue
                mark = "" if is_tensor else NUMBER
                out[f"{PREFIX}{i}.{key}{mark}"] = (
                    value if is_tensor else torch.tensor(value, dtype=torch.float64)
                )
        return out

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave."""
        state: dict[int, dict[str, Any]] = {}
        for name, tensor in tensors.items():
            i, _, key = name.removeprefix(PREFIX).partition(".")
            is_number = key.endswith(NUMBER)
            value = float(tensor) if is_number else tensor.clone()
            state.setdefault(int(i), {})[key.removesuffix(NUMBER)] = (
                int(value) if is_number and value == int(value) else value
            )
        self.restore(self._optimizer.state_dict() | {"state": state})
