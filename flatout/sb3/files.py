"""The files of models with Stable-Baselines3's interface: a zip with a checkpoint and the arguments as JSON."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from flatout.errors import FlatoutError
from flatout.sb3.arguments import refuse
from flatout.training.checkpoint import Checkpoint
from flatout.training.checkpoint import read as read_checkpoint

AGENT, ABOUT = "agent.flatout", "sb3.json"
"""Files in the zip that `save` writes."""
CODE = "code"
"""Marks an argument that was a function or class, in the file."""


def to_json(value: Any) -> Any:
    """An argument as JSON; functions and classes only by name."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.device):
        return str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return {CODE: f"{named.__module__}:{named.__qualname__}"}


def from_json(name: str, value: Any) -> Any:
    """An argument from JSON. Classes are looked up in modules that are imported already: nothing is imported for a file."""
    if isinstance(value, dict) and value.keys() == {CODE}:
        module, _, qualname = value[CODE].partition(":")
        found = getattr(sys.modules.get(module), qualname, None)
        if isinstance(found, type) and issubclass(found, torch.nn.Module | torch.optim.Optimizer):
            return found
        return Missing(name, value[CODE])
    if isinstance(value, dict):
        return {key: from_json(name, item) for key, item in value.items()}
    return value


class Missing:
    """A function or class that was an argument of a saved model and is not known here."""

    def __init__(self, name: str, code: str) -> None:
        self._name, self._code, self._is_first = name, code, True

    def __call__(self, *_: Any, **__: Any) -> Any:
        if self._is_first and self._name in ("learning_rate", "clip_range"):
            self._is_first = False  # acting needs no schedule
            return 1.0
        raise refuse(
            f"{self._name} of this model was '{self._code}', which is not here",
            f"give it again: load(…, custom_objects={{'{self._name}': …}})",
        )


def place_of(path: Any, suffix: str, *, reading: bool) -> Any:
    """The path with its suffix, as Stable-Baselines3 would add it; a file that is open already as it is."""
    if isinstance(path, io.IOBase):
        return path
    path = Path(path)
    path = path if path.suffix or (reading and path.exists()) else path.with_name(path.name + suffix)
    if not reading:
        path.parent.mkdir(parents=True, exist_ok=True)
    elif not path.is_file():
        raise FlatoutError(f"there is no file {str(path)!r}")
    return path


def read_model(path: Any) -> tuple[Checkpoint, dict[str, Any]]:
    """The checkpoint in a file that `save` wrote, and the arguments."""
    try:
        with TemporaryDirectory() as folder, zipfile.ZipFile(place_of(path, ".zip", reading=True)) as archive:
            if ABOUT not in archive.namelist():
                raise refuse(
                    f"{str(path)!r} was not written by flatout.sb3",
                    f"flatout import sb3 {path} --trust reads a model of Stable-Baselines3",
                )
            archive.extract(AGENT, folder)
            return read_checkpoint(Path(folder, AGENT)), json.loads(archive.read(ABOUT))
    except zipfile.BadZipFile as error:
        raise refuse(f"{str(path)!r} is no zip", "give a file that save() wrote") from error
