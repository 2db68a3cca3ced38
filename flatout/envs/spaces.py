"""Gymnasium spaces as flat arrays: an observation becomes a tuple of leaf arrays, an action one row.

Everything behind the env seam (buffers, models, learner) sees only leaves, so Dict, Tuple and plain
spaces take the same path. JSON in and out, so that a saved agent acts without its env.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from flatout.errors import FlatoutError

Array: TypeAlias = npt.NDArray[Any]
ObsArrays: TypeAlias = tuple[Array, ...]
Path: TypeAlias = tuple[str | int, ...]
ArrayKind: TypeAlias = Literal["vector", "image", "discrete", "binary", "mask"]

MASK_KEY = "action_mask"


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of an observation: where it lies in the space, and how it is stored."""

    path: Path
    kind: ArrayKind
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nvec: tuple[int, ...] = ()
    """For `discrete`: the number of categories of each element."""
    start: tuple[int, ...] = ()
    """For `discrete`: the value of the first category of each element."""

    def pick(self, obs: Any) -> Any:
        """This leaf's part of an observation of the whole space."""
        for key in self.path:
            obs = obs[key]
        return obs


class ObsLayout:
    """The leaves of an observation space, in a fixed order; the action mask, if any, is one of them."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self.space = space
        self.specs = tuple(_leaves(space, ()))
        if not any(leaf.kind != "mask" for leaf in self.specs):
            raise FlatoutError(f"observation space {space} holds nothing to learn from")
        self.mask_index = next((i for i, leaf in enumerate(self.specs) if leaf.kind == "mask"), None)
        self._single = self.specs[0].path == () if len(self.specs) == 1 else False

    def alloc(self, *lead: int) -> ObsArrays:
        """Zeroed arrays of shape `lead + leaf.shape`, one per leaf (pages untouched until written)."""
        return tuple(np.zeros(lead + leaf.shape, leaf.dtype) for leaf in self.specs)

    def write(self, out: ObsArrays, index: int | tuple[int, ...], obs: Any) -> None:
        """Copy one observation into row `index` of `out`."""
        if self._single:
            out[0][index] = obs
            return
        for leaf, array in zip(self.specs, out, strict=True):
            array[index] = leaf.pick(obs)

    def batch(self, obs: Any) -> tuple[ObsArrays, bool]:
        """Observation arrays with a leading batch dimension, and whether `obs` was a single observation."""
        arrays = [np.asarray(leaf.pick(obs)) for leaf in self.specs]
        single = arrays[0].ndim == len(self.specs[0].shape)
        out: list[Array] = []
        for leaf, raw in zip(self.specs, arrays, strict=True):
            row = raw[None] if single else raw
            if row.shape[1:] != leaf.shape:
                where = "".join(f"[{key!r}]" for key in leaf.path)
                raise FlatoutError(f"observation{where} has shape {raw.shape}, the agent knows {leaf.shape}")
            out.append(np.ascontiguousarray(row, dtype=leaf.dtype))
        return tuple(out), single


class ActionLayout:
    """An action space as rows: `categorical` rows hold one category per group, `continuous` ones floats.

    MultiBinary is a group of two categories per bit. Continuous rows live in [-1, 1] for each bounded
    dimension and in the env's own units elsewhere, so that one initial spread fits every env.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self.space = space
        self.nvec: tuple[int, ...] = ()
        self._start: Array | int = 0
        if isinstance(space, spaces.Discrete):
            self.nvec, self._start = (int(space.n),), int(space.start)
        elif isinstance(space, spaces.MultiDiscrete):
            self.nvec, self._start = _ints(space.nvec), np.asarray(space.start).reshape(-1)
        elif isinstance(space, spaces.MultiBinary):
            self.nvec = (2,) * int(np.prod(space.shape))
        elif isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
            self._bounds(space)
        else:
            raise FlatoutError(
                f"action space {space} is not supported; PPO takes Discrete, MultiDiscrete, MultiBinary "
                "and Box of floats"
            )
        self.continuous = not self.nvec
        self.dtype: np.dtype[Any] = np.dtype(np.float32 if self.continuous else np.int64)
        """Of a row."""
        self.size = len(self.nvec) or int(np.prod(space.shape or (1,)))
        self.n_logits = sum(self.nvec)
        self.noise_size = self.n_logits or self.size

    def _bounds(self, space: spaces.Box) -> None:
        self.low, self.high = space.low.reshape(-1), space.high.reshape(-1)
        with np.errstate(over="ignore"):  # a float32 range may be wider than float32 can hold
            half = (self.high - self.low) / 2
        self.bounded = np.isfinite(self.low) & np.isfinite(self.high) & np.isfinite(half)
        self._half = np.where(self.bounded, half, 1.0).astype(np.float32)
        self._mid = np.where(self.bounded, self.low + self._half, 0.0).astype(np.float32)

    def to_env(self, rows: Array) -> Array:
        """Rows (n, size) as the actions that n envs take; continuous ones rescaled and clipped."""
        space, actions = self.space, rows
        if self.continuous:
            actions = np.clip(rows * self._half + self._mid, self.low, self.high)
        elif isinstance(space, spaces.Discrete):
            return np.add(rows[:, 0], self._start)
        else:
            actions = rows + self._start
        return actions.astype(space.dtype, copy=False).reshape(-1, *(space.shape or ()))


def _leaves(space: gym.Space[Any], path: Path) -> Iterator[ArraySpec]:
    if isinstance(space, spaces.Dict):
        for key, sub in space.spaces.items():
            if key == MASK_KEY and not path:
                yield ArraySpec((key,), "mask", (int(np.prod(sub.shape or (1,))),), np.dtype(np.bool_))
            else:
                yield from _leaves(sub, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for i, sub in enumerate(space.spaces):
            yield from _leaves(sub, (*path, i))
    elif isinstance(space, spaces.Discrete):
        yield ArraySpec(path, "discrete", (), np.dtype(np.int64), (int(space.n),), (int(space.start),))
    elif isinstance(space, spaces.MultiDiscrete):
        nvec, start = _ints(space.nvec), _ints(space.start)
        yield ArraySpec(path, "discrete", space.nvec.shape, np.dtype(np.int64), nvec, start)
    elif isinstance(space, spaces.MultiBinary):
        yield ArraySpec(path, "binary", space.shape, np.dtype(np.int8))
    elif isinstance(space, spaces.Box):
        image = is_image(space)
        dtype = np.dtype(np.uint8 if image and space.dtype == np.uint8 else np.float32)
        yield ArraySpec(path, "image" if image else "vector", space.shape, dtype)
    else:
        where = "".join(f"[{key!r}]" for key in path)
        raise FlatoutError(
            f"observation space{where} {space} is not supported; Box, Discrete, MultiDiscrete, MultiBinary, "
            "and Dict and Tuple of those are"
        )


def is_image(space: spaces.Box) -> bool:
    """Whether a CNN should look at this Box: three dimensions of which two are at least 7 wide."""
    return len(space.shape) == 3 and sorted(space.shape)[1] >= 7


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in np.asarray(values).reshape(-1))


def space_to_json(space: gym.Space[Any]) -> dict[str, Any]:
    """A JSON description of a supported space."""
    match space:
        case spaces.Dict():
            return {"type": "Dict", "spaces": {k: space_to_json(s) for k, s in space.spaces.items()}}
        case spaces.Tuple():
            return {"type": "Tuple", "spaces": [space_to_json(s) for s in space.spaces]}
        case spaces.Discrete():
            return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
        case spaces.MultiDiscrete():
            return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else _ints(space.n)}
        case spaces.Box():
            bounds = {"low": _finite_list(space.low), "high": _finite_list(space.high)}
            return {"type": "Box", **bounds, "shape": list(space.shape), "dtype": str(space.dtype)}
    raise FlatoutError(f"space {space} is not supported")


def space_from_json(data: dict[str, Any]) -> gym.Space[Any]:
    """The space that `space_to_json` described."""
    match data["type"]:
        case "Dict":
            return spaces.Dict({k: space_from_json(s) for k, s in data["spaces"].items()})
        case "Tuple":
            return spaces.Tuple([space_from_json(s) for s in data["spaces"]])
        case "Discrete":
            return spaces.Discrete(data["n"], start=data["start"])
        case "MultiDiscrete":
            return spaces.MultiDiscrete(np.array(data["nvec"]), start=np.array(data["start"]))
        case "MultiBinary":
            return spaces.MultiBinary(data["n"])
        case "Box":
            shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
            low, high = (_bound_array(data[key], shape, dtype) for key in ("low", "high"))
            return spaces.Box(low, high, shape, dtype.type)
    raise FlatoutError(f"a saved space has the unknown type {data['type']!r}")


def _finite_list(values: Array) -> list[float | str] | float | str:
    """Bounds as JSON: one number when all are equal, infinities as text."""
    flat = [float(v) if np.isfinite(v) else str(v) for v in values.reshape(-1).tolist()]
    return flat[0] if len(set(flat)) == 1 else flat


def _bound_array(
    bound: Sequence[float | str] | float | str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Array:
    values = np.asarray(bound, dtype=np.float64)
    return np.broadcast_to(values.reshape(shape if values.ndim else ()), shape).astype(dtype)
