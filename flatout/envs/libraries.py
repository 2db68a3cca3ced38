"""Env libraries that are not installed with flatout: imported when an env of theirs is named."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from flatout.envs.spaces import Array, StackedFrames
from flatout.errors import EnvError, FlatoutError, did_you_mean, one_line

LIBRARIES = (
    (r"ALE/|.+NoFrameskip-v4$", "ale_py", "atari"),
    (r"MiniGrid-|BabyAI-", "minigrid", "minigrid"),
)
"""Ids, the package whose import registers them, and flatout's extra that installs it."""


def import_library(env_id: str) -> None:
    """Import the library that registers this id, if it is one of LIBRARIES."""
    for ids, package, extra in LIBRARIES:
        if re.match(ids, env_id):
            _imported(package, extra, env_id)


def hush_mujoco() -> None:
    """Print each of MuJoCo's warnings once; it repeats them for every env, and in a file in the current folder."""
    mujoco: Any = sys.modules.get("mujoco")
    with suppress(AttributeError):  # not imported, or another version
        if mujoco.get_mju_user_warning() is None:
            mujoco.set_mju_user_warning(_tell_once)


def follow_robot(env: gym.Env[Any, Any]) -> None:
    """Let the camera of a MuJoCo env follow its robot; Gymnasium's own stays where it is, in HalfCheetah for one."""
    renderer: Any = getattr(env.unwrapped, "mujoco_renderer", None)
    if getattr(renderer, "camera_id", None) != -1:
        return
    if "trackbodyid" not in (getattr(renderer, "default_cam_config", None) or {}):
        mujoco: Any = sys.modules["mujoco"]
        camera = mujoco.mj_name2id(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
        renderer.camera_id = camera  # -1: there is none, as before


def _tell_once(text: str) -> None:
    kind = re.sub(r"[\d.]+", "", text)
    if kind not in _told:
        _told.add(kind)
        print(f"note: MuJoCo: {text}", file=sys.stderr, flush=True)


_told: set[str] = set()


def envpool_creator(task: str) -> Callable[..., EnvPool]:
    """Makes EnvPool's own batch of envs of this task."""
    envpool = _imported("envpool", "envpool", f"envpool:{task}")
    tasks = envpool.list_all_envs()
    if task not in tasks:
        raise FlatoutError(f"EnvPool has no env '{task}'{did_you_mean(task, tasks)}")
    return partial(EnvPool, task)


def _imported(package: str, extra: str, env: str) -> Any:
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise EnvError(f"env '{env}': importing {package} failed: {one_line(error)}") from error
        raise FlatoutError(
            f"env '{env}' needs the package '{package}', which is not installed; pip install \"flatout[{extra}]\""
        ) from None


class EnvPool(VectorEnv[Any, Any, Array]):
    """EnvPool's batch: C++ threads step all envs at once.

    Where an episode ended, the next step only resets (NEXT_STEP).
    """

    def __init__(self, task: str, num_envs: int = 1, **options: Any) -> None:
        """`options`: EnvPool's own, such as stack_num or episodic_life."""
        self._task, self.num_envs, self._options = task, num_envs, options
        self._pool = self._made(0)
        config = self._pool.spec.config
        self.single_observation_space = _frames(self._pool.observation_space, getattr(config, "stack_num", 1))
        self.single_action_space = self._pool.action_space
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def _made(self, seed: int) -> Any:
        make = import_module("envpool").make_gymnasium
        return make(self._task, num_envs=self.num_envs, seed=seed, **self._options)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:  # noqa: ARG002
        """Begin an episode in every env; EnvPool takes a seed only when it is made."""
        if seed is not None:
            self._pool.close()
            self._pool = self._made(int(seed) % 2**31)
        return self._pool.reset()[0], {}

    def step(self, actions: Array) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step all envs."""
        obs, reward, terminated, truncated, _ = self._pool.step(
            np.asarray(actions, self._pool.action_space.dtype)
        )
        return obs, reward, terminated, truncated, {}

    def close(self, **_: Any) -> None:
        """End its threads."""
        self._pool.close()


def _frames(space: Any, n: int) -> Any:
    """An image space of EnvPool as the stack of frames that it is; other spaces as they are."""
    is_image = isinstance(space, spaces.Box) and len(space.shape) == 3 and space.dtype == np.uint8
    if not is_image or n < 2 or space.shape[0] % n:
        return space
    return StackedFrames(space.low, space.high, space.shape, np.uint8, frames=n)
