"""One optimizer step on a minibatch: gradient of a loss, clipping to a norm, Adam; and the backends that compute it.

`Update.step` has one meaning. The eager backend here defines it: autograd, operation by operation. The others compute
the same faster, for minibatches of `batch_size`, and tests hold them equal to it: `GraphBackend` here for accelerators,
compiled code (compile.py), and code written out for small networks on the CPU (fused.py). A step changes nothing until all memory
that it needs is allocated, so one that runs out of memory can be repeated in smaller parts. Nothing is read back to the
host: a step that must not happen (loss or gradient not finite, KL limit exceeded) is skipped on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from flatout.device.accelerator import (
    Graph,
    Packed,
    has_streams,
    is_accelerator,
    is_out_of_memory,
    release_memory,
    short_reason,
)
from flatout.device.private import find
from flatout.models.params import FlatParams, copy_all, zero_all
from flatout.models.shared_layer import Team, shared_params

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-5
"""Adam's constants."""
ADAM: dict[str, Any] = {"beta1": BETA1, "beta2": BETA2, "eps": EPSILON}
ADAM |= {"weight_decay": 0.0, "amsgrad": False, "maximize": False}
FIRST_SCALE, GROWTH_STEPS = 2.0**14, 1000
"""Loss scale for fp16: halved when gradients overflow, doubled after so many good steps."""
FEWEST_ROWS = 8
"""A thread differentiates at least so many samples."""
_fused_adam = find("torch._fused_adam_")


class Minibatch:
    """Base of an algorithm's minibatch: a dataclass of tensors, or tuples of them, with one row per transition."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]  # the dataclass's fields

    def take(self, index: Tensor | slice) -> Self:
        """The samples named by the index."""
        if isinstance(index, slice):
            return self._mapped(lambda tensor: tensor[index])
        return self._mapped(lambda tensor: tensor.index_select(0, index))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        fields = [getattr(self, name) for name in self.__match_args__]
        return type(self)(*[tuple(map(change, it)) if type(it) is tuple else change(it) for it in fields])

    def tensors(self) -> list[Tensor]:
        """All of its tensors, in a fixed order."""
        out: list[Tensor] = []
        for name in self.__match_args__:
            field = getattr(self, name)
            out += field if type(field) is tuple else [field]
        return out

    def like(self, tensors: Sequence[Tensor]) -> Self:
        """A minibatch of other tensors, in the order of `tensors`."""
        left = iter(tensors)
        return self._mapped(lambda _: next(left))

    def __len__(self) -> int:
        field = getattr(self, self.__match_args__[-1])
        return len(field[0] if type(field) is tuple else field)


Batch = TypeVar("Batch", bound=Minibatch)
T = TypeVar("T")
LossFn = Callable[[Batch, Tensor], tuple[Tensor, ...]]
"""(minibatch, scheduled coefficient) → mean loss over the samples, vector of mean metrics whose first is the loss, and,
where `sample_output` asks for it, a number for each sample."""
Step = Callable[..., Sequence[Tensor]]
"""(state, settings, the model's buffers, a minibatch's tensors) → new state."""
BatchIn = TypeVar("BatchIn", bound=Minibatch, contravariant=True)


class Backend(Protocol[BatchIn]):
    """Computes an update's step on minibatches of its `batch_size`."""

    name: str

    def step(self, batch: BatchIn) -> None:
        """Learn from one minibatch; out of memory leaves no trace."""


class Optimizer(Protocol):
    """Steps the parameters in place of Adam; the user's own."""

    def step(self, grad: Tensor, learning_rate: float) -> None:
        """Step with this flat gradient, which is clipped."""

    def snapshot(self) -> dict[str, Any]:
        """What `restore` takes."""

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go back to a snapshot."""

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave."""


class Ranks(Protocol):
    """The other processes that learn from parts of the same minibatches; see `training/distributed.py`."""

    n: int
    """How many processes there are."""

    def part(self, batch: Batch) -> Batch:
        """This process's part of a minibatch."""

    def put(self, grad: Tensor, metrics: Tensor, samples: Sequence[Tensor]) -> None:
        """Store what this process has computed; may be captured as a part of a graph."""

    def reduce(self) -> None:
        """Bring what all processes have stored together."""

    def take(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Gradient and metrics of the whole minibatch, and the outputs of all its samples; may be captured."""


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
        sample_output: bool = False,
    ) -> None:
        """`prepare`: applied to a whole minibatch before it may be split. `kl_index`: the metric that is the KL."""
        self._model, self._params, self._loss, self._prepare = model, params, loss, prepare
        self.max_grad_norm, self.kl_index, self.kl_limit = max_grad_norm, kl_index, kl_limit
        self.batch_size, self.autocast = batch_size, autocast
        self._asks_if_stopped = kl_limit is not None and not is_accelerator(params.flat.device)
        flat = params.flat
        self.device = flat.device
        self.parts = PartSize(batch_size, flat.device)
        """How many samples of a minibatch are differentiated at once."""
        self.momentum, self.variance = torch.zeros_like(flat), torch.zeros_like(flat)
        scalar = partial(torch.full, (), device=flat.device)
        self.n_steps, self.n_taken, self.n_bad = scalar(0.0), scalar(0.0), scalar(0.0)
        self.stopped = scalar(False)
        self.scale = scalar(FIRST_SCALE if autocast is torch.float16 else 1.0)
        self.metrics = torch.zeros(n_metrics + 1, device=flat.device)
        """Sums over the steps taken since `begin`; the last entry is the gradient's norm before clipping."""
        self.sample_output = torch.zeros(batch_size if sample_output else 0, device=flat.device)
        """What the last step's loss returned for each sample."""
        self._state = [flat, self.momentum, self.variance, self.n_steps, self.scale]
        self._state += [self.metrics, self.n_taken, self.n_bad, self.stopped]
        self._state += [self.sample_output] if sample_output else []
        self._sent: Packed | None = None
        """The settings in pinned memory and on the device, where a graph can copy them."""
        self.learning_rate, self.coefficient = scalar(0.0), scalar(0.0)
        if has_streams(flat.device):
            self._sent = Packed([np.zeros((), np.float32), np.zeros((), np.float32)], flat.device)
            self.learning_rate, self.coefficient = self._sent.tensors
        self._settings = [self.learning_rate, self.coefficient]
        self.step_size = 0.0
        lower = autocast and torch.autocast(flat.device.type, autocast, cache_enabled=False)
        self._precision: Any = lower or nullcontext()
        self.splits = False
        """Whether threads may differentiate shares of a minibatch at the same time."""
        self._threads: ThreadPoolExecutor | None = None
        self._team: Team | None = None
        self._backend: Backend[Batch] | None = None
        self.compiled_step: Step | None = None
        """What a graph captures, if it was compiled."""
        self.backend = "eager"
        """What computes the steps: eager, compiled, graph or fused."""
        self.optimizer: Optimizer | None = None
        """The user's own; None: Adam. With one, steps are eager."""
        self.ranks: Ranks | None = None
        """Other processes that compute parts of each minibatch; None: this one computes all of it."""

    @property
    def own_rows(self) -> int:
        """Rows of a minibatch that this process computes."""
        return self.batch_size // (1 if self.ranks is None else self.ranks.n)

    def own(self, batch: Batch) -> Batch:
        """What this process computes of a minibatch, prepared as a whole."""
        batch = self._prepare(batch)
        return batch if self.ranks is None else self.ranks.part(batch)

    def use(self, backend: Backend[Batch] | None) -> None:
        """Compute the steps of whole minibatches with this backend from now on; None: eager."""
        self._backend, self.backend = backend, "eager" if backend is None else backend.name

    def begin(self, learning_rate: float, coefficient: float = 0.0) -> None:
        """Start a rollout's updates: clear the sums, set the step size and the loss's coefficient."""
        self.set(learning_rate, coefficient)
        self.clear()

    def set(self, learning_rate: float, coefficient: float = 0.0) -> None:
        """Set the step size and the loss's coefficient; on an accelerator `clear` sends them."""
        self.step_size = learning_rate
        if self._sent is None:
            self.learning_rate.fill_(learning_rate)
            self.coefficient.fill_(coefficient)
        else:
            for array, value in zip(self._sent.arrays, (learning_rate, coefficient), strict=True):
                array[...] = value

    def clear(self) -> None:
        """Clear the sums; may be captured as a graph."""
        if self._sent is not None:
            self._sent.to_device()
        zero_all([self.metrics, self.n_taken, self.n_bad])
        self.stopped.zero_()

    def has_stopped(self) -> bool:
        """Whether the KL limit was exceeded, so that further steps would change nothing.

        On an accelerator asking would wait for all steps launched so far, so it is not asked there.
        """
        return self._asks_if_stopped and bool(self.stopped)

    def step(self, batch: Batch) -> None:
        """Learn from one minibatch; eagerly if its size is another one, or in parts after out-of-memory."""
        self.parts.attempt(lambda: self._step(batch))

    def _step(self, batch: Batch) -> None:
        if self._backend is not None and len(batch) == self.batch_size == self.parts.n_rows:
            self._backend.step(batch)
        else:
            self.eager_step(batch)

    def eager_step(self, batch: Batch) -> None:
        """The step as it is defined."""
        gradient = self._split_gradient(batch)
        if self.ranks is not None:
            self.ranks.put(*gradient)
            self.ranks.reduce()
            gradient = self.ranks.take()
        self._apply(*gradient, self.step_size)

    def is_shared(self, n_threads: int) -> bool:
        """Whether so many threads differentiate shares of each minibatch, in eager steps."""
        n, rest = divmod(self.own_rows, n_threads)
        whole = self.batch_size == self.parts.n_rows
        return self.splits and whole and n_threads > 1 and n >= FEWEST_ROWS and not rest

    def _split_gradient(self, batch: Batch) -> tuple[Tensor, Tensor, list[Tensor]]:
        """`_gradient` with a share of the minibatch for each of torch's threads, where that is allowed.

        They meet once. Within operations they would meet dozens of times, and each time wait for a core to wake up.
        """
        n_threads = torch.get_num_threads()
        if len(batch) != self.batch_size or not self.is_shared(n_threads):
            return self._gradient(batch, self._params.tensors, self._loss, self.coefficient)
        n, batch = self.own_rows // n_threads, self.own(batch)
        team, threads = self._gather_team(n_threads)
        team.begin()

        def differentiate(i: int) -> tuple[Tensor, list[Tensor]]:
            with team.seat(i):
                loss, metrics, *samples = self._loss(batch.take(slice(i * n, (i + 1) * n)), self.coefficient)
                mean = loss / n_threads  # the shares are of equal size
                grads = torch.autograd.grad(mean, self._own_leaves, allow_unused=True, materialize_grads=True)
                copy_all(self._own_grads[i], grads)
            return metrics, samples

        futures = [threads.submit(differentiate, i) for i in range(n_threads)]
        wait(futures)  # all of them, also if one fails: nothing may go on beside what follows
        metrics, samples = zip(*team.results(futures), strict=True)
        with torch.no_grad():
            for total, *others in zip(*self._own_grads, strict=True):
                for more in others:
                    total += more
            outputs = [torch.cat(parts) for parts in zip(*samples, strict=True)]
            return self._grad, torch.stack(metrics).mean(0), outputs

    def _gather_team(self, n_threads: int) -> tuple[Team, ThreadPoolExecutor]:
        """The threads, and memory for their gradients: of large layers they compute one together, of others one each."""
        if self._threads is None or self._team is None or self._team.n != n_threads:
            self.close()
            params, self._grad = self._params, torch.zeros_like(self._params.flat)
            together = shared_params(self._model)
            own = [i for i, tensor in enumerate(params.tensors) if id(tensor) not in together]
            flats = [self._grad, *(torch.empty_like(self._grad) for _ in range(1, n_threads))]
            views = [params.views(flat) for flat in flats]
            self._own_leaves = [params.tensors[i] for i in own]
            self._own_grads = [[each[i] for i in own] for each in views]
            shared = {id(tensor): view for tensor, view in zip(params.tensors, views[0], strict=True)}
            self._team = Team(n_threads, {key: shared[key] for key in together if key in shared})
            self._threads = ThreadPoolExecutor(n_threads, "flatout update", torch.set_num_threads, (1,))
        return self._team, self._threads

    def close(self) -> None:
        """End its threads; a further step would begin new ones."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def captured_step(self, batch: Batch) -> None:
        """`eager_step` for a graph: nothing in it is fixed by the time of the capture."""
        if self.compiled_step is not None and len(batch) == self.batch_size == self.parts.n_rows:
            self.commit(self.compiled_step(*self.inputs(batch)))
        else:
            self._apply(*self.own_gradient(batch), self.learning_rate)

    def captured_apply(self, gradient: tuple[Tensor, Tensor, list[Tensor]]) -> None:
        """The rest of `captured_step`, after the gradient."""
        self._apply(*gradient, self.learning_rate)

    def own_gradient(self, batch: Batch) -> tuple[Tensor, Tensor, list[Tensor]]:
        """`_gradient` that differentiates views of its own.

        For the model's parameters autograd would wait for the stream that they were first differentiated on.
        """
        leaves = [tensor.detach().requires_grad_() for tensor in self._own_params()]
        return self._gradient(batch, leaves, self._loss_of(leaves, []), self.coefficient)

    @torch.no_grad()
    def _own_params(self) -> Sequence[Tensor]:
        """The parameters; those that autocast would convert one by one are converted by one kernel."""
        params = self._params
        if self.autocast is None:
            return params.tensors
        lower = params.views(params.flat.to(self.autocast))
        names = [name for name, tensor in self._model.named_parameters() if tensor.requires_grad]
        converted = _converted_names(self._model)
        return [
            low if name in converted else tensor
            for name, low, tensor in zip(names, lower, params.tensors, strict=True)
        ]

    @torch.no_grad()
    def _apply(
        self, grad: Tensor, metrics: Tensor, samples: list[Tensor], learning_rate: float | Tensor
    ) -> None:
        """Step with this gradient, in place."""
        if self.optimizer is not None and self.device.type != "meta":
            skipped, divisor, counters = self._check(self._state, grad, metrics)
            if not bool(skipped):
                self.optimizer.step(grad / divisor, float(learning_rate))
            self._count(counters)
        elif _fused_adam is None:
            copy_all(self._state[:9], self._advance(self._state, self.learning_rate, grad, metrics))
        else:
            skipped, divisor, counters = self._check(self._state, grad, metrics)
            # From here on everything happens in place: nothing can run out of memory.
            self._adam_in_place(grad, divisor, skipped, counters[0], learning_rate)
            self._count(counters)
        for values in samples:
            n = min(len(values), len(self.sample_output))
            self.sample_output[:n] = values[:n]

    def _count(self, counters: Sequence[Tensor]) -> None:
        """Make these the counters, which are `_state[3:9]`."""
        changed = [pair for pair in zip(self._state[3:9], counters, strict=True) if pair[0] is not pair[1]]
        copy_all([old for old, _ in changed], [new for _, new in changed])

    def _adam_in_place(
        self, grad: Tensor, divisor: Tensor, skipped: Tensor, n_steps: Tensor, learning_rate: float | Tensor
    ) -> None:
        """`adam` in one pass over the parameters."""
        options = ADAM | {"lr": learning_rate, "grad_scale": divisor, "found_inf": skipped}
        flat = self._params.flat
        _fused_adam([flat], [grad], [self.momentum], [self.variance], [], [n_steps], **options)

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of a prepared minibatch."""
        return self._loss(batch, self.coefficient)[0]

    def next_state(self, batch: Batch) -> list[Tensor]:
        """The state after learning from one minibatch; changes nothing."""
        grad, metrics, samples = self._gradient(batch, self._params.tensors, self._loss, self.coefficient)
        with torch.no_grad():
            return [*self._advance(self._state, self.learning_rate, grad, metrics), *samples]

    @torch.no_grad()
    def commit(self, state: Sequence[Tensor]) -> None:
        """Make a computed state the current one; in place, so that nothing here can run out of memory."""
        copy_all(self._state, list(state))

    @contextmanager
    def preserving_state(self) -> Iterator[None]:
        """Undo the steps taken inside: for timing and warming up."""
        kept = [tensor.detach().clone() for tensor in self._state]
        own = self.optimizer.snapshot() if self.optimizer is not None else None
        try:
            yield
        finally:
            self.commit(kept)
            if self.optimizer is not None and own is not None:
                self.optimizer.restore(own)

    def buffers(self) -> list[Tensor]:
        """The model's tensors that change between rollouts, such as observation statistics."""
        return [b for b in self._model.buffers() if b.dtype == torch.float32]

    def inputs(self, batch: Batch) -> tuple[list[Tensor], ...]:
        """What `pure` takes, as it is now: the tensors themselves."""
        return self._state, self._settings, self.buffers(), batch.tensors()

    def pure(self, example: Batch) -> Step:
        """`next_state` as a function of its arguments alone, for tracing; `example` shows what minibatches look like."""

        def step(*groups: Sequence[Tensor]) -> Sequence[Tensor]:
            state, settings, buffers, tensors = groups
            leaves = [view.detach().requires_grad_() for view in self._params.views(state[0])]
            loss, batch = self._loss_of(leaves, buffers), example.like(tensors)
            grad, metrics, samples = self._gradient(batch, leaves, loss, settings[1], state[4])
            with torch.no_grad():
                return [*self._advance(state, settings[0], grad, metrics), *samples]

        return step

    def _loss_of(self, params: Sequence[Tensor], buffers: Sequence[Tensor]) -> LossFn[Batch]:
        """The loss as a function of these parameters, and of these buffers unless there are none."""
        names = [name for name, tensor in self._model.named_parameters() if tensor.requires_grad]
        buffer_names = [name for name, b in self._model.named_buffers() if b.dtype == torch.float32]
        own = {f"model.{name}": tensor for name, tensor in zip(names, params, strict=True)}
        own |= {f"model.{name}": tensor for name, tensor in zip(buffer_names, buffers, strict=False)}
        wrapped = _Loss(self._model, self._loss)

        def loss(batch: Batch, coefficient: Tensor) -> tuple[Tensor, ...]:
            out: tuple[Tensor, ...] = torch.func.functional_call(wrapped, own, (batch, coefficient))
            return out

        return loss

    def _gradient(
        self,
        batch: Batch,
        leaves: Sequence[Tensor],
        loss_of: LossFn[Batch],
        coefficient: Tensor,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Flat gradient, metrics and per-sample output of a minibatch, computed in parts that fit into memory."""
        scale = self.scale if scale is None else scale
        batch = self.own(batch)
        n, size = len(batch), self.parts.n_rows
        grads: list[Tensor] = []
        means: list[Tensor] = []
        samples: list[Tensor] = []
        for start in range(0, n, size):
            part = batch if size >= n else batch.take(slice(start, start + size))
            with self._precision:
                loss, metrics, *output = loss_of(part, coefficient)
            samples += output
            weight = len(part) / n
            scaled = self.autocast is torch.float16
            total, metrics = (loss, metrics) if size >= n else (loss * weight, metrics * weight)
            total = total * scale if scaled else total
            # A user's network may have parameters that this loss does not depend on.
            part_grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
            flat = self._params.flatten(part_grads)
            grads.append(flat / scale if scaled else flat)
            means.append(metrics)
            if len(grads) == 2:
                grads, means = [grads[0] + grads[1]], [means[0] + means[1]]
        return grads[0], means[0], [torch.cat(samples)] if len(samples) > 1 else samples

    def _advance(
        self, state: Sequence[Tensor], learning_rate: Tensor, grad: Tensor, metrics: Tensor
    ) -> list[Tensor]:
        """The state after one step with this gradient."""
        skipped, divisor, counters = self._check(state, grad, metrics)
        params, momentum, variance = old = state[:3]
        stepped = adam(params, momentum, variance, grad / divisor, counters[0], learning_rate)
        kept = [torch.where(skipped > 0, was, new) for new, was in zip(stepped, old, strict=True)]
        return kept + [
            new.clone() if new is was else new for new, was in zip(counters, state[3:9], strict=True)
        ]

    def _check(
        self, state: Sequence[Tensor], grad: Tensor, metrics: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Whether this step is skipped (1.0 or 0.0), what clipping divides the gradient by, and the new counters.

        Of the counters some may be the old ones. Every operation here is a launch of a captured step: few are better.
        """
        n_steps, scale, sums, n_taken, n_bad, stopped = state[3:9]
        norm = torch.linalg.vector_norm(grad)
        finite = (norm + metrics[0]).abs() < math.inf
        taken = finite
        if self.kl_limit is not None:
            stopped = stopped | (metrics[self.kl_index] > self.kl_limit)
            taken = finite & ~stopped
        sums = sums + torch.where(taken, torch.cat([metrics, norm.view(1)]), 0.0)
        one = taken.float()
        skipped, n_steps = 1 - one, n_steps + one
        divisor = ((norm + 1e-6) / self.max_grad_norm).clamp(min=1.0)
        bad = skipped if self.kl_limit is None else (~finite).float()
        if self.autocast is torch.float16:  # an overflow at a large scale only lowers the scale
            bad = bad * (scale <= 1.0)
            grown = torch.where(n_steps % GROWTH_STEPS == GROWTH_STEPS - 1, scale * 2, scale)
            scale = torch.where(finite, grown, (scale / 2).clamp(min=1.0))
        return skipped, divisor, [n_steps, scale, sums, n_taken + one, n_bad + bad, stopped]

    def state(self) -> dict[str, Tensor]:
        """The optimizer's state, for a checkpoint."""
        state = {"momentum": self.momentum, "variance": self.variance, "n_steps": self.n_steps}
        state |= self.optimizer.state() if self.optimizer is not None else {}
        return state | ({"scale": self.scale} if self.autocast is torch.float16 else {})


def adam(
    params: Tensor, momentum: Tensor, variance: Tensor, grad: Tensor, n_steps: Tensor, learning_rate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Adam (Kingma and Ba 2015): parameters, momentum and variance after step number `n_steps`, counted from 1.

    The formula of every backend. Eager computes it by PyTorch's fused kernel, `fused.py` by a compiled loop.
    """
    momentum = torch.lerp(momentum, grad, 1 - BETA1)
    variance = torch.lerp(variance, grad.square(), 1 - BETA2)
    step_size = learning_rate / (1 - BETA1**n_steps)
    divisor = (1 - BETA2**n_steps).sqrt()
    return params - step_size * momentum / (variance.sqrt() / divisor + EPSILON), momentum, variance


class GraphBackend(Generic[Batch]):
    """Steps captured as a graph: a replay makes the next minibatch and learns from it, in one launch.

    A graph reads and writes fixed addresses. What `next_batch` reads is written in place; the update's state and settings
    and the model's buffers are only ever changed in place too, so every replay sees their current values.
    """

    name = "graph"

    def __init__(
        self,
        update: Update[Batch],
        next_batch: Callable[[], Batch],
        example: Batch,
        after: Callable[[], None] = lambda: None,
        n_steps: int = 1,
    ) -> None:
        """`after` follows each step, such as new priorities. `n_steps`: steps of one replay, one with other ranks."""
        self.n_steps, self._ranks = n_steps, update.ranks
        ranks = update.ranks

        def steps() -> None:
            for _ in range(n_steps):
                update.captured_step(next_batch())
                after()

        def gradient() -> None:
            assert ranks is not None, "it is for them"
            ranks.put(*update.own_gradient(next_batch()))

        def apply() -> None:
            assert ranks is not None, "it is for them"
            update.captured_apply(ranks.take())
            after()

        work = steps if ranks is None else gradient
        self._graph = Graph(work, update.device, warm_up=lambda: update.own_gradient(example))
        self._apply = None if ranks is None else Graph(apply, update.device)

    def replay(self) -> None:
        """Learn from the next minibatches."""
        self._graph.replay()
        if self._ranks is not None and self._apply is not None:
            self._ranks.reduce()
            self._apply.replay()


class Repeated(Generic[T]):
    """Work that launches the same every time: done eagerly at first, then captured, and replayed from then on.

    It must leave the same behind when it is done twice.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._key: object = None
        self._captured: tuple[Graph, T] | None = None
        self._may_capture = True
        self.version = 0
        """Stays the same for as long as results come in the same memory."""
        self.notes: list[str] = []

    def run(self, key: object, work: Callable[[], T]) -> T:
        """What `work` returns. `key` stands for what it depends on besides the contents of memory; None: never captured."""
        if key is None or key != self._key:
            self._key, self._captured = key, None
        elif self._captured is None and self._may_capture:
            self._capture(work)
        if self._captured is None:
            self.version += 1
            return work()
        graph, result = self._captured
        graph.replay()
        return result

    def _capture(self, work: Callable[[], T]) -> None:
        results: list[T] = []
        try:
            graph = Graph(lambda: results.append(work()), self._device, warm_up=work)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._may_capture = False
            self.notes.append(f"not captured as a graph: {short_reason(error)}")
        else:
            self._captured = graph, results[0]
            self.version += 1


def _converted_names(model: nn.Module) -> set[str]:
    """Names of the parameters that autocast converts: those of linear and convolutional layers."""
    layers = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, layers)
        for name, _ in module.named_parameters(recurse=False)
    }


class _Loss(nn.Module):
    """A loss as a module, so that its model's parameters can be replaced for a call."""

    def __init__(self, model: nn.Module, loss: LossFn[Any]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any, coefficient: Tensor) -> tuple[Tensor, ...]:
        return self._loss(batch, coefficient)


class PartSize:
    """How many samples are processed at once; shrinks when memory runs out."""

    def __init__(self, n_rows: int, device: torch.device) -> None:
        self.n_rows, self._device = n_rows, device
        self.n_backoffs = 0
        self.notes: list[str] = []
        """One line for each time memory ran out."""

    def attempt(self, work: Callable[[], T]) -> T:
        """What `work` returns; if it runs out of memory it is repeated with parts of half the size.

        `work` must read `n_rows` itself, and leave no trace when it fails.
        """
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self.n_rows == 1:
                    raise
                reason = short_reason(error)
            # Outside the except block, so that the tensors that the traceback held are freed.
            before, self.n_rows = self.n_rows, -(-self.n_rows // 2)
            self.n_backoffs += 1
            self.notes.append(
                f"out of memory with {before} samples at once; continuing with {self.n_rows}, same result ({reason})"
            )
            release_memory(self._device)


def in_parts(function: Callable[[slice], Tensor], n_rows: int, size: int) -> Tensor:
    """`function` of all rows, `size` at a time."""
    if size >= n_rows:
        return function(slice(None))
    return torch.cat([function(slice(i, i + size)) for i in range(0, n_rows, size)])
