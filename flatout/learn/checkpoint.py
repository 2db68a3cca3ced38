"""Checkpoints: tensors and JSON state in, one safetensors file out, and never half of one.

A kill at any moment leaves the older files whole; a file is trusted only when its checksum matches.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flatout.envs.spaces import Array
from flatout.errors import FlatoutError

FORMAT_VERSION = 1
FORMAT = f"flatout-{FORMAT_VERSION}"
SUFFIX = ".flatout"
STAGING_SUFFIX = ".flatout-saving"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """All that a run needs to go on."""

    tensors: dict[str, torch.Tensor]
    """CPU tensors by name; those that share memory come back apart"""
    state: dict[str, Any]
    """plain JSON: string keys, no NaN or infinity; tuples come back as lists"""
    replay: Mapping[str, Array] | None = None
    """what was stored to be learned from again; in a file of its own beside the checkpoint's"""


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Put `checkpoint` at `path` durably, or raise and leave what was there; missing folders are made."""
    tensors, state = _plain_tensors(checkpoint.tensors), _canonical_json(checkpoint.state)
    metadata = {"format": FORMAT, "state": state, "checksum": _checksum(tensors, state)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _staging(path.parent) as staging:
            part = staging / "part"
            save_file(tensors, part, metadata)
            # safetensors makes files that only their owner may read; the folder shows what the umask allows.
            part.chmod(staging.stat().st_mode & 0o666)
            _fsync(part)
            os.replace(part, path)
        _fsync(path.parent)
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and "I/O error" not in str(error):
            raise
        raise FlatoutError(f"cannot write checkpoint {str(path)!r}: {_reason(error)}") from error
    _sweep(path.parent)


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`, its format and checksum verified; nothing is unpickled."""
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
    return Checkpoint(tensors, json.loads(state))


class CheckpointFolder:
    """A run's checkpoints: the last two by env steps, and the best."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, checkpoint: Checkpoint, env_steps: int) -> Path:
        """Write the checkpoint of `env_steps`; keep it and the one before it, delete the other steps."""
        assert env_steps >= 0, f"env_steps is {env_steps}"
        path = self.path / f"step-{env_steps:012d}{SUFFIX}"
        write(path, checkpoint)
        steps = self._steps()
        # Steps above this one belong to a line of training that was abandoned by resuming from before them;
        # left in place, the next resume would take them for the newest.
        kept = {env_steps, max((step for step in steps if step < env_steps), default=env_steps)}
        for step in steps.keys() - kept:
            try:
                steps[step].unlink(missing_ok=True)
            except OSError as error:
                raise FlatoutError(f"cannot delete {str(steps[step])!r}: {_reason(error)}") from error
        return path

    def save_best(self, checkpoint: Checkpoint) -> Path:
        """Write `checkpoint` as the best so far, in place of the one before."""
        path = self.path / f"best{SUFFIX}"
        write(path, checkpoint)
        return path

    def newest(self) -> tuple[Path, Checkpoint, list[str]]:
        """The newest step that loads, and a sentence for each newer one that does not."""
        skipped: dict[Path, str] = {}
        # List again after each failure: a run that is still saving deletes files while we read.
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
        """The files of single steps, oldest first."""
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
    """The tensors as safetensors wants them, contiguous and apart, copying only those that are not."""
    plain: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        assert tensor.device.type == "cpu", (
            f"tensor {name!r} is on {tensor.device}; checkpoints hold CPU tensors"
        )
        assert name != "__metadata__", "safetensors keeps the name '__metadata__' for itself"
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


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A new folder inside `folder`, locked while its writer lives and removed at the end.

    A folder, because safetensors writes to a temporary file whose name it invents: after a kill
    `_sweep` could not tell that file from a stranger's.
    """
    staging, descriptor = _new_locked_folder(folder)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(descriptor)


def _new_locked_folder(parent: Path) -> tuple[Path, int]:
    while True:
        folder = parent / f".{secrets.token_hex(8)}{STAGING_SUFFIX}"
        folder.mkdir()
        # Another writer may sweep the folder in the moment before it is locked: then make another one.
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        with suppress(OSError):  # A file system without locks: nothing is swept there, saving still works.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove what killed writers left in `folder`; the lock tells the dead from the living."""
    for staging in folder.glob(f".*{STAGING_SUFFIX}"):
        with suppress(OSError), _opened(staging) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(staging)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _fsync(path: Path) -> None:
    with _opened(path) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems cannot sync a folder and say so with EINVAL.
            if error.errno != errno.EINVAL or not path.is_dir():
                raise


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
        # pread, not mmap: the tensors must not change or fault when the file does.
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
    """One line for a file that safetensors refused, judged by its first bytes."""
    with path.open("rb") as file:
        head = file.read(9)
    if head.startswith(b"PK\x03\x04"):
        if _is_torch_zip(path):
            return (
                f"{str(path)!r} is a file of torch.save, not a flatout checkpoint; flatout loads no pickles"
            )
        return f"{str(path)!r} is a zip, not a flatout checkpoint; Stable-Baselines3's zip files cannot be loaded"
    # safetensors begins with the header's length in 8 bytes, the high ones zero; pickle with 0x80 and its version.
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
    """Why, in one line; safetensors wraps the system's words in its own."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = re.sub(r"^Error while [\w ]+: (I/O error: )?", "", " ".join(text.split()))
    return text.partition(" (os error")[0]
