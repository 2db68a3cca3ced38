"""Env wrappers: action masks from `info`, NEXT_STEP autoreset, a time limit for async envs, async envs as blocking ones.

Gymnasium's own wrappers unpack what `step` returns and so fail on a coroutine; the async ones here await it.
"""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from flatout.envs.spaces import MASK_KEY, logit_sizes
from flatout.errors import EnvError

CLOSE_SECONDS = 2.0
"""How long pending coroutines may take to end after they are cancelled."""

T = TypeVar("T")


class MaskFromInfo(gym.Wrapper[Any, Any, Any, Any]):
    """Moves `info["action_mask"]` into the observation, the only place where the rest of flatout looks for masks."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._n_logits = sum(logit_sizes(env.action_space))
        self.observation_space = spaces.Dict(
            {"obs": env.observation_space, MASK_KEY: spaces.MultiBinary(self._n_logits)}
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset; the observation is `{"obs": ..., "action_mask": ...}`. Awaitable if the env is async."""
        return self._with_mask(self.env.reset(seed=seed, options=options), "reset")

    def step(self, action: Any) -> Any:
        """Step; the observation is `{"obs": ..., "action_mask": ...}`. Awaitable if the env is async."""
        return self._with_mask(self.env.step(action), "step")

    def _with_mask(self, result: Any, call: str) -> Any:
        if inspect.isawaitable(result):
            return self._awaited(result, call)
        obs, *rest = result
        return ({"obs": obs, MASK_KEY: self._mask(rest[-1], call)}, *rest)

    async def _awaited(self, result: Any, call: str) -> Any:
        return self._with_mask(await result, call)

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


class NextStepReset(gym.Wrapper[Any, Any, Any, Any]):
    """NEXT_STEP autoreset in an executor, which resets an env as soon as its episode ends.

    That reset is put off: it returns the episode's last observation, and the next step resets instead of stepping.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._last: tuple[Any, dict[str, Any]] | None = None
        """Observation and info at the end of an episode, until the executor's reset."""
        self._is_due = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset, or put it off if the episode has just ended. Awaitable if the env is async."""
        last, self._last = self._last, None
        self._is_due = last is not None
        if last is None:
            return self.env.reset(seed=seed, options=options)
        return _at_once(last) if inspect.iscoroutinefunction(self.unwrapped.reset) else last

    def step(self, action: Any) -> Any:
        """Step, or reset if the step before ended an episode. Awaitable if the env is async."""
        is_reset, self._is_due = self._is_due, False
        return self._noted(self.env.reset() if is_reset else self.env.step(action), is_reset)

    def reset_at_next_step(self) -> None:
        """Reset at the next step, whatever happened before."""
        self._is_due = True

    def _noted(self, result: Any, is_reset: bool) -> Any:
        if inspect.isawaitable(result):
            return self._awaited(result, is_reset)
        if is_reset:
            obs, info = result
            return obs, 0.0, False, False, info
        obs, _, terminated, truncated, info = result
        if terminated or truncated:
            self._last = obs, info
        return result

    async def _awaited(self, result: Any, is_reset: bool) -> Any:
        return self._noted(await result, is_reset)


async def _at_once(value: T) -> T:
    return value


class KeptOpen(gym.Wrapper[Any, Any, Any, Any]):
    """An env that the user made and closes."""

    def close(self) -> None:
        """Nothing."""


class AsyncTimeLimit(gym.Wrapper[Any, Any, Any, Any]):
    """Truncates an async env's episodes after `max_episode_steps` steps."""

    def __init__(self, env: gym.Env[Any, Any], max_episode_steps: int) -> None:
        super().__init__(env)
        self._max_episode_steps = max_episode_steps
        self._elapsed_steps = 0

    async def reset(  # type: ignore[override]  # Gymnasium knows no async envs
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the env and its step counter."""
        self._elapsed_steps = 0
        return await self.env.reset(seed=seed, options=options)  # type: ignore[misc,no-any-return]

    async def step(  # type: ignore[override]
        self, action: Any
    ) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env; truncated after `max_episode_steps`."""
        obs, reward, terminated, truncated, info = await self.env.step(action)  # type: ignore[misc]
        self._elapsed_steps += 1
        return obs, reward, terminated, truncated or self._elapsed_steps >= self._max_episode_steps, info


class Blocking(gym.Wrapper[Any, Any, Any, Any]):
    """An async env with blocking methods: each call waits for the coroutine, which runs on the env's own event loop."""

    def __init__(self, env: gym.Env[Any, Any], loop_thread: LoopThread) -> None:
        super().__init__(env)
        self._loop_thread = loop_thread

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Wait for the env's reset."""
        return self._wait(lambda: self.env.reset(seed=seed, options=options))  # type: ignore[no-any-return]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Wait for the env's step."""
        return self._wait(lambda: self.env.step(action))  # type: ignore[no-any-return]

    def close(self) -> None:
        """Wait for the env's close, then end its event loop."""
        try:
            self._wait(self.env.close)
        finally:
            self._loop_thread.close()

    @property
    def unwrapped(self) -> gym.Env[Any, Any]:
        """Itself: callers must not reach the async env."""
        return self

    def _wait(self, call: Callable[[], Any]) -> Any:
        return self._loop_thread.run(_awaited(call))


def run_blocking(factory: Callable[[], gym.Env[Any, Any]], env: gym.Env[Any, Any] | None) -> Blocking:
    """The async env as a blocking one; without `env` the factory makes it on the event loop."""
    loop_thread = LoopThread("flatout-env-loop")
    try:
        return Blocking(env or loop_thread.run(_awaited(factory)), loop_thread)
    except BaseException:
        loop_thread.close()
        raise


async def _awaited(call: Callable[[], Any]) -> Any:
    result = call()
    return await result if inspect.isawaitable(result) else result


class LoopThread:
    """An event loop in a daemon thread; also works where a loop already runs, as in notebooks."""

    def __init__(self, name: str) -> None:
        import asyncio  # as late as here: with it every command begins noticeably later

        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result."""
        from asyncio import run_coroutine_threadsafe

        return run_coroutine_threadsafe(coroutine, self.loop).result()

    def blocked_at(self, seconds: float = 1.0) -> str | None:
        """`file.py:40` of the code that has blocked the loop for longer than this; None if the loop responds."""
        turned = threading.Event()
        self.loop.call_soon_threadsafe(turned.set)
        if turned.wait(seconds):
            return None
        frame = sys._current_frames().get(self._thread.ident or 0)
        if turned.is_set() or frame is None:
            return None
        last = traceback.extract_stack(frame)[-1]
        return f"{Path(last.filename).name}:{last.lineno}"

    def close(self) -> None:
        """Cancel pending coroutines, stop the loop and end its thread; gives up on a thread that does not end."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            # The thread itself waits CLOSE_SECONDS for what it has cancelled.
            self._thread.join(1.5 * CLOSE_SECONDS)

    def _run(self) -> None:
        import asyncio

        loop = self.loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                _, stubborn = loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_SECONDS))
                for task in stubborn:  # ignored its cancellation: suppress asyncio's warning
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
