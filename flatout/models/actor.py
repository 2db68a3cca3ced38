"""Acting: observation arrays and noise in, actions and log-probabilities out.

A small network on the CPU is one compiled function (`kernel`); all others run in torch. The choice depends on the
network and device alone, so every collector of a run computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch

from flatout.device.accelerator import (
    Graph,
    Packed,
    Retries,
    can_capture,
    has_streams,
    new_event,
    short_reason,
)
from flatout.envs.spaces import Array, ObsArrays
from flatout.models.params import copy_all
from flatout.models.policy import OBS_CLIP, Policy, PolicyNet

SMALL_NETWORK = 300_000
"""Up to this many weights the compiled function is faster: they fit a core's own cache."""
BRIEF_WORK = 1_000_000
"""Weights × observations that take about ten microseconds."""


class Actor(Protocol):
    """Draws actions for a batch of observations."""

    def bind(self) -> None:
        """Take the model's current parameters; once per rollout."""

    def begin(self, obs: ObsArrays, noise: Array, action_out: Array, log_prob_out: Array) -> None:
        """Draw actions with the given noise, before squashing, and their log-probabilities."""

    def finish(self) -> None:
        """Wait until they are written."""


def make_actor(
    model: PolicyNet,
    max_batch: int,
    device: torch.device,
    retries: Retries | None = None,
    next_state: Array | None = None,
) -> Actor:
    """The fastest actor for batches of up to `max_batch` observations.

    `next_state`: where it writes the new states of the model's memory, if the model has one.
    """
    if model.state_size:
        actor: Actor = model.own_actor(max_batch, device, next_state)
        return actor
    if is_small(model, device):
        return KernelActor(model)
    if not has_streams(device):
        return TorchActor(model, max_batch, device)
    return DeviceActor(model, max_batch, device, retries or Retries(device))


def is_small(model: PolicyNet, device: torch.device) -> bool:
    """Whether the compiled function can act for the model, and is faster."""
    images = any(spec.kind == "image" for spec in model.obs.specs)
    n_weights = sum(weight.numel() for weight, _ in model.acting_layers())
    plain = model.is_plain and not images and not model.state_size
    return device.type == "cpu" and plain and n_weights <= SMALL_NETWORK


class TorchActor:
    """The model itself, on its own device, with input buffers allocated once."""

    def __init__(self, model: PolicyNet, max_batch: int, device: torch.device) -> None:
        self._model = model
        n = model.whole_blocks(max_batch)
        self._obs = tuple(torch.from_numpy(x).to(device) for x in model.obs.alloc(n))
        self._noise = torch.zeros(n, model.action.noise_size, device=device)

    def bind(self) -> None:
        """Does nothing: it acts with the model's own parameters."""

    @torch.inference_mode()
    def begin(self, obs: ObsArrays, noise: Array, action_out: Array, log_prob_out: Array) -> None:
        n = len(noise)
        for buffer, array in zip(self._obs, obs, strict=True):
            buffer[:n] = torch.from_numpy(array)
        self._noise[:n] = torch.from_numpy(noise)
        end = self._model.whole_blocks(n)
        action, log_prob = self._act(tuple(x[:end] for x in self._obs), self._noise[:end])
        torch.from_numpy(action_out).copy_(action[:n])
        torch.from_numpy(log_prob_out).copy_(log_prob[:n])

    def _act(self, obs: tuple[torch.Tensor, ...], noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model.sample(obs, noise)

    def finish(self) -> None:
        """Nothing: `begin` has written them."""


class DeviceActor:
    """The model on an accelerator: a graph that copies observations in, acts, and copies actions out.

    It always acts on `max_batch` observations, of which the first ones count, in the stream that is current.
    """

    def __init__(self, model: PolicyNet, max_batch: int, device: torch.device, retries: Retries) -> None:
        self._model, self._device, self._retries = model, device, retries
        n = model.whole_blocks(max_batch)
        zeros = np.zeros
        noise = zeros((n, model.action.noise_size), np.float32)
        given = [noise, *model.obs.alloc(n)]
        results = [zeros((n, model.action.size), model.action.dtype), zeros(n, np.float32)]
        self._in, self._out = (Packed(arrays, device) for arrays in (given, results))
        self._done = new_event(device)
        self._work: Callable[[], None] = self._launch
        self._is_captured = False
        self._to: tuple[Array, Array] | None = None

    def bind(self) -> None:
        """Capture the graph, once: it reads the model's own parameters, which change in place."""
        if self._is_captured or not can_capture(self._device):
            return
        self._is_captured = True
        try:
            graph = self._retries.attempt(lambda: Graph(self._launch, self._device, warm_up=self._launch))
        except RuntimeError as error:
            self._retries.notes.append(f"acting without a graph, with more launches: {short_reason(error)}")
        else:
            self._work = graph.replay

    @torch.no_grad()
    def _launch(self) -> None:
        noise, *obs = self._in.to_device()
        action, log_prob = self._model.sample(tuple(obs), noise)
        self._out.to_host((action, log_prob))

    def begin(self, obs: ObsArrays, noise: Array, action_out: Array, log_prob_out: Array) -> None:
        for buffer, array in zip(self._in.arrays, (noise, *obs), strict=True):
            buffer[: len(array)] = array
        self._retries.attempt(self._work)
        self._done.record()
        self._to = action_out, log_prob_out

    def finish(self) -> None:
        assert self._to is not None, "begin comes before finish"
        self._done.synchronize()
        for out, buffer in zip(self._to, self._out.arrays, strict=True):
            out[...] = buffer[: len(out)]


class KernelActor:
    """An MLP on the CPU as one compiled function."""

    def __init__(self, model: PolicyNet) -> None:
        from flatout.models import kernel  # imports Numba, which takes a moment

        obs, action = model.obs, model.action
        self._model, self._mask_index = model, obs.mask_index
        self._layers, self._norms = model.acting_layers(), model.acting_norms()
        layers = self._layers
        widths = [layers[0][0].shape[1], *(len(bias) for _, bias in layers)]
        n_params = sum(tensor.numel() for tensor in self._tensors())
        self._params = np.zeros(n_params, np.float32)
        self._places = self._views()
        self._few = BRIEF_WORK // n_params
        self._only = obs.only_vector
        normalized = self._only is not None and model.normalizes
        self._obs_stats = np.zeros((2 if normalized else 0, widths[0]), np.float32)
        self._bound = model.head.bound
        no_mask = np.zeros((0, 1), bool)
        self._head: tuple[Array, Array] = np.array(action.nvec), no_mask
        if action.continuous:
            bound = np.zeros(len(getattr(model.head, self._bound)), np.float32)
            self._head = bound, action.bounded & model.head.squashes
        elif self._bound:
            self._head = np.zeros(1), no_mask
        self._sample, self._sample_few = kernel.SAMPLERS[self._bound]
        activation = kernel.ACTIVATIONS[model.activation] + kernel.LAYER_NORM * model.layer_norm
        scratch = np.zeros((2, kernel.ROWS, max(widths)), np.float32)
        inputs = self._obs_stats, np.float32(OBS_CLIP)
        self._network: kernel.Network = *inputs, np.array(widths), self._params, activation, scratch
        self.bind()

    def bind(self) -> None:
        copy_all(self._places, list(self._tensors()))
        if len(self._obs_stats):
            mean, scale = (self._model.get_buffer(f"obs_{name}_{self._only}") for name in ("mean", "scale"))
            self._obs_stats[0], self._obs_stats[1] = mean.numpy().reshape(-1), scale.numpy().reshape(-1)
        if self._bound:
            self._head[0][:] = getattr(self._model.head, self._bound).detach().numpy()

    def _tensors(self) -> Iterator[torch.Tensor]:
        """The parameters in the order that the compiled function expects."""
        for k, (weight, bias) in enumerate(self._layers):
            yield from (weight.detach().t(), bias.detach())
            if k < len(self._norms):
                yield from (tensor.detach() for tensor in self._norms[k])

    def _views(self) -> list[torch.Tensor]:
        """Views of the compiled function's parameters, shaped like `_tensors`."""
        tensors = list(self._tensors())
        pieces = torch.from_numpy(self._params).split([tensor.numel() for tensor in tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]

    def begin(self, obs: ObsArrays, noise: Array, action_out: Array, log_prob_out: Array) -> None:
        x = self._features(obs) if self._only is None else obs[self._only].reshape(len(noise), -1)
        head = self._head
        if self._mask_index is not None:
            head = head[0], obs[self._mask_index]
        sample = self._sample_few if len(x) <= self._few else self._sample
        sample(x, self._network, *head, noise, action_out, log_prob_out)

    def finish(self) -> None:
        """Nothing: `begin` has written them."""

    @torch.inference_mode()
    def _features(self, obs: ObsArrays) -> Array:
        features: Array = self._model.features(tuple(torch.from_numpy(x) for x in obs)).numpy()
        return features


def env_actions(
    policy: Policy, obs: ObsArrays, noise: torch.Tensor | None, state: Array | None = None
) -> Array:
    """Actions as envs take them: sampled with the noise, or without it the most likely ones.

    `state`: of the model's memory, if it has one; it is replaced by the new one.
    """
    model, tensors = policy.model, tuple(torch.from_numpy(x).to(policy.device) for x in obs)
    if model.state_size:
        assert state is not None, "it is needed to act"
        chosen, _, new = model.act((*tensors, torch.from_numpy(state).to(policy.device)), noise)
        state[:] = new.cpu().numpy()
    else:
        chosen = model.mode(tensors) if noise is None else model.sample(tensors, noise)[0]
    return policy.action.to_env(model.head.squash(chosen).cpu().numpy())
