"""Whole updates written out, for plain perceptrons on the CPU.

A small network's update is mostly the framework's work around it: recording operations, then looking for what follows
from what. Here the few matrix products are called one after another, into memory that is taken once, and compiled
loops do the rest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic

import numpy as np
import torch
from torch import Tensor, nn

from flatout.envs.spaces import Array
from flatout.learning import fused_kernel as kernel
from flatout.learning.update import Batch, Update
from flatout.models.encoders import Obs
from flatout.models.params import FlatParams
from flatout.models.policy import OBS_CLIP, PolicyNet

BENDS = ("relu", "tanh")
"""Activations whose slope follows from what they gave."""
NARROW = 16
"""Inputs or outputs of a layer up to which a loop is faster than a product of matrices."""
ALL_ALLOWED = np.zeros((0, 1), np.bool_)

Layer = tuple[Tensor, Tensor]
"""Weight and bias."""


class Perceptron:
    """Layers, room for what each gives to `n_rows` rows, and, given room for gradients, for what pulls at it."""

    def __init__(
        self, layers: Sequence[Layer], n_rows: int, activation: str, grads: Sequence[Layer] = ()
    ) -> None:
        self._layers = [(weight.detach(), bias.detach()) for weight, bias in layers]
        widths = [len(bias) for _, bias in layers]
        self._outputs = [torch.zeros(n_rows, width) for width in widths]
        self.out = self._outputs[-1].numpy()
        self._is_relu = activation == "relu"
        pairs = zip(self._layers, self._outputs, strict=True)
        self._calls = [(w.t(), b, out, out.numpy(), b.numpy()) for (w, b), out in pairs]
        n_inputs = layers[0][0].shape[1]
        self._side = np.zeros((n_inputs, widths[0]), np.float32)
        self._starts_narrow = n_inputs <= NARROW
        self._ends_narrow = len(widths) > 1 and widths[-1] <= NARROW
        self._first = self._layers[0][0].numpy(), self._side, self._outputs[0].numpy()
        if not grads:
            return
        self._grads = list(grads)
        self._slopes = [torch.zeros(n_rows, width) for width in widths]
        self.slope = self._slopes[-1].numpy()
        """What pulls at the outputs, to be filled in before `backward`."""
        self._ones = torch.ones(n_rows)
        is_bent = self._ends_narrow and len(widths) == 2
        pulled = self._slopes[0].numpy(), self._outputs[0].numpy()
        self._first_back = *pulled, is_bent, self._is_relu, self._side, *_arrays(grads[0])
        if self._ends_narrow:
            before, after = self._outputs[-2].numpy(), self._slopes[-2].numpy()
            weight = self._layers[-1][0].numpy()
            self._last_back = (
                self.slope,
                before,
                weight,
                self._is_relu,
                *_arrays(grads[-1]),
                after,
                grads[-2][1].numpy(),
            )

    def forward(self, x: Tensor) -> Tensor:
        """What it gives to these rows; valid until the next ones."""
        last = len(self._calls) - 1
        for k, (weight, bias, out, hidden, shift) in enumerate(self._calls):
            if k == last:
                return torch.addmm(bias, x, weight, out=out)
            if k == 0 and self._starts_narrow:
                kernel.affine(x.numpy(), *self._first)
            else:
                torch.mm(x, weight, out=out)
            kernel.bend(hidden, shift, self._is_relu)
            x = out
        raise AssertionError("there is at least one layer")

    def backward(self, x: Tensor) -> None:
        """Fill in the gradients, of the rows that `forward` was given."""
        slopes, inputs = self._slopes, [x, *self._outputs[:-1]]
        last = len(slopes) - 1
        for k in range(last, -1, -1):
            weight_grad, bias_grad = self._grads[k]
            if k == last and self._ends_narrow:
                kernel.back_through_few(*self._last_back)
            elif k == 0 and self._starts_narrow:
                kernel.back_to_inputs(x.numpy(), *self._first_back)
            else:
                across = slopes[k].t()
                torch.mm(across, inputs[k], out=weight_grad)
                if k < last - 1 or not self._ends_narrow:
                    torch.mv(across, self._ones, out=bias_grad)
                if k > 0:
                    torch.mm(slopes[k], self._layers[k][0], out=slopes[k - 1])
                if k > 1 or (k == 1 and not self._starts_narrow):
                    self._bend_back(slopes[k - 1], inputs[k])

    def _bend_back(self, slope: Tensor, output: Tensor) -> None:
        if self._is_relu:
            torch.ops.aten.threshold_backward.grad_input(slope, output, 0, grad_input=slope)
        else:
            torch.ops.aten.tanh_backward.grad_input(slope, output, grad_input=slope)


class HandMadeStep(ABC, Generic[Batch]):
    """Learns from minibatches of one size, as the algorithm's loss and `Update` would.

    Nothing here is recorded for autograd: layers are taken without their wish for gradients.
    """

    def __init__(self, model: PolicyNet, params: FlatParams, update: Update[Batch]) -> None:
        self._model, self._update = model, update
        self._only = _only_leaf(model)
        self.gradient = torch.zeros_like(params.flat)
        self.means = np.zeros(update.metrics.numel() - 1, np.float32)
        """The metrics of the last minibatch."""
        state = (params.flat, self.gradient, update.momentum, update.variance)
        counts = (update.n_steps, update.n_taken, update.n_bad, update.stopped)
        self._state: tuple[Array, ...] = (
            *(tensor.detach().numpy() for tensor in state),
            self.means,
            *(tensor.view(1).numpy() for tensor in counts),
            update.metrics.numpy(),
        )

    @abstractmethod
    def differentiate(self, batch: Batch) -> None:
        """Fill in the gradient and the means."""

    def __call__(self, batch: Batch) -> None:
        """Learn from one minibatch."""
        self.differentiate(batch)
        norm, update = math.sqrt(torch.dot(self.gradient, self.gradient).item()), self._update
        moved = float(self.means[update.kl_index])
        limit = math.inf if update.kl_limit is None else update.kl_limit
        kernel.adam(norm, update.max_grad_norm, update.step_size, moved, limit, *self._state)

    def _allowed(self, obs: Obs) -> Array:
        """Which actions are allowed; without rows where the env has no mask."""
        mask = self._model.mask(obs)
        return ALL_ALLOWED if mask is None else mask.numpy()

    def _seen(self, obs: Obs) -> Tensor:
        """What the first layer sees."""
        model, i = self._model, self._only
        if i is None:
            return model.features(obs)
        x = obs[i].flatten(1)
        if not model.normalizes:
            return x
        mean, scale = (model.get_buffer(f"obs_{name}_{i}").flatten() for name in ("mean", "scale"))
        return ((x - mean) * scale).clamp_(-OBS_CLIP, OBS_CLIP)


def is_plain(model: PolicyNet, device: torch.device) -> bool:
    """Whether all that this network learns is in plain layers after one another, on the CPU."""
    plain = not model.layer_norm and model.activation in BENDS
    return plain and device.type == "cpu" and not any(leaf.kind == "image" for leaf in model.obs.specs)


def layers_in(
    params: FlatParams, flat: Tensor, layers: Sequence[tuple[nn.Parameter | Tensor, nn.Parameter | Tensor]]
) -> list[Layer]:
    """Where some of a model's layers lie in such a flat tensor."""
    places = {id(leaf): view for leaf, view in zip(params.leaves, params.views(flat), strict=True)}
    return [(places[id(weight)], places[id(bias)]) for weight, bias in layers]


def _only_leaf(model: PolicyNet) -> int | None:
    """The one leaf that a model sees, if it is a vector; None: there are several, or it has to be encoded."""
    seen = [i for i, leaf in enumerate(model.obs.specs) if leaf.kind != "mask"]
    return seen[0] if len(seen) == 1 and model.obs.specs[seen[0]].kind == "vector" else None


def _arrays(layer: Layer) -> tuple[Array, Array]:
    weight, bias = layer
    return weight.numpy(), bias.numpy()
