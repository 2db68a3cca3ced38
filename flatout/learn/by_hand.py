"""The gradient of DQN's loss written out, for multi-layer perceptrons on the CPU.

A small network's update is mostly the framework's work around it: recording operations, then looking for what follows
from what. Here the few matrix products are called one after another, into memory that is taken once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flatout.algorithms.dqn import Minibatch, Twins
from flatout.algorithms.q_config import DQNConfig
from flatout.learn.params import FlatParams
from flatout.models.heads import MASKED
from flatout.models.policy import OBS_CLIP
from flatout.models.q import QNetwork

BENDS = {"relu": torch.relu_, "tanh": torch.tanh_}
"""Activations whose slope follows from what they gave."""


class HandMadeGradient:
    """Of minibatches of one size: flat gradient, metrics and errors, as `dqn.loss` has them."""

    def __init__(self, twins: Twins, params: FlatParams, config: DQNConfig, errors_out: Tensor) -> None:
        model = twins.online
        self._model, self._config = model, config
        self._leaf = next(i for i, leaf in enumerate(model.obs.leaves) if leaf.kind != "mask")
        n, widths = config.batch_size, [len(bias) for _, bias in model.acting_layers()]
        self._bend = BENDS[model.activation]
        self._is_relu = model.activation == "relu"
        self._online = _Layers(params.views(params.flat), n, widths)
        self._target = _Layers(params.views(twins.target), n, widths)
        self._chooser = _Layers(params.views(params.flat), n, widths)
        self._flat = torch.zeros_like(params.flat)
        self._grads = _pairs(params.views(self._flat))
        self._slopes = [torch.zeros(n, width) for width in widths]
        self._ones = torch.ones(n)
        self._wanted, self._best, self._value = torch.zeros(n), torch.zeros(n), torch.zeros(n, 1)
        self._error, self._small, self._pull = (torch.zeros(n) for _ in range(3))
        self._size = errors_out
        self._means = torch.zeros(3)

    @torch.no_grad()
    def __call__(self, batch: Minibatch) -> tuple[Tensor, Tensor]:
        """The gradient and the metrics, in memory that the next call uses again."""
        self._aim(batch)
        x = self._seen(batch.obs)
        values = self._online.forward(x, self._bend)
        torch.gather(values, 1, batch.action, out=self._value)
        metrics = self._errors(batch.weight)
        n = len(x)
        slope = self._slopes[-1].zero_().scatter_(1, batch.action, self._pull.mul_(1 / n).view(n, 1))
        layers, inputs = self._online.layers, [x, *self._online.outputs[:-1]]
        for k in range(len(layers) - 1, -1, -1):
            weight_grad, bias_grad = self._grads[k]
            torch.mm(slope.t(), inputs[k], out=weight_grad)
            torch.mv(slope.t(), self._ones, out=bias_grad)
            if k > 0:
                torch.mm(slope, layers[k][0], out=self._slopes[k - 1])
                slope = self._bend_back(self._slopes[k - 1], inputs[k])
        return self._flat, metrics

    def _aim(self, batch: Minibatch) -> None:
        """What the values should have been."""
        x, mask = self._seen(batch.next_obs), self._model.mask(batch.next_obs)
        later = self._target.forward(x, self._bend)
        chooses = self._chooser.forward(x, self._bend) if self._config.double else later
        if mask is not None:
            chooses.masked_fill_(~mask, MASKED)
        if self._config.double:
            best = later.gather(1, chooses.argmax(1, keepdim=True)).view(-1)
        else:
            best = torch.amax(later, 1, out=self._best)
        torch.addcmul(batch.reward, batch.discount, best, out=self._wanted)

    def _errors(self, weight: Tensor) -> Tensor:
        """Fill in errors and what pulls at each value; returns the metrics."""
        value = self._value.view(-1)
        error, size = torch.sub(value, self._wanted, out=self._error), self._size
        torch.abs(error, out=size)
        if self._config.loss == "mse":
            torch.mul(error, error, out=self._small)
            torch.mul(error, weight, out=self._pull).mul_(2)
        else:  # size² / 2, and from 1 on size - 1/2
            small = torch.clamp(size, max=1.0, out=self._small)
            small.mul_(torch.sub(size, small, alpha=0.5))
            torch.clamp(error, -1.0, 1.0, out=self._pull).mul_(weight)
        n = len(value)
        sums = torch.stack([torch.dot(self._small, weight), value.sum(), size.sum()])
        return torch.div(sums, n, out=self._means)

    def _seen(self, obs: Sequence[Tensor]) -> Tensor:
        x, model = obs[self._leaf].flatten(1), self._model
        if not model.normalizes:
            return x
        mean, scale = (model.get_buffer(f"obs_{name}_{self._leaf}").flatten() for name in ("mean", "scale"))
        return ((x - mean) * scale).clamp_(-OBS_CLIP, OBS_CLIP)

    def _bend_back(self, slope: Tensor, output: Tensor) -> Tensor:
        if self._is_relu:
            torch.ops.aten.threshold_backward.grad_input(slope, output, 0, grad_input=slope)
        else:
            torch.ops.aten.tanh_backward.grad_input(slope, output, grad_input=slope)
        return slope


class _Layers:
    """A perceptron's layers, and room for what each gives."""

    def __init__(self, tensors: Sequence[Tensor], n_rows: int, widths: Sequence[int]) -> None:
        self.layers = [(weight.detach(), bias.detach()) for weight, bias in _pairs(tensors)]
        self.outputs = [torch.zeros(n_rows, width) for width in widths]
        self._calls = [(w.t(), b, out) for (w, b), out in zip(self.layers, self.outputs, strict=True)]

    def forward(self, x: Tensor, bend: Callable[[Tensor], Tensor]) -> Tensor:
        """The last layer's outputs."""
        last = len(self._calls) - 1
        for k, (weight, bias, out) in enumerate(self._calls):
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
