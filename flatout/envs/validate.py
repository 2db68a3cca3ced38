"""Validates spaces, observations and masks; imports no torch.

An env that breaks Gymnasium's API is refused with an EnvError of one line; smaller flaws become warnings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from flatout.envs.make import BatchedEnvs
from flatout.envs.spaces import MASK_KEY, is_text, logit_sizes
from flatout.errors import EnvError, one_line

SIMPLE_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
# A value may be cast to a wider kind of number (bool to int to float), not to a narrower one.
KIND_WIDTH = {"b": 0, "u": 1, "i": 1, "f": 2}


def nan_message(what: str, env_index: int, step: int, kind: str = "a NaN") -> str:
    """`env 3 gave a NaN observation at step 117`."""
    return f"env {env_index} gave {kind} {what} at step {step}"


def broke_api(env_index: int, doing: str, step: int, error: EnvError) -> str:
    """`env 3 at step 117: observation is …`."""
    return f"env {env_index} {f'at step {step}' if doing == 'step' else f'in {doing}'}: {error}"


WRAPPERS = {
    "Text": "text must become numbers: encode it to a Box or MultiDiscrete of fixed length with "
    "gymnasium.wrappers.TransformObservation",
    "Graph": "a graph must have a fixed size: pad its nodes and edges to Boxes in a Dict with "
    "gymnasium.wrappers.TransformObservation",
    "Sequence": "a sequence must have a fixed length: pad it to a Box with gymnasium.wrappers.TransformObservation",
    "OneOf": "choose one of its spaces, or give all of them in a Dict, with gymnasium.wrappers.TransformObservation",
}
"""What to do about an observation space that has no fixed size, by its kind."""


def validate_spaces(env: gym.Env[Any, Any] | BatchedEnvs, prefix: str = "", *, text: bool = True) -> None:
    """Raise EnvError unless the env has both spaces, of supported kinds; `prefix` is `single_` for a batched env.

    `text`: whether a Dict or Tuple may have text, which is left out.
    """
    obs_name, action_name = f"{prefix}observation_space", f"{prefix}action_space"
    for name in (obs_name, action_name):
        space = getattr(env, name, None)
        if space is None:
            raise EnvError(f"has no {name}; set self.{name} in __init__")
        if not isinstance(space, gym.Space):
            raise EnvError(
                f"{name} is a {type(space).__module__}.{type(space).__name__}, not a gymnasium space"
            )
    observation_space, action_space = getattr(env, obs_name), getattr(env, action_name)
    _validate_obs_space(observation_space, obs_name, text=text)
    if not isinstance(action_space, SIMPLE_SPACES):
        kinds = "Discrete, MultiDiscrete, MultiBinary and Box"
        raise EnvError(
            f"{action_name} is a {type(action_space).__name__}; supported are {kinds}: "
            "convert it with gymnasium.wrappers.TransformAction"
        )
    _refuse_empty(action_space, action_name)
    if has_mask(observation_space):
        _validate_mask_space(observation_space[MASK_KEY], action_space)


def validate_obs(space: gym.Space[Any], obs: object, step: int = 0) -> list[str]:
    """Warnings about an observation; raises EnvError if it does not fit its space."""
    notes = []
    for part, value, path, array in fitting_parts(space, obs, step):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            kind = "a NaN" if np.isnan(array).any() else "an infinite"
            raise EnvError(nan_message(path, 0, step, kind))
        if is_outside(part, array).any():
            notes.append(OUTSIDE.format(path))
        notes += _cast_note(part, value, array, path)
    return notes


OUTSIDE = "{} is outside the bounds that its space declares"


def fitting_parts(
    space: gym.Space[Any], obs: object, step: int | None = None
) -> Iterator[tuple[gym.Space[Any], Any, str, NDArray[Any]]]:
    """What `simple_parts` gives, and each part as an array; raises EnvError if one does not fit its space."""
    for part, value, path in simple_parts(space, obs, "observation", step):
        array = _as_declared(part, value, path, step)
        # A discrete value out of range has no one-hot code; a Box value is only badly scaled, if its dtype can hold it.
        is_box = isinstance(part, spaces.Box)
        outside = array.astype(np.dtype(part.dtype)) != array if is_box else is_outside(part, array)
        if outside.any() and array.dtype.kind != "f":
            raise EnvError(f"{path}{_at(step)} is {_shorten(value)}, outside {_describe(part)}")
        yield part, value, path, array


def is_outside(space: gym.Space[Any], values: NDArray[Any]) -> NDArray[np.bool_]:
    """Which elements of a simple space's values, or of a batch of them, are out of its bounds."""
    low, high = bounds(space)
    outside: NDArray[np.bool_] = (values < low) | (values > high)
    return outside


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


def validate_reward(reward: object, step: int) -> None:
    """Raise EnvError unless the reward is a finite number."""
    try:
        array = np.asarray(reward)
    except Exception:
        array = np.asarray(None)  # not a number
    if array.dtype.kind not in KIND_WIDTH:
        raise EnvError(f"reward at step {step} is {_shorten(reward)}; return a number")
    if array.shape != ():
        raise EnvError(f"reward at step {step} is an array of shape {array.shape}; return float(reward)")
    if not np.isfinite(array):
        raise EnvError(nan_message("reward", 0, step, "a NaN" if np.isnan(array) else "an infinite"))


def validate_flag(name: str, value: object, step: int) -> list[str]:
    """A warning if `terminated` or `truncated` is an int; raises EnvError unless it is a bool or one of 0 and 1."""
    if isinstance(value, bool | np.bool_):
        return []
    if isinstance(value, int | np.integer) and value in (0, 1):
        return [f"{name} is the int {value} where Gymnasium expects a bool; return bool({name})"]
    got = f"an array of shape {value.shape}" if isinstance(value, np.ndarray) else _shorten(value)
    raise EnvError(f"{name} at step {step} is {got}; return bool({name})")


def sample_action(space: gym.Space[Any], mask: Any, step: int) -> Any:
    """A random action that the mask, if any, allows."""
    if mask is None:
        return space.sample()
    mask = np.ravel(mask)
    if not np.isin(mask, (0, 1)).all():
        raise EnvError(f"action_mask at step {step} holds other values than 0 and 1")
    sizes = logit_sizes(space)
    parts = np.split(mask, np.cumsum(sizes)[:-1])
    if not all(part.any() for part in parts):
        raise EnvError(
            f"action_mask at step {step} allows no action; allow at least one until the episode ends"
        )
    choices = np.array([space.np_random.choice(np.flatnonzero(part)) for part in parts])
    if isinstance(space, spaces.Discrete):
        return space.start + choices[0]
    start = space.start if isinstance(space, spaces.MultiDiscrete) else 0
    return (choices.reshape(space.shape) + start).astype(space.dtype)


def has_mask(space: gym.Space[Any]) -> TypeGuard[spaces.Dict]:
    """Whether observations of this space carry an action mask."""
    return isinstance(space, spaces.Dict) and MASK_KEY in space.spaces


def _validate_mask_space(mask_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
    n_logits = sum(logit_sizes(action_space))
    if not n_logits:
        raise EnvError(
            "observation_space['action_mask'] cannot mask a Box action space; give the key another name"
        )
    if mask_space.shape != (n_logits,):
        raise EnvError(
            f"observation_space['action_mask'] has shape {mask_space.shape}; "
            f"{_describe(action_space)} needs ({n_logits},), one value for each choice"
        )


def _validate_obs_space(space: gym.Space[Any], path: str, *, text: bool) -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        children = _children(space)
        if text:
            children = {key: child for key, child in children.items() if not is_text(child)}
        if not children:
            what = f"a {type(space).__name__} of text alone; {WRAPPERS['Text']}"
            raise EnvError(f"{path} is {what if len(space.spaces) else f'an empty {type(space).__name__}'}")
        for key, child in children.items():
            _validate_obs_space(child, f"{path}[{key!r}]", text=text)
    elif isinstance(space, SIMPLE_SPACES):
        _refuse_empty(space, path)
    else:
        kind = "Text" if is_text(space) else type(space).__name__
        kinds = "supported are Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of those"
        raise EnvError(f"{path} is a {type(space).__name__}; {WRAPPERS.get(kind, kinds)}")


def text_parts(space: gym.Space[Any], path: str = "observation") -> Iterator[str]:
    """Names of the parts of an observation that are text."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, child in _children(space).items():
            yield from text_parts(child, f"{path}[{key!r}]")
    elif is_text(space):
        yield path


def _refuse_empty(space: gym.Space[Any], path: str) -> None:
    if 0 in (space.shape or ()):
        raise EnvError(f"{path} has no elements: its shape is {space.shape}")


def _children(space: spaces.Dict | spaces.Tuple[Any]) -> dict[Any, gym.Space[Any]]:
    return dict(space.spaces) if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))


def simple_parts(
    space: gym.Space[Any], value: Any, path: str, step: int | None
) -> Iterator[tuple[gym.Space[Any], Any, str]]:
    """Each simple space in `space`, its part of the observation, and the name of that part; text is left out."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        if not is_text(space):
            yield space, value, path
        return
    container = Mapping if isinstance(space, spaces.Dict) else (tuple, list)
    if not isinstance(value, container):
        raise EnvError(
            f"{path}{_at(step)} is a {type(value).__name__}; its space is a {type(space).__name__}"
        )
    children = _children(space)
    keys = set(value) if isinstance(value, Mapping) else set(range(len(value)))
    if isinstance(space, spaces.Tuple) and len(keys) != len(children):
        raise EnvError(f"{path}{_at(step)} has {len(keys)} parts; its Tuple space has {len(children)}")
    for what, odd in (("lacks", set(children) - keys), ("has the undeclared", keys - set(children))):
        if odd:
            raise EnvError(f"{path}{_at(step)} {what} {', '.join(sorted(map(repr, odd)))}")
    for key, child in children.items():
        yield from simple_parts(child, value[key], f"{path}[{key!r}]", step)


def _as_declared(space: gym.Space[Any], value: object, path: str, step: int | None) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except Exception as error:
        raise EnvError(f"{path}{_at(step)} is not an array: {one_line(error)}") from error
    width = KIND_WIDTH.get(array.dtype.kind)
    if width is None or width > KIND_WIDTH[np.dtype(space.dtype).kind] or array.shape != space.shape:
        kind = {"O": "objects", "U": "strings", "S": "bytes"}.get(array.dtype.kind, array.dtype.name)
        is_array = isinstance(value, np.ndarray | np.generic | list | tuple)
        got = f"{kind} of shape {array.shape}" if is_array else f"a {type(value).__name__}"
        raise EnvError(f"{path}{_at(step)} is {got}; its space is {_describe(space)}")
    return array


def bounds(space: gym.Space[Any]) -> tuple[Any, Any]:
    """The least and the greatest value of each element of a simple space."""
    match space:
        case spaces.Box():
            return space.low, space.high
        case spaces.Discrete():
            return space.start, space.start + space.n - 1
        case spaces.MultiDiscrete():
            return space.start, space.start + space.nvec - 1
        case _:
            return 0, 1


def _cast_note(space: gym.Space[Any], value: object, array: NDArray[Any], path: str) -> list[str]:
    if isinstance(value, list | tuple):
        return [f"{path} is a {type(value).__name__}, not a NumPy array; it is converted at every step"]
    is_array = isinstance(value, np.ndarray | np.generic)
    if is_array and isinstance(space, spaces.Box) and not np.can_cast(array.dtype, space.dtype):
        return [f"{path} is {array.dtype} where its space says {space.dtype}; it is cast at every step"]
    return []


def _describe(space: gym.Space[Any]) -> str:
    if isinstance(space, spaces.Box):  # its repr prints whole arrays of bounds, over several lines
        return f"a Box of shape {space.shape}, {space.dtype}"
    return _shorten(space)


def _shorten(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
