"""Action masks in `info`, moved into the observation, so that only one kind of mask exists downstream."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from flatout.envs.awaitable import is_async
from flatout.envs.spaces import MASK_KEY
from flatout.errors import EnvError


class MaskFromInfo(gym.Wrapper[Any, Any, Any, Any]):
    """Moves `info["action_mask"]` into the observation, so that only one kind of mask exists downstream."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._n_logits = sum(logit_sizes(env.action_space))
        self.observation_space = spaces.Dict(
            {"obs": env.observation_space, MASK_KEY: spaces.MultiBinary(self._n_logits)}
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Gymnasium's reset, the observation being `{"obs": ..., "action_mask": ...}`."""
        obs, info = self.env.reset(seed=seed, options=options)
        return {"obs": obs, MASK_KEY: self._mask(info, "reset")}, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Gymnasium's step, the observation being `{"obs": ..., "action_mask": ...}`."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return {"obs": obs, MASK_KEY: self._mask(info, "step")}, reward, terminated, truncated, info

    def _mask(self, info: dict[str, Any], call: str) -> NDArray[np.int8]:
        if MASK_KEY not in info:
            raise EnvError(
                f"{call}() gave no info['action_mask'], but the first reset() did; "
                "give one after every reset and step"
            )
        mask = info[MASK_KEY]
        # Gymnasium masks a MultiDiscrete with a tuple of arrays of different lengths.
        parts = mask if isinstance(mask, tuple) else (mask,)
        flat = np.concatenate([np.ravel(part) for part in parts])
        if flat.size != self._n_logits:
            raise EnvError(
                f"{call}() gave an info['action_mask'] of {flat.size} values; "
                f"the action space has {self._n_logits} choices"
            )
        return flat.astype(np.int8)


class AsyncMaskFromInfo(MaskFromInfo):
    """The same for an env with `async def reset` and `async def step`."""

    async def reset(  # type: ignore[override]  # Gymnasium knows no async envs
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """The env's reset, the observation being `{"obs": ..., "action_mask": ...}`."""
        obs, info = await self.env.reset(seed=seed, options=options)  # type: ignore[misc]
        return {"obs": obs, MASK_KEY: self._mask(info, "reset")}, info

    async def step(  # type: ignore[override]
        self, action: Any
    ) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """The env's step, the observation being `{"obs": ..., "action_mask": ...}`."""
        obs, reward, terminated, truncated, info = await self.env.step(action)  # type: ignore[misc]
        return {"obs": obs, MASK_KEY: self._mask(info, "step")}, reward, terminated, truncated, info


def mask_from_info(env: gym.Env[Any, Any]) -> MaskFromInfo:
    """The env with its info's mask in the observation, async where the env is."""
    return AsyncMaskFromInfo(env) if is_async(env) else MaskFromInfo(env)


def logit_sizes(action_space: gym.Space[Any]) -> tuple[int, ...]:
    """How many choices each part of a discrete action has; empty for a Box, which cannot be masked."""
    match action_space:
        case spaces.Discrete():
            return (int(action_space.n),)
        case spaces.MultiDiscrete():
            return tuple(int(n) for n in action_space.nvec.ravel())
        case spaces.MultiBinary():
            return (2,) * int(np.prod(action_space.shape))
        case _:
            return ()
