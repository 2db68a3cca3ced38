"""DQN's whole update written out, for multi-layer perceptrons on the CPU.

A small network's update is mostly the framework's work around it: recording operations, then looking for what follows
from what. Here the few matrix products are called one after another, into memory that is taken once, and two compiled
loops do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from flatout.algorithms.dqn import Minibatch, Twins
from flatout.algorithms.q_config import DQNConfig
from flatout.envs.spaces import Array
from flatout.learn import by_hand_kernel as kernel
from flatout.learn.params import FlatParams
from flatout.learn.update import Update
from flatout.models.policy import OBS_CLIP
from flatout.models.q import QNetwork

BENDS = {"relu": torch.relu_, "tanh": torch.tanh_}
"""Activations whose slope follows from what they gave."""
ALL_ALLOWED = np.zeros((0, 1), np.bool_)
NARROW = 16
"""Inputs up to which a loop is faster than a product of matrices."""


class HandMadeStep:
    """Learns from minibatches of one size, as `dqn.loss` and `Update` would."""

    def __init__(
        self, twins: Twins, params: FlatParams, config: DQNConfig, update: Update[Minibatch]
    ) -> None:
        model = twins.online
        self._model, self._config, self._update = model, config, update
        self._leaf = next(i for i, leaf in enumerate(model.obs.leaves) if leaf.kind != "mask")
        n, widths = config.batch_size, [len(bias) for _, bias in model.acting_layers()]
        self._bend = BENDS[model.activation]
        self._is_relu = model.activation == "relu"
        self._online = _Layers(params.views(params.flat), n, widths)
        older = params.views(twins.target)
        self._target = _Layers(older, n, widths)
        self._ahead = lru_cache(2)(lambda n_rows: _Layers(older, n_rows, widths))
        self._chooser = _Layers(params.views(params.flat), n, widths)
        self.gradient = torch.zeros_like(params.flat)
        self._grads = _pairs(params.views(self.gradient))
        self._slopes = [torch.zeros(n, width) for width in widths]
        self._ones = torch.ones(n)
        self._means = np.zeros(3, np.float32)
        self._side = np.zeros((self._online.n_inputs, widths[0]), np.float32)
        self._errors: tuple[Array, ...] = update.row_output.numpy(), self._slopes[-1].numpy(), self._means
        state = (params.flat, self.gradient, update.momentum, update.variance)
        counts = (update.n_steps, update.n_taken, update.n_bad)
        self._state: tuple[Array, ...] = (
            *(tensor.detach().numpy() for tensor in state),
            self._means,
            *(tensor.view(1).numpy() for tensor in counts),
            update.metrics.numpy(),
        )

    @torch.no_grad()
    def __call__(self, batch: Minibatch) -> None:
        """Learn from one minibatch."""
        self.differentiate(batch)
        norm = torch.linalg.vector_norm(self.gradient).item()
        kernel.adam(norm, self._config.max_grad_norm, self._update.step_size, *self._state)

    @torch.no_grad()
    def look_ahead(self, batches: Minibatch) -> Tensor:
        """The older network's values of what follows in several minibatches at once; valid until the next ones."""
        layers: _Layers = self._ahead(len(batches))
        return layers.forward(self._seen(batches.next_obs), self._bend)

    @torch.no_grad()
    def differentiate(self, batch: Minibatch) -> None:
        """Fill in the gradient, the rows' errors and the means."""
        mask, following = self._model.mask(batch.next_obs), self._seen(batch.next_obs)
        later = self._target.forward(following, self._bend) if batch.later is None else batch.later
        chooses = self._chooser.forward(following, self._bend) if self._config.double else later
        x = self._seen(batch.obs)
        value = self._online.forward(x, self._bend)
        kernel.errors(
            self._config.loss == "mse",
            ALL_ALLOWED if mask is None else mask.numpy(),
            batch.action.numpy(),
            batch.reward.numpy(),
            batch.discount.numpy(),
            batch.weight.numpy(),
            value.numpy(),
            later.numpy(),
            chooses.numpy(),
            *self._errors,
        )
        self._back(x, batch.action)

    def _back(self, x: Tensor, action: Tensor) -> None:
        layers, inputs = self._online.layers, [x, *self._online.outputs[:-1]]
        slopes, last = self._slopes, len(layers) - 1
        for k in range(last, -1, -1):
            weight_grad, bias_grad = self._grads[k]
            if k == last > 0:
                kernel.back_through_values(
                    action.numpy(),
                    slopes[k].numpy(),
                    inputs[k].numpy(),
                    layers[k][0].numpy(),
                    self._is_relu,
                    weight_grad.numpy(),
                    bias_grad.numpy(),
                    slopes[k - 1].numpy(),
                )
            elif k == 0 and len(self._side) <= NARROW:
                kernel.back_to_inputs(
                    x.numpy(), slopes[k].numpy(), self._side, weight_grad.numpy(), bias_grad.numpy()
                )
            else:
                across = slopes[k].t()
                torch.mm(across, inputs[k], out=weight_grad)
                torch.mv(across, self._ones, out=bias_grad)
                if k > 0:
                    torch.mm(slopes[k], layers[k][0], out=slopes[k - 1])
                    self._bend_back(slopes[k - 1], inputs[k])

    def _seen(self, obs: Sequence[Tensor]) -> Tensor:
        x, model = obs[self._leaf].flatten(1), self._model
        if not model.normalizes:
            return x
        mean, scale = (model.get_buffer(f"obs_{name}_{self._leaf}").flatten() for name in ("mean", "scale"))
        return ((x - mean) * scale).clamp_(-OBS_CLIP, OBS_CLIP)

    def _bend_back(self, slope: Tensor, output: Tensor) -> None:
        if self._is_relu:
            torch.ops.aten.threshold_backward.grad_input(slope, output, 0, grad_input=slope)
        else:
            torch.ops.aten.tanh_backward.grad_input(slope, output, grad_input=slope)


class _Layers:
    """A perceptron's layers, and room for what each gives."""

    def __init__(self, tensors: Sequence[Tensor], n_rows: int, widths: Sequence[int]) -> None:
        self.layers = [(weight.detach(), bias.detach()) for weight, bias in _pairs(tensors)]
        self.outputs = [torch.zeros(n_rows, width) for width in widths]
        self.n_inputs = self.layers[0][0].shape[1]
        self._calls = [(w.t(), b, out) for (w, b), out in zip(self.layers, self.outputs, strict=True)]
        weight, bias = self.layers[0]
        side = np.zeros((self.n_inputs, widths[0]), np.float32)
        self._first: tuple[Array, ...] = weight.numpy(), bias.numpy(), side, self.outputs[0].numpy()

    def forward(self, x: Tensor, bend: Callable[[Tensor], Tensor]) -> Tensor:
        """Fill in the outputs; returns the last."""
        last = len(self._calls) - 1
        for k, (weight, bias, out) in enumerate(self._calls):
            if k == 0 and self.n_inputs <= NARROW:
                kernel.affine(x.numpy(), *self._first)
            else:
                torch.addmm(bias, x, weight, out=out)
            if k < last:
                bend(out)
            x = out
        return x


def can_be_made_by_hand(model: QNetwork, device: torch.device) -> bool:
    """Whether this network is a plain perceptron over one vector, on the CPU."""
    seen = [leaf for leaf in model.obs.leaves if leaf.kind != "mask"]
    plain = not model.layer_norm and model.v_out is None and model.activation in BENDS
    return plain and device.type == "cpu" and len(seen) == 1 and seen[0].kind == "vector"


def _pairs(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))
