"""The fused backend: whole updates of plain MLPs on the CPU, written out without autograd.

A small network's update is mostly the framework's overhead: recording operations and finding their derivatives. Here a
few matrix products are called one after another into buffers allocated once, and compiled loops do the rest. An
algorithm adds the gradient of its loss w.r.t. the network's outputs (`FusedBackend.loss_gradient`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor, nn

from flatout.device.blas import product
from flatout.device.jit import compiled
from flatout.envs.spaces import Array
from flatout.learning.update import BETA1, BETA2, EPSILON, Batch, Ranks, Update
from flatout.models.kernel import tanh
from flatout.models.params import FlatParams
from flatout.models.policy import OBS_CLIP, Obs, PolicyNet

ACTIVATIONS = ("relu", "tanh")
"""Activations whose derivative follows from their output."""
NARROW = 16
"""Outputs of the last layer up to which a loop goes back through it faster than matrix products of a small batch."""
NO_MASK = np.zeros((0, 1), np.bool_)

_KEEP1, _KEEP2 = np.float32(1 - BETA1), np.float32(1 - BETA2)
_EPSILON = np.float32(EPSILON)
_ZERO, _ONE = np.float32(0), np.float32(1)

Layer = tuple[Tensor, Tensor]
"""Weight and bias."""
State = tuple[Array, ...]
"""What `adam` changes, and the gradient and metrics that it reads."""


Net = tuple[Array, Array, bool, bool, bool]
"""The parameters, and in a row per layer its inputs, its outputs and where its weight and bias begin among them, then
where their gradients begin; whether weights are stored as (inputs, outputs) instead of (outputs, inputs); whether the
activation is ReLU; whether the last layer has few outputs."""


class FusedMLP:
    """An MLP with buffers for the outputs of `n` samples and, where `grads` is given, for gradients w.r.t. them.

    All parameters are in one tensor, and so are all of `grads`.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        n: int,
        activation: str,
        grads: Sequence[Layer] = (),
        n_back: int | None = None,
        narrow: int = NARROW,
        *,
        flipped: bool = False,
    ) -> None:
        """`n_back`: how many of the samples, the first ones, go through `backward`; None: all.

        `narrow`: outputs of the last layer up to which a loop takes the place of matrix products. `flipped`: weights
        and their gradients are (inputs, outputs) instead of (outputs, inputs).
        """
        sizes = [weight.shape if flipped else weight.shape[::-1] for weight, _ in layers]
        begins = [
            [part.storage_offset() for pair in both for part in pair]
            for both in zip(layers, grads or layers, strict=True)
        ]
        places = np.array([[*size, *begin] for size, begin in zip(sizes, begins, strict=True)])
        is_narrow = len(sizes) > 1 and sizes[-1][1] <= (1 if flipped else narrow)
        self.net: Net = (_whole(layers), places, flipped, activation == "relu", is_narrow)
        self.outputs, self.out = _buffers(n, sizes)
        """Those of all layers one after another, and the last ones."""
        if not grads:
            return
        self.param_grads = _whole(grads)
        self.grads, self.grad = _buffers(n if n_back is None else n_back, sizes)
        """The loss's gradient w.r.t. the outputs of all layers, and w.r.t. the last, to be filled in before `backward`."""

    def forward(self, x: Array) -> Array:
        """The outputs for these samples; valid until the next call."""
        forward(x.reshape(-1), self.net, self.outputs)
        return self.out

    def backward(self, x: Array) -> None:
        """Fill in the parameters' gradients, for the samples that `forward` was given, or the first of them."""
        backward(x.reshape(-1), self.net, self.outputs, self.grads, self.param_grads)


class FusedBackend(ABC, Generic[Batch]):
    """An update's step on minibatches of its batch size, equal to what the algorithm's loss and `Update` compute.

    Nothing here is recorded for autograd: the layers are detached.
    """

    name = "fused"

    def __init__(self, model: PolicyNet, params: FlatParams, update: Update[Batch]) -> None:
        self._model, self._update = model, update
        self._vector = model.obs.only_vector
        self.gradient = torch.zeros_like(params.flat)
        self.means = np.zeros(update.metrics.numel() - 1, np.float32)
        """The metrics of the last minibatch."""
        state = (params.flat, self.gradient, update.momentum, update.variance)
        counts = (update.n_steps, update.n_taken, update.n_bad, update.stopped)
        self._state: State = (
            *(tensor.detach().numpy() for tensor in state),
            self.means,
            *(tensor.view(1).numpy() for tensor in counts),
            update.metrics.numpy(),
        )

    @abstractmethod
    def differentiate(self, batch: Batch) -> None:
        """Fill in the gradient and the means."""

    def step(self, batch: Batch) -> None:
        update = self._update
        if update.ranks is None:
            self.differentiate(batch)
        else:
            self.differentiate(update.own(batch))
            self._reduce(update.ranks)
        norm = math.sqrt(torch.dot(self.gradient, self.gradient).item())
        approx_kl = float(self.means[update.kl_index])
        limit = math.inf if update.kl_limit is None else update.kl_limit
        adam(norm, update.max_grad_norm, update.step_size, approx_kl, limit, self._state)

    def _reduce(self, ranks: Ranks) -> None:
        """Make gradient, means and outputs those of the whole minibatch, of which each rank has computed a part."""
        output, n = self._update.sample_output, self._update.own_rows
        ranks.put(self.gradient, torch.from_numpy(self.means), [output[:n]] if len(output) else [])
        ranks.reduce()
        gradient, means, outputs = ranks.take()
        self.gradient.copy_(gradient)
        self.means[:] = means.numpy()
        for values in outputs:
            output.copy_(values)

    def _mask(self, obs: Obs) -> Array:
        """Which actions are allowed; without rows where the env has no mask."""
        index = self._model.obs.mask_index
        return NO_MASK if index is None else obs[index].numpy()

    def _features(self, obs: Obs) -> Array:
        """The first layer's input."""
        model, i = self._model, self._vector
        if i is None:
            return model.features(obs).detach().contiguous().numpy()
        x = obs[i].flatten(1)
        if model.normalizes:
            mean, scale = (model.get_buffer(f"obs_{name}_{i}").flatten() for name in ("mean", "scale"))
            x = ((x - mean) * scale).clamp_(-OBS_CLIP, OBS_CLIP)
        return x.contiguous().numpy()


def is_plain(model: PolicyNet, device: torch.device) -> bool:
    """Whether all that this network learns is in plain layers after one another, on the CPU."""
    plain = model.is_plain and not model.layer_norm and model.activation in ACTIVATIONS
    return plain and device.type == "cpu" and not any(spec.kind == "image" for spec in model.obs.specs)


def layers_in(
    params: FlatParams, flat: Tensor, layers: Sequence[tuple[nn.Parameter | Tensor, nn.Parameter | Tensor]]
) -> list[Layer]:
    """Some of a model's layers as views of such a flat tensor."""
    places = {id(p): view for p, view in zip(params.tensors, params.views(flat), strict=True)}
    return [(places[id(weight)], places[id(bias)]) for weight, bias in layers]


def _whole(layers: Sequence[Layer]) -> Array:
    """All of the tensor that these layers are parts of."""
    flat = layers[0][0].detach()
    assert len({part.untyped_storage().data_ptr() for layer in layers for part in layer}) == 1
    return torch.as_strided(flat, (flat.untyped_storage().nbytes() // 4,), (1,), 0).numpy()


def _buffers(n: int, sizes: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Memory for the outputs of all layers for `n` samples, and the last layer's part of it."""
    flat = np.zeros(n * sum(size for _, size in sizes), np.float32)
    return flat, flat[len(flat) - n * sizes[-1][1] :].reshape(n, -1)


@compiled
def forward(x: Array, net: Net, outputs: Array) -> None:
    """Every layer's outputs. Matrices are in flat arrays here, so that there is one compiled function for all layers."""
    params, places, flipped, is_relu, _ = net
    n, begin, before = len(x) // places[0, 0], 0, x
    for k in range(len(places)):
        n_inputs, n_outputs = places[k, 0], places[k, 1]
        weight, bias = params[places[k, 2] :], params[places[k, 3] :]
        out = outputs[begin : begin + n * n_outputs]
        if n_outputs == 1:
            _dot(before, weight[:n_inputs], out)
        else:
            product(n, n_outputs, n_inputs, before, False, weight, not flipped, out)
        _activate(out, bias, n_outputs, k < len(places) - 1, is_relu)
        before = out
        begin += n * n_outputs


@compiled
def backward(x: Array, net: Net, outputs: Array, grads: Array, param_grads: Array) -> None:
    """Gradients of all parameters, from the one w.r.t. the last outputs; those w.r.t. hidden ones are before activation."""
    params, places, flipped, is_relu, few_outputs = net
    last, total = len(places) - 1, 0
    for k in range(len(places)):
        total += places[k, 1]
    n_all, n = len(outputs) // total, len(grads) // total
    total -= places[last, 1]
    grad = grads[n * total :]
    _add_up(grad, places[last, 1], param_grads[places[last, 5] :])
    for k in range(last, -1, -1):
        n_inputs, n_outputs = places[k, 0], places[k, 1]
        weight, weight_out = params[places[k, 2] :], param_grads[places[k, 4] :]
        before = grad_before = x
        if k > 0:
            total -= n_inputs
            before = outputs[n_all * total :]
            grad_before = grads[n * total : n * (total + n_inputs)]
        if k == last and few_outputs:
            _backward_few_outputs(grad, before, weight, n_outputs, weight_out, grad_before)
        else:
            if flipped:
                product(n_inputs, n_outputs, n, before, True, grad, False, weight_out)
            else:
                product(n_outputs, n_inputs, n, grad, True, before, False, weight_out)
            if k > 0:
                product(n, n_inputs, n_outputs, grad, False, weight, flipped, grad_before)
        if k > 0:
            _activation_backward(grad_before, before, is_relu)
            _add_up(grad_before, n_inputs, param_grads[places[k - 1, 5] :])
        grad = grad_before


@partial(compiled, reorder=True)
def _dot(x: Array, weight: Array, out: Array) -> None:
    """A layer of a single output."""
    n = len(weight)
    for b in range(len(out)):
        row, total = x[b * n : (b + 1) * n], _ZERO
        for k in range(n):
            total += row[k] * weight[k]
        out[b] = total


@compiled
def _activate(y: Array, bias: Array, width: int, is_hidden: bool, is_relu: bool) -> None:
    """A layer's bias and, of a hidden one, the activation, in place; tanh at a tenth of what torch's costs."""
    for b in range(len(y) // width):
        row = y[b * width : (b + 1) * width]
        if not is_hidden:
            for j in range(width):
                row[j] += bias[j]
        elif is_relu:
            for j in range(width):
                size = row[j] + bias[j]
                row[j] = _ZERO if size < 0 else size  # NaN stays NaN
        else:
            for j in range(width):
                row[j] = tanh(row[j] + bias[j])


@compiled
def _activation_backward(grad: Array, output: Array, is_relu: bool) -> None:
    """Backward through an activation with this output, in place."""
    if is_relu:
        for i in range(len(grad)):
            grad[i] = grad[i] if output[i] > 0 else _ZERO
    else:
        for i in range(len(grad)):
            grad[i] *= _ONE - output[i] * output[i]


@compiled
def _add_up(rows: Array, width: int, out: Array) -> None:
    for j in range(width):
        out[j] = _ZERO
    for b in range(len(rows) // width):
        row = rows[b * width : (b + 1) * width]
        for j in range(width):
            out[j] += row[j]


@compiled
def _backward_few_outputs(
    grad: Array, hidden: Array, weight: Array, n_outputs: int, weight_out: Array, grad_out: Array
) -> None:
    """Backward through a last layer of few outputs, skipping zero gradients: the gradient of its weight, (outputs,
    inputs), and the one w.r.t. the layer before."""
    n = len(grad) // n_outputs
    width = len(grad_out) // n
    for i in range(n_outputs * width):
        weight_out[i] = _ZERO
    for b in range(n):
        row, seen = grad_out[b * width : (b + 1) * width], hidden[b * width : (b + 1) * width]
        for j in range(width):
            row[j] = _ZERO
        for a in range(n_outputs):
            size = grad[b * n_outputs + a]
            if size == 0:
                continue
            side, side_out = weight[a * width : (a + 1) * width], weight_out[a * width : (a + 1) * width]
            for j in range(width):
                side_out[j] += size * seen[j]
                row[j] += size * side[j]


@compiled
def adam(
    norm: float, max_grad_norm: float, learning_rate: float, approx_kl: float, kl_limit: float, state: State
) -> Any:
    """`update.adam` in place, with clipping and the rules by which `Update` skips a step."""
    flat, gradient, momentum, variance, means, n_steps, n_taken, n_bad, stopped, sums = state
    if approx_kl > kl_limit:
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
    clip_scale = np.float32(min(max_grad_norm / (norm + 1e-6), 1.0))
    step = np.float32(learning_rate / (1 - BETA1 ** np.float64(n_steps[0])))
    divisor = np.float32(1 / math.sqrt(1 - BETA2 ** np.float64(n_steps[0])))
    for i in range(len(flat)):
        g = gradient[i] * clip_scale
        m = momentum[i] + (g - momentum[i]) * _KEEP1
        v = variance[i] + (g * g - variance[i]) * _KEEP2
        momentum[i], variance[i] = m, v
        flat[i] -= step * m / (np.sqrt(v) * divisor + _EPSILON)
