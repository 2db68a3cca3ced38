"""Checks an env before training: its spaces, reset, and some random steps, against Gymnasium's API.

An env that breaks the API is refused with an EnvError of one line; smaller flaws become warnings.
"""

from __future__ import annotations

import inspect
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from flatout.envs.make import BatchedEnvs, BatchedKind, EnvFactory
from flatout.envs.spaces import MASK_KEY, logit_sizes
from flatout.envs.wrappers import Blocking, MaskFromInfo, blocking
from flatout.errors import EnvError, is_engine_file, one_line

RETURNS = {"reset": ("obs", "info"), "step": ("obs", "reward", "terminated", "truncated", "info")}
SIMPLE_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
# A value may be cast to a wider kind of number (bool to int to float), not to a narrower one.
KIND_WIDTH = {"b": 0, "u": 1, "i": 1, "f": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvInfo:
    """What is known about an env that passed the check."""

    factory: EnvFactory
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    warnings: tuple[str, ...]
    is_async: bool = False
    """Whether its reset and step are coroutine functions."""
    batched: BatchedKind | None = None
    """For a batched env: what its arrays are. The spaces above are then those of a single env."""
    n_envs: int | None = None
    """Number of envs of a batched env."""
    device: str = "cpu"
    """Device of its observations."""


def check(
    factory: EnvFactory,
    *,
    env: gym.Env[Any, Any] | None = None,
    seed: int = 0,
    max_steps: int = 200,
    max_seconds: float = 1.0,
) -> EnvInfo:
    """Take random steps in one env, the given or a new one; raises EnvError at the first break of Gymnasium's API."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        env = env or blocking(factory)
        try:
            deadline = time.perf_counter() + max_seconds
            validate_spaces(env)
            env, obs = _start(env, seed, notes)
            _random_steps(env, obs, notes, max_steps, deadline)
        except EnvError as error:
            raise EnvError(f"{factory.name}: {error}") from error.__cause__
        finally:
            _close(env, notes)
    return EnvInfo(
        factory=replace(factory, mask_in_info=isinstance(env, MaskFromInfo)),
        observation_space=env.observation_space,
        action_space=env.action_space,
        warnings=tuple(dict.fromkeys(notes + plain_warnings(raised))),
        is_async=isinstance(env.unwrapped, Blocking),
    )


def nan_message(what: str, env_index: int, step: int, kind: str = "a NaN") -> str:
    """`env 3 gave a NaN observation at step 117`."""
    return f"env {env_index} gave {kind} {what} at step {step}"


def validate_spaces(env: gym.Env[Any, Any] | BatchedEnvs, prefix: str = "") -> None:
    """Raise EnvError unless the env has both spaces, of supported kinds; `prefix` is `single_` for a batched env."""
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
    _validate_obs_space(observation_space, obs_name)
    if not isinstance(action_space, SIMPLE_SPACES):
        kinds = "Discrete, MultiDiscrete, MultiBinary and Box"
        raise EnvError(f"{action_name} is a {type(action_space).__name__}; supported are {kinds}")
    _refuse_empty(action_space, action_name)
    if has_mask(observation_space):
        _validate_mask_space(observation_space[MASK_KEY], action_space)


def validate_obs(space: gym.Space[Any], obs: object, *, env_index: int = 0, step: int = 0) -> list[str]:
    """Warnings about an observation; raises EnvError if it does not fit its space."""
    notes = []
    for part, value, path in simple_parts(space, obs, "observation", step):
        array = _as_declared(part, value, path, step)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            kind = "a NaN" if np.isnan(array).any() else "an infinite"
            raise EnvError(nan_message(path, env_index, step, kind))
        low, high = _bounds(part)
        if np.any(array < low) or np.any(array > high):
            # A discrete value out of range has no one-hot code; a Box value is only badly scaled.
            if not isinstance(part, spaces.Box):
                raise EnvError(f"{path} at step {step} is {_shorten(value)}, outside {_describe(part)}")
            notes.append(f"{path} is outside the bounds that its space declares")
        notes += _cast_note(part, value, array, path)
    return notes


def _start(env: gym.Env[Any, Any], seed: int, notes: list[str]) -> tuple[gym.Env[Any, Any], Any]:
    """The env, wrapped if its mask is in the info, and its first observation."""
    env.action_space.seed(seed)
    obs, info = _reset(env, 0, notes, seed)
    if MASK_KEY not in info or has_mask(env.observation_space):
        return env, obs
    if not logit_sizes(env.action_space):
        notes.append("info['action_mask'] is ignored: a Box action space has nothing to mask")
        return env, obs
    env = MaskFromInfo(env)
    return env, _reset(env, 0, notes, seed)[0]


def _random_steps(
    env: gym.Env[Any, Any], obs: Any, notes: list[str], max_steps: int, deadline: float
) -> None:
    for step in range(1, max_steps + 1):
        mask = obs[MASK_KEY] if has_mask(env.observation_space) else None
        action = sample_action(env.action_space, mask, step - 1)
        obs, done = _step(env, action, step, notes)
        if done:
            obs = _reset(env, step, notes)[0]
        if time.perf_counter() >= deadline:
            break


def _reset(
    env: gym.Env[Any, Any], step: int, notes: list[str], seed: int | None = None
) -> tuple[Any, dict[str, Any]]:
    kwargs: dict[str, Any] = {} if seed is None else {"seed": seed, "options": None}
    obs, info = call(lambda: env.reset(**kwargs), "reset", step)
    require_dict(info, "reset")
    notes += validate_obs(env.observation_space, obs, step=step)
    return obs, info


def _step(env: gym.Env[Any, Any], action: Any, step: int, notes: list[str]) -> tuple[Any, bool]:
    obs, reward, terminated, truncated, info = call(lambda: env.step(action), "step", step)
    require_dict(info, "step")
    notes += validate_obs(env.observation_space, obs, step=step)
    _validate_reward(reward, step)
    notes += _validate_flag("terminated", terminated, step)
    notes += _validate_flag("truncated", truncated, step)
    return obs, bool(terminated or truncated)


def call(method: Callable[[], Any], name: str, step: int) -> tuple[Any, ...]:
    """Call reset or step and return its tuple of the right length."""
    try:
        result = method()
    except EnvError:
        raise
    except Exception as error:
        raise EnvError(_raised(error, name, step)) from error
    if inspect.iscoroutine(result):
        result.close()
        raise EnvError(f"{name}() is async; give both reset and step an async def")
    if isinstance(result, tuple) and len(result) == len(RETURNS[name]):
        return result
    got = f"{len(result)} values" if isinstance(result, tuple) else f"one value ({type(result).__name__})"
    raise EnvError(_wrong_count(name, got))


def _wrong_count(name: str, got: str) -> str:
    names = RETURNS[name]
    return f"{name}() returned {got}; Gymnasium's {name} returns {len(names)}: {', '.join(names)}"


def _raised(error: Exception, name: str, step: int) -> str:
    text = str(error)
    keyword = re.search(r"reset\(\) got an unexpected keyword argument '(seed|options)'", text)
    if name == "reset" and keyword:
        return f"reset() does not accept '{keyword[1]}'; write def reset(self, *, seed=None, options=None)"
    # A tuple of the wrong length fails first in a wrapper such as TimeLimit.
    if is_engine_file(traceback.extract_tb(error.__traceback__)[-1].filename):
        count = re.search(rf"values to unpack \(expected {len(RETURNS[name])}(?:, got (\d+))?\)", text)
        single = re.search(r"cannot unpack non-iterable (\w+) object", text)
        if count:
            return _wrong_count(name, f"{count[1] or 'more'} values")
        if single and single[1] == "coroutine":
            return f"a wrapper does not await the async env's {name}(); wrap it with async def reset and step"
        if single:
            return _wrong_count(name, f"one value ({single[1]})")
    return f"raised in {name if name == 'reset' else f'step {step}'}: {one_line(error)}"


def require_dict(info: object, name: str) -> None:
    """Raise EnvError unless the info is a dict."""
    if not isinstance(info, dict):
        raise EnvError(f"{name}() returned an info that is a {type(info).__name__}; it must be a dict")


def _validate_reward(reward: object, step: int) -> None:
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


def _validate_flag(name: str, value: object, step: int) -> list[str]:
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


def _validate_obs_space(space: gym.Space[Any], path: str) -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        children = _children(space)
        if not children:
            raise EnvError(f"{path} is an empty {type(space).__name__}")
        for key, child in children.items():
            _validate_obs_space(child, f"{path}[{key!r}]")
    elif isinstance(space, SIMPLE_SPACES):
        _refuse_empty(space, path)
    else:
        kinds = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of those"
        raise EnvError(f"{path} is a {type(space).__name__}; supported are {kinds}")


def _refuse_empty(space: gym.Space[Any], path: str) -> None:
    if 0 in (space.shape or ()):
        raise EnvError(f"{path} has no elements: its shape is {space.shape}")


def _children(space: spaces.Dict | spaces.Tuple[Any]) -> dict[Any, gym.Space[Any]]:
    return dict(space.spaces) if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))


def simple_parts(
    space: gym.Space[Any], value: Any, path: str, step: int
) -> Iterator[tuple[gym.Space[Any], Any, str]]:
    """Each simple space in `space`, its part of the observation, and the name of that part."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        yield space, value, path
        return
    container = Mapping if isinstance(space, spaces.Dict) else (tuple, list)
    if not isinstance(value, container):
        raise EnvError(
            f"{path} at step {step} is a {type(value).__name__}; its space is a {type(space).__name__}"
        )
    children = _children(space)
    keys = set(value) if isinstance(value, Mapping) else set(range(len(value)))
    if isinstance(space, spaces.Tuple) and len(keys) != len(children):
        raise EnvError(f"{path} at step {step} has {len(keys)} parts; its Tuple space has {len(children)}")
    for what, odd in (("lacks", set(children) - keys), ("has the undeclared", keys - set(children))):
        if odd:
            raise EnvError(f"{path} at step {step} {what} {', '.join(sorted(map(repr, odd)))}")
    for key, child in children.items():
        yield from simple_parts(child, value[key], f"{path}[{key!r}]", step)


def _as_declared(space: gym.Space[Any], value: object, path: str, step: int) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except Exception as error:
        raise EnvError(f"{path} at step {step} is not an array: {one_line(error)}") from error
    width = KIND_WIDTH.get(array.dtype.kind)
    if width is None or width > KIND_WIDTH[np.dtype(space.dtype).kind] or array.shape != space.shape:
        kind = {"O": "objects", "U": "strings", "S": "bytes"}.get(array.dtype.kind, array.dtype.name)
        is_array = isinstance(value, np.ndarray | np.generic | list | tuple)
        got = f"{kind} of shape {array.shape}" if is_array else f"a {type(value).__name__}"
        raise EnvError(f"{path} at step {step} is {got}; its space is {_describe(space)}")
    return array


def _bounds(space: gym.Space[Any]) -> tuple[Any, Any]:
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


def _close(env: gym.Env[Any, Any], notes: list[str]) -> None:
    try:
        env.close()
    except Exception as error:
        notes.append(f"close() raised {one_line(error)}")


def plain_warnings(raised: list[warnings.WarningMessage]) -> list[str]:
    """Python warnings as text, one for each line of code that raised some."""
    by_place: dict[str, str] = {}
    for warning in raised:
        if not issubclass(warning.category, DeprecationWarning | PendingDeprecationWarning):
            # Gymnasium adds colour codes and the prefix WARN.
            text = re.sub(r"\x1b\[[0-9;]*m|WARN: ", "", str(warning.message))
            place = f"{Path(warning.filename).name}:{warning.lineno}"
            by_place.setdefault(place, f"{' '.join(text.split())} ({place})")
    return list(by_place.values())
