"""One optimizer step as one function: loss, gradients, clipping, Adam (Kingma and Ba 2015).

The step changes nothing until everything that needs memory is there, so a step that runs out of memory leaves no
trace. Nothing is read back to the host: a step that must not happen (loss or gradient not finite, policy moved too
far) is left out on the device. `pure` is the same step as a function from state to state, which is what is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from flatout.learning.adam import BETA1, BETA2, EPSILON
from flatout.learning.memory import PartSize
from flatout.learning.minibatch import Rows
from flatout.models.params import FlatParams

FIRST_SCALE, GROWTH_STEPS = 2.0**14, 1000
"""Loss scale for fp16: halved when gradients overflow, doubled after so many good steps."""


Batch = TypeVar("Batch", bound=Rows)
LossFn = Callable[[Batch, Tensor], tuple[Tensor, ...]]
"""(minibatch, the algorithm's scheduled coefficient) → mean loss over rows, vector of mean metrics over rows, and
what `row_output` asks for: a number for each row."""
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
        row_output: bool = False,
    ) -> None:
        self._model, self._params, self._loss, self._prepare = model, params, loss, prepare
        self.max_grad_norm, self.kl_index, self.kl_limit = max_grad_norm, kl_index, kl_limit
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
        self.row_output = torch.zeros(batch_size if row_output else 0, device=flat.device)
        """What the last step's loss said of each row."""
        self._state += [self.row_output] if row_output else []
        self._settings = [self.learning_rate, self.coefficient]
        self.step_size = 0.0
        self.compiled: Step | None = None
        """The same step as a compiled function, for minibatches of `batch_size` rows; None: not (yet)."""
        self.replayed: Callable[[Batch], None] | None = None
        """On CUDA: the same step, committed, as a graph; None: not captured."""
        self.by_hand: Callable[[Batch], None] | None = None
        """The same step, for minibatches of `batch_size` rows, written out without autograd; None: there is no such code."""
        self.batch_size = batch_size

    def begin(self, learning_rate: float, coefficient: float = 0.0) -> None:
        """Start a rollout's updates: clear the sums, set the step size and the loss's coefficient."""
        self.step_size = learning_rate
        self.learning_rate.fill_(learning_rate)
        self.coefficient.fill_(coefficient)
        for tensor in (self.metrics, self.n_taken, self.n_bad, self.stopped):
            tensor.zero_()

    def step(self, batch: Batch) -> None:
        """Learn from one minibatch."""
        if self.replayed is not None and len(batch) == self.batch_size == self.parts.n_rows:
            self.replayed(batch)
            return
        if self.by_hand is not None and len(batch) == self.batch_size == self.parts.n_rows:
            self.by_hand(batch)
        elif self.compiled is not None and len(batch) == self.batch_size == self.parts.n_rows:
            self.commit(self.parts.attempt(lambda: self._run_compiled(batch)))
        else:
            self._apply(*self.parts.attempt(lambda: self._change(batch)))

    def _run_compiled(self, batch: Batch) -> Sequence[Tensor]:
        if self.compiled is None or self.parts.n_rows < self.batch_size:  # it did not fit into memory
            return self.run_eagerly(batch)
        return self.compiled(self._state, self._settings, self.buffers(), batch.tensors())

    def run(self, batch: Batch) -> Sequence[Tensor]:
        """The state after learning from one minibatch, compiled or not; changes nothing."""
        return self._run_compiled(batch) if self.compiled is not None else self.run_eagerly(batch)

    def run_eagerly(self, batch: Batch) -> list[Tensor]:
        """The same, operation by operation."""
        gradient, metrics, rows = self._gradient(batch, self._params.leaves, self._loss, self.coefficient)
        with torch.no_grad():
            return [*self._advance(self._state, self.learning_rate, gradient, metrics), *rows]

    def _change(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """All that a step needs memory for: gradient, what to divide it by, whether to leave it out, new counters."""
        gradient, metrics, rows = self._gradient(batch, self._params.leaves, self._loss, self.coefficient)
        with torch.no_grad():
            go, shrink, counters = self._judge(self._state, gradient, metrics)
            return gradient, 1 / shrink, 1 - go, [*counters, *rows]

    @torch.no_grad()
    def _apply(self, gradient: Tensor, divisor: Tensor, left_out: Tensor, counters: list[Tensor]) -> None:
        """Adam in one pass over the parameters, in place; in what passes and memory cost, `_advance` is no match."""
        self._adam(gradient, divisor, left_out, counters[0])
        torch._foreach_copy_(self._state[3:9], counters[:6])
        for rows in counters[6:]:  # a batch of another size is only being tried
            n = min(len(rows), len(self.row_output))
            self.row_output[:n] = rows[:n]

    def _adam(self, gradient: Tensor, divisor: Tensor, left_out: Tensor, n_steps: Tensor) -> None:
        torch._fused_adam_(
            [self._params.flat],
            [gradient],
            [self.momentum],
            [self.variance],
            [],
            [n_steps],
            lr=self.step_size,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=0.0,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=left_out,
        )

    @torch.no_grad()
    def commit(self, new: Sequence[Tensor]) -> None:
        """Make a computed state the current one; in place, so that nothing here can run out of memory."""
        torch._foreach_copy_(self._state, list(new))

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Steps taken inside leave nothing behind: for timing and warming up."""
        kept = [tensor.detach().clone() for tensor in self._state]
        try:
            yield
        finally:
            self.commit(kept)

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

            def loss(batch: Batch, coefficient: Tensor) -> tuple[Tensor, ...]:
                out: tuple[Tensor, ...] = torch.func.functional_call(wrapped, own, (batch, coefficient))
                return out

            batch = example.like(tensors)
            gradient, metrics, rows = self._gradient(batch, leaves, loss, settings[1], state[4])
            with torch.no_grad():
                return [*self._advance(state, settings[0], gradient, metrics), *rows]

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
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Flat gradient and metrics of a minibatch, in parts of what fits into memory, and what it says of rows."""
        scale = self.scale if scale is None else scale
        batch, n, size = self._prepare(batch), len(batch), self.parts.n_rows
        grads: list[Tensor] = []
        means: list[Tensor] = []
        said: list[Tensor] = []
        for start in range(0, n, size):
            part = batch if size >= n else batch.take(slice(start, start + size))
            with self._precision():
                loss, metrics, *rows = loss_of(part, coefficient)
            said += rows
            share = len(part) / n
            scaled = self._autocast is torch.float16
            part_grads = torch.autograd.grad(loss * (scale * share if scaled else share), leaves)
            flat = self._params.flatten(part_grads)
            grads.append(flat / scale if scaled else flat)
            means.append(metrics * share)
            if len(grads) == 2:
                grads, means = [grads[0] + grads[1]], [means[0] + means[1]]
        return grads[0], means[0], [torch.cat(said)] if len(said) > 1 else said

    def _precision(self) -> Any:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self._autocast, cache_enabled=False)

    def _advance(
        self, state: Sequence[Tensor], learning_rate: Tensor, grad: Tensor, metrics: Tensor
    ) -> list[Tensor]:
        """The state after one step with this gradient."""
        flat, momentum, variance = state[:3]
        go, shrink, counters = self._judge(state, grad, metrics)
        grad = torch.where(go > 0, grad * shrink, 0.0)
        momentum = torch.lerp(momentum, grad, (1 - BETA1) * go)
        variance = torch.lerp(variance, grad.square(), (1 - BETA2) * go)
        n_steps = counters[0]
        step_size = go * learning_rate / (1 - BETA1**n_steps).clamp(min=1 - BETA1)
        divisor = (1 - BETA2**n_steps).clamp(min=1 - BETA2).sqrt()
        flat = flat - step_size * momentum / (variance.sqrt() / divisor + EPSILON)
        return [flat, momentum, variance, *counters]

    def _judge(
        self, state: Sequence[Tensor], grad: Tensor, metrics: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Whether this step counts (1.0 or 0.0), what clipping multiplies the gradient by, and the counters after."""
        n_steps, scale, sums, n_taken, n_bad, stopped = state[3:9]
        norm = torch.linalg.vector_norm(grad)
        finite = torch.isfinite(norm) & torch.isfinite(metrics[0])
        if self.kl_limit is not None:
            stopped = stopped | (metrics[self.kl_index] > self.kl_limit)
        go = (finite & ~stopped).float()
        n_steps = n_steps + go
        shrink = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        seen = torch.cat([metrics, norm.view(1)])
        sums = sums + torch.where(go > 0, seen, 0.0)
        bad = ~finite
        if self._autocast is torch.float16:  # too large a scale is no fault
            bad = bad & (scale <= 1.0)
            grown = torch.where(n_steps % GROWTH_STEPS == GROWTH_STEPS - 1, scale * 2, scale)
            scale = torch.where(finite, grown, (scale / 2).clamp(min=1.0))
        return go, shrink, [n_steps, scale.clone(), sums, n_taken + go, n_bad + bad.float(), stopped.clone()]

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

    def forward(self, batch: Any, coefficient: Tensor) -> tuple[Tensor, ...]:
        return self._loss(batch, coefficient)
