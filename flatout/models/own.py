"""A network of the user's own before the hidden layers: observation in, features out.

`network(observation_space)` makes a module that is given observations in the structure of that space: a tensor, or a dict
or tuple of tensors, with a leading batch dimension. Where the parameter is called `n_features`, the module is given encoded
observations (B, n_features) instead. Both return features (B, n), for any n.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import gymnasium as gym
import torch
from gymnasium import spaces
from torch import Tensor, nn

from flatout.envs.loader import Code
from flatout.envs.spaces import ArraySpec, ObsLayout, StackedFrames, has_channels_last, is_image, is_text
from flatout.errors import FlatoutError, one_line

WANTED = "an nn.Module class or a function that makes a module"
ENCODED = "n_features"
"""Name of the parameter of a network that takes encoded observations."""
TRIAL = 2
"""Observations that the number of features is found out with."""


class Encoder(Protocol):
    """Encodes observations."""

    n_features: int

    def __call__(self, obs: Sequence[Tensor]) -> Tensor:
        """Features (B, n_features)."""


class OwnEncoder(nn.Module):
    """The user's module, given what it asks for."""

    def __init__(self, code: Code, obs: ObsLayout, make_encoder: Callable[[], Encoder]) -> None:
        """`make_encoder`: makes what encodes observations for a network that takes `n_features`."""
        super().__init__()
        self._code, self._space, self._specs = code, obs.space, obs.specs
        make = code.load("network", nn.Module, WANTED)
        self.encoder = make_encoder() if ENCODED in _parameters(make) else None
        for i, spec in enumerate(obs.specs):
            if any(spec.start):
                first = torch.tensor(spec.start).view(spec.shape)
                self.register_buffer(f"_start_{i}", first, persistent=False)
        with _telling(code, "could not be made"):
            self.module = make(seen_space(obs.space) if self.encoder is None else self.encoder.n_features)
        if not isinstance(self.module, nn.Module):
            raise FlatoutError(
                f"network '{code}' made {type(self.module).__name__}; it must make an nn.Module"
            )
        _refuse_random(code, self.module)
        self.independent_rows = getattr(self.module, "independent_rows", False) is True
        """Whether its author says that features of an observation do not depend on the others in the batch."""
        self.n_features = self._count(obs)

    def forward(self, obs: Sequence[Tensor]) -> Tensor:
        if self.encoder is not None:
            out: Tensor = self.module(self.encoder(obs))
        else:
            pairs = enumerate(zip(self._specs, obs, strict=False))  # a memory's state may follow
            values = (self._prepared(i, spec, value) for i, (spec, value) in pairs)
            out = self.module(_structured(self._space, values))
        return out

    def _prepared(self, i: int, spec: ArraySpec, value: Tensor) -> Tensor:
        """An observation array as a network takes it: floats, images from 0 to 1, categories from 0."""
        if spec.kind == "discrete":
            return value - self.get_buffer(f"_start_{i}") if any(spec.start) else value
        if spec.kind == "mask":
            return value
        return value.float() / 255 if spec.dtype == "uint8" else value.float()

    @torch.no_grad()
    def _count(self, obs: ObsLayout) -> int:
        """The number of features."""
        arrays = tuple(torch.from_numpy(array) for array in obs.alloc(TRIAL))
        for array, spec in zip(arrays, obs.specs, strict=True):
            if spec.kind == "discrete":
                array += torch.tensor(spec.start).view(array.shape[1:])
        with _telling(self._code, "fails on a batch of two observations"):
            out = self(arrays)
        if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != TRIAL or not out.is_floating_point():
            shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise FlatoutError(
                f"network '{self._code}' returns {shape} for {TRIAL} observations; it must return features, "
                f"({TRIAL}, n)"
            )
        return out.shape[1]


def seen_space(space: gym.Space[Any]) -> gym.Space[Any]:
    """The space of what the module is given: images are channels first, text is left out."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict(
            [(key, seen_space(part)) for key, part in space.spaces.items() if not is_text(part)]
        )
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([seen_space(part) for part in space.spaces if not is_text(part)])
    if not isinstance(space, spaces.Box) or isinstance(space, StackedFrames) or not is_image(space):
        return space
    if not has_channels_last(space.shape):
        return space
    low, high = (bound.transpose(2, 0, 1) for bound in (space.low, space.high))
    return spaces.Box(low, high, dtype=space.dtype.type)


def _structured(space: gym.Space[Any], values: Iterator[Tensor]) -> Any:
    """Observation arrays in the structure of the space."""
    if isinstance(space, spaces.Dict):
        return {key: _structured(part, values) for key, part in space.spaces.items() if not is_text(part)}
    if isinstance(space, spaces.Tuple):
        return tuple(_structured(part, values) for part in space.spaces if not is_text(part))
    return next(values)


def _parameters(make: Any) -> Sequence[str]:
    try:
        return list(inspect.signature(make).parameters)
    except (TypeError, ValueError):
        return []


def _refuse_random(code: Code, module: nn.Module) -> None:
    """Refuse layers that compute something else when an observation is learned from than when it was acted on."""
    for layer in module.modules():
        name = type(layer).__name__
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise FlatoutError(
                f"network '{code}' has a {name}, which mixes the observations of a batch; use LayerNorm"
            )
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise FlatoutError(f"network '{code}' has a {name}, which makes acting random; set dropout to 0")


@contextmanager
def _telling(code: Code, what: str) -> Iterator[None]:
    """Turns an exception of the user's code into an error of one line."""
    try:
        yield
    except FlatoutError:
        raise
    except Exception as error:
        raise FlatoutError(f"network '{code}' {what}: {one_line(error)}") from error
