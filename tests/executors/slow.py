"""Envs that wait, blocking and async, with the same behaviour, for the tests of both executors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv

from flatout.envs.spaces import ObsLayout
from flatout.executors.base import EnvSet, Episode
from flatout.executors.waiting import CoroutineExecutor, ThreadExecutor, WaitingExecutor

Make: TypeAlias = Callable[[], gym.Env[Any, Any]]
StepResult: TypeAlias = tuple[Any, Any, bool, bool, dict[str, Any]]

LAYOUT = ObsLayout(spaces.Box(0, 1000, (1,)))
PLAY_SECONDS = 20.0


class Script:
    """What the envs of one test do, by their number in order of making; shared between their threads."""

    def __init__(
        self,
        *,
        seconds: tuple[float, float] = (0.0, 0.002),
        length: int = 5,
        on_make: Callable[[int], None] = lambda made: None,
        on_reset: Callable[[int], None] = lambda made: None,
        on_step: Callable[[int, int], Any] = lambda made, t: None,
    ) -> None:
        self.seconds, self.length = seconds, length
        self.on_make, self.on_reset, self.on_step = on_make, on_reset, on_step
        self.lock = threading.Lock()
        self.seeds: list[int | None] = []
        self.made: list[Counter] = []
        self.n_closed = 0


class Counter(gym.Env[Any, Any]):
    """Observes its own step number, reuses one observation buffer, and waits a random time in each step.

    `on_step` may raise, return the seconds to wait, or the whole tuple that the step then returns.
    """

    observation_space = spaces.Box(0, 1000, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, script: Script) -> None:
        self.script = script
        with script.lock:
            self.number = len(script.made)
            script.made.append(self)
        script.on_make(self.number)
        self.rng = np.random.default_rng(self.number)
        self.buffer = np.zeros(1, np.float32)
        self.n_steps = 0
        self.action: Any = None
        self.home = threading.get_ident()

    def begin(self, seed: int | None) -> tuple[Any, dict[str, Any]]:
        with self.script.lock:
            self.script.seeds.append(seed)
        self.script.on_reset(self.number)
        self.buffer[0] = 0
        return self.buffer, {}

    def wait_for(self) -> tuple[float, Any]:
        """How long this step waits, and its result if that is not the usual one."""
        self.n_steps += 1
        assert threading.get_ident() == self.home, "an env lives in one thread"
        odd = self.script.on_step(self.number, self.n_steps)
        return (odd, None) if isinstance(odd, float) else (self.rng.uniform(*self.script.seconds), odd)

    def advance(self, odd: Any) -> StepResult:
        self.buffer[0] += 1
        end = bool(self.buffer[0] == self.script.length)
        result: StepResult = (
            self.buffer,
            2.0,
            end and self.number % 2 == 0,
            end and self.number % 2 == 1,
            {},
        )
        return odd if isinstance(odd, tuple) else result

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return self.begin(seed)

    def step(self, action: Any) -> StepResult:
        self.action = action
        seconds, odd = self.wait_for()
        time.sleep(seconds)
        return self.advance(odd)

    def close(self) -> None:
        with self.script.lock:
            self.script.n_closed += 1


class AsyncCounter(Counter):
    """The same with coroutines."""

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        await asyncio.sleep(0)
        return self.begin(seed)

    async def step(self, action: Any) -> StepResult:  # type: ignore[override]
        self.action = action
        seconds, odd = self.wait_for()
        await asyncio.sleep(seconds)
        return self.advance(odd)


class AsyncCartPole(CartPoleEnv):
    """CartPole with coroutines, without a time limit."""

    async def reset(self, **kwargs: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(**kwargs)

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(action)  # type: ignore[no-untyped-call]


class Kind:
    """One kind of executor with the envs that fit it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.executor = ThreadExecutor if name == "thread" else CoroutineExecutor
        self.counter = Counter if name == "thread" else AsyncCounter
        self.cart_pole: Make = CartPoleEnv if name == "thread" else AsyncCartPole
        self._open: list[WaitingExecutor] = []

    def make(
        self, factory: Make, n_envs: int, layout: ObsLayout = LAYOUT, **settings: Any
    ) -> WaitingExecutor:
        given = {name: settings.pop(name) for name in ("budget",) if name in settings}
        made = self.executor(EnvSet(factory, layout, np.arange(n_envs), 5, **given), **settings)
        self._open.append(made)
        return made

    def counters(self, script: Script, n_envs: int, **settings: Any) -> WaitingExecutor:
        """An executor of counters, begun."""
        envs = self.make(lambda: self.counter(script), n_envs, **settings)
        envs.reset()
        return envs

    def close(self) -> None:
        for executor in self._open:
            executor.close()


class Seen:
    """What each env did, in its own order."""

    def __init__(self, n_envs: int) -> None:
        self.obs: list[list[Any]] = [[] for _ in range(n_envs)]
        self.rewards: list[list[float]] = [[] for _ in range(n_envs)]
        self.flags: list[list[tuple[bool, bool]]] = [[] for _ in range(n_envs)]
        self.finals: list[list[Any]] = [[] for _ in range(n_envs)]
        self.ended: list[list[Episode]] = [[] for _ in range(n_envs)]
        self.restarted: list[int] = []
        self.batches: list[int] = []


def play(envs: Any, n_steps: int, actions: Callable[[int, int], Any] = lambda i, t: 0) -> Seen:
    """Take `n_steps` steps of every env, each as soon as it is ready, with its given actions."""
    seen, taken = Seen(envs.n_envs), [0] * envs.n_envs
    deadline = time.perf_counter() + PLAY_SECONDS
    envs.send(np.array([actions(i, 0) for i in range(envs.n_envs)]), np.arange(envs.n_envs))
    while min(taken) < n_steps:
        now = envs.recv()
        assert time.perf_counter() < deadline, f"taken so far: {taken}"
        seen.batches.append(len(now.env_indices))
        seen.restarted += now.restarted
        for episode in now.ended:
            seen.ended[episode.env_id].append(episode)
        for i in now.env_indices.tolist():
            taken[i] += i not in now.restarted
            seen.obs[i].append(now.obs[0][i].tolist())
            seen.rewards[i].append(float(now.reward[i]))
            seen.flags[i].append((bool(now.terminated[i]), bool(now.truncated[i])))
            if now.terminated[i] or now.truncated[i]:
                seen.finals[i].append(now.final_obs[0][i].tolist())
        again = np.array([i for i in now.env_indices.tolist() if taken[i] < n_steps], np.int64)
        if len(again):
            envs.send(np.array([actions(i, taken[i]) for i in again.tolist()]), again)
    return seen
