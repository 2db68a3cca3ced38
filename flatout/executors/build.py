"""Executors by name, for callers that step envs themselves: `make_vec` and the Stable-Baselines3 bridge.

They see what training drops: the space's own dtypes, the envs' infos, seeds of the caller's choice, the envs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from flatout.envs.check import validate_spaces
from flatout.envs.make import EnvSource, env_factory
from flatout.envs.spaces import ObsLayout
from flatout.errors import EnvError, FlatoutError, did_you_mean
from flatout.executors.base import Executor, Step
from flatout.executors.serial import SerialExecutor

T = TypeVar("T")

KINDS = ("auto", "serial")


class OpenExecutor(Executor, Protocol):
    """An executor that also lets its user choose seeds, see the envs' infos and reach the envs."""

    infos: list[dict[str, Any]]
    """What each env's last step told, or its last reset where an episode has just begun."""
    final_infos: dict[int, dict[str, Any]]
    """By place, what the last step of each episode told that ended in it."""

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
    """Leaves with the shapes and dtypes that the space declares, where training would convert them."""

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__(space)
        declared = [leaf.pick(space) for leaf in self.leaves]
        self.leaves = tuple(
            replace(leaf, shape=sub.shape, dtype=np.dtype(sub.dtype))
            for leaf, sub in zip(self.leaves, declared, strict=True)
        )
        self.is_plain = len(self.leaves) == 1 and not self.leaves[0].path
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


@dataclass(frozen=True, slots=True)
class OpenEnvs:
    """An executor and what its caller has to know about the envs."""

    executor: OpenExecutor
    layout: ExactLayout
    sample: gym.Env[Any, Any]
    """A closed env like the executor's, for its spaces and metadata."""


def open_envs(
    env: EnvSource,
    n_envs: int,
    kind: str,
    seed: int,
    env_kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> OpenEnvs:
    """`n_envs` copies of an env behind an executor of this kind; `options` are the kind's own."""
    if n_envs < 1:
        raise FlatoutError(f"n_envs must be at least 1, got {n_envs}")
    factory = env_factory(env, env_kwargs)
    sample = factory()
    try:
        validate_spaces(sample)
    except EnvError as error:
        raise EnvError(f"{factory.name}: {error}") from error
    finally:
        sample.close()
    layout = ExactLayout(sample.observation_space)
    return OpenEnvs(make_executor(kind, factory, layout, n_envs, seed, **options), layout, sample)


def make_executor(
    kind: str,
    factory: Callable[[], gym.Env[Any, Any]],
    layout: ObsLayout,
    n_envs: int,
    seed: int,
    **options: Any,
) -> OpenExecutor:
    """The executor of this kind over `n_envs` envs; `options` are the kind's own."""
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise FlatoutError(f"there is no executor '{kind}' here; there is {known}{did_you_mean(kind, KINDS)}")
    if options:
        raise FlatoutError(f"executor '{kind}' takes no option '{next(iter(options))}'")
    return SerialExecutor(factory, layout, np.arange(n_envs), seed, replayable=False)


def lost_as_truncated(now: Step) -> Step:
    """Where an env was lost during its step and rebuilt, a step without reward that cut its episode."""
    if not now.restarted:
        return now
    now = replace(now, reward=now.reward.copy(), truncated=now.truncated.copy())
    now.reward[now.restarted] = 0.0
    now.truncated[now.restarted] = True
    return now
