"""The loops that hand-made updates share: narrow layers there and back, then clipping and Adam."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flatout.device.jit import compiled
from flatout.envs.spaces import Array
from flatout.learning.adam import BETA1, BETA2, EPSILON
from flatout.models.kernel import tanh

_KEEP1, _KEEP2 = np.float32(1 - BETA1), np.float32(1 - BETA2)
_EPSILON = np.float32(EPSILON)
_ZERO, _ONE = np.float32(0), np.float32(1)


@compiled
def bend(y: Array, bias: Array, is_relu: bool) -> None:
    """A hidden layer's bias and activation, in place; tanh at a tenth of what torch's costs."""
    for b in range(len(y)):
        row = y[b]
        if is_relu:
            for j in range(len(bias)):
                size = row[j] + bias[j]
                row[j] = _ZERO if size < 0 else size  # what is no number stays one
        else:
            for j in range(len(bias)):
                row[j] = tanh(row[j] + bias[j])


@compiled
def affine(x: Array, weight: Array, room: Array, out: Array) -> None:
    """out = x Wᵀ for a layer of few inputs; `room` is for W on its side."""
    n_inputs, n_outputs = room.shape
    for k in range(n_inputs):
        for j in range(n_outputs):
            room[k, j] = weight[j, k]
    for b in range(len(x)):
        row = out[b]
        for j in range(n_outputs):
            row[j] = _ZERO
        for k in range(n_inputs):
            size, side = x[b, k], room[k]
            for j in range(n_outputs):
                row[j] += size * side[j]


@compiled
def _bend_back(slope: Array, output: Array, is_relu: bool) -> None:
    if is_relu:
        for j in range(len(slope)):
            slope[j] = slope[j] if output[j] > 0 else _ZERO
    else:
        for j in range(len(slope)):
            slope[j] *= _ONE - output[j] * output[j]


@compiled
def back_through_few(
    slope: Array,
    hidden: Array,
    weight: Array,
    is_relu: bool,
    weight_out: Array,
    bias_out: Array,
    slope_out: Array,
    bias_before: Array,
) -> None:
    """The gradient of a last layer of few outputs, of which some may not pull, what pulls at the layer before, and
    the gradient of that one's bias."""
    weight_out[:] = 0
    bias_out[:] = 0
    bias_before[:] = 0
    for b in range(len(slope)):
        row, seen = slope_out[b], hidden[b]
        row[:] = 0
        for a in range(slope.shape[1]):
            pull = slope[b, a]
            if pull == 0:
                continue
            towards, along = weight_out[a], weight[a]
            bias_out[a] += pull
            for j in range(len(row)):
                towards[j] += pull * seen[j]
                row[j] += pull * along[j]
        _bend_back(row, seen, is_relu)
        for j in range(len(row)):
            bias_before[j] += row[j]


@compiled
def back_to_inputs(
    x: Array,
    slope: Array,
    hidden: Array,
    is_bent: bool,
    is_relu: bool,
    room: Array,
    weight_out: Array,
    bias_out: Array,
) -> None:
    """The gradient of a first layer of few inputs; `is_bent`: its slope has gone back through the activation."""
    n_inputs, n_outputs = room.shape
    room[:] = 0
    bias_out[:] = 0
    for b in range(len(x)):
        row = slope[b]
        if not is_bent:
            _bend_back(row, hidden[b], is_relu)
        for k in range(n_inputs):
            size, side = x[b, k], room[k]
            for j in range(n_outputs):
                side[j] += size * row[j]
        for j in range(n_outputs):
            bias_out[j] += row[j]
    for j in range(n_outputs):
        for k in range(n_inputs):
            weight_out[j, k] = room[k, j]


@compiled
def adam(
    norm: float,
    longest: float,
    learning_rate: float,
    moved: float,
    farthest: float,
    flat: Array,
    gradient: Array,
    momentum: Array,
    variance: Array,
    means: Array,
    n_steps: Array,
    n_taken: Array,
    n_bad: Array,
    stopped: Array,
    sums: Array,
) -> Any:
    """One step with the gradient clipped to `longest`; left out and counted where something is not finite.

    From where the policy has `moved` farther than it may on, no step is taken.
    """
    if moved > farthest:
        stopped[0] = True
    if not (math.isfinite(norm) and math.isfinite(means[0])):
        n_bad[0] += _ONE
        return
    if stopped[0]:
        return
    n_steps[0] += _ONE
    n_taken[0] += _ONE
    for i in range(len(means)):
        sums[i] += means[i]
    sums[len(means)] += np.float32(norm)
    shrink = np.float32(min(longest / (norm + 1e-6), 1.0))
    step = np.float32(learning_rate / (1 - BETA1 ** np.float64(n_steps[0])))
    divisor = np.float32(1 / math.sqrt(1 - BETA2 ** np.float64(n_steps[0])))
    for i in range(len(flat)):
        g = gradient[i] * shrink
        m = momentum[i] + (g - momentum[i]) * _KEEP1
        v = variance[i] + (g * g - variance[i]) * _KEEP2
        momentum[i], variance[i] = m, v
        flat[i] -= step * m / (np.sqrt(v) * divisor + _EPSILON)
