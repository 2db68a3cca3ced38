"""Envs with `async def reset` and `async def step`: told apart, limited in time, and made to block.

Gymnasium's own wrappers unpack what `step` returns and so break on a coroutine; those here await it.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import gymnasium as gym

CLOSE_SECONDS = 2.0
"""How long whatever still runs may take to end when it is closed."""

T = TypeVar("T")


def is_async(env: gym.Env[Any, Any]) -> bool:
    """Whether the env, under its wrappers, has `async def reset` and `async def step`."""
    bare = getattr(env, "unwrapped", env)  # envs that step N at once as tensors have no wrappers
    return inspect.iscoroutinefunction(bare.reset) and inspect.iscoroutinefunction(bare.step)


class AsyncTimeLimit(gym.Wrapper[Any, Any, Any, Any]):
    """Truncates an async env's episodes after `max_episode_steps` steps."""

    def __init__(self, env: gym.Env[Any, Any], max_episode_steps: int) -> None:
        super().__init__(env)
        self._max_episode_steps = max_episode_steps
        self._elapsed_steps = 0

    async def reset(  # type: ignore[override]  # Gymnasium knows no async envs
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """The env's own reset."""
        self._elapsed_steps = 0
        return await self.env.reset(seed=seed, options=options)  # type: ignore[misc,no-any-return]

    async def step(  # type: ignore[override]
        self, action: Any
    ) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """The env's own step, truncated when the time is up."""
        obs, reward, terminated, truncated, info = await self.env.step(action)  # type: ignore[misc]
        self._elapsed_steps += 1
        return obs, reward, terminated, truncated or self._elapsed_steps >= self._max_episode_steps, info


class Blocking(gym.Wrapper[Any, Any, Any, Any]):
    """An async env that anyone can step: each call waits for its coroutine, which runs on a loop of the env's own."""

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
        """Wait for the env's close, then end its loop."""
        try:
            self._wait(self.env.close)
        finally:
            self._loop_thread.close()

    @property
    def unwrapped(self) -> gym.Env[Any, Any]:
        """Itself: to those outside there is no async env underneath."""
        return self

    def _wait(self, call: Callable[[], Any]) -> Any:
        return self._loop_thread.run(_awaited(call))


def blocking(factory: Callable[[], gym.Env[Any, Any]]) -> gym.Env[Any, Any]:
    """The factory's env; where it is async, one that waits."""
    try:
        env = factory()
        if not is_async(env):
            return env
        made = env
    except Exception as error:
        if "no running event loop" not in str(error):  # as clients say that are opened in a constructor
            raise
        made = None
    loop_thread = LoopThread("flatout-env-loop")
    try:
        return Blocking(made or loop_thread.run(_awaited(factory)), loop_thread)
    except BaseException:
        loop_thread.close()
        raise


async def _awaited(call: Callable[[], Any]) -> Any:
    result = call()
    return await result if inspect.isawaitable(result) else result


class LoopThread:
    """An event loop in a daemon thread of its own; also works where a loop already runs, as in notebooks."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def blocked_at(self, seconds: float = 1.0) -> str | None:
        """`file.py:40` where something keeps the loop from turning for longer than this, None while it turns."""
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
        """Cancel what is pending, stop the loop and end its thread; gives up on what does not let go."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            # The thread waits that long for what it has cancelled, then ends by itself.
            self._thread.join(1.5 * CLOSE_SECONDS)

    def _run(self) -> None:
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
                for task in stubborn:  # ignores being cancelled: nothing is left to do or to say about it
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
