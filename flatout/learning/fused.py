"""The fused backend: whole updates of plain MLPs on the CPU, written out without autograd.

A small network's update is mostly the framework's overhead: recording operations and finding their derivatives. Here a
few matrix products are called one after another into buffers allocated once, and compiled loops do the rest. An
algorithm adds the gradient of its loss w.r.t. the network's outputs (`FusedBackend.loss_gradient`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor, nn

from flatout.device.jit import compiled
from flatout.device.private import find
from flatout.envs.spaces import Array
from flatout.learning.update import BETA1, BETA2, EPSILON, Batch, Update
from flatout.models.kernel import tanh
from flatout.models.params import FlatParams
from flatout.models.policy import OBS_CLIP, Obs, PolicyNet

ACTIVATIONS = ("relu", "tanh")
"""Activations whose derivative follows from their output."""
NARROW = 16
"""Inputs or outputs of a layer up to which a loop is faster than a matrix product of a small batch."""
NO_MASK = np.zeros((0, 1), np.bool_)

_KEEP1, _KEEP2 = np.float32(1 - BETA1), np.float32(1 - BETA2)
_EPSILON = np.float32(EPSILON)
_ZERO, _ONE = np.float32(0), np.float32(1)

_relu_backward = find("torch.ops.aten.threshold_backward.grad_input")
_tanh_backward = find("torch.ops.aten.tanh_backward.grad_input")

Layer = tuple[Tensor, Tensor]
"""Weight and bias."""
State = tuple[Array, ...]
"""What `adam` changes, and the gradient and metrics that it reads."""


class FusedMLP:
    """An MLP with buffers for the outputs of `n` samples and, where `grads` is given, for gradients w.r.t. them."""

    def __init__(
        self,
        layers: Sequence[Layer],
        n: int,
        activation: str,
        grads: Sequence[Layer] = (),
        n_back: int | None = None,
        narrow: int = NARROW,
    ) -> None:
        """`n_back`: how many of the samples, the first ones, go through `backward`; None: all.

        `narrow`: inputs or outputs of a layer up to which a loop takes the place of a matrix product.
        """
        self._layers = [(weight.detach(), bias.detach()) for weight, bias in layers]
        widths = [len(bias) for _, bias in layers]
        self._outputs = [torch.zeros(n, width) for width in widths]
        self.out = self._outputs[-1].numpy()
        self._is_relu = activation == "relu"
        pairs = zip(self._layers, self._outputs, strict=True)
        self._calls = [(w.t(), b, out, out.numpy(), b.numpy()) for (w, b), out in pairs]
        n_inputs = layers[0][0].shape[1]
        self._transposed = np.zeros((n_inputs, widths[0]), np.float32)
        self._starts_narrow = n_inputs <= narrow
        self._ends_narrow = len(widths) > 1 and widths[-1] <= narrow
        self._first = self._layers[0][0].numpy(), self._transposed, self._outputs[0].numpy()
        if not grads:
            return
        n_back = n if n_back is None else n_back
        self._param_grads = list(grads)
        self._grads = [torch.zeros(n_back, width) for width in widths]
        self._hidden = [out[:n_back] for out in self._outputs[:-1]]
        self.grad = self._grads[-1].numpy()
        """The loss's gradient w.r.t. the outputs, to be filled in before `backward`."""
        self._ones = torch.ones(n_back)
        is_activated = self._ends_narrow and len(widths) == 2
        first = self._grads[0].numpy(), self._outputs[0][:n_back].numpy()
        self._first_backward = *first, is_activated, self._is_relu, (self._transposed, *_arrays(grads[0]))
        if self._ends_narrow:
            last = self.grad, self._hidden[-1].numpy(), self._layers[-1][0].numpy(), self._is_relu
            out = *_arrays(grads[-1]), self._grads[-2].numpy(), grads[-2][1].numpy()
            self._last_backward = *last, out

    def forward(self, x: Tensor) -> Tensor:
        """The outputs for these samples; valid until the next call."""
        last = len(self._calls) - 1
        for k, (weight, bias, out, hidden, shift) in enumerate(self._calls):
            if k == last:
                return torch.addmm(bias, x, weight, out=out)
            if k == 0 and self._starts_narrow:
                affine(x.numpy(), *self._first)
            else:
                torch.mm(x, weight, out=out)
            activate(hidden, shift, self._is_relu)
            x = out
        raise AssertionError("there is at least one layer")

    def backward(self, x: Tensor) -> None:
        """Fill in the parameters' gradients, for the samples that `forward` was given, or the first of them."""
        grads, inputs = self._grads, [x, *self._hidden]
        last = len(grads) - 1
        for k in range(last, -1, -1):
            weight_grad, bias_grad = self._param_grads[k]
            if k == last and self._ends_narrow:
                backward_narrow_output(*self._last_backward)
            elif k == 0 and self._starts_narrow:
                backward_narrow_input(x.numpy(), *self._first_backward)
            else:
                transposed = grads[k].t()
                torch.mm(transposed, inputs[k], out=weight_grad)
                if k < last - 1 or not self._ends_narrow:
                    torch.mv(transposed, self._ones, out=bias_grad)
                if k > 0:
                    torch.mm(grads[k], self._layers[k][0], out=grads[k - 1])
                if k > 1 or (k == 1 and not self._starts_narrow):
                    self._activation_backward(grads[k - 1], inputs[k])

    def _activation_backward(self, grad: Tensor, output: Tensor) -> None:
        if self._is_relu:
            if _relu_backward is None:
                grad.masked_fill_(output <= 0, 0)
            else:
                _relu_backward(grad, output, 0, grad_input=grad)
        elif _tanh_backward is None:
            grad.mul_(1 - output * output)
        else:
            _tanh_backward(grad, output, grad_input=grad)


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
        self.differentiate(batch)
        norm, update = math.sqrt(torch.dot(self.gradient, self.gradient).item()), self._update
        approx_kl = float(self.means[update.kl_index])
        limit = math.inf if update.kl_limit is None else update.kl_limit
        adam(norm, update.max_grad_norm, update.step_size, approx_kl, limit, self._state)

    def _mask(self, obs: Obs) -> Array:
        """Which actions are allowed; without rows where the env has no mask."""
        index = self._model.obs.mask_index
        return NO_MASK if index is None else obs[index].numpy()

    def _features(self, obs: Obs) -> Tensor:
        """The first layer's input."""
        model, i = self._model, self._vector
        if i is None:
            return model.features(obs)
        x = obs[i].flatten(1)
        if not model.normalizes:
            return x
        mean, scale = (model.get_buffer(f"obs_{name}_{i}").flatten() for name in ("mean", "scale"))
        return ((x - mean) * scale).clamp_(-OBS_CLIP, OBS_CLIP)


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


def _arrays(layer: Layer) -> tuple[Array, Array]:
    weight, bias = layer
    return weight.numpy(), bias.numpy()


@compiled
def activate(y: Array, bias: Array, is_relu: bool) -> None:
    """A hidden layer's bias and activation, in place; tanh at a tenth of what torch's costs."""
    for b in range(len(y)):
        row = y[b]
        if is_relu:
            for j in range(len(bias)):
                size = row[j] + bias[j]
                row[j] = _ZERO if size < 0 else size  # NaN stays NaN
        else:
            for j in range(len(bias)):
                row[j] = tanh(row[j] + bias[j])


@compiled
def affine(x: Array, weight: Array, transposed: Array, out: Array) -> None:
    """out = x Wᵀ for a layer of few inputs; `transposed` is a buffer for Wᵀ."""
    n_inputs, n_outputs = transposed.shape
    for k in range(n_inputs):
        for j in range(n_outputs):
            transposed[k, j] = weight[j, k]
    for b in range(len(x)):
        row = out[b]
        for j in range(n_outputs):
            row[j] = _ZERO
        for k in range(n_inputs):
            size, side = x[b, k], transposed[k]
            for j in range(n_outputs):
                row[j] += size * side[j]


@compiled
def _activation_backward(grad: Array, output: Array, is_relu: bool) -> None:
    if is_relu:
        for j in range(len(grad)):
            grad[j] = grad[j] if output[j] > 0 else _ZERO
    else:
        for j in range(len(grad)):
            grad[j] *= _ONE - output[j] * output[j]


@compiled
def backward_narrow_output(
    grad: Array, hidden: Array, weight: Array, is_relu: bool, out: tuple[Array, ...]
) -> None:
    """Backward through a last layer of few outputs, skipping zero gradients: the gradient of its parameters, the one
    w.r.t. the previous layer before its activation, and the one of that layer's bias."""
    weight_out, bias_out, grad_out, bias_before = out
    weight_out[:] = 0
    bias_out[:] = 0
    bias_before[:] = 0
    for b in range(len(grad)):
        row, seen = grad_out[b], hidden[b]
        row[:] = 0
        for a in range(grad.shape[1]):
            size = grad[b, a]
            if size == 0:
                continue
            weight_row, along = weight_out[a], weight[a]
            bias_out[a] += size
            for j in range(len(row)):
                weight_row[j] += size * seen[j]
                row[j] += size * along[j]
        _activation_backward(row, seen, is_relu)
        for j in range(len(row)):
            bias_before[j] += row[j]


@compiled
def backward_narrow_input(
    x: Array, grad: Array, hidden: Array, is_activated: bool, is_relu: bool, out: tuple[Array, ...]
) -> None:
    """Backward through a first layer of few inputs; `is_activated`: `grad` is already w.r.t. the activation's input."""
    transposed, weight_out, bias_out = out
    n_inputs, n_outputs = transposed.shape
    transposed[:] = 0
    bias_out[:] = 0
    for b in range(len(x)):
        row = grad[b]
        if not is_activated:
            _activation_backward(row, hidden[b], is_relu)
        for k in range(n_inputs):
            size, side = x[b, k], transposed[k]
            for j in range(n_outputs):
                side[j] += size * row[j]
        for j in range(n_outputs):
            bias_out[j] += row[j]
    for j in range(n_outputs):
        for k in range(n_inputs):
            weight_out[j, k] = transposed[k, j]


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
