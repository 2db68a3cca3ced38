"""One optimizer step as one function: loss, gradients, clipping, Adam (Kingma and Ba 2015).

All state lies in tensors that are changed in place; nothing is read back to the host. A step that must
not happen (loss or gradient not finite, policy moved too far) changes nothing, decided on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from flatout.learn.params import FlatParams

Batch = TypeVar("Batch")
LossFn = Callable[[Batch], tuple[Tensor, Tensor]]

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-5


class Update(Generic[Batch]):
    """`step(batch)` for any algorithm that supplies a loss returning (loss, metrics vector)."""

    def __init__(
        self,
        params: FlatParams,
        loss: LossFn[Batch],
        n_metrics: int,
        *,
        max_grad_norm: float,
        kl_index: int | None = None,
        kl_limit: float | None = None,
    ) -> None:
        self._params, self._loss = params, loss
        self._max_grad_norm = max_grad_norm
        self._kl_index, self._kl_limit = kl_index, kl_limit
        flat = params.flat
        self.momentum, self.variance = torch.zeros_like(flat), torch.zeros_like(flat)
        self.n_steps = torch.zeros((), device=flat.device)
        self.learning_rate = torch.zeros((), device=flat.device)
        self.metrics = torch.zeros(n_metrics + 1, device=flat.device)
        """Sums over the steps taken since `begin`; the last entry is the gradient's norm before clipping."""
        self.n_taken = torch.zeros((), device=flat.device)
        self.n_bad = torch.zeros((), device=flat.device)
        self.stopped = torch.zeros((), dtype=torch.bool, device=flat.device)

    def begin(self, learning_rate: float) -> None:
        """Start a rollout's updates: clear the sums, set the step size."""
        self.learning_rate.fill_(learning_rate)
        for tensor in (self.metrics, self.n_taken, self.n_bad, self.stopped):
            tensor.zero_()

    def step(self, batch: Batch) -> None:
        """Learn from one minibatch."""
        loss, metrics = self._loss(batch)
        grads = torch.autograd.grad(loss, self._params.leaves)
        with torch.no_grad():
            self._apply(self._params.flatten(grads), metrics)

    def _apply(self, grad: Tensor, metrics: Tensor) -> None:
        norm = torch.linalg.vector_norm(grad)
        finite = torch.isfinite(norm) & torch.isfinite(metrics[0])
        if self._kl_limit is not None:
            assert self._kl_index is not None
            self.stopped |= metrics[self._kl_index] > self._kl_limit
        # 1.0 where this step counts, 0.0 where it must leave no trace.
        go = (finite & ~self.stopped).float()
        grad = torch.where(go > 0, grad * (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0), 0.0)

        self.n_steps += go
        self.momentum.lerp_(grad, (1 - BETA1) * go)
        self.variance.lerp_(grad.square(), (1 - BETA2) * go)
        step_size = go * self.learning_rate / (1 - BETA1**self.n_steps).clamp(min=1 - BETA1)
        scale = (1 - BETA2**self.n_steps).clamp(min=1 - BETA2).sqrt()
        self._params.flat.sub_(step_size * self.momentum / (self.variance.sqrt() / scale + EPSILON))

        seen = torch.cat([metrics, norm.view(1)])
        self.metrics += torch.where(go > 0, seen, 0.0)
        self.n_taken += go
        self.n_bad += (~finite).float()

    def state(self) -> dict[str, Tensor]:
        """The optimizer's state, for a checkpoint."""
        return {"momentum": self.momentum, "variance": self.variance, "n_steps": self.n_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
