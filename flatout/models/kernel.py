"""Acting with a small network on the CPU as one compiled function: forward pass, sampling, log-probability.

Torch's dispatch would cost several times what such a network computes. Every observation is computed in one fixed
order of operations, so its result depends neither on the rest of the batch nor on how envs are split over collectors.
The definitions of the distributions are in `heads`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from flatout.device.jit import Function, compiled, renamed
from flatout.envs.spaces import Array

F = np.float32

ROWS = 4
"""Observations that go through the network together."""
ACTIVATIONS = {"tanh": 0, "relu": 1, "elu": 2, "silu": 3}
LAYER_NORM = 4
"""Added to the activation's number if every hidden layer has a LayerNorm before it."""

# tanh(x) = x P(x²) / Q(x²): a rational minimax fit with an error below 4e-7 for every float32.
_EDGE = F(8.2)
_P0, _P1, _P2 = F(0.9999999917938667), F(0.1343211837920016), F(3.5566806473495832e-3)
_P3, _P4 = F(2.163717221369853e-05), F(1.4840398657826958e-08)
_Q1, _Q2 = F(0.46765444137147794), F(0.026108277588829523)
_Q3, _Q4 = F(3.3864314200499854e-4), F(8.370542470109286e-07)
_ONE, _HALF, _ZERO = F(1), F(0.5), F(0)
_MASKED = F(-1e8)
_LOG_SQRT_2PI = F(0.5 * math.log(2 * math.pi))
_LOG_2 = F(math.log(2))
_LEAST = F(-3e38)
_NORM_EPSILON = F(1e-5)


def contracted(function: Function) -> Function:
    """The function, compiled; a multiply and an add may become one instruction."""
    return compiled(function, contract=True)


def _brief(function: Function) -> Function:
    """The same for a few observations: a call of about ten microseconds keeps Python's lock."""
    return compiled(renamed(function, "few"), contract=True, nogil=False)


@contracted
def tanh(x: Any) -> Any:
    """tanh with an error below 4e-7; NaN stays NaN."""
    x = -_EDGE if x < -_EDGE else (_EDGE if x > _EDGE else x)
    u = x * x
    over = (((_P4 * u + _P3) * u + _P2) * u + _P1) * u + _P0
    under = (((_Q4 * u + _Q3) * u + _Q2) * u + _Q1) * u + _ONE
    return x * over / under


@contracted
def _activate(y: Array, kind: int) -> None:
    if kind == 0:
        for j in range(len(y)):
            y[j] = tanh(y[j])
    elif kind == 1:
        for j in range(len(y)):
            y[j] = max(y[j], _ZERO)
    elif kind == 2:
        for j in range(len(y)):
            if y[j] < _ZERO:
                y[j] = math.expm1(y[j])
    else:
        for j in range(len(y)):
            y[j] = y[j] * _HALF * (_ONE + tanh(_HALF * y[j]))


@contracted
def _affine(x: Array, weight: Array, bias: Array, y: Array) -> None:
    """y = x W + b for four observations; four inputs at a time, for fewer loads of weights and stores of y."""
    n_in, n_out = weight.shape
    y0, y1, y2, y3 = y[0], y[1], y[2], y[3]
    for j in range(n_out):
        y0[j] = y1[j] = y2[j] = y3[j] = bias[j]
    whole = n_in - n_in % 4
    for k in range(0, whole, 4):
        wa, wb, wc, wd = weight[k], weight[k + 1], weight[k + 2], weight[k + 3]
        a0, b0, c0, d0 = x[0, k], x[0, k + 1], x[0, k + 2], x[0, k + 3]
        a1, b1, c1, d1 = x[1, k], x[1, k + 1], x[1, k + 2], x[1, k + 3]
        a2, b2, c2, d2 = x[2, k], x[2, k + 1], x[2, k + 2], x[2, k + 3]
        a3, b3, c3, d3 = x[3, k], x[3, k + 1], x[3, k + 2], x[3, k + 3]
        for j in range(n_out):
            p, q, r, s = wa[j], wb[j], wc[j], wd[j]
            y0[j] += a0 * p + b0 * q + c0 * r + d0 * s
            y1[j] += a1 * p + b1 * q + c1 * r + d1 * s
            y2[j] += a2 * p + b2 * q + c2 * r + d2 * s
            y3[j] += a3 * p + b3 * q + c3 * r + d3 * s
    for k in range(whole, n_in):
        a0, a1, a2, a3 = x[0, k], x[1, k], x[2, k], x[3, k]
        wa = weight[k]
        for j in range(n_out):
            y0[j] += a0 * wa[j]
            y1[j] += a1 * wa[j]
            y2[j] += a2 * wa[j]
            y3[j] += a3 * wa[j]


@contracted
def _layer_norm(y: Array, gain: Array, shift: Array) -> None:
    """LayerNorm of four observations in one loop: their sums are independent, so the additions overlap."""
    y0, y1, y2, y3 = y[0], y[1], y[2], y[3]
    n, share = len(gain), _ONE / F(len(gain))
    a = b = c = d = _ZERO
    for j in range(n):
        a, b, c, d = a + y0[j], b + y1[j], c + y2[j], d + y3[j]
    a, b, c, d = a * share, b * share, c * share, d * share
    p = q = r = s = _ZERO
    for j in range(n):
        p += (y0[j] - a) * (y0[j] - a)
        q += (y1[j] - b) * (y1[j] - b)
        r += (y2[j] - c) * (y2[j] - c)
        s += (y3[j] - d) * (y3[j] - d)
    p, q = _ONE / np.sqrt(p * share + _NORM_EPSILON), _ONE / np.sqrt(q * share + _NORM_EPSILON)
    r, s = _ONE / np.sqrt(r * share + _NORM_EPSILON), _ONE / np.sqrt(s * share + _NORM_EPSILON)
    for j in range(n):
        y0[j] = (y0[j] - a) * p * gain[j] + shift[j]
        y1[j] = (y1[j] - b) * q * gain[j] + shift[j]
        y2[j] = (y2[j] - c) * r * gain[j] + shift[j]
        y3[j] = (y3[j] - d) * s * gain[j] + shift[j]


Network = tuple[Array, Any, Array, Array, int, Array]
"""What the forward pass needs: mean and scale of the inputs (empty if they are not normalised) and their clip range,
widths, parameters, the activation's number, and a buffer for the inputs and outputs of a layer."""


@contracted
def forward(x: Array, network: Network) -> Array:
    """The last layer's outputs for up to ROWS observations."""
    obs_stats, clip, widths, params, activation, scratch = network
    here, there = scratch[0], scratch[1]
    for i in range(len(x)):
        for k in range(widths[0]):
            here[i, k] = x[i, k]
        if len(obs_stats):
            for k in range(widths[0]):
                here[i, k] = min(max((x[i, k] - obs_stats[0, k]) * obs_stats[1, k], -clip), clip)
    start, n_layers = 0, len(widths) - 1
    for layer in range(n_layers):
        n_in, n_out = widths[layer], widths[layer + 1]
        end = start + n_in * n_out
        weight = params[start:end].reshape(n_in, n_out)
        _affine(here, weight, params[end : end + n_out], there)
        start = end + n_out
        if layer < n_layers - 1:
            if activation >= LAYER_NORM:
                _layer_norm(there, params[start : start + n_out], params[start + n_out : start + 2 * n_out])
                start += 2 * n_out
            for i in range(len(x)):
                _activate(there[i, :n_out], activation % LAYER_NORM)
        here, there = there, here
    out: Array = here
    return out


@contracted
def sample_categories(
    x: Array, network: Network, nvec: Array, mask: Array, noise: Array, action_out: Array, log_prob_out: Array
) -> None:
    """Gumbel-max for each part of the action; `mask` is empty if everything is allowed."""
    for i in range(len(x)):
        if i % ROWS == 0:
            outs = forward(x[i : i + ROWS], network)
        out = outs[i % ROWS]
        if len(mask):
            for j in range(mask.shape[1]):
                if not mask[i, j]:
                    out[j] = _MASKED
        start, log_prob = 0, _ZERO
        for g in range(len(nvec)):
            end = start + nvec[g]
            most, best, choice = _LEAST, _LEAST, start
            for j in range(start, end):
                most = max(most, out[j])
                score = out[j] + noise[i, j]
                if score > best:
                    best, choice = score, j
            total = _ZERO
            for j in range(start, end):
                total += math.exp(out[j] - most)
            log_prob += out[choice] - most - math.log(total)
            action_out[i, g] = choice - start
            start = end
        log_prob_out[i] = log_prob


@contracted
def sample_greedy(
    x: Array,
    network: Network,
    epsilon: Array,
    mask: Array,
    noise: Array,
    action_out: Array,
    log_prob_out: Array,
) -> None:
    """Epsilon-greedy: the network runs only for observations that do not explore. See `GreedyHead` for the use of noise."""
    threshold = -math.log(epsilon[0]) if epsilon[0] > 0.0 else np.inf
    n_actions, n_computed = network[2][-1], 0  # observations that have been through the network
    for i in range(len(x)):
        log_prob_out[i] = _ZERO
        n_allowed, max_noise, choice = 0, _LEAST, 0
        for j in range(n_actions):
            if not len(mask) or mask[i, j]:
                n_allowed += 1
                if noise[i, j] > max_noise:
                    max_noise, choice = noise[i, j], j
        action_out[i, 0] = choice
        if n_allowed > 0 and n_allowed * math.exp(-np.float64(max_noise)) > threshold:
            continue
        if i >= n_computed:
            first = i - i % ROWS
            n_computed = first + ROWS
            outs = forward(x[first:n_computed], network)
        out = outs[i % ROWS]
        best, choice = _LEAST, 0
        for j in range(n_actions):
            if (not len(mask) or mask[i, j]) and out[j] > best:
                best, choice = out[j], j
        action_out[i, 0] = choice


@contracted
def sample_normals(
    x: Array,
    network: Network,
    log_std: Array,
    squashed: Array,
    noise: Array,
    action_out: Array,
    log_prob_out: Array,
) -> None:
    """Mean plus noise in each dimension; with log-probabilities of the squashed action in squashed dimensions."""
    for i in range(len(x)):
        if i % ROWS == 0:
            outs = forward(x[i : i + ROWS], network)
        out = outs[i % ROWS]
        log_prob = _ZERO
        for j in range(len(log_std)):
            value = out[j] + noise[i, j] * math.exp(log_std[j])
            log_prob -= _HALF * noise[i, j] * noise[i, j] + log_std[j] + _LOG_SQRT_2PI
            if squashed[j]:
                size = abs(value)
                # log(1 - tanh²(x)) in a form that does not overflow.
                log_prob -= F(2) * (_LOG_2 - size - math.log1p(math.exp(-F(2) * size)))
            action_out[i, j] = value
        log_prob_out[i] = log_prob


SAMPLERS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {}
"""Functions for many and for few observations, by the head's parameter that they take; "": none."""


def add_sampler(bound: str, function: Callable[..., None]) -> None:
    """Make a compiled function known for heads with this parameter; all have the same arguments."""
    SAMPLERS[bound] = function, _brief(function)


for _bound, _function in (("", sample_categories), ("epsilon", sample_greedy), ("log_std", sample_normals)):
    add_sampler(_bound, _function)
