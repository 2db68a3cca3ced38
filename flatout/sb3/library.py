"""Stable-Baselines3 itself, which is not a dependency of flatout."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from flatout.errors import FlatoutError


def library(module: str) -> Any:
    """A module of Stable-Baselines3, imported by name: types must check with and without it."""
    try:
        return import_module(f"stable_baselines3.{module}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("stable_baselines3"):
            raise
        raise FlatoutError(
            "flatout.sb3 needs Stable-Baselines3, which is not installed; pip install 'flatout[sb3]'"
        ) from error
