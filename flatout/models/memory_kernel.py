"""LSTM and GRU on the CPU as compiled loops: a step for acting, and whole sequences, forward and backward, for updates.

A step computes every observation in one fixed order of operations, like `kernel`. A sequence calls a matrix product
for the gates of the output before and a loop for the rest at every step; the gradients of the weights are one product
over all steps. `memory.Memory.advance` is the definition of both. S: sequences, L: steps, H: width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.envs.spaces import Array
from flatout.models.kernel import ROWS as ROWS
from flatout.models.kernel import _affine, contracted, tanh

F = np.float32
_ONE, _HALF, _ZERO = F(1), F(0.5), F(0)

Weights = tuple[Array, Array, Array]
"""Transposed, of the input gates and of the gates of the output before; their biases."""


def weights_of(memory: Any) -> Weights:
    """Arrays for the weights of a `memory.Memory`."""
    n_in, n_gates = memory.gates_in.in_features, memory.gates_in.out_features
    return (
        np.zeros((n_in, n_gates), F),
        np.zeros((memory.width, n_gates), F),
        np.zeros((2, n_gates), F),
    )


def copy_weights(memory: Any, out: Weights) -> None:
    """Take the memory's current parameters."""
    out[0][:] = memory.gates_in.weight.detach().numpy().T
    out[1][:] = memory.gates_back.weight.detach().numpy().T
    out[2][0] = memory.gates_in.bias.detach().numpy()
    out[2][1] = memory.gates_back.bias.detach().numpy()


@contracted
def sigmoid(x: Any) -> Any:
    """The logistic function."""
    return _HALF + _HALF * tanh(_HALF * x)


@contracted
def _sigmoids(x: Array) -> None:
    for j in range(len(x)):
        x[j] = sigmoid(x[j])


@contracted
def _tanhs(x: Array, out: Array) -> None:
    for j in range(len(x)):
        out[j] = tanh(x[j])


@contracted
def _gates(x: Array, state: Array, start: int, first: int, weights: Weights, out: tuple[Array, ...]) -> None:
    """Gates of up to ROWS inputs and of their outputs before, which begin at column `start` of the states."""
    w_in, w_back, bias = weights
    some_x, some_h, gates, back = out
    for i in range(min(ROWS, len(x) - first)):
        some_x[i] = x[first + i]
        some_h[i] = state[first + i, start : start + len(w_back)]
    _affine(some_x, w_in, bias[0], gates)
    _affine(some_h, w_back, bias[1], back)


@contracted
def lstm_step(
    x: Array, state: Array, start: int, weights: Weights, scratch: tuple[Array, ...], state_out: Array
) -> None:
    """The states after one step of all observations: the columns from `start` on, outputs and then cells."""
    width = len(weights[1])
    for first in range(0, len(x), ROWS):
        _gates(x, state, start, first, weights, scratch)
        for i in range(min(ROWS, len(x) - first)):
            a, b = scratch[2][i], scratch[3][i]
            cell = state[first + i, start + width : start + 2 * width]
            out = state_out[first + i, start : start + 2 * width]
            for j in range(4 * width):
                a[j] += b[j]
            _sigmoids(a[: 2 * width])
            _tanhs(a[2 * width : 3 * width], a[2 * width : 3 * width])
            _sigmoids(a[3 * width :])
            for j in range(width):
                out[width + j] = a[width + j] * cell[j] + a[j] * a[2 * width + j]
            _tanhs(out[width:], out[:width])
            for j in range(width):
                out[j] *= a[3 * width + j]


@contracted
def gru_step(
    x: Array, state: Array, start: int, weights: Weights, scratch: tuple[Array, ...], state_out: Array
) -> None:
    """The states after one step of all observations: the columns from `start` on."""
    width = len(weights[1])
    for first in range(0, len(x), ROWS):
        _gates(x, state, start, first, weights, scratch)
        for i in range(min(ROWS, len(x) - first)):
            a, b = scratch[2][i], scratch[3][i]
            old, out = state[first + i, start : start + width], state_out[first + i, start : start + width]
            for j in range(2 * width):
                a[j] += b[j]
            _sigmoids(a[: 2 * width])
            for j in range(width):
                out[j] = tanh(a[2 * width + j] + a[j] * b[2 * width + j])
            for j in range(width):
                out[j] += a[width + j] * (old[j] - out[j])


def scratch_for(memory: Any) -> tuple[Array, ...]:
    """Buffers for a step: inputs, outputs before, and the gates of both."""
    n_in, n_gates = memory.gates_in.in_features, memory.gates_in.out_features
    return tuple(np.zeros((ROWS, n), F) for n in (n_in, memory.width, n_gates, n_gates))


STEPS: dict[int, Callable[..., None]] = {4: lstm_step, 3: gru_step}
"""By number of gates."""


@contracted
def _lstm_forward(
    gates: Array, cells: Array, squashed: Array, h: Array, h_next: Array, keep: Array, t: int
) -> None:
    """Step t of all sequences: activates the gates in place. Loops over few arrays, which become vector instructions."""
    width = h.shape[2]
    for s in range(gates.shape[1]):
        a, c, c_out, u = gates[t, s], cells[t, s], cells[t + 1, s], squashed[t, s]
        out, following = h[t, s], h_next[t + 1, s]
        goes_on, will_go_on = keep[t, s], keep[t + 1, s]
        _sigmoids(a[: 2 * width])
        gate_i, gate_f, gate_g, gate_o = (
            a[:width],
            a[width : 2 * width],
            a[2 * width : 3 * width],
            a[3 * width :],
        )
        _tanhs(gate_g, gate_g)
        _sigmoids(gate_o)
        for j in range(width):
            c_out[j] = gate_f[j] * (c[j] * goes_on) + gate_i[j] * gate_g[j]
        _tanhs(c_out, u)
        for j in range(width):
            out[j] = gate_o[j] * u[j]
        for j in range(width):
            following[j] = out[j] * will_go_on


@contracted
def _lstm_backward(
    grad_h: Array,
    grad_back: Array,
    grad_cell: Array,
    gates: Array,
    cells: Array,
    squashed: Array,
    keep: Array,
    t: int,
) -> None:
    """Back through step t of all sequences: gates become their gradients, `grad_cell` goes on to the step before."""
    width = grad_cell.shape[1]
    for s in range(len(grad_cell)):
        a, c, u, inner = gates[t, s], cells[t, s], squashed[t, s], grad_cell[s]
        given, gh = grad_h[t, s], grad_back[s]
        goes_on, went_on = keep[t, s], keep[t + 1, s]
        gate_i, gate_f, gate_g, gate_o = (
            a[:width],
            a[width : 2 * width],
            a[2 * width : 3 * width],
            a[3 * width :],
        )
        for j in range(width):
            gh[j] = given[j] + gh[j] * went_on
        for j in range(width):
            inner[j] += gh[j] * gate_o[j] * (_ONE - u[j] * u[j])
            gate_o[j] = gh[j] * u[j] * gate_o[j] * (_ONE - gate_o[j])
        for j in range(width):
            i, g = gate_i[j], gate_g[j]
            gate_i[j] = inner[j] * g * i * (_ONE - i)
            gate_g[j] = inner[j] * i * (_ONE - g * g)
        for j in range(width):
            f = gate_f[j]
            gate_f[j] = inner[j] * (c[j] * goes_on) * f * (_ONE - f)
            inner[j] *= f * goes_on


class LSTMSequences(torch.autograd.Function):
    """Outputs (L, S, H) of an LSTM; differentiates the gates of the inputs, the weights and the bias."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, weight: Tensor, bias: Tensor, state: Tensor, keep: Tensor) -> Tensor:
        n_steps, n, n_gates = gates.shape
        width = n_gates // 4
        active = gates + bias
        cells = torch.empty(n_steps + 1, n, width)
        squashed, outputs = torch.empty(n_steps, n, width), torch.empty(n_steps, n, width)
        before = torch.empty(n_steps + 1, n, width)
        cells[0] = state[:, width:]
        torch.mul(state[:, :width], keep[0, :, None], out=before[0])
        keeps = torch.cat([keep, keep.new_ones(1, n)]).numpy()
        back = weight.t()
        a, c, u, h, b = (x.numpy() for x in (active, cells, squashed, outputs, before))
        for t in range(n_steps):
            active[t].addmm_(before[t], back)
            _lstm_forward(a, c, u, h, b, keeps, t)
        ctx.save_for_backward(weight)
        ctx.kept = active, cells, squashed, before, keeps
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        active, cells, squashed, before, keeps = ctx.kept
        n_steps, n, width = squashed.shape
        grad = grad.contiguous()
        grad_back, grad_cell = torch.zeros(n, width), np.zeros((n, width), F)
        a, c, u, g, gb = (x.numpy() for x in (active, cells, squashed, grad, grad_back))
        for t in range(n_steps - 1, -1, -1):
            _lstm_backward(g, gb, grad_cell, a, c, u, keeps, t)
            torch.mm(active[t], weight, out=grad_back)
        flat = active.flatten(0, 1)
        weight_grad = flat.t() @ before[:-1].flatten(0, 1)
        return active, weight_grad, flat.sum(0), None, None


@contracted
def _gru_forward(gates: Array, backs: Array, h: Array, before: Array, keep: Array, t: int) -> None:
    """Step t of all sequences: activates the gates in place."""
    width = h.shape[2]
    for s in range(gates.shape[1]):
        a, b, old = gates[t, s], backs[t, s], before[t, s]
        out, following, will_go_on = h[t, s], before[t + 1, s], keep[t + 1, s]
        for j in range(2 * width):
            a[j] = sigmoid(a[j] + b[j])
        gate_r, gate_z, new, back_n = a[:width], a[width : 2 * width], a[2 * width :], b[2 * width :]
        for j in range(width):
            new[j] = tanh(new[j] + gate_r[j] * back_n[j])
        for j in range(width):
            out[j] = new[j] + gate_z[j] * (old[j] - new[j])
        for j in range(width):
            following[j] = out[j] * will_go_on


@contracted
def _gru_backward(
    grad_h: Array,
    grad_back: Array,
    grad_direct: Array,
    gates: Array,
    backs: Array,
    before: Array,
    keep: Array,
    t: int,
) -> None:
    """Back through step t of all sequences: gates become their gradients, and so do those of the output before."""
    width = grad_direct.shape[1]
    for s in range(len(grad_direct)):
        a, b, old, given = gates[t, s], backs[t, s], before[t, s], grad_h[t, s]
        gh, direct, went_on = grad_back[s], grad_direct[s], keep[t + 1, s]
        gate_r, gate_z, new, back_n = a[:width], a[width : 2 * width], a[2 * width :], b[2 * width :]
        for j in range(width):
            gh[j] = given[j] + (gh[j] + direct[j]) * went_on
            direct[j] = gh[j] * gate_z[j]
        for j in range(width):
            n, z = new[j], gate_z[j]
            new[j] = gh[j] * (_ONE - z) * (_ONE - n * n)
            gate_z[j] = gh[j] * (old[j] - n) * z * (_ONE - z)
        for j in range(width):
            r = gate_r[j]
            gate_r[j] = new[j] * back_n[j] * r * (_ONE - r)
            back_n[j] = new[j] * r
        for j in range(2 * width):
            b[j] = a[j]


class GRUSequences(torch.autograd.Function):
    """Outputs (L, S, H) of a GRU; differentiates the gates of the inputs, the weights and the bias."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, weight: Tensor, bias: Tensor, state: Tensor, keep: Tensor) -> Tensor:
        n_steps, n, n_gates = gates.shape
        width = n_gates // 3
        active, backs = gates.clone(), torch.empty_like(gates)
        outputs, before = torch.empty(n_steps, n, width), torch.empty(n_steps + 1, n, width)
        torch.mul(state, keep[0, :, None], out=before[0])
        keeps = torch.cat([keep, keep.new_ones(1, n)]).numpy()
        back = weight.t()
        a, k, h, b = (x.numpy() for x in (active, backs, outputs, before))
        for t in range(n_steps):
            torch.addmm(bias, before[t], back, out=backs[t])
            _gru_forward(a, k, h, b, keeps, t)
        ctx.save_for_backward(weight)
        ctx.kept = active, backs, before, keeps
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        active, backs, before, keeps = ctx.kept
        n_steps, n, _ = active.shape
        width = weight.shape[1]
        grad = grad.contiguous()
        grad_back, direct = torch.zeros(n, width), np.zeros((n, width), F)
        a, k, b, g, gb = (x.numpy() for x in (active, backs, before, grad, grad_back))
        for t in range(n_steps - 1, -1, -1):
            _gru_backward(g, gb, direct, a, k, b, keeps, t)
            torch.mm(backs[t], weight, out=grad_back)
        flat = backs.flatten(0, 1)
        weight_grad = flat.t() @ before[:-1].flatten(0, 1)
        return active, weight_grad, flat.sum(0), None, None


def run_fused(memory: Any, gates: Tensor, state: Tensor, keep: Tensor) -> Tensor:
    """`memory.run_steps` on the CPU, with its gradient written out."""
    function: Any = LSTMSequences if memory.n_gates == 4 else GRUSequences
    back = memory.gates_back
    out: Tensor = function.apply(gates, back.weight, back.bias, state, keep)
    return out
