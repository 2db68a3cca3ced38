"""One env of a waiting executor: it is made, reset, stepped with autoreset and closed in its own thread or task.

The same coroutine serves both. On an event loop it awaits its commands and its env. In a thread it blocks in them and
never suspends, so it runs from start to end when it is sent once.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias

import gymnasium as gym

from flatout.envs.make import is_async
from flatout.envs.spaces import Array, ObsArrays, ObsLayout
from flatout.envs.wrappers import CLOSE_SECONDS, LoopThread
from flatout.errors import EnvError, FlatoutError, one_line

Doing = Literal["constructor", "reset", "step"]


class Reset(NamedTuple):
    """Command: begin an episode; None: unseeded."""

    seed: int | None
    options: dict[str, Any] | None = None


class Act(NamedTuple):
    """Command: take one step."""

    action: Any


class Apply(NamedTuple):
    """Command: call a function with the env, where the env lives, and answer through `result`."""

    function: Callable[[gym.Env[Any, Any]], Any]
    result: Future[Any]


Command: TypeAlias = Reset | Act | Apply


class Outcome(NamedTuple):
    """The result of a command, or of making the env."""

    env_index: int
    generation: int
    """Counts the envs that this index has had, so that reports of an abandoned env are ignored."""
    done: Doing
    obs: Any = None
    """The env's own object; None after `constructor`."""
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False
    final_obs: ObsArrays | None = None
    """A copy, made before the reset, with one row."""
    seconds: float = 0.0
    error: BaseException | None = None
    """The exception that ended the worker while it was doing `done`."""
    info: dict[str, Any] | None = None
    final_info: dict[str, Any] | None = None


class EnvWorker:
    """What the envs of one executor have in common, and the coroutine that runs each of them."""

    def __init__(
        self,
        factory: Callable[[], gym.Env[Any, Any]],
        layout: ObsLayout,
        report: Callable[[Outcome], None],
        *,
        awaits: bool,
    ) -> None:
        self._factory, self._layout, self._report, self._awaits = factory, layout, report, awaits

    async def run(self, inbox: _ThreadInbox | _TaskInbox) -> None:
        """Make an env and obey commands until the last one; whatever the env raises is reported."""
        i, generation = inbox.env_index, inbox.generation
        doing: Doing = "constructor"
        env: gym.Env[Any, Any] | None = None
        try:
            env = self._make()
            self._report(Outcome(i, generation, doing))
            while (command := await inbox.next_command()) is not None:
                if isinstance(command, Apply):
                    await self._apply(env, command)
                    continue
                if isinstance(command, Reset):
                    doing = "reset"
                    obs, info = await self._reset(env, command.seed, command.options)
                    self._report(Outcome(i, generation, doing, obs, info=info))
                    continue
                doing = "step"
                started = perf_counter()
                result = env.step(command.action)
                obs, reward, terminated, truncated, info = await result if self._awaits else result  # type: ignore[misc]
                final_obs = final_info = None
                if terminated or truncated:
                    final_obs, final_info, doing = self._copy(obs), info, "reset"
                    obs, info = await self._reset(env)
                seconds = perf_counter() - started
                flags = reward, terminated, truncated
                self._report(
                    Outcome(i, generation, "step", obs, *flags, final_obs, seconds, None, info, final_info)
                )
        except BaseException as error:
            self._report(Outcome(i, generation, doing, error=error))
            if not isinstance(error, Exception | SystemExit):
                raise
        finally:
            if env is not None:
                await self._close(env)

    def _make(self) -> gym.Env[Any, Any]:
        env = self._factory()
        if is_async(env) != self._awaits:
            raise FlatoutError(
                "the env has async def reset and step; run it with executor 'async'"
                if is_async(env)
                else "the env has no async def reset and step; run it with executor 'thread'"
            )
        return env

    async def _reset(
        self, env: gym.Env[Any, Any], seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        result = env.reset(seed=seed, options=options) if options else env.reset(seed=seed)
        return await result if self._awaits else result  # type: ignore[misc]

    async def _apply(self, env: gym.Env[Any, Any], command: Apply) -> None:
        """Answer the command; the caller gets what the function raises, and the env lives on."""
        try:
            value = command.function(env)
            command.result.set_result(await value if self._awaits and inspect.isawaitable(value) else value)
        except BaseException as error:
            command.result.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def _copy(self, obs: Any) -> ObsArrays:
        copy = self._layout.alloc(1)
        try:
            self._layout.write(copy, 0, obs)
        except Exception as error:
            raise EnvError(one_line(error)) from error
        return copy

    async def _close(self, env: gym.Env[Any, Any]) -> None:
        with suppress(Exception):  # an env that fails to close is gone all the same
            closing: Any = env.close()  # type: ignore[func-returns-value]  # an async one returns a coroutine
            if closing is not None and self._awaits:
                await closing


class EnvThreads:
    """A thread for each env, for blocking envs that wait (requests, sleep, sockets).

    A thread that hangs cannot be ended. It is left behind as a daemon, and its reports are ignored.
    """

    awaits = False
    """Whether the envs have `async def reset` and `async def step`."""

    def __init__(self) -> None:
        self._inboxes: dict[int, _ThreadInbox] = {}
        self._threads: dict[int, threading.Thread] = {}

    def start(self, worker: EnvWorker, generations: Mapping[int, int], env_ids: Array) -> None:
        """Start a thread for each env index."""
        for i, generation in generations.items():
            inbox = self._inboxes[i] = _ThreadInbox(i, generation)
            name = f"flatout-env-{env_ids[i]}"
            thread = threading.Thread(target=_run_in_thread, args=(worker, inbox), name=name, daemon=True)
            self._threads[i] = thread
            thread.start()

    def send(self, commands: Mapping[int, Command]) -> None:
        """Send each env its command."""
        for i, command in commands.items():
            self._inboxes[i].commands.put(command)

    def abandon(self, env_index: int) -> None:
        """End the env's thread when it next looks for a command."""
        self._inboxes[env_index].commands.put(None)

    def close(self) -> None:
        """End all threads; one that hangs is left behind."""
        for inbox in self._inboxes.values():
            inbox.commands.put(None)
        deadline = perf_counter() + CLOSE_SECONDS
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - perf_counter()))
        self._threads.clear()
        self._inboxes.clear()

    def raise_if_blocked(self) -> None:
        """Nothing: threads do not block each other."""


class _ThreadInbox:
    def __init__(self, env_index: int, generation: int) -> None:
        self.env_index, self.generation = env_index, generation
        self.commands: SimpleQueue[Command | None] = SimpleQueue()

    async def next_command(self) -> Command | None:
        """Block until there is a command."""
        return self.commands.get()


def _run_in_thread(worker: EnvWorker, inbox: _ThreadInbox) -> None:
    with suppress(StopIteration):
        worker.run(inbox).send(None)


class EnvTasks:
    """A task for each env, all on one event loop, for async envs; thousands may be in flight.

    The loop has its own thread. Driving it inside `recv` was measured to be no faster; an env that blocks the loop
    could not be named then, and envs could not go on while the policy acts or learns.
    """

    awaits = True

    def __init__(self) -> None:
        self._loop_thread = LoopThread("flatout-loop")
        self._inboxes: dict[int, _TaskInbox] = {}

    def start(self, worker: EnvWorker, generations: Mapping[int, int], env_ids: Array) -> None:
        """Start a task for each env index."""
        loop = self._loop_thread.loop
        for i, generation in generations.items():
            inbox = self._inboxes[i] = _TaskInbox(i, generation, loop)
            loop.call_soon_threadsafe(inbox.start, f"env {env_ids[i]}", worker)

    def send(self, commands: Mapping[int, Command]) -> None:
        """Send each env its command; waking the loop is expensive, so it happens once."""
        pairs = [(self._inboxes[i], command) for i, command in commands.items()]
        self._loop_thread.loop.call_soon_threadsafe(_deliver, pairs)

    def abandon(self, env_index: int) -> None:
        """Cancel the env's task."""
        self._loop_thread.loop.call_soon_threadsafe(self._inboxes[env_index].cancel)

    def close(self) -> None:
        """Cancel all tasks and end the loop."""
        self._loop_thread.close()

    def raise_if_blocked(self) -> None:
        """Raise if an env blocks the loop, and with it all others."""
        place = self._loop_thread.blocked_at()
        if place is not None:
            task = asyncio.current_task(self._loop_thread.loop)
            raise EnvError(
                f"{task.get_name() if task else 'an env'} blocks all others at {place}: "
                "await there instead, or run it with executor 'thread'"
            )


class _TaskInbox:
    """One env's task and the command it awaits; used on the loop's thread."""

    def __init__(self, env_index: int, generation: int, loop: asyncio.AbstractEventLoop) -> None:
        self.env_index, self.generation = env_index, generation
        self._loop = loop
        self.command: asyncio.Future[Command] = loop.create_future()
        self._task: asyncio.Task[None] | None = None

    def start(self, name: str, worker: EnvWorker) -> None:
        """Start the task."""
        self._task = self._loop.create_task(worker.run(self), name=name)

    def cancel(self) -> None:
        """Cancel the task, also in the middle of a step."""
        assert self._task is not None
        self._task.cancel()

    async def next_command(self) -> Command:
        """Wait until there is a command."""
        command = await self.command
        self.command = self._loop.create_future()
        return command


def _deliver(pairs: list[tuple[_TaskInbox, Command]]) -> None:
    for inbox, command in pairs:
        inbox.command.set_result(command)


EnvWorkers: TypeAlias = EnvThreads | EnvTasks
"""The threads or tasks of one executor, one for each env."""
