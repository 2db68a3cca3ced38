"""Frames as an agent sees them: Atari's preprocessing, and the last frames of an episode on top of each other."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from flatout.envs.spaces import MASK_KEY, StackedFrames, has_channels_last, is_image
from flatout.errors import EnvError

FIRE = 1
"""The action that starts a game or the next life, where a game has it."""


def preprocessed(env: gym.Env[Any, Any], *, atari: bool, frame_stack: int) -> gym.Env[Any, Any]:
    """The env with Atari's preprocessing, if asked for, and stacked frames."""
    if atari:
        from gymnasium.wrappers import AtariPreprocessing  # needs ale-py and OpenCV

        if not hasattr(env.unwrapped, "ale"):
            raise EnvError(f"--atari is for games of ale-py; this env is a {type(env.unwrapped).__name__}")
        env = PressFire(AtariPreprocessing(env))
    return FrameStack(env, frame_stack) if atari or frame_stack > 1 else env


class PressFire(gym.Wrapper[Any, Any, Any, Any]):
    """Presses FIRE at the begin of an episode and after a lost life, as games such as Breakout wait for it."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        self._waits = len(meanings) > 2 and meanings[FIRE] == "FIRE"
        self._lives = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset, and start the game."""
        obs, info = self.env.reset(seed=seed, options=options)
        if self._waits:
            obs, _, terminated, truncated, info = self.env.step(FIRE)
            if terminated or truncated:
                obs, info = self.env.reset(options=options)
        self._lives = info.get("lives", 0)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; where a life is lost, start the next one within the same step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        lost, self._lives = info.get("lives", 0) < self._lives, info.get("lives", 0)
        if lost and self._waits and not (terminated or truncated):
            obs, more, terminated, truncated, info = self.env.step(FIRE)
            reward = float(reward) + float(more)
        return obs, reward, terminated, truncated, info


class FrameStack(gym.Wrapper[Any, Any, Any, Any]):
    """Shows the last `n` frames of every Box: images on top of each other along the channels, vectors end to end.

    The newest is last. At a reset the first one is repeated. The arrays it returns change with the next step.
    """

    def __init__(self, env: gym.Env[Any, Any], n: int) -> None:
        super().__init__(env)
        self._stacks = _stacks(env.observation_space, n)
        self.observation_space = _space(self._stacks, env.observation_space)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset, and repeat the first frame."""
        obs, info = self.env.reset(seed=seed, options=options)
        return _pushed(self._stacks, obs, is_first=True), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and add the newest frame."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return _pushed(self._stacks, obs), reward, terminated, truncated, info


class _Stack:
    """The last frames of one Box."""

    def __init__(self, space: spaces.Box, n: int) -> None:
        self._shape = shape = space.shape
        self._last = len(shape) == 3 and is_image(space) and has_channels_last(shape)
        low, high = (np.concatenate([self._as_frame(bound)] * n) for bound in (space.low, space.high))
        self.frames = np.zeros_like(low, dtype=space.dtype)
        self._size = len(low) // n
        stacked = spaces.Box(low, high, low.shape, space.dtype)
        if is_image(stacked):
            stacked = StackedFrames(low, high, low.shape, space.dtype, frames=n)
        self.space = stacked

    def _as_frame(self, value: Any) -> Any:
        """An image as (C, H, W), anything else as a vector."""
        array = np.asarray(value)
        if self._last:
            return np.moveaxis(array, -1, 0)
        if len(self._shape) == 2 and min(self._shape) >= 7:
            return array[None]
        return array if len(self._shape) == 3 else array.reshape(-1)

    def push(self, value: Any, is_first: bool) -> Any:
        """All frames after this one."""
        frame, frames, size = self._as_frame(value), self.frames, self._size
        if is_first:
            for start in range(0, len(frames), size):
                frames[start : start + size] = frame
        else:
            frames[:-size] = frames[size:]
            frames[-size:] = frame
        return frames


def _stacks(space: gym.Space[Any], n: int) -> Any:
    """The stack of every Box, in the structure of the space; None for spaces that stay as they are."""
    if isinstance(space, spaces.Dict):
        return {key: None if key == MASK_KEY else _stacks(sub, n) for key, sub in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_stacks(sub, n) for sub in space.spaces)
    return _Stack(space, n) if isinstance(space, spaces.Box) else None


def _space(stacks: Any, space: gym.Space[Any]) -> gym.Space[Any]:
    if isinstance(stacks, dict):
        return spaces.Dict([(key, _space(sub, space[key])) for key, sub in stacks.items()])  # type: ignore[index]
    if isinstance(stacks, tuple):
        return spaces.Tuple([_space(sub, space[i]) for i, sub in enumerate(stacks)])  # type: ignore[index]
    return space if stacks is None else stacks.space


def _pushed(stacks: Any, obs: Any, is_first: bool = False) -> Any:
    if isinstance(stacks, dict):
        return {key: _pushed(sub, obs[key], is_first) for key, sub in stacks.items()}
    if isinstance(stacks, tuple):
        return tuple(_pushed(sub, obs[i], is_first) for i, sub in enumerate(stacks))
    return obs if stacks is None else stacks.push(obs, is_first)
