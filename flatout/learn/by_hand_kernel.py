"""The loops of DQN's hand-made update: errors of a batch and what pulls at its values, then clipping and Adam."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flatout.buffers.compiled import compiled
from flatout.envs.spaces import Array
from flatout.learn.adam import BETA1, BETA2, EPSILON

_KEEP1, _KEEP2 = np.float32(1 - BETA1), np.float32(1 - BETA2)
_EPSILON = np.float32(EPSILON)
_ONE = np.float32(1)


@compiled
def errors(
    squared: bool,
    mask: Array,
    action: Array,
    reward: Array,
    discount: Array,
    weight: Array,
    value: Array,
    later: Array,
    chooses: Array,
    error_out: Array,
    slope_out: Array,
    means_out: Array,
) -> None:
    """Errors (B,), the mean loss's slope by value (B, A), and means of loss, value and error; no mask: no rows."""
    n, n_actions = value.shape
    total, values, sizes = 0.0, 0.0, 0.0
    for b in range(n):
        choice, most = -1, np.float32(0)
        for a in range(n_actions):
            if (not len(mask) or mask[b, a]) and (choice < 0 or chooses[b, a] > most):
                choice, most = a, chooses[b, a]
        taken = action[b, 0]
        error = value[b, taken] - (reward[b] + discount[b] * later[b, max(choice, 0)])
        size = abs(error)
        if squared:
            loss, pull = error * error, error + error
        elif size < 1:
            loss, pull = np.float32(0.5) * error * error, error
        else:  # an error that is no number comes here too, and stays one
            loss, pull = size - np.float32(0.5), np.float32(np.sign(error))
        for a in range(n_actions):
            slope_out[b, a] = 0
        slope_out[b, taken] = pull * weight[b] / n
        error_out[b] = size
        total += np.float64(weight[b] * loss)
        values += np.float64(value[b, taken])
        sizes += np.float64(size)
    means_out[0], means_out[1], means_out[2] = total / n, values / n, sizes / n


@compiled
def affine(x: Array, weight: Array, bias: Array, room: Array, out: Array) -> None:
    """out = x Wᵀ + b for a layer of few inputs; `room` is for W on its side."""
    n_inputs, n_outputs = room.shape
    for k in range(n_inputs):
        for j in range(n_outputs):
            room[k, j] = weight[j, k]
    for b in range(len(x)):
        row = out[b]
        for j in range(n_outputs):
            row[j] = bias[j]
        for k in range(n_inputs):
            size, side = x[b, k], room[k]
            for j in range(n_outputs):
                row[j] += size * side[j]


@compiled
def _bend_back(slope: Array, output: Array, is_relu: bool) -> None:
    if is_relu:
        for j in range(len(slope)):
            slope[j] = slope[j] if output[j] > 0 else np.float32(0)
    else:
        for j in range(len(slope)):
            slope[j] *= _ONE - output[j] * output[j]


@compiled
def back_through_values(
    action: Array,
    slope: Array,
    hidden: Array,
    weight: Array,
    is_relu: bool,
    weight_out: Array,
    bias_out: Array,
    slope_out: Array,
) -> None:
    """The last layer's gradient, and what pulls at the layer before: of a row's values only the one taken does."""
    weight_out[:] = 0
    bias_out[:] = 0
    for b in range(len(slope)):
        taken = action[b, 0]
        pull, row, seen = slope[b, taken], slope_out[b], hidden[b]
        towards, along = weight_out[taken], weight[taken]
        bias_out[taken] += pull
        for j in range(len(row)):
            towards[j] += pull * seen[j]
            row[j] = pull * along[j]
        _bend_back(row, seen, is_relu)


@compiled
def back_to_inputs(x: Array, slope: Array, room: Array, weight_out: Array, bias_out: Array) -> None:
    """The gradient of a first layer of few inputs."""
    n_inputs, n_outputs = room.shape
    room[:] = 0
    bias_out[:] = 0
    for b in range(len(x)):
        row = slope[b]
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
    flat: Array,
    gradient: Array,
    momentum: Array,
    variance: Array,
    means: Array,
    n_steps: Array,
    n_taken: Array,
    n_bad: Array,
    sums: Array,
) -> Any:
    """One step with the gradient clipped to `longest`; left out and counted where something is not finite."""
    if not (math.isfinite(norm) and math.isfinite(means[0])):
        n_bad[0] += _ONE
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
