"""Large linear layers of threads that share a minibatch: each thread computes some of the outputs, for all samples.

A share has few samples, so most of a large layer's time goes into reading its weights and writing their gradient. If every
thread computed all outputs for its own samples, each would read all weights and write a gradient, to be summed up afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flatout.device.tiles import Flat, product

LARGE = 2**18
"""Layers with fewer weights stay in a core's cache: each thread computes them for its own samples."""
T = TypeVar("T")
_thread = threading.local()


class SharedLinear(nn.Linear):
    """A linear layer that the threads of a team compute together; anywhere else a plain one."""

    def forward(self, x: Tensor) -> Tensor:
        seat: Seat | None = getattr(_thread, "seat", None)
        if seat is None or not self.is_shared:
            return super().forward(x)
        out: Tensor = _Outputs.apply(x, self.weight, self.bias, seat)  # type: ignore[no-untyped-call]
        return out

    @property
    def is_shared(self) -> bool:
        """Whether a team computes it together."""
        return self.weight.numel() >= LARGE


def shared_params(model: nn.Module) -> set[int]:
    """Ids of the weights and biases of layers that a team computes together."""
    layers = (it for it in model.modules() if isinstance(it, SharedLinear) and it.is_shared)
    return {id(param) for layer in layers for param in (layer.weight, layer.bias)}


class Team:
    """Threads that run the same operations on equal shares of a minibatch, and meet in large layers."""

    def __init__(self, n: int, gradients: Mapping[int, Tensor]) -> None:
        """`gradients`: where those of `shared_params` are written to."""
        self.n, self._gradients = n, gradients
        self._meeting = threading.Barrier(n)
        # Two tables in turn: what lies on one is taken before anything is put on it again.
        self._tables: list[list[Any]] = [[None] * n, [None] * n]
        self._written: list[set[int]] = []

    def begin(self) -> None:
        """Before each gradient."""
        self._meeting.reset()
        self._written = [set() for _ in range(self.n)]

    @contextmanager
    def seat(self, i: int) -> Iterator[None]:
        """This thread has share `i`; if it fails, the others do not wait for it."""
        _thread.seat = Seat(self, i)
        try:
            yield
        except BaseException:
            self._meeting.abort()
            raise
        finally:
            del _thread.seat

    def results(self, futures: Sequence[Future[T]]) -> list[T]:
        """What the threads return; if one failed, why."""
        errors = [error for future in futures if (error := future.exception()) is not None]
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        if errors:
            raise errors[0]
        for key in self._gradients.keys() - self._written[0]:  # the loss does not depend on it
            self._gradients[key].zero_()
        return [future.result() for future in futures]


class Seat:
    """A thread's place in a team."""

    def __init__(self, team: Team, i: int) -> None:
        self._team, self._i = team, i

    def exchange(self, table: int, mine: Tensor) -> list[Tensor]:
        """What all threads have put here."""
        there = self._team._tables[table]
        there[self._i] = mine
        self._team._meeting.wait()
        return list(there)

    def part(self, n: int) -> slice:
        """Which of `n` outputs this thread computes."""
        n_threads = self._team.n
        return slice(n * self._i // n_threads, n * (self._i + 1) // n_threads)

    def samples(self, parts: Sequence[Tensor]) -> slice:
        """Where this thread's samples are among all."""
        first = sum(len(part) for part in parts[: self._i])
        return slice(first, first + len(parts[self._i]))

    def add(self, param: Tensor, part: slice, write: Callable[[Tensor], object]) -> None:
        """Add what `write` writes to this part of a parameter's gradient."""
        team, key = self._team, id(param)
        out = team._gradients[key][part]
        if key not in team._written[self._i]:
            team._written[self._i].add(key)
            write(out)
        else:
            more = torch.empty_like(out)
            write(more)
            out.add_(more)


class _Outputs(torch.autograd.Function):
    """The outputs of all samples, of which each thread computes a part; the gradient is written where the team says.

    N: samples of all threads, P: outputs of this thread, I: inputs. Products of few samples are faster transposed: the
    weights are then read once, as they lie there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, seat: Seat) -> Tensor:
        given = seat.exchange(0, x)
        x_ni, part = torch.cat(given), seat.part(len(weight))
        ctx.seat, ctx.weight, ctx.bias, ctx.part = seat, weight, bias, part
        ctx.samples = seat.samples(given)
        ctx.save_for_backward(x_ni)
        out_pn = torch.empty(part.stop - part.start, len(x_ni))
        _product(weight[part], x_ni.T, out_pn)
        outputs = seat.exchange(1, out_pn.add_(bias[part, None]))
        return torch.cat([some[:, ctx.samples] for some in outputs]).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        seat, part = ctx.seat, ctx.part
        (x_ni,) = ctx.saved_tensors
        grad_np = torch.cat([some[:, part] for some in seat.exchange(0, grads[0])])
        seat.add(ctx.weight, part, lambda out_pi: _product(grad_np.T, x_ni, out_pi))
        seat.add(ctx.bias, part, lambda out_p: torch.sum(grad_np, 0, out=out_p))
        x_grad_in = x_ni.new_empty(x_ni.shape[1], len(x_ni))
        _product(ctx.weight[part].T, grad_np.T, x_grad_in)
        return sum(some[:, ctx.samples] for some in seat.exchange(1, x_grad_in)).T, None, None, None


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = A B; a matrix is stored by rows or by columns, the result by rows."""
    (n_rows, depth), n_columns = a.shape, b.shape[1]
    (flat_a, flip_a), (flat_b, flip_b) = _stored(a), _stored(b)
    product(n_rows, n_columns, depth, flat_a, flip_a, flat_b, flip_b, out.view(-1).numpy())


def _stored(matrix: Tensor) -> tuple[Flat, bool]:
    """Its numbers in one row, and whether they lie there by columns."""
    flips = not matrix.is_contiguous()
    return (matrix.T if flips else matrix).detach().reshape(-1).numpy(), flips
