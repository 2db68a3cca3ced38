"""One env's life behind a waiting executor: made, begun, stepped with autoreset, closed.

The same coroutine serves both kinds: on an event loop it awaits its orders and its env; in a thread it blocks in
them, never suspends, and so runs from start to end by being sent once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from time import perf_counter
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import gymnasium as gym

from flatout.envs.spaces import ObsArrays, ObsLayout
from flatout.envs.wrappers import is_async
from flatout.errors import EnvError, FlatoutError, one_line

Doing = Literal["constructor", "reset", "step"]


class Begin(NamedTuple):
    """Order: begin a seeded episode and, to come back to a moment, walk through actions."""

    seed: int | None
    actions: Iterable[Any] = ()
    give_up_at: float = math.inf
    options: dict[str, Any] | None = None


class Act(NamedTuple):
    """Order: take one step."""

    action: Any
    reseed: int | None
    """The seed of the next episode if this step ends one; None goes on with the env's own randomness."""


class Apply(NamedTuple):
    """Order: call a function with the env, where the env lives, and answer through `result`."""

    function: Callable[[gym.Env[Any, Any]], Any]
    result: Future[Any]


Order: TypeAlias = Begin | Act | Apply


class Outcome(NamedTuple):
    """What came of an order, or of making the env."""

    row: int
    generation: int
    """Counts the envs that this row has had: what an env that was given up still reports is known by it."""
    done: Doing
    obs: Any = None
    """The env's own object; None after `constructor`, and after a walk that was given up."""
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False
    final_obs: ObsArrays | None = None
    """A copy, made before the reset, with one row."""
    seconds: float = 0.0
    error: BaseException | None = None
    """Why the env's life has ended; it was `done` at the time."""
    info: dict[str, Any] | None = None
    """What the observation came with."""
    final_info: dict[str, Any] | None = None
    """What `final_obs` came with."""


class Worker(Protocol):
    """Where one env lives, a thread or a task."""

    row: int
    generation: int

    async def next_order(self) -> Order | None:
        """Wait for the next order; None is the end."""
        ...


class Life:
    """What the envs of one executor have in common, and the coroutine each of them is."""

    def __init__(
        self,
        factory: Callable[[], gym.Env[Any, Any]],
        layout: ObsLayout,
        report: Callable[[Outcome], None],
        *,
        awaits: bool,
    ) -> None:
        self._factory, self._layout, self._report, self._awaits = factory, layout, report, awaits

    async def live(self, worker: Worker) -> None:
        """Make an env and obey the worker's orders until the last; whatever the env raises is reported."""
        row, generation = worker.row, worker.generation
        doing: Doing = "constructor"
        env: gym.Env[Any, Any] | None = None
        try:
            env = self._make()
            self._report(Outcome(row, generation, doing))
            while (order := await worker.next_order()) is not None:
                if isinstance(order, Apply):
                    await self._apply(env, order)
                    continue
                if isinstance(order, Begin):
                    doing = "reset"
                    obs, info = await self._begin(env, order)
                    self._report(Outcome(row, generation, doing, obs, info=info))
                    continue
                doing = "step"
                started = perf_counter()
                result = env.step(order.action)
                obs, reward, terminated, truncated, info = await result if self._awaits else result  # type: ignore[misc]
                final_obs = final_info = None
                if terminated or truncated:
                    final_obs, final_info, doing = self._copy(obs), info, "reset"
                    obs, info = await self._reset(env, order.reseed)
                seconds = perf_counter() - started
                flags = reward, terminated, truncated
                self._report(
                    Outcome(row, generation, "step", obs, *flags, final_obs, seconds, None, info, final_info)
                )
        except BaseException as error:
            self._report(Outcome(row, generation, doing, error=error))
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
        self, env: gym.Env[Any, Any], seed: int | None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        result = env.reset(seed=seed, options=options) if options else env.reset(seed=seed)
        return await result if self._awaits else result  # type: ignore[misc]

    async def _begin(self, env: gym.Env[Any, Any], order: Begin) -> tuple[Any, dict[str, Any]]:
        """What the env gave after the order's reset and actions; no observation when that took too long."""
        obs, info = await self._reset(env, order.seed, order.options)
        for action in order.actions:
            if perf_counter() > order.give_up_at:
                return None, {}
            result = env.step(action)
            obs, _, terminated, truncated, info = await result if self._awaits else result  # type: ignore[misc]
            if terminated or truncated:
                obs, info = await self._reset(env, None)
        return obs, info

    async def _apply(self, env: gym.Env[Any, Any], order: Apply) -> None:
        """Answer the order; what the function raises is the caller's, and the env lives on."""
        try:
            value = order.function(env)
            order.result.set_result(await value if self._awaits and inspect.isawaitable(value) else value)
        except BaseException as error:
            order.result.set_exception(error)
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
        with suppress(Exception):  # an env that fails to close has lived all the same
            closing: Any = env.close()  # type: ignore[func-returns-value]  # an async one does
            if closing is not None and self._awaits:
                await closing
