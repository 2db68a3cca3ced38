"""Tries an env out in a process of its own, which it may end or block without harm to this one. Loads no torch.

Envs of Gymnasium and of flatout are tried in this process, where that takes no time to start. So are those that cannot
be sent to another one or that raise there, since an env may need something that only this process has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, TypeAlias

import cloudpickle
import gymnasium as gym
import numpy as np

from flatout.device.shared import SharedArrays
from flatout.envs.check import EnvInfo, check
from flatout.envs.make import EnvFactory, blocking
from flatout.envs.spaces import ActionLayout, Array
from flatout.errors import EnvError, one_line
from flatout.executors.workers import DONE, POLL_SECONDS, ChildProcess
from flatout.perf.costs import Costs
from flatout.perf.probe import time_steps

MAX_PAYLOAD = 100_000_000
"""Bytes; an env that takes more to send is tried in this process."""
START_SECONDS = 60.0
"""How long the process may at least take to start, to import the env's code, and to make an env."""
PLACES = ("when its code was imported", "in its constructor", "in reset", "in step {}", "in close")
"""Where an env is, by the number that its process tells."""

Make: TypeAlias = Callable[[Callable[[], gym.Env[Any, Any]]], Any]
Work: TypeAlias = Callable[[EnvFactory, Make], Iterator[Any]]
"""Something to do with an env, in steps; it makes envs with the function that it is given."""


def try_out(
    factory: EnvFactory, *, seed: int, n_envs: int, timeout: float, timed: bool = False
) -> tuple[EnvInfo, Costs | None]:
    """Check an env and, if `timed`, time its steps, unless it is batched or async; raises EnvError if the check fails.

    `timeout`: seconds that one reset or step may take.
    """
    results, fault = tried(factory, partial(_check_and_time, seed=seed, n_envs=n_envs, timed=timed), timeout)
    info: EnvInfo = results[0]
    info = replace(info, factory=replace(factory, mask_in_info=info.factory.mask_in_info))
    return info, results[1] if len(results) > 1 else unknown_costs(fault) if fault else None


def try_steps(factory: EnvFactory, action: ActionLayout, *, timeout: float, **limits: Any) -> Costs:
    """Time an env's steps; `limits` are those of `time_steps`. Never raises: a failure is the costs' `fault`."""
    try:
        results, _ = tried(factory, partial(_time, action=action, **limits), timeout)
        costs: Costs = results[0]
        return costs
    except Exception as error:
        return unknown_costs(one_line(error))


def tried(factory: EnvFactory, work: Work, timeout: float, *, isolated: bool = True) -> tuple[list[Any], str]:
    """What `work` yields, and one line about what kept it from yielding more; raises if it yields nothing."""
    if isolated and not factory.is_built_in and not factory.is_instance:
        outcome = _in_child(factory, work, timeout)
        if outcome is not None:
            return outcome
    results: list[Any] = []
    try:
        results.extend(work(factory, blocking))
    except Exception as error:
        if not results:
            raise
        return results, one_line(error)
    return results, ""


def _check_and_time(factory: EnvFactory, make: Make, *, seed: int, n_envs: int, timed: bool) -> Iterator[Any]:
    info = check(factory, n_envs=n_envs, seed=seed, make=make)
    yield replace(info, factory=EnvFactory(name="", source="", mask_in_info=info.factory.mask_in_info))
    if timed and not info.batched and not info.is_async:
        yield time_steps(info.factory, ActionLayout(info.action_space), seed=seed, make=make)


def _time(factory: EnvFactory, make: Make, *, action: ActionLayout, **limits: Any) -> Iterator[Any]:
    yield time_steps(factory, action, make=make, **limits)


def unknown_costs(fault: str) -> Costs:
    """The costs of an env whose steps could not be timed, for this reason."""
    return Costs(wait=(0.0,), compute=(0.0,), fault=fault)


def _in_child(factory: EnvFactory, work: Work, timeout: float) -> tuple[list[Any], str] | None:
    """What `tried` returns, from a child process; None if the work has to be done in this one."""
    try:
        payload = cloudpickle.dumps((factory, work))
        if len(payload) > MAX_PAYLOAD:
            return None
        shared = SharedArrays({"at": ((3,), np.int64)})
        child = ChildProcess("trial", _trial_main, (payload,), (shared,), context=_context())
    except Exception:  # it cannot be pickled, or this process may not start others
        return None
    results: list[Any] = []
    try:
        while (answer := _next_answer(child, shared["at"], timeout)) != DONE:
            if answer[:1] != DONE:
                line = str(answer[1:], errors="replace").partition("\n")[0]
                return (results, line) if results else None
            results.append(cloudpickle.loads(answer[1:]))
    except EnvError as error:
        if results:
            return results, str(error)
        raise EnvError(f"{factory.name}: {error}") from None
    finally:
        child.kill()
    return results, ""


def _context() -> str:
    """A fork server, if one runs, forks in milliseconds; starting it takes longer than starting one interpreter."""
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    return "forkserver" if getattr(server, "_forkserver_pid", None) else "spawn"


def _next_answer(child: ChildProcess, at: Array, timeout: float) -> bytes:
    """The child's next message; raises EnvError if it dies, or stays in one call for longer than `timeout` seconds."""
    seen, since, limit = -1, perf_counter(), START_SECONDS
    try:
        while not child.connection.poll(POLL_SECONDS):
            n_calls, place, step = at.tolist()
            if n_calls != seen:
                seen, since = n_calls, perf_counter()
                limit = timeout if place > 1 else max(timeout, START_SECONDS)
            elif perf_counter() - since > limit:
                raise EnvError(
                    f"gave no answer within {limit:g} s {PLACES[place].format(step)}, when it was tried before the "
                    "run; if that is its usual speed, raise --step-timeout"
                )
        answer: bytes = child.connection.recv_bytes()
        return answer
    except (EOFError, OSError):
        where = PLACES[at[1]].format(at[2])
        raise EnvError(
            f"its process was lost {where}, when it was tried before the run: {child.cause_of_death()}"
        ) from None


def _trial_main(connection: Connection, payload: bytes, shared: SharedArrays) -> None:
    """The child: does the work and sends each result."""
    try:
        factory, work = cloudpickle.loads(payload)
        factory.load()
        for result in work(factory, partial(_watched, shared["at"].data)):
            connection.send_bytes(DONE + cloudpickle.dumps(result))
    except Exception as error:
        raise EnvError(one_line(error)) from error
    connection.send_bytes(DONE)


def _watched(at: memoryview, make: Callable[[], gym.Env[Any, Any]]) -> Any:
    """A new env that writes into shared memory what it is about to do: the number of calls, the place, the step."""
    at[0], at[1], at[2] = at[0] + 1, 1, 0
    env = blocking(make)
    for place, name in enumerate(("reset", "step", "close"), 2):
        if hasattr(env, name):  # a batched env need not have close
            with suppress(AttributeError):  # __slots__
                setattr(env, name, _telling(at, place, getattr(env, name)))
    return env


def _telling(at: memoryview, place: int, method: Callable[..., Any]) -> Callable[..., Any]:
    n_calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        at[0], at[1], at[2] = at[0] + 1, place, n_calls
        return method(*args, **kwargs)

    return call
