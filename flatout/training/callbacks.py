"""What users may do at the beginning of learn(), after each iteration and at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from flatout.errors import FlatoutError
from flatout.runlog.recorder import Progress

OnIteration: TypeAlias = Callable[[Progress], bool | None]
"""Sees the progress after each iteration; returning False stops the run."""


class Callback:
    """Hooks of learn(); a subclass overrides those that it needs."""

    def on_begin(self, agent: Any) -> None:
        """Called before the first iteration; `agent` is the one that learns."""

    def on_iteration(self, progress: Progress) -> bool | None:
        """Called after each iteration; returning False stops the run."""

    def on_end(self, agent: Any) -> None:
        """Called when everything is saved; `agent.summary["status"]` is finished, stopped or failed."""


Callbacks: TypeAlias = Callback | OnIteration | Sequence[Callback | OnIteration]


class CallbackList(Callback):
    """Several callbacks and functions as one; the run stops if any of them wants to."""

    def __init__(self, callbacks: Callbacks | None) -> None:
        several = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
        self._callbacks = [as_callback(it) for it in several if it is not None]

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def on_begin(self, agent: Any) -> None:
        for callback in self._callbacks:
            callback.on_begin(agent)

    def on_iteration(self, progress: Progress) -> bool:
        wishes = [callback.on_iteration(progress) for callback in self._callbacks]
        return False not in wishes

    def on_end(self, agent: Any) -> None:
        for callback in self._callbacks:
            callback.on_end(agent)


class _Function(Callback):
    """A function as a callback."""

    def __init__(self, function: OnIteration) -> None:
        self._function = function

    def on_iteration(self, progress: Progress) -> bool | None:
        return self._function(progress)


def as_callback(callback: Any) -> Callback:
    """A callback or a function as a callback; anything else is refused."""
    if isinstance(callback, Callback):
        return callback
    if isinstance(callback, type) or not callable(callback):
        raise FlatoutError(
            f"callback is {callback!r}; it must be a function, a flatout.Callback, or a list of them"
        )
    return _Function(callback)
