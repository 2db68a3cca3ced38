"""Executors by name, for callers that step envs themselves: `make_vec` and the Stable-Baselines3 bridge.

They see what training drops: the space's own dtypes, the envs' infos, seeds of the caller's choice, the envs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Protocol, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from flatout.device.machine import usable_cores
from flatout.envs.check import validate_spaces
from flatout.envs.make import EnvFactory, EnvSource, env_factory
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.envs.wrappers import Blocking, blocking
from flatout.errors import EnvError, FlatoutError, did_you_mean, one_line
from flatout.executors.base import Executor, Kind, Step
from flatout.executors.coroutine import CoroutineExecutor
from flatout.executors.process import WORKERS_PER_CORE, ProcessExecutor
from flatout.executors.serial import SerialExecutor
from flatout.executors.supervise import RestartBudget
from flatout.executors.thread import ThreadExecutor
from flatout.executors.waiting import STEP_TIMEOUT

T = TypeVar("T")

FAULTS = ("step_timeout", "max_restarts", "window_seconds")
WAITING = ("infos", *FAULTS, "batch_size", "batch_seconds")
OPTIONS: dict[str, tuple[str, ...]] = {
    "auto": ("infos",),
    "serial": ("infos",),
    "process": ("infos", *FAULTS, "n_workers"),
    "thread": WAITING,
    "async": WAITING,
}
"""By kind, what can be set. `infos=False` spares worker processes the pickling of infos; others have none to do."""
KINDS = tuple(OPTIONS)
Rank: TypeAlias = Callable[[EnvFactory, gym.Space[Any], int, int], tuple[list[Kind], list[str]]]
"""Ranks the kinds of executor for an env, given its factory, action space, number and seed; with notes for the user."""


class OpenExecutor(Executor, Protocol):
    """An executor that also lets its user choose seeds, see the envs' infos and reach the envs."""

    infos: list[dict[str, Any]]
    """What each env's last step told, or its last reset where an episode has just begun."""
    final_infos: dict[int, dict[str, Any]]
    """By place, what the last step of each episode told that ended in it; until that env is sent an action."""

    @property
    def notes(self) -> list[str]:
        """One line for each env or worker that was lost and rebuilt."""
        ...

    def begin(
        self,
        seeds: Sequence[int | None],
        options: Sequence[dict[str, Any] | None] | None = None,
        rows: Sequence[int] | None = None,
    ) -> Step:
        """Begin new episodes, in the places named or in all, with the caller's seeds (None: none) and options."""
        ...

    def apply(self, function: Callable[[gym.Env[Any, Any]], T], rows: Iterable[int] | None = None) -> list[T]:
        """What `function` returns for each env, in the places named or in all."""
        ...


class ExactLayout(ObsLayout):
    """Observation arrays with the shapes and dtypes that the space declares, where training would convert them."""

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__(space)
        declared = [leaf.pick(space) for leaf in self.specs]
        self.specs = tuple(
            replace(leaf, shape=sub.shape, dtype=np.dtype(sub.dtype))
            for leaf, sub in zip(self.specs, declared, strict=True)
        )
        self.is_plain = len(self.specs) == 1 and not self.specs[0].path
        """Whether an observation is one array, not a structure of some."""

    def build(self, leaves: Iterable[Any]) -> Any:
        """The leaves in the structure of the space."""
        return next(iter(leaves)) if self.is_plain else _build(self.space, iter(leaves))


def _build(space: gym.Space[Any], leaves: Iterator[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _build(sub, leaves) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_build(sub, leaves) for sub in space.spaces)
    return next(leaves)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvs:
    """An executor and what its caller has to know about the envs."""

    executor: OpenExecutor
    layout: ExactLayout
    sample: gym.Env[Any, Any]
    """A closed env like the executor's, for its spaces and metadata."""
    kind: str
    """The executor's kind, never `auto`."""
    notes: list[str] = field(default_factory=list)
    """Why `auto` took this kind, and which ones could not start; one line each."""


def open_envs(
    env: EnvSource,
    n_envs: int,
    kind: str,
    seed: int,
    env_kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    rank: Rank,
) -> OpenEnvs:
    """`n_envs` copies of an env behind an executor of this kind; `options` are the kind's own, `rank` decides `auto`."""
    if n_envs < 1:
        raise FlatoutError(f"n_envs must be at least 1, got {n_envs}")
    _refuse_unknown(kind, options)
    factory = env_factory(env, env_kwargs)
    sample, awaits = _sample(factory)
    layout, action_space = ExactLayout(sample.observation_space), sample.action_space
    _refuse_unfit(kind, awaits)
    notes: list[str] = []
    ranked: Sequence[str] = [kind]
    if kind == "auto":
        ranked, notes = (["async"], []) if awaits else rank(factory, action_space, n_envs, seed)
    for this, following in zip_longest(ranked, ranked[1:]):
        try:
            executor = make_executor(
                this, factory, layout, n_envs, seed, action_space=action_space, **options
            )
            if kind == "auto":
                _await_start(executor)
            return OpenEnvs(executor=executor, layout=layout, sample=sample, kind=this, notes=notes)
        except Exception as error:
            if following is None:
                raise
            notes.append(f"executor {this} could not start ({one_line(error)}); using {following}")
    raise AssertionError("serial is always among them")


def make_executor(
    kind: str,
    factory: Callable[[], gym.Env[Any, Any]],
    layout: ObsLayout,
    n_envs: int,
    seed: int,
    *,
    action_space: gym.Space[Any],
    infos: bool = True,
    n_workers: int | None = None,
    step_timeout: float = STEP_TIMEOUT,
    max_restarts: int = 10,
    window_seconds: float = 60.0,
    **batching: Any,
) -> OpenExecutor:
    """The executor of this kind over `n_envs` envs, each option being for the kinds that have it."""
    ids = np.arange(n_envs)
    if kind == "serial":
        return SerialExecutor(factory, layout, ids, seed, replayable=False)
    budget = RestartBudget(max_restarts, window_seconds)
    if kind == "process":
        n_cores = usable_cores()
        return ProcessExecutor(
            factory,
            layout,
            ids,
            seed,
            action=ActionLayout(action_space),
            n_workers=n_workers or WORKERS_PER_CORE * n_cores,
            n_cores=n_cores,
            replayable=False,
            infos=infos,
            timeout=step_timeout,
            budget=budget,
        )
    waiting = ThreadExecutor if kind == "thread" else CoroutineExecutor
    return waiting(factory, layout, ids, seed, step_timeout=step_timeout, budget=budget, **batching)


def _refuse_unknown(kind: str, options: Mapping[str, Any]) -> None:
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise FlatoutError(f"there is no executor '{kind}' here; there is {known}{did_you_mean(kind, KINDS)}")
    for name in options:
        if name not in OPTIONS[kind]:
            hint = did_you_mean(name, OPTIONS[kind])
            raise FlatoutError(f"executor '{kind}' takes no option '{name}'{hint}")
    n_workers = options.get("n_workers")
    if n_workers is not None and n_workers < 1:
        raise FlatoutError(f"n_workers must be at least 1, got {n_workers}")


def _sample(factory: EnvFactory) -> tuple[gym.Env[Any, Any], bool]:
    """An env, closed again, and whether it is async."""
    made = blocking(factory)
    try:
        validate_spaces(made)
    except EnvError as error:
        raise EnvError(f"{factory.name}: {error}") from error
    finally:
        made.close()
    return (made.env, True) if isinstance(made, Blocking) else (made, False)


def _refuse_unfit(kind: str, awaits: bool) -> None:
    if awaits and kind not in ("auto", "async"):
        raise FlatoutError(f"executor '{kind}' cannot run an async env; use 'async'")
    if kind == "async" and not awaits:
        raise FlatoutError(
            "executor 'async' is for envs with async def reset and step; use 'thread' or 'auto'"
        )


def _await_start(executor: OpenExecutor) -> None:
    """Have every env answer: worker processes fail after they were started, if they do."""
    try:
        executor.apply(id)
    except BaseException:
        executor.close()
        raise


def lost_as_truncated(now: Step) -> Step:
    """Where an env was lost during its step and rebuilt, a step without reward that cut its episode."""
    if not now.restarted:
        return now
    now = replace(now, reward=now.reward.copy(), truncated=now.truncated.copy())
    now.reward[now.restarted] = 0.0
    now.truncated[now.restarted] = True
    return now
