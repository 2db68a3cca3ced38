"""The search space of an algorithm: which settings `flatout sweep` tries, and from which values.

Besides settings a space may have these names, from which settings follow so that batch sizes always divide a rollout:
`n_minibatches` (per epoch), `total_batch` (a rollout), `repeat_times` (epochs) and `workers` (envs).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from flatout.errors import FlatoutError


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """What one setting may be."""

    when: tuple[str, Any] | None = None
    """Only where another setting, which comes before, has this value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Number(Dimension):
    """A number between two others, both included; whole if both are."""

    low: float
    high: float
    log: bool = False
    """Whether small values are tried as often as large ones."""
    step: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise FlatoutError(f"a range from {self.low:g} to {self.high:g} is empty")
        if self.log and (self.low <= 0 or self.step is not None):
            raise FlatoutError(f"a logarithmic range from {self.low:g} must begin above 0 and have no step")
        if self.step is not None and self.step <= 0:
            raise FlatoutError(f"a step of {self.step:g} must be above 0")

    @property
    def is_whole(self) -> bool:
        """Whether its values are whole numbers."""
        return all(isinstance(it, int) for it in (self.low, self.high, self.step or 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Dimension):
    """One of several values: numbers, texts, true and false."""

    values: tuple[bool | int | float | str, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise FlatoutError("a choice needs at least one value")


Space: TypeAlias = Mapping[str, Number | Choice]


def one_of(*values: bool | int | float | str, when: tuple[str, Any] | None = None) -> Choice:
    """One of these values."""
    return Choice(values=values, when=when)


def between(
    low: float,
    high: float,
    *,
    log: bool = False,
    step: float | None = None,
    when: tuple[str, Any] | None = None,
) -> Number:
    """A number from `low` to `high`."""
    return Number(low=low, high=high, log=log, step=step, when=when)


NETWORK: Space = {
    "network_arch": one_of("64,64", "128,128", "256,256"),
    "activation": one_of("tanh", "relu"),
}
"""The network of small envs."""
ROLLOUTS: Space = {
    "n_envs": one_of(4, 8, 16, 32),
    "n_steps": one_of(16, 32, 64, 128, 256, 512, 1024),
    "n_minibatches": one_of(1, 2, 4, 8, 16, 32),
    "n_epochs": between(1, 20, log=True),
}
"""Shapes of rollouts and minibatches; all are powers of two, so one divides the other."""
GAMMA = one_of(0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
ELEGANTRL: Space = {
    "repeat_times": between(4, 32, log=True),
    "total_batch": between(32_768, 196_608, step=16_384),
    "workers": between(16, 40, step=8),
    "n_minibatches": one_of(8, 16, 32, 64, 128),
    "learning_rate": between(1e-5, 3e-3, log=True),
    "gamma": GAMMA,
}
"""Large rollouts and many epochs, as users of ElegantRL sweep them."""
NAMED: dict[str, Space] = {"elegantrl": ELEGANTRL}
"""Spaces for any algorithm that learns from rollouts, by name."""
DERIVED = ("n_minibatches", "total_batch", "repeat_times", "workers")
"""Names of a space that are no settings."""


def bounded(space: Space, *, most_transitions: int) -> Space:
    """The space with rollouts that fit into memory."""
    total = space.get("total_batch")
    if isinstance(total, Number) and total.high > most_transitions:
        step = total.step or 1
        high = max(total.low, total.low + (most_transitions - total.low) // step * step)
        return {**space, "total_batch": replace(total, high=int(high) if total.is_whole else high)}
    return space


def names_in(space: Space) -> Sequence[str]:
    """The settings that a space decides."""
    follow = {
        "n_minibatches": "batch_size",
        "total_batch": "n_steps",
        "repeat_times": "n_epochs",
        "workers": "n_envs",
    }
    return [follow.get(name, name) for name in space]
