"""Checks an env before training, single or batched: its spaces, reset, and some random steps, against Gymnasium's API."""

from __future__ import annotations

import inspect
import re
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from flatout.envs.make import BatchedEnvs, BatchedKind, EnvFactory, batched_kind, blocking
from flatout.envs.spaces import MASK_KEY, is_image, logit_sizes, without_text
from flatout.envs.validate import (
    has_mask,
    nan_message,
    sample_action,
    simple_parts,
    text_parts,
    validate_flag,
    validate_obs,
    validate_reward,
    validate_spaces,
)
from flatout.envs.wrappers import Blocking, MaskFromInfo
from flatout.errors import EnvError, is_engine_file, one_line

if TYPE_CHECKING:
    import torch

RETURNS = {"reset": ("obs", "info"), "step": ("obs", "reward", "terminated", "truncated", "info")}
BATCHED_STEPS = 4
"""Steps of a batched env: enough to see shapes; NaN and wrong episode ends are checked all through the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvInfo:
    """What is known about an env that passed the check."""

    factory: EnvFactory
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    warnings: tuple[str, ...] = ()
    is_async: bool = False
    """Whether its reset and step are coroutine functions."""
    batched: BatchedKind | None = None
    """For a batched env: what its arrays are. The spaces above are then those of a single env."""
    n_envs: int | None = None
    """Number of envs of a batched env."""
    device: str = "cpu"
    """Device of its observations."""
    obs_size: float = 0.0
    """The largest root mean square of a number in its vector observations, over the steps of the check."""
    reward_size: float = 0.0
    """The median of the absolute rewards of these steps."""


def check(
    factory: EnvFactory,
    *,
    n_envs: int = 1,
    seed: int = 0,
    max_steps: int = 200,
    max_seconds: float = 1.0,
    make: Callable[..., Any] = blocking,
) -> EnvInfo:
    """Take random steps in a new env; raises EnvError at the first break of Gymnasium's API.

    A batched env is made with `n_envs` envs if it takes `num_envs`. Loads torch only for one of tensors.
    """
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        env: Any = make(partial(factory.make, n_envs))  # a batched env is returned as it is
        kind = batched_kind(env)
        try:
            if kind:
                info = _check_batched(factory, env, kind, seed, notes)
            else:
                info = _check_single(factory, env, seed, notes, max_steps, max_seconds)
        except EnvError as error:
            raise EnvError(f"{factory.name}: {error}") from error.__cause__
        finally:
            if not factory.is_instance:
                _close(env, notes)
    notes += [
        f"{part} is text, which the network does not see; to use it, encode it as numbers"
        for part in text_parts(info.observation_space)
    ]
    space = without_text(info.observation_space)
    every = tuple(dict.fromkeys(notes + _plain_warnings(raised)))
    return replace(info, observation_space=space, warnings=every)


def _check_single(
    factory: EnvFactory,
    env: gym.Env[Any, Any],
    seed: int,
    notes: list[str],
    max_steps: int,
    max_seconds: float,
) -> EnvInfo:
    deadline = time.perf_counter() + max_seconds
    validate_spaces(env)
    env.action_space.seed(seed)
    size = _Sizes()
    obs, info = _reset(env, 0, notes, seed=seed, options=None)
    if MASK_KEY in info and not has_mask(env.observation_space):
        if logit_sizes(env.action_space):
            env = MaskFromInfo(env)
            obs, _ = _reset(env, 0, notes, seed=seed, options=None)
        else:
            notes.append("info['action_mask'] is ignored: a Box action space has nothing to mask")
    for step in range(1, max_steps + 1):
        mask = obs[MASK_KEY] if has_mask(env.observation_space) else None
        action = sample_action(env.action_space, mask, step - 1)
        obs, reward, terminated, truncated, _ = _call(partial(env.step, action), "step", step)
        notes += validate_obs(env.observation_space, obs, step)
        validate_reward(reward, step)
        notes += validate_flag("terminated", terminated, step) + validate_flag("truncated", truncated, step)
        size.add(env.observation_space, obs, reward)
        if terminated or truncated:
            obs, _ = _reset(env, step, notes)
        if time.perf_counter() >= deadline:
            break
    return EnvInfo(
        factory=replace(factory, mask_in_info=isinstance(env, MaskFromInfo)),
        observation_space=env.observation_space,
        action_space=env.action_space,
        is_async=isinstance(env.unwrapped, Blocking),
        obs_size=size.of_obs(),
        reward_size=size.of_rewards(),
    )


class _Sizes:
    """How large observations and rewards are."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        """Of the squares of the numbers in vector observations."""
        self._rewards: list[float] = []
        self._n = 0

    def add(self, space: gym.Space[Any], obs: Any, reward: Any) -> None:
        """Add an observation and a reward, or several in rows."""
        self._rewards += np.abs(np.asarray(_to_numpy(reward), np.float64)).reshape(-1).tolist()
        for part, values, name in simple_parts(space, obs, "observation", None):
            if isinstance(part, gym.spaces.Box) and not is_image(part):
                rows = np.asarray(_to_numpy(values), np.float64).reshape(-1, *(part.shape or ()))
                self._sums[name] = self._sums.get(name, 0.0) + np.square(rows).mean(0)
        self._n += 1

    def of_rewards(self) -> float:
        """The median of the absolute rewards."""
        return float(np.median(self._rewards))

    def of_obs(self) -> float:
        """The largest root mean square."""
        return max(
            (float(np.sqrt(sums.max(initial=0.0) / self._n)) for sums in self._sums.values()), default=0.0
        )


def _reset(env: gym.Env[Any, Any], step: int, notes: list[str], **kwargs: Any) -> tuple[Any, ...]:
    obs, info = _call(partial(env.reset, **kwargs), "reset", step)
    notes += validate_obs(env.observation_space, obs, step)
    return obs, info


def _call(method: Callable[[], Any], name: str, step: int) -> tuple[Any, ...]:
    """Call reset or step and return its tuple of the right length, with a dict as info."""
    try:
        result = method()
    except EnvError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvError(_raised(error, name, step)) from error
    if inspect.iscoroutine(result):
        result.close()
        raise EnvError(f"{name}() is async; give both reset and step an async def")
    if not isinstance(result, tuple):
        raise EnvError(_wrong_count(name, f"one value ({type(result).__name__})"))
    if len(result) != len(RETURNS[name]):
        raise EnvError(_wrong_count(name, f"{len(result)} values"))
    if not isinstance(result[-1], dict):
        kind = type(result[-1]).__name__
        raise EnvError(f"{name}() returned an info that is a {kind}; it must be a dict")
    return result


def _wrong_count(name: str, got: str) -> str:
    names = RETURNS[name]
    return f"{name}() returned {got}; Gymnasium's {name} returns {len(names)}: {', '.join(names)}"


def _raised(error: BaseException, name: str, step: int) -> str:
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


def _check_batched(
    factory: EnvFactory, envs: BatchedEnvs, kind: BatchedKind, seed: int, notes: list[str]
) -> EnvInfo:
    n_envs = envs.num_envs
    if not isinstance(n_envs, int | np.integer) or n_envs < 1:
        raise EnvError(f"num_envs is {n_envs!r}; it must be at least 1")
    validate_spaces(envs, "single_")
    trial = _BatchedTrial(envs, kind, seed)
    notes += trial.run()
    if factory.is_instance:  # the run continues with this one: leave it in new episodes
        _call(lambda: envs.reset(seed=seed), "reset", BATCHED_STEPS)
    return EnvInfo(
        factory=factory,
        observation_space=envs.single_observation_space,
        action_space=envs.single_action_space,
        batched=kind,
        n_envs=int(n_envs),
        device=str(envs.device) if kind == "tensor" else "cpu",  # type: ignore[union-attr]
        obs_size=trial.size.of_obs(),
        reward_size=trial.size.of_rewards(),
    )


class _BatchedTrial:
    """A few checked random steps of a batched env."""

    def __init__(self, envs: BatchedEnvs, kind: BatchedKind, seed: int) -> None:
        self._envs, self._seed, self._n_envs = envs, seed, int(envs.num_envs)
        self._device = envs.device if kind == "tensor" else None  # type: ignore[union-attr]
        self._space, self._action_space = envs.single_observation_space, envs.single_action_space
        self._step, self.size = 0, _Sizes()

    def run(self) -> list[str]:
        """Take the steps; returns warnings, or raises EnvError."""
        self._action_space.seed(self._seed)
        obs, info = _call(lambda: self._envs.reset(seed=self._seed), "reset", 0)
        self._validate_obs(obs, "observation")
        notes = self._notes(info)
        for self._step in range(1, BATCHED_STEPS + 1):
            result = _call(partial(self._envs.step, self._actions(obs)), "step", self._step)
            self._validate_step(*result)
            obs = result[0]
            self.size.add(self._space, obs, result[1])
        return notes

    def _validate_step(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        self._validate_obs(obs, "observation")
        self._validate(reward, "reward", ())
        for name, flags in (("terminated", terminated), ("truncated", truncated)):
            self._validate(flags, name, ())
            if _to_numpy(flags).dtype != np.bool_:
                raise EnvError(f"{name} at step {self._step} is not an array of bools")
        if self._device is not None:
            if "final_obs" not in info:
                raise EnvError(
                    "step() gave no info['final_obs']; a batched env of tensors must give it at every step"
                )
            self._validate_obs(info["final_obs"], "final_obs", finite=False)

    def _notes(self, info: dict[str, Any]) -> list[str]:
        notes = []
        if self._device is None and "autoreset_mode" not in self._envs.metadata:  # type: ignore[union-attr]
            notes.append("metadata['autoreset_mode'] is missing; Gymnasium's default NEXT_STEP is assumed")
        if MASK_KEY in info and not has_mask(self._space):
            notes.append("info['action_mask'] of a batched env is ignored; put it into a Dict observation")
        return notes

    def _actions(self, obs: Any) -> Any:
        masks = _to_numpy(obs[MASK_KEY]) if has_mask(self._space) else [None] * self._n_envs
        actions = np.stack([sample_action(self._action_space, mask, self._step) for mask in masks])
        if self._device is None:
            return actions
        import torch

        return torch.from_numpy(actions).to(self._device)

    def _validate_obs(self, obs: Any, path: str, finite: bool = True) -> None:
        for part, values, name in simple_parts(self._space, obs, path, self._step):
            self._validate(values, name, part.shape or (), finite)

    def _validate(self, values: Any, name: str, shape: tuple[int, ...], finite: bool = True) -> None:
        if self._device is not None:
            self._refuse_other_device(values, name)
        array = _to_numpy(values)
        if array.dtype.kind not in "buif":
            raise EnvError(f"{name} at step {self._step} is not an array of numbers")
        if array.shape != (self._n_envs, *shape):
            raise EnvError(
                f"{name} at step {self._step} has shape {array.shape}; "
                f"for {self._n_envs} envs it must be {(self._n_envs, *shape)}"
            )
        bad = ~np.isfinite(array.reshape(self._n_envs, -1)).all(axis=1)
        if finite and bad.any():
            kind = "a NaN" if np.isnan(array).any() else "an infinite"
            raise EnvError(nan_message(name, int(bad.argmax()), self._step, kind))

    def _refuse_other_device(self, values: Any, name: str) -> None:
        if not hasattr(values, "detach"):
            raise EnvError(f"{name} at step {self._step} is a {type(values).__name__}, not a torch tensor")
        if not same_device(values.device, self._device):
            raise EnvError(f"{name} at step {self._step} is on {values.device}; the env says {self._device}")


def same_device(a: torch.device | str, b: torch.device | str | None) -> bool:
    """Whether two names mean the same device; `cuda` without an index matches every CUDA device."""
    import torch

    one, other = torch.device(a), torch.device(b or "cpu")
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


def _to_numpy(values: Any) -> Any:
    return values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)


def _close(env: Any, notes: list[str]) -> None:
    try:
        getattr(env, "close", lambda: None)()  # optional for a batched env
    except Exception as error:
        notes.append(f"close() raised {one_line(error)}")


def _plain_warnings(raised: list[warnings.WarningMessage]) -> list[str]:
    """Python warnings as text, one for each line of code that raised some."""
    by_place: dict[str, str] = {}
    for warning in raised:
        if not issubclass(warning.category, DeprecationWarning | PendingDeprecationWarning):
            # Gymnasium adds colour codes and the prefix WARN.
            text = re.sub(r"\x1b\[[0-9;]*m|WARN: ", "", str(warning.message))
            place = f"{Path(warning.filename).name}:{warning.lineno}"
            by_place.setdefault(place, f"{' '.join(text.split())} ({place})")
    return list(by_place.values())
