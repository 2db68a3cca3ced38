"""Files that are there whole or not at all: temporary file in the same folder, fsync, rename, fsync folder."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STAGING_SUFFIX = ".flatout-saving"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file to write, which durably takes the place of `path` at the end; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _staging(path.parent) as staging:
        part = staging / "part"
        yield part
        # safetensors makes files that only their owner may read; the folder shows what the umask allows.
        part.chmod(staging.stat().st_mode & 0o666)
        _fsync(part)
        os.replace(part, path)
    _fsync(path.parent)


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A new folder inside `folder`, locked while its writer lives and removed at the end.

    A folder, because safetensors writes to a temporary file whose name it invents: after a kill
    `sweep` could not tell that file from a stranger's.
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


def sweep(folder: Path) -> None:
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
