"""One optimizer step as one function: loss, gradients, clipping, Adam (Kingma and Ba 2015).

The step computes a new state from the old one and changes nothing until all of it is there, so a step that runs
out of memory leaves no trace. Nothing is read back to the host: a step that must not happen (loss or gradient not
finite, policy moved too far) is undone on the device. The same function, traced, is what is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from flatout.learn.memory import PartSize
from flatout.learn.params import FlatParams

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-5
FIRST_SCALE, GROWTH_STEPS = 2.0**14, 1000
"""Loss scale for fp16: halved when gradients overflow, doubled after so many good steps."""


class Rows(Protocol):
    """A minibatch: tensors with one row per transition."""

    def __len__(self) -> int: ...

    def take(self: Batch, index: slice) -> Batch:
        """Some of the rows."""
        ...

    def tensors(self) -> list[Tensor]:
        """All of its tensors, in a fixed order."""
        ...

    def like(self: Batch, tensors: Sequence[Tensor]) -> Batch:
        """The same kind of minibatch with other tensors."""
        ...


Batch = TypeVar("Batch", bound=Rows)
LossFn = Callable[[Batch, Tensor], tuple[Tensor, Tensor]]
"""(minibatch, the algorithm's scheduled coefficient) → mean loss over rows, vector of mean metrics over rows."""
Step = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""(state, settings, the model's buffers, a minibatch's tensors) → new state."""


class Update(Generic[Batch]):
    """`step(batch)` for any algorithm that supplies a loss."""

    def __init__(
        self,
        model: nn.Module,
        params: FlatParams,
        loss: LossFn[Batch],
        n_metrics: int,
        *,
        max_grad_norm: float,
        batch_size: int,
        prepare: Callable[[Batch], Batch] = lambda batch: batch,
        kl_index: int = 0,
        kl_limit: float | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._model, self._params, self._loss, self._prepare = model, params, loss, prepare
        self._max_grad_norm, self._kl_index, self._kl_limit = max_grad_norm, kl_index, kl_limit
        self._autocast = autocast
        flat = params.flat
        self.device = flat.device
        self.parts = PartSize(batch_size)
        """How many rows of a minibatch are worked on at once."""
        self.momentum, self.variance = torch.zeros_like(flat), torch.zeros_like(flat)
        self.n_steps = torch.zeros((), device=flat.device)
        scale = FIRST_SCALE if autocast is torch.float16 else 1.0
        self.scale = torch.full((), scale, device=flat.device)
        self.metrics = torch.zeros(n_metrics + 1, device=flat.device)
        """Sums over the steps taken since `begin`; the last entry is the gradient's norm before clipping."""
        self.n_taken = torch.zeros((), device=flat.device)
        self.n_bad = torch.zeros((), device=flat.device)
        self.stopped = torch.zeros((), dtype=torch.bool, device=flat.device)
        self.learning_rate = torch.zeros((), device=flat.device)
        self.coefficient = torch.zeros((), device=flat.device)
        self._state = [flat, self.momentum, self.variance, self.n_steps, self.scale]
        self._state += [self.metrics, self.n_taken, self.n_bad, self.stopped]
        self._settings = [self.learning_rate, self.coefficient]
        self.compiled: Step | None = None
        """The same step as a compiled function, for minibatches of `batch_size` rows; None: not (yet)."""
        self.replayed: Callable[[Batch], None] | None = None
        """On CUDA: the same step, committed, as a graph; None: not captured."""
        self._compiled_rows = batch_size

    def begin(self, learning_rate: float, coefficient: float = 0.0) -> None:
        """Start a rollout's updates: clear the sums, set the step size and the loss's coefficient."""
        self.learning_rate.fill_(learning_rate)
        self.coefficient.fill_(coefficient)
        for tensor in (self.metrics, self.n_taken, self.n_bad, self.stopped):
            tensor.zero_()

    def step(self, batch: Batch) -> None:
        """Learn from one minibatch."""
        if self.replayed is not None and len(batch) == self._compiled_rows == self.parts.n_rows:
            self.replayed(batch)
            return
        if self.compiled is not None and len(batch) == self._compiled_rows == self.parts.n_rows:
            new = self.parts.attempt(lambda: self._run_compiled(batch))
        else:
            new = self.parts.attempt(lambda: self.run_eagerly(batch))
        self.commit(new)

    def _run_compiled(self, batch: Batch) -> Sequence[Tensor]:
        if self.compiled is None or self.parts.n_rows < self._compiled_rows:  # it did not fit into memory
            return self.run_eagerly(batch)
        return self.compiled(self._state, self._settings, self.buffers(), batch.tensors())

    def run(self, batch: Batch) -> Sequence[Tensor]:
        """The state after learning from one minibatch, compiled or not; changes nothing."""
        return self._run_compiled(batch) if self.compiled is not None else self.run_eagerly(batch)

    def run_eagerly(self, batch: Batch) -> list[Tensor]:
        """The same, operation by operation."""
        gradient, metrics = self._gradient(batch, self._params.leaves, self._loss, self.coefficient)
        with torch.no_grad():
            return self._advance(self._state, self.learning_rate, gradient, metrics)

    @torch.no_grad()
    def commit(self, new: Sequence[Tensor]) -> None:
        """Make a computed state the current one; in place, so that nothing here can run out of memory."""
        torch._foreach_copy_(self._state, list(new))

    def buffers(self) -> list[Tensor]:
        """The model's own tensors that change between rollouts, such as observation statistics."""
        return [b for b in self._model.buffers() if b.dtype == torch.float32]

    def pure(self, example: Batch) -> Step:
        """The step as a function of its arguments alone, for tracing; `example` says what minibatches are like."""
        names = [name for name, _ in self._model.named_parameters()]
        buffer_names = [name for name, b in self._model.named_buffers() if b.dtype == torch.float32]
        wrapped = _Loss(self._model, self._loss)

        def step(
            state: Sequence[Tensor],
            settings: Sequence[Tensor],
            buffers: Sequence[Tensor],
            tensors: Sequence[Tensor],
        ) -> Sequence[Tensor]:
            leaves = [view.detach().requires_grad_() for view in self._params.views(state[0])]
            own = dict(zip([f"model.{name}" for name in names], leaves, strict=True))
            own |= dict(zip([f"model.{name}" for name in buffer_names], buffers, strict=True))

            def loss(batch: Batch, coefficient: Tensor) -> tuple[Tensor, Tensor]:
                out: tuple[Tensor, Tensor] = torch.func.functional_call(wrapped, own, (batch, coefficient))
                return out

            batch = example.like(tensors)
            gradient, metrics = self._gradient(batch, leaves, loss, settings[1], state[4])
            with torch.no_grad():
                return self._advance(state, settings[0], gradient, metrics)

        return step

    def example_inputs(self, batch: Batch) -> tuple[list[Tensor], ...]:
        """Copies of what `pure` takes."""
        inputs = (self._state, self._settings, self.buffers(), batch.tensors())
        return tuple([tensor.detach().clone() for tensor in group] for group in inputs)

    def current_inputs(self, batch: Batch) -> tuple[list[Tensor], ...]:
        """What `pure` takes, as it is now."""
        return self._state, self._settings, self.buffers(), batch.tensors()

    def _gradient(
        self,
        batch: Batch,
        leaves: Sequence[Tensor],
        loss_of: LossFn[Batch],
        coefficient: Tensor,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Flat gradient and metrics of a minibatch, in parts of what fits into memory."""
        scale = self.scale if scale is None else scale
        batch, n, size = self._prepare(batch), len(batch), self.parts.n_rows
        grads: list[Tensor] = []
        means: list[Tensor] = []
        for start in range(0, n, size):
            part = batch if size >= n else batch.take(slice(start, start + size))
            with self._precision():
                loss, metrics = loss_of(part, coefficient)
            share = len(part) / n
            part_grads = torch.autograd.grad(loss * (scale * share), leaves)
            grads.append(self._params.flatten(part_grads) / scale)
            means.append(metrics * share)
            if len(grads) == 2:
                grads, means = [grads[0] + grads[1]], [means[0] + means[1]]
        return grads[0], means[0]

    def _precision(self) -> Any:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self._autocast, cache_enabled=False)

    def _advance(
        self, state: Sequence[Tensor], learning_rate: Tensor, grad: Tensor, metrics: Tensor
    ) -> list[Tensor]:
        """The state after one step with this gradient."""
        flat, momentum, variance, n_steps, scale, sums, n_taken, n_bad, stopped = state
        norm = torch.linalg.vector_norm(grad)
        finite = torch.isfinite(norm) & torch.isfinite(metrics[0])
        if self._kl_limit is not None:
            stopped = stopped | (metrics[self._kl_index] > self._kl_limit)
        # 1.0 where this step counts, 0.0 where it must leave no trace.
        go = (finite & ~stopped).float()
        grad = torch.where(go > 0, grad * (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0), 0.0)

        n_steps = n_steps + go
        momentum = torch.lerp(momentum, grad, (1 - BETA1) * go)
        variance = torch.lerp(variance, grad.square(), (1 - BETA2) * go)
        step_size = go * learning_rate / (1 - BETA1**n_steps).clamp(min=1 - BETA1)
        divisor = (1 - BETA2**n_steps).clamp(min=1 - BETA2).sqrt()
        flat = flat - step_size * momentum / (variance.sqrt() / divisor + EPSILON)

        seen = torch.cat([metrics, norm.view(1)])
        sums = sums + torch.where(go > 0, seen, 0.0)
        bad = ~finite
        if self._autocast is torch.float16:  # too large a scale is no fault
            bad = bad & (scale <= 1.0)
            grown = torch.where(n_steps % GROWTH_STEPS == GROWTH_STEPS - 1, scale * 2, scale)
            scale = torch.where(finite, grown, (scale / 2).clamp(min=1.0))
        return [
            flat,
            momentum,
            variance,
            n_steps,
            scale.clone(),
            sums,
            n_taken + go,
            n_bad + bad.float(),
            stopped.clone(),
        ]

    def state(self) -> dict[str, Tensor]:
        """The optimizer's state, for a checkpoint."""
        state = {"momentum": self.momentum, "variance": self.variance, "n_steps": self.n_steps}
        return state | ({"scale": self.scale} if self._autocast is torch.float16 else {})


class _Loss(nn.Module):
    """A loss as a module, so that its model's parameters can be replaced for a call."""

    def __init__(self, model: nn.Module, loss: LossFn[Any]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any, coefficient: Tensor) -> tuple[Tensor, Tensor]:
        return self._loss(batch, coefficient)
