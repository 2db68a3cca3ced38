"""The policy as collectors use it: arrays of observations and noise in, actions and log-probabilities out.

A small network on the CPU is one compiled function (`kernel`); any other one runs in torch, wherever it lies.
Which of the two depends on the network alone, so that every collector of a run computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from flatout.envs.spaces import Array, ObsArrays
from flatout.models.heads import GaussianHead, GreedyHead
from flatout.models.policy import OBS_CLIP, PolicyNet

SMALL_NETWORK = 100_000
"""Weights of a policy up to which the compiled function is faster: they stay in a core's own cache."""
ROWS = 8
"""In torch the policy acts on multiples of this many rows. Matrix kernels round by the number of rows; in whole
blocks a row's result does not depend on its neighbours, so neither do results on how envs are spread."""


BRIEF_WORK = 1_000_000
"""Weights times rows that are through in some ten microseconds."""


class Actor(Protocol):
    """Draws actions for many observations at once."""

    def bind(self) -> None:
        """Take the model's parameters as they are now; once per rollout."""

    def act(self, obs: ObsArrays, noise: Array, rows_out: Array, log_prob_out: Array) -> None:
        """Write the rows drawn with the given noise, and their log-probabilities."""


def make_actor(model: PolicyNet, n_rows: int, device: torch.device) -> Actor:
    """The fastest way of acting on up to `n_rows` observations at once."""
    return KernelActor(model) if is_small(model, device) else TorchActor(model, n_rows, device)


def is_small(model: PolicyNet, device: torch.device) -> bool:
    """Whether one compiled function may act for the model."""
    images = any(leaf.kind == "image" for leaf in model.obs.specs)
    n_weights = sum(weight.numel() for weight, _ in model.acting_layers())
    return device.type == "cpu" and not images and n_weights <= SMALL_NETWORK


class TorchActor:
    """The model itself, on its own device, fed through buffers made once."""

    def __init__(self, model: PolicyNet, n_rows: int, device: torch.device) -> None:
        self._model = model
        n_rows = _whole_blocks(n_rows)
        self._obs = tuple(torch.from_numpy(leaf).to(device) for leaf in model.obs.alloc(n_rows))
        self._noise = torch.zeros(n_rows, model.action.noise_size, device=device)

    def bind(self) -> None:
        """Nothing: it acts with the model's own parameters."""

    @torch.inference_mode()
    def act(self, obs: ObsArrays, noise: Array, rows_out: Array, log_prob_out: Array) -> None:
        """Write the rows drawn with the given noise, and their log-probabilities."""
        n = len(noise)
        for whole, part in zip(self._obs, obs, strict=True):
            whole[:n] = torch.from_numpy(part)
        self._noise[:n] = torch.from_numpy(noise)
        end = _whole_blocks(n)
        rows, log_prob = self._model.sample(tuple(leaf[:end] for leaf in self._obs), self._noise[:end])
        torch.from_numpy(rows_out).copy_(rows[:n])
        torch.from_numpy(log_prob_out).copy_(log_prob[:n])


class KernelActor:
    """A multi-layer perceptron on the CPU as one compiled function."""

    def __init__(self, model: PolicyNet) -> None:
        from flatout.models import kernel  # here, because the compiler takes a moment to load

        obs, action = model.obs, model.action
        self._model, self._mask_index = model, obs.mask_index
        layers = model.acting_layers()
        widths = [layers[0][0].shape[1], *(len(bias) for _, bias in layers)]
        n_params = sum(tensor.numel() for tensor in self._tensors())
        self._params = np.zeros(n_params, np.float32)
        self._few = BRIEF_WORK // n_params
        seen = [i for i, leaf in enumerate(obs.specs) if leaf.kind != "mask"]
        self._only = seen[0] if len(seen) == 1 and obs.specs[seen[0]].kind == "vector" else None
        """The vector that is all there is to see, if so."""
        normalized = self._only is not None and model.normalizes
        self._shift = np.zeros((2 if normalized else 0, widths[0]), np.float32)
        if isinstance(model.head, GaussianHead):
            self._sample: Callable[..., None] = kernel.sample_normals
            self._sample_few: Callable[..., None] = kernel.sample_few_normals
            self._log_std = np.zeros(action.size, np.float32)
            self._head: tuple[Array, Array] = self._log_std, action.bounded & model.head.squashes
        elif isinstance(model.head, GreedyHead):
            self._sample, self._sample_few = kernel.pick_greedily, kernel.pick_few_greedily
            self._epsilon = np.zeros(1)
            self._head = self._epsilon, np.zeros((0, 1), bool)
        else:
            self._sample, self._sample_few = kernel.sample_categories, kernel.sample_few_categories
            self._head = np.array(action.nvec), np.zeros((0, 1), bool)  # no row: all is allowed
        scratch = np.zeros((2, kernel.ROWS, max(widths)), np.float32)
        self._network: tuple[Any, ...] = (
            self._shift,
            np.float32(OBS_CLIP),
            np.array(widths),
            self._params,
            kernel.BENDS[model.activation] + kernel.NORMED * model.layer_norm,
            scratch,
        )
        self.bind()

    def bind(self) -> None:
        """Take the model's parameters as they are now; once per rollout."""
        start = 0
        for tensor in self._tensors():
            end = start + tensor.numel()
            self._params[start:end] = tensor.numpy().reshape(-1)
            start = end
        if len(self._shift):
            mean, scale = (self._model.get_buffer(f"obs_{name}_{self._only}") for name in ("mean", "scale"))
            self._shift[0], self._shift[1] = mean.numpy().reshape(-1), scale.numpy().reshape(-1)
        if isinstance(self._model.head, GaussianHead):
            self._log_std[:] = self._model.head.log_std.detach().numpy()
        elif isinstance(self._model.head, GreedyHead):
            self._epsilon[:] = self._model.head.epsilon.numpy()

    def _tensors(self) -> Iterator[torch.Tensor]:
        """The parameters in the order in which the compiled function reads them."""
        norms = self._model.acting_norms()
        for k, (weight, bias) in enumerate(self._model.acting_layers()):
            yield from (weight.detach().t(), bias.detach())
            if k < len(norms):
                yield from (tensor.detach() for tensor in norms[k])

    def act(self, obs: ObsArrays, noise: Array, rows_out: Array, log_prob_out: Array) -> None:
        """Write the rows drawn with the given noise, and their log-probabilities."""
        x = self._features(obs) if self._only is None else obs[self._only].reshape(len(noise), -1)
        head = self._head
        if self._mask_index is not None:
            head = head[0], obs[self._mask_index]
        sample = self._sample_few if len(x) <= self._few else self._sample
        sample(x, *self._network, *head, noise, rows_out, log_prob_out)

    @torch.inference_mode()
    def _features(self, obs: ObsArrays) -> Array:
        features: Array = self._model.features(tuple(torch.from_numpy(leaf) for leaf in obs)).numpy()
        return features


def _whole_blocks(n_rows: int) -> int:
    return -(-n_rows // ROWS) * ROWS
