"""Gymnasium spaces as arrays: an observation becomes a tuple of arrays, an action one flat array.

Executors, buffers, models and learners see only these arrays, so Dict, Tuple and plain spaces take the same path.
Spaces convert to and from JSON, so that a saved agent acts without its env.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from flatout.errors import FlatoutError

Array: TypeAlias = npt.NDArray[Any]
ObsArrays: TypeAlias = tuple[Array, ...]
Path: TypeAlias = tuple[str | int, ...]
ArrayKind: TypeAlias = Literal["vector", "image", "discrete", "binary", "mask", "memory"]
"""`memory`: the state of a recurrent policy, which no env gives."""

MASK_KEY = "action_mask"


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of an observation: its path in the space, and how it is stored."""

    path: Path
    kind: ArrayKind
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nvec: tuple[int, ...] = ()
    """For `discrete`: the number of categories of each element."""
    start: tuple[int, ...] = ()
    """For `discrete`: the value of the first category of each element."""
    channels_last: bool = False
    """For `image`: whether the env gives it as (H, W, C); `shape` is (C, H, W), as it is stored."""
    frames: int = 1
    """For `image`: how many frames it stacks, of which a replay stores the newest."""

    def pick(self, obs: Any) -> Any:
        """This array's part of an observation, or of a batch of them."""
        for key in self.path:
            obs = obs[key]
        if not self.channels_last:
            return obs
        image = obs if hasattr(obs, "swapaxes") else np.asarray(obs)
        return image.swapaxes(-1, -2).swapaxes(-2, -3)


class ObsLayout:
    """The arrays of an observation space, in a fixed order; the action mask, if any, is one of them.

    Images are channels first, whatever the env gives. Text has no array.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self.space = space
        self.specs = tuple(_array_specs(space, ()))
        inputs = [i for i, spec in enumerate(self.specs) if spec.kind != "mask"]
        if not inputs:
            raise FlatoutError(
                f"observation space {space} is not supported: it has no arrays to learn from, only text or a mask"
            )
        self.mask_index = next((i for i, spec in enumerate(self.specs) if spec.kind == "mask"), None)
        self.only_vector = inputs[0] if len(inputs) == 1 and self.specs[inputs[0]].kind == "vector" else None
        """Index of the vector that, but for a mask, is the whole observation; None if there is more or other."""
        self.frames = max(spec.frames for spec in self.specs)
        """Frames that its images stack, at most."""
        only = self.specs[0]
        self.stored_as_given = len(self.specs) == 1 and only.path == () and not only.channels_last
        """Whether an observation is one array, stored as the env gives it."""

    def alloc(self, *lead: int) -> ObsArrays:
        """Zeros of shape `lead + spec.shape` for each array; memory is used only where it is written."""
        return tuple(np.zeros(lead + spec.shape, spec.dtype) for spec in self.specs)

    def write(self, out: ObsArrays, index: int | tuple[int, ...], obs: Any) -> None:
        """Copy one observation to `index` of each array in `out`."""
        if self.stored_as_given:
            out[0][index] = obs
            return
        for spec, array in zip(self.specs, out, strict=True):
            array[index] = spec.pick(obs)

    def batch(self, obs: Any) -> tuple[ObsArrays, bool]:
        """Observation arrays with a leading batch dimension, and whether `obs` was a single observation."""
        arrays = [np.asarray(spec.pick(obs)) for spec in self.specs]
        single = arrays[0].ndim == len(self.specs[0].shape)
        out: list[Array] = []
        for spec, array in zip(self.specs, arrays, strict=True):
            batch = array[None] if single else array
            if batch.shape[1:] != spec.shape:
                name = f"observation{brackets(spec.path)}"
                raise FlatoutError(f"{name} has shape {array.shape}; the agent was trained with {spec.shape}")
            out.append(np.ascontiguousarray(batch, dtype=spec.dtype))
        return tuple(out), single


class ActionLayout:
    """Actions as flat arrays (n, size): categories, counted from 0, for each part, or floats if `continuous`.

    MultiBinary has a part of two categories per bit. Continuous actions are in [-1, 1] in bounded dimensions and in
    the env's own units elsewhere, so that one initial standard deviation suits every env.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self.space = space
        self.nvec = logit_sizes(space)
        """Number of categories of each part; empty if continuous."""
        self._start: Array | int = 0
        if isinstance(space, spaces.Discrete):
            self._start = int(space.start)
        elif isinstance(space, spaces.MultiDiscrete):
            self._start = np.asarray(space.start).reshape(-1)
        elif isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
            self._bounds(space)
        elif not self.nvec:
            raise FlatoutError(
                f"action space {space} is not supported; supported are Discrete, MultiDiscrete, MultiBinary "
                "and Box of floats; for a Box of whole numbers take MultiDiscrete"
            )
        self.continuous = not self.nvec
        self.dtype: np.dtype[Any] = np.dtype(np.float32 if self.continuous else np.int64)
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

    def to_env(self, actions: Array) -> Array:
        """Actions (n, size) as n envs take them; continuous ones are rescaled and clipped."""
        space = self.space
        if self.continuous:
            actions = np.clip(actions * self._half + self._mid, self.low, self.high)
        elif isinstance(space, spaces.Discrete):
            return np.add(actions[:, 0], self._start)
        else:
            actions = actions + self._start
        return actions.astype(space.dtype, copy=False).reshape(-1, *(space.shape or ()))


def logit_sizes(action_space: gym.Space[Any]) -> tuple[int, ...]:
    """Number of categories of each part of a discrete action; empty for a Box, which cannot be masked."""
    match action_space:
        case spaces.Discrete():
            return (int(action_space.n),)
        case spaces.MultiDiscrete():
            return _ints(action_space.nvec)
        case spaces.MultiBinary():
            return (2,) * int(np.prod(action_space.shape))
        case _:
            return ()


def _array_specs(space: gym.Space[Any], path: Path) -> Iterator[ArraySpec]:
    if isinstance(space, spaces.Dict):
        for key, sub in space.spaces.items():
            if key == MASK_KEY and not path:
                yield ArraySpec((key,), "mask", (int(np.prod(sub.shape or (1,))),), np.dtype(np.bool_))
            else:
                yield from _array_specs(sub, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for i, sub in enumerate(space.spaces):
            yield from _array_specs(sub, (*path, i))
    elif isinstance(space, spaces.Discrete):
        yield ArraySpec(path, "discrete", (), np.dtype(np.int64), (int(space.n),), (int(space.start),))
    elif isinstance(space, spaces.MultiDiscrete):
        nvec, start = _ints(space.nvec), _ints(space.start)
        yield ArraySpec(path, "discrete", space.nvec.shape, np.dtype(np.int64), nvec, start)
    elif isinstance(space, spaces.MultiBinary):
        yield ArraySpec(path, "binary", space.shape, np.dtype(np.int8))
    elif isinstance(space, spaces.Box):
        yield _box_spec(space, path)
    elif not is_text(space) or not path:
        raise FlatoutError(
            f"observation space{brackets(path)} {space} is not supported; supported are Box, Discrete, "
            "MultiDiscrete, MultiBinary, and Dict and Tuple of those"
        )


def _box_spec(space: spaces.Box, path: Path) -> ArraySpec:
    if not is_image(space):
        return ArraySpec(path, "vector", space.shape, np.dtype(np.float32))
    dtype = np.dtype(np.uint8 if space.dtype == np.uint8 else np.float32)
    if isinstance(space, StackedFrames):
        return ArraySpec(path, "image", space.shape, dtype, frames=space.frames)
    last = has_channels_last(space.shape)
    shape = (space.shape[2], *space.shape[:2]) if last else space.shape
    return ArraySpec(path, "image", shape, dtype, channels_last=last)


def brackets(path: Path) -> str:
    """`['camera'][0]`: a path in a space as it is written in Python."""
    return "".join(f"[{key!r}]" for key in path)


def is_image(space: spaces.Box) -> bool:
    """Whether a CNN encodes this Box: it has three dimensions, two of them at least 7."""
    return len(space.shape) == 3 and sorted(space.shape)[1] >= 7


def has_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether an image of this shape is (H, W, C), not (C, H, W): by its equal sides, or else its shortest one."""
    first, middle, last = shape
    if (first == middle) != (middle == last):
        return first == middle
    return last < first


class StackedFrames(spaces.Box):
    """The last `frames` images of an episode, channels first, the newest last: (frames · C, H, W).

    At the begin of an episode the first one is repeated.
    """

    def __init__(self, low: Any, high: Any, shape: Sequence[int], dtype: Any, *, frames: int) -> None:
        super().__init__(low, high, tuple(shape), dtype)
        self.frames = frames

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and getattr(other, "frames", 1) == self.frames


LEFT_OUT = spaces.Text(1)
"""In a saved observation space: text, which no network sees."""


def is_text(space: gym.Space[Any]) -> bool:
    """Whether observations of this space are strings: Gymnasium's Text, MiniGrid's missions."""
    return isinstance(space, spaces.Text) or getattr(space.dtype, "kind", "") == "U"


def without_text(space: gym.Space[Any]) -> gym.Space[Any]:
    """The space with LEFT_OUT for text in its Dicts and Tuples; the same one if it has none."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return LEFT_OUT if is_text(space) else space
    by_key: dict[Any, gym.Space[Any]] = dict(
        space.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    )
    kept = {key: without_text(sub) for key, sub in by_key.items()}
    if all(kept[key] is sub for key, sub in by_key.items()):
        return space
    return spaces.Dict([*kept.items()]) if isinstance(space, spaces.Dict) else spaces.Tuple(kept.values())


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in np.asarray(values).reshape(-1))


def space_to_json(space: gym.Space[Any]) -> dict[str, Any]:
    """A JSON description of a supported space."""
    match space:
        case spaces.Dict():
            # Pairs, which keep the order of the keys: parameters are in this order.
            return {"type": "Dict", "spaces": [[k, space_to_json(s)] for k, s in space.spaces.items()]}
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
            frames = {"frames": space.frames} if isinstance(space, StackedFrames) else {}
            return {"type": "Box", **bounds, "shape": list(space.shape), "dtype": str(space.dtype), **frames}
        case spaces.Text():
            return {"type": "Text"}
    raise FlatoutError(f"space {space} is not supported")


def space_from_json(data: dict[str, Any]) -> gym.Space[Any]:
    """The space from what `space_to_json` gave."""
    match data["type"]:
        case "Dict":
            pairs = data["spaces"].items() if isinstance(data["spaces"], dict) else data["spaces"]
            return spaces.Dict([(k, space_from_json(s)) for k, s in pairs])
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
            if "frames" in data:
                return StackedFrames(low, high, shape, dtype.type, frames=data["frames"])
            return spaces.Box(low, high, shape, dtype.type)
        case "Text":
            return LEFT_OUT
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


class FastDiscrete(spaces.Discrete):
    """A Discrete whose `contains` is fast for np.int64; it gives the same answers.

    Envs like CartPole assert `action_space.contains(action)` at every step, and Gymnasium takes 2 µs for it, a
    quarter of such an env's step.
    """

    low: int
    high: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache_bounds()

    def cache_bounds(self) -> None:
        """Keep the bounds as plain ints."""
        self.low, self.high = int(self.start), int(self.start) + int(self.n)

    def contains(self, x: Any) -> bool:
        """Whether x is a member."""
        if type(x) is np.int64:
            return self.low <= x.item() < self.high
        return super().contains(x)


def fast_contains(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """The same env; if its action space is a plain Discrete, it becomes a FastDiscrete."""
    space = env.action_space
    if type(space) is spaces.Discrete and space.dtype == np.int64:
        # In place, so that its random state and every reference to it stay as they are.
        space.__class__ = FastDiscrete
        cast(FastDiscrete, space).cache_bounds()
    return env
