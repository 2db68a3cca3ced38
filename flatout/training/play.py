"""An agent at play: envs that are rendered, step by step, with what the agent thought of its actions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from flatout.envs.libraries import follow_robot
from flatout.envs.make import EnvFactory
from flatout.envs.wrappers import run_blocking
from flatout.errors import FlatoutError, one_line
from flatout.models.heads import CategoricalHead, GreedyHead, masked
from flatout.models.policy import ActorCritic, Policy
from flatout.views.figures import number
from flatout.views.film import Shot

FPS = 10.0
"""Of envs that do not say: slow enough for the eye to follow each step."""
CUT = "cut here"
"""Why an episode is over that would have gone on."""
Predict = Callable[..., tuple[Any, Any]]


@dataclass
class Player:
    """Plays one episode in one env."""

    env: gym.Env[Any, Any]
    policy: Policy
    predict: Predict
    deterministic: bool
    shows: bool = False
    """Whether the env draws in a window of its own."""
    every: int = 1
    """Only every so many steps, and the last, are rendered."""
    reward_scale: float | None = 1.0
    """What values are multiplied by to be returns of the env; None: they cannot be told."""

    def episode(self, seed: int, max_steps: int) -> Iterator[Shot]:
        """The env after its reset and after every step."""
        obs, _ = self.env.reset(seed=seed)
        state: Any = None
        total, over = 0.0, ""
        yield self._shot(0, total)
        for step in range(1, max_steps + 1):
            thoughts = self._thoughts(obs)
            action, state = self.predict(obs, state, np.array([step == 1]), deterministic=self.deterministic)
            obs, reward, terminated, truncated, _ = self.env.step(action)
            total += float(reward)
            over = "terminated" if terminated else "truncated" if truncated else ""
            over = over or (CUT if step == max_steps else "")
            thoughts |= self._taken(action)
            yield self._shot(step, total, over=over, **thoughts)
            if over:
                return

    def _shot(self, step: int, total: float, **more: Any) -> Shot:
        is_skipped = step % self.every > 0 and not more.get("over")
        try:
            image: Any = self.env.render() if not self.shows and not is_skipped else ""
        except NotImplementedError:
            raise FlatoutError(
                "this env has no render(); write one that returns an RGB image or a text"
            ) from None
        except Exception as error:
            raise FlatoutError(f"this env could not be rendered: {one_line(error)}{_gl_hint()}") from error
        if isinstance(image, list):  # modes such as rgb_array_list
            image = image[-1]
        if image is None:
            raise FlatoutError("this env rendered nothing; its render() must return an image or a text")
        return Shot(
            image=image if isinstance(image, str) else _rgb(image), step=step, total_reward=total, **more
        )

    def _taken(self, action: Any) -> dict[str, Any]:
        """Which bars are those of the action; of a bounded continuous action, the bars themselves."""
        space, nvec = self.policy.action.space, self.policy.action.nvec
        if isinstance(space, gym.spaces.Box):
            low, high = (np.ravel(bound).astype(float) for bound in (space.low, space.high))
            known = np.isfinite(high - low).all() and (high > low).all()
            ends = {"shares": np.ravel(action), "zeros": np.clip(0, low, high)}
            return {key: ((it - low) / (high - low)).tolist() for key, it in ends.items()} if known else {}
        parts = (np.ravel(action) - np.ravel(getattr(space, "start", 0))).tolist()
        offsets = [sum(nvec[:nth]) for nth in range(len(nvec))]
        return {"chosen": tuple(offset + int(part) for offset, part in zip(offsets, parts, strict=False))}

    @torch.inference_mode()
    def _thoughts(self, obs: Any) -> dict[str, Any]:
        """Probabilities or values of discrete actions, and the return that the agent expects."""
        model, policy = self.policy.model, self.policy
        if model.state_size or (policy.obs.mask_index is not None and not isinstance(obs, dict)):
            return {}
        tensors = tuple(torch.from_numpy(x).to(policy.device) for x in policy.obs.batch(obs)[0])
        thoughts: dict[str, Any] = {}
        expected: float | None = None
        if isinstance(model, ActorCritic):
            expected = float(model.value(tensors))
        if isinstance(model.head, CategoricalHead):
            parts = masked(model.policy(tensors), model.mask(tensors))[0].split(policy.action.nvec)
            thoughts["shares"] = torch.cat([part.softmax(-1) for part in parts]).tolist()
        elif isinstance(model.head, GreedyHead):
            values = model(tensors)[0]
            low, high = float(values.min()), float(values.max())
            expected = high
            thoughts["shares"] = ((values - low) / max(high - low, 1e-9)).mul(0.9).add(0.1).tolist()
        if expected is not None and self.reward_scale is not None:
            thoughts["note"] = f"expects {number(expected * self.reward_scale)}"
        return thoughts


def _rgb(image: Any) -> npt.NDArray[np.uint8]:
    """A rendered image as RGB; one without colours has its grey in all three."""
    array = np.asarray(image)
    pixels = array[..., None] if array.ndim == 2 else array
    if array.dtype.kind not in "iu" or pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4):
        raise FlatoutError(
            f"this env's render() returned {array.dtype} of shape {array.shape}; it must return an RGB image, uint8 of "
            "shape (height, width, 3), or a text"
        )
    return np.broadcast_to(pixels[..., :3], (*pixels.shape[:2], 3)).astype(np.uint8)


def played(player: Player, seed: int, max_steps: int) -> Iterator[Shot]:
    """One episode, after which the env is closed."""
    try:
        yield from player.episode(seed, max_steps)
    finally:
        _close(player.env)


def rendered(factory: EnvFactory, modes: tuple[str, ...]) -> tuple[gym.Env[Any, Any], float]:
    """An env that renders in the first of these modes that it has, and its frames per second."""
    if factory.is_instance:
        raise FlatoutError("the env was given as an object; give what makes it, to render it")
    plain = _made(factory, None)
    known = [str(mode) for mode in plain.metadata.get("render_modes") or ()]
    fps = plain.metadata.get("render_fps") or FPS
    mode = next((mode for mode in modes if mode in known), None)
    if mode is None:
        if plain.render_mode in modes:  # made with its mode by the user's own function
            return plain, float(fps)
        _close(plain)
        returned = {
            "rgb_array": ", and return an RGB image from render()",
            "ansi": ", and return a text from render()",
        }
        raise FlatoutError(
            f"env '{factory.name}' cannot be rendered: its metadata['render_modes'] has no {' or '.join(modes)}; name "
            f"{modes[0]} there, take render_mode in __init__{returned.get(modes[0], '')}; the agent need not be trained again"
        )
    _close(plain)
    try:
        return _made(factory, mode), float(fps)
    except TypeError as error:
        raise FlatoutError(
            f"env '{factory.name}' cannot be made with render_mode='{mode}' ({error}); let what makes it take render_mode"
        ) from None


def _made(factory: EnvFactory, mode: str | None) -> gym.Env[Any, Any]:
    """An env of the factory; an async one blocks."""
    env = factory(mode)
    follow_robot(env)
    return run_blocking(lambda: env, env) if _is_async(env) else env


def _is_async(env: gym.Env[Any, Any]) -> bool:
    return inspect.iscoroutinefunction(env.unwrapped.reset)


def together(episodes: list[Iterator[Shot]]) -> Iterator[list[Shot]]:
    """The shots of several episodes side by side; one that is over stays as it was."""
    now: list[Shot] = [next(it) for it in episodes]
    yield now
    while True:
        after = [next(it, None) if not shot.over else None for it, shot in zip(episodes, now, strict=True)]
        if not any(after):
            return
        now = [new or old for new, old in zip(after, now, strict=True)]
        yield now


def _gl_hint() -> str:
    """What helps where MuJoCo finds no OpenGL."""
    if "mujoco" not in sys.modules:
        return ""
    return "; MuJoCo draws with MUJOCO_GL=egl (needs libegl1) or MUJOCO_GL=osmesa (needs libosmesa6)"


def _close(env: gym.Env[Any, Any]) -> None:
    with suppress(Exception):
        env.close()
