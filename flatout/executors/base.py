"""The executor protocol: a set of envs that take actions and return steps; the registry and the factory.

`send` and `recv` are the primitives; `step` is derived from them. Autoreset is SAME_STEP: where an episode ended, `obs`
is the first observation of the next episode and `final_obs` the last one of the episode that ended.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import Any, Protocol, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np

from flatout.envs.loader import load_object
from flatout.envs.spaces import ActionLayout, Array, ObsArrays, ObsLayout
from flatout.errors import EnvError, FlatoutError, did_you_mean

T = TypeVar("T")
EnvCall: TypeAlias = Callable[[gym.Env[Any, Any]], T]
Seeds: TypeAlias = Sequence[int | None]
Options: TypeAlias = Sequence[dict[str, Any] | None] | None
EnvIndices: TypeAlias = Sequence[int] | None
"""None: all envs."""

NOT_IN_ENV = -1
"""Instead of an env index: no env is being called."""

EXECUTORS = {
    "serial": "flatout.executors.serial:SerialExecutor",
    "process": "flatout.executors.process:ProcessExecutor",
    "thread": "flatout.executors.waiting:ThreadExecutor",
    "async": "flatout.executors.waiting:CoroutineExecutor",
    "batched": "flatout.executors.tensors:batched_executor",
}
"""Name → `module:NAME` of a class or function that is called with an EnvSet and options and returns an Executor."""


class RestartBudget:
    """At most `max_restarts` restarts of envs or workers within `window_seconds`; one more ends the run."""

    def __init__(self, max_restarts: int = 10, window_seconds: float = 60.0) -> None:
        self._max_restarts, self._window_seconds = max_restarts, window_seconds
        self._times: deque[float] = deque()
        self.n_restarts = 0
        self.notes: list[str] = []
        """What happened, one line each, where nobody listens."""
        self.tracebacks: list[str] = []
        """For each note the traceback of the env's error, or an empty string."""
        self.listener: Callable[[str, str], None] | None = None
        """Called at once, in whatever thread, with each note and its traceback."""

    def spend(self, reason: str, traceback_text: str = "") -> None:
        """Count one restart, with its one-line reason; raises EnvError when there were too many."""
        now = perf_counter()
        self._times.append(now)
        while self._times[0] < now - self._window_seconds:
            self._times.popleft()
        is_last = len(self._times) > self._max_restarts
        if self.listener is not None:
            follows = "too many restarts" if is_last else "rebuilt, going on"
            self.listener(f"{reason}; {follows}", traceback_text)
        if is_last:
            window = self._window_seconds
            within = f" within {window:.0f} s" if math.isfinite(window) else ""
            raise EnvError(f"gave up after {self._max_restarts} restarts{within}; the last: {reason}")
        self.n_restarts += 1
        if self.listener is None:
            self.notes.append(reason)
            self.tracebacks.append(traceback_text)

    def renew(self) -> None:
        """Allow as many restarts again, because the envs are made again."""
        self._times.clear()


@dataclass(frozen=True, slots=True)
class EnvSet:
    """The envs that an executor runs."""

    factory: Callable[[], gym.Env[Any, Any]]
    """Makes one env. An `EnvFactory`, except in tests."""
    obs: ObsLayout
    env_ids: Array
    """The envs' numbers in the whole run; seeds and random streams depend on them, not on the executor."""
    seed: int
    _: KW_ONLY
    action: ActionLayout | None = None
    """Needed by executors that allocate memory for actions."""
    replayable: bool = True
    """Whether actions are logged, so that `restore` can replay each env; if not, callers may choose seeds. Envs that
    wait are never replayed, because they depend on the outside world."""
    infos: bool = False
    """Whether `infos` and `final_infos` are needed."""
    budget: RestartBudget | None = None
    """How often envs may be replaced. None: the serial executor raises, others have a budget of their own."""
    out: Step | None = None
    """Arrays to write to, such as shared memory; None: new ones."""
    at: Array | None = None
    """Where the serial executor tells, in shared memory, which env it calls, or NOT_IN_ENV, and in which step."""


@dataclass(slots=True)
class Step:
    """What `recv` returns: arrays with a row per env, of which those of `env_indices` are new.

    The arrays belong to the executor; a row is valid until its env is sent the next action.
    """

    env_indices: Array
    """Which envs took a step, as indices into the arrays."""
    obs: ObsArrays
    reward: Array
    terminated: Array
    truncated: Array
    final_obs: ObsArrays
    """Written only where an episode ended."""
    ended: list[Episode] = field(default_factory=list)
    """The episodes that ended in this step."""
    restarted: list[int] = field(default_factory=list)
    """Indices (also in `env_indices`) of envs that were lost during the step and replaced: the step did not happen,
    the episode ends before it, and `obs` is the first observation of a new episode."""

    def begin(self, env_indices: Array | list[int] | slice = slice(None)) -> Step:
        """The state of all envs after a reset of these: no reward, and no episode has ended."""
        for array in (self.reward, self.terminated, self.truncated):
            array[env_indices] = 0
        self.env_indices, self.ended, self.restarted = np.arange(len(self.reward)), [], []
        return self


def alloc_step(layout: ObsLayout, n_envs: int) -> Step:
    """A Step for `n_envs` envs, in ordinary memory."""
    return Step(
        env_indices=np.arange(n_envs),
        obs=layout.alloc(n_envs),
        reward=np.zeros(n_envs),
        terminated=np.zeros(n_envs, np.bool_),
        truncated=np.zeros(n_envs, np.bool_),
        final_obs=layout.alloc(n_envs),
    )


@dataclass(frozen=True, slots=True)
class Episode:
    """Statistics of one finished episode."""

    env_id: int
    """The env's number in the whole run, not its index in one executor."""
    total_reward: float
    length: int


class Executor(Protocol):
    """Steps a set of envs. Subclasses must have `reset`, `send`, `recv` and `current`; the rest has defaults."""

    n_envs: int
    env_ids: Array
    """The envs' numbers in the whole run."""
    current: Step
    """The current state of all envs, as the last `reset`, `recv` or `restore` left it."""
    steps_together: bool = False
    """Whether every `send` must name all envs, because they cannot be stepped apart."""
    waits: bool = False
    """Whether `recv` may return some envs while others still step, each of which can be sent on at once."""
    infos: Sequence[dict[str, Any]] = ()
    """The info of each env's last step, or of its last reset where an episode has just begun."""
    final_infos: Mapping[int, dict[str, Any]] = {}  # nobody writes to it
    """By env index, the info of the last step of an episode that has ended, until the env is sent an action."""
    notes: Sequence[str] = ()
    """One line for each env or worker that was lost and replaced."""

    def reset(self) -> Step:
        """Begin a new episode in every env; rewards are zero."""

    def send(self, actions: Array, env_indices: Array) -> None:
        """Send actions, in the env's own units, to these envs."""

    def recv(self) -> Step:
        """Wait for envs to finish their step."""

    def mark(self) -> None:
        """Remember the current state as the one that `snapshot` describes."""
        return

    def snapshot(self) -> dict[str, Array]:
        """What `restore` needs to bring every env back to the last mark; empty: it begins new episodes."""
        return {}

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:  # noqa: ARG002
        """Bring the envs back to a snapshot; returns the indices of those that began a new episode instead."""
        self.reset()
        return list(range(self.n_envs))

    def reset_envs(self, seeds: Seeds, options: Options = None, env_indices: EnvIndices = None) -> Step:
        """Begin new episodes in these envs, or in all, with the caller's seeds (None: unseeded) and options."""
        if env_indices is not None or any(seed is not None for seed in seeds) or any(options or ()):
            raise FlatoutError(f"{type(self).__name__} has no reset_envs: it resets all envs, without seeds")
        return self.reset()

    def apply(self, function: EnvCall[T], env_indices: Iterable[int] | None = None) -> list[T]:  # noqa: ARG002
        """What `function` returns for each of these envs, or of all, called where the env lives."""
        raise FlatoutError(f"{type(self).__name__} has no apply: attributes of its envs cannot be reached")

    def close(self) -> None:
        """Close every env; never raises for an env's own failure."""
        return


def check_kind(kind: str, flag: str = "executor", known: Sequence[str] = tuple(EXECUTORS)) -> None:
    """Raise unless this is a known kind or has the form FILE.py:NAME; nothing is loaded."""
    if kind not in known and ":" not in kind:
        names = f"{', '.join(known)} or FILE.py:NAME"
        raise FlatoutError(f"{flag} is '{kind}'; it must be one of {names}{did_you_mean(kind, known)}")


def executor_class(kind: str) -> Callable[..., Executor]:
    """What makes executors of this kind."""
    check_kind(kind)
    if kind in EXECUTORS:
        module, _, name = EXECUTORS[kind].partition(":")
        found: Callable[..., Executor] = getattr(import_module(module), name)
    else:
        found = load_object(kind, "executor")
    return found


def option_names(kind: str) -> list[str]:
    """Keyword arguments that executors of this kind take."""
    maker = executor_class(kind)
    fixed = maker.keywords if isinstance(maker, partial) else {}
    parameters = inspect.signature(maker).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in fixed]


def make_executor(
    kind: str, envs: EnvSet, *, n_workers: int = 0, step_timeout: float = 0.0, **options: Any
) -> Executor:
    """An executor over these envs; `n_workers` and `step_timeout` are passed to the kinds that take them."""
    names = option_names(kind)
    given = {"n_workers": n_workers, "step_timeout": step_timeout}
    options |= {name: value for name, value in given.items() if value and name in names}
    return executor_class(kind)(envs, **options)


def step(executor: Executor, actions: Array) -> Step:
    """Send and receive: one step of all envs, however many `recv`s that takes."""
    n_envs = executor.n_envs
    executor.send(actions, np.arange(n_envs))
    now = executor.recv()
    if len(now.env_indices) == n_envs and not executor.waits:  # envs that wait are in order of arrival
        return now
    n_seen, ended, restarted = len(now.env_indices), list(now.ended), list(now.restarted)
    while n_seen < n_envs:
        now = executor.recv()
        n_seen += len(now.env_indices)
        ended += now.ended
        restarted += now.restarted
    ended.sort(key=lambda episode: episode.env_id)
    return replace(now, env_indices=np.arange(n_envs), ended=ended, restarted=restarted)
