"""Checkpoints: tensors and JSON state in one safetensors file, with the replay in a file beside it.

A kill at any moment leaves the older files whole. A file is used only if its checksum matches.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
import stat
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flatout.envs.spaces import Array
from flatout.errors import FlatoutError
from flatout.training.durable import SavedArrays, replacing, sweep, write_arrays

FORMAT_VERSION = 1
FORMAT = f"flatout-{FORMAT_VERSION}"
SUFFIX = ".flatout"
REPLAY_SUFFIX = ".replay"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Everything a run needs to continue."""

    tensors: dict[str, torch.Tensor]
    """CPU tensors by name; tensors that share memory are saved as separate ones."""
    state: dict[str, Any]
    """Plain JSON: string keys, no NaN or infinity; tuples are read back as lists."""
    replay: Mapping[str, Array] | None = None
    """Contents of the replay buffer, in a file of its own."""


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint` to `path` durably, or raise and leave what was there; missing folders are made."""
    tensors, state = _plain_tensors(checkpoint.tensors), _canonical_json(checkpoint.state)
    metadata = {"format": FORMAT, "state": state, "checksum": _checksum(tensors, state)}
    replay = checkpoint.replay
    if isinstance(replay, SavedArrays) and (problem := replay.problem()) is not None:
        raise FlatoutError(f"{problem}; delete it to save without it")
    try:
        with ExitStack() as both:  # the replay is in place first: no checkpoint is ever without its own
            part = both.enter_context(replacing(path))
            if replay is not None:
                checksums = write_arrays(both.enter_context(replacing(replay_path(path))), replay)
                metadata["replay"] = json.dumps(checksums)
            save_file(tensors, part, metadata)
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and "I/O error" not in str(error):
            raise
        raise FlatoutError(f"cannot write checkpoint {str(path)!r}: {_reason(error)}") from error
    sweep(path.parent)


def replay_path(path: Path) -> Path:
    """The replay of a checkpoint: `x.replay` of `x.flatout`, `lr0.01.replay` of `lr0.01`."""
    return path.with_name(path.name.removesuffix(SUFFIX) + REPLAY_SUFFIX)


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`, with verified format and checksum; nothing is unpickled."""
    try:
        _require_file(path)
        tensors, metadata = _load(path)
    except OSError as error:
        raise FlatoutError(f"cannot read checkpoint {str(path)!r}: {_reason(error)}") from error
    state = metadata.get("state", "")
    if _checksum(tensors, state) != metadata.get("checksum"):
        raise FlatoutError(
            f"checkpoint {str(path)!r} is corrupt: its checksum does not match; {_advice(path)}"
        )
    replay, checksums = replay_path(path), json.loads(metadata.get("replay", "null"))
    return Checkpoint(tensors, json.loads(state), SavedArrays(replay, checksums) if replay.exists() else None)


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A run's checkpoints: the last two by env steps, and the best."""

    path: Path

    def save(self, checkpoint: Checkpoint, env_steps: int) -> Path:
        """Write the checkpoint of `env_steps`; keep it and the one before it, delete the other steps.

        If the disk is full, the other steps are deleted first.
        """
        assert env_steps >= 0, f"env_steps is {env_steps}"
        path = self.path / f"step-{env_steps:012d}{SUFFIX}"
        # Later steps were abandoned by resuming from before them; the next resume would take them for the newest.
        before = max((step for step in self._steps() if step < env_steps), default=env_steps)
        try:
            write(path, checkpoint)
        except FlatoutError as error:
            if not any(os.strerror(full) in str(error) for full in (errno.ENOSPC, errno.EDQUOT)):
                raise
            self._delete_except({before, env_steps})
            write(path, checkpoint)
        self._delete_except({before, env_steps})
        return path

    def _delete_except(self, kept: set[int]) -> None:
        for path in self.path.glob("step-*.*"):
            match = re.fullmatch(
                rf"step-(\d{{12,}})({re.escape(SUFFIX)}|{re.escape(REPLAY_SUFFIX)})", path.name
            )
            if match and int(match[1]) not in kept:
                with suppress(OSError):  # it takes room, no more
                    path.unlink()

    def save_best(self, checkpoint: Checkpoint) -> Path:
        """Write `checkpoint` as the best so far."""
        path = self.path / f"best{SUFFIX}"
        write(path, dataclasses.replace(checkpoint, replay=None))  # training never resumes from it
        return path

    def newest(self) -> tuple[Path, Checkpoint, list[str]]:
        """The newest checkpoint that loads, and a sentence for each newer one that does not."""
        skipped: dict[Path, str] = {}
        # List again after each failure: a run that is still saving may delete files meanwhile.
        while candidates := [path for path in self._steps().values() if path not in skipped]:
            try:
                return candidates[-1], read(candidates[-1]), list(skipped.values())
            except FlatoutError as error:
                if os.path.lexists(candidates[-1]):
                    skipped[candidates[-1]] = str(error)
        if not skipped:
            raise FlatoutError(f"there is no checkpoint in {str(self.path)!r}")
        first = next(iter(skipped.values()))
        raise FlatoutError(
            f"no checkpoint in {str(self.path)!r} can be loaded ({len(skipped)} tried): {first}"
        )

    def _steps(self) -> dict[int, Path]:
        """The checkpoints by env steps, oldest first."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise FlatoutError(f"cannot list checkpoints in {str(self.path)!r}: {_reason(error)}") from error
        matches = (re.fullmatch(rf"step-(\d{{12,}}){re.escape(SUFFIX)}", name) for name in names)
        steps = {int(match[1]): self.path / match[0] for match in matches if match}
        return dict(sorted(steps.items()))


def _plain_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors contiguous and in separate memory, as safetensors requires; copies only where needed."""
    plain: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        assert tensor.device.type == "cpu", (
            f"tensor {name!r} is on {tensor.device}; checkpoints hold CPU tensors"
        )
        assert name != "__metadata__", "safetensors reserves the name '__metadata__'"
        tensor = tensor.detach().contiguous()
        if tensor.untyped_storage().data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        plain[name] = tensor
    return plain


def _canonical_json(state: dict[str, Any]) -> str:
    try:
        text = json.dumps(state, allow_nan=False, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"checkpoint state is not plain JSON: {error}") from error
    assert _has_string_keys(state), "checkpoint state has keys that are not strings; JSON would change them"
    return text


def _has_string_keys(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_string_keys(item) for key, item in value.items())
    return not isinstance(value, list | tuple) or all(map(_has_string_keys, value))


def _checksum(tensors: dict[str, torch.Tensor], state: str) -> str:
    digest = hashlib.sha256(state.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{json.dumps([name, str(tensor.dtype), list(tensor.shape)])}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _require_file(path: Path) -> None:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise FlatoutError(f"checkpoint {str(path)!r} does not exist") from None
    if stat.S_ISDIR(status.st_mode):
        raise FlatoutError(f"{str(path)!r} is a folder, not a checkpoint; name a {SUFFIX} file")
    if not stat.S_ISREG(status.st_mode):
        raise FlatoutError(f"{str(path)!r} is not a regular file, so not a checkpoint")
    if status.st_size == 0:
        raise FlatoutError(f"checkpoint {str(path)!r} is empty; {_advice(path)}")


def _load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        # pread, not mmap: the tensors must not change or fault if the file changes.
        with safe_open(path, framework="pt", backend="pread") as file:
            metadata = file.metadata() or {}
            _require_format(path, metadata)
            return file.get_tensors(), metadata
    except SafetensorError as error:
        raise FlatoutError(_why_unreadable(path, error)) from error


def _require_format(path: Path, metadata: dict[str, str]) -> None:
    found = metadata.get("format", "")
    if found == FORMAT:
        return
    match = re.fullmatch(r"flatout-(\d+)", found)
    if match and int(match[1]) > FORMAT_VERSION:
        raise FlatoutError(
            f"checkpoint {str(path)!r} has format {found}, this flatout reads up to {FORMAT}; upgrade flatout"
        )
    raise FlatoutError(f"{str(path)!r} is a safetensors file, but not a checkpoint that flatout wrote")


def _why_unreadable(path: Path, error: Exception) -> str:
    """One line about a file that safetensors refused, by its first bytes."""
    with path.open("rb") as file:
        head = file.read(9)
    if head.startswith(b"PK\x03\x04"):
        if _is_torch_zip(path):
            return f"{str(path)!r} was written by torch.save and is not a flatout checkpoint; flatout loads no pickles"
        return f"{str(path)!r} is a zip, not a flatout checkpoint; Stable-Baselines3's zip files cannot be loaded"
    # safetensors begins with the header's length in 8 bytes, the high ones zero; a pickle with 0x80 and its version.
    if head[:1] == b"\x80" and any(head[2:8]):
        return f"{str(path)!r} is a pickle, not a flatout checkpoint; flatout loads no pickles"
    if len(head) < 9 or head.endswith(b"{"):
        return f"checkpoint {str(path)!r} is truncated or corrupt ({_reason(error)}); {_advice(path)}"
    return f"{str(path)!r} is not a flatout checkpoint"


def _is_torch_zip(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _advice(path: Path) -> str:
    return f"use an older checkpoint from {str(path.parent)!r}"


def _reason(error: Exception) -> str:
    """The system's reason in one line, without what safetensors puts around it."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = re.sub(r"^Error while [\w ]+: (I/O error: )?", "", " ".join(text.split()))
    return text.partition(" (os error")[0]
