"""What crosses a process border outside the training loop: functions for envs, what they return, and infos."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from flatout.errors import EnvError, one_line
from flatout.executors.serial import SerialExecutor


def pack(value: Any) -> bytes:
    """Pickled; what the user's main module defines goes by value, as the other side may have another one."""
    try:
        return pickle.dumps(value)
    except Exception:
        return bytes(cloudpickle.dumps(value))


def pack_infos(infos: Sequence[dict[str, Any]], final_infos: Mapping[int, dict[str, Any]]) -> bytes:
    """Infos by place, those that are empty left out: nothing at all where all are."""
    told = {i: info for i, info in enumerate(infos) if info}
    finals = {i: info for i, info in final_infos.items() if info}
    if not told and not finals:
        return b""
    try:
        return pack((told, finals))
    except Exception as error:
        # Without a cause: a new worker would have the same infos.
        raise EnvError(
            f"an env's info cannot be sent between processes ({one_line(error)}); "
            "use infos=False, or executor 'serial' or 'thread'"
        ) from None


def unpack_infos(packed: bytes) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    """What `pack_infos` packed."""
    return pickle.loads(packed) if packed else ({}, {})


def pack_call(function: Callable[..., Any], places: Sequence[int]) -> bytes:
    """A function to be called with the envs in these places."""
    try:
        return bytes(cloudpickle.dumps((function, list(places))))
    except Exception as error:
        raise EnvError(
            f"what should reach the envs cannot be sent to their processes: {one_line(error)}"
        ) from error


def answer_call(envs: SerialExecutor, packed: bytes) -> bytes:
    """Call a packed function and pack what it returned, or what it raised."""
    try:
        function, places = pickle.loads(packed)
        return pack((envs.apply(function, places), None))
    except Exception as error:
        return pack((None, _sendable(error)))


def unpack_answer(packed: bytes) -> list[Any]:
    """What the function returned for each env; raises what it raised."""
    values, error = pickle.loads(packed)
    if error is not None:
        raise error
    return list(values)


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pack(error))
    except Exception:  # many exceptions cannot be made again from their message
        return EnvError(one_line(error))
    return error
