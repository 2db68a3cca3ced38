"""Files that are written whole or not at all, and large arrays in one of them.

A write goes to a temporary file in the same folder, then fsync, rename, fsync of the folder. Arrays are an
uncompressed npz: written array by array, read as memory maps, without a second copy in memory and without pickles.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

import numpy as np

from flatout.envs.spaces import Array
from flatout.errors import FlatoutError
from flatout.runlog.folder import try_lock

STAGING_SUFFIX = ".flatout-saving"
LOCAL_HEADER = 30
"""Bytes of a zip entry before its name; the last four are the lengths of the name and the extra field."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file to write; at the end it durably replaces `path`. Missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging, descriptor = _new_locked_folder(path.parent)
    try:
        part = staging / "part"
        yield part
        # safetensors makes files that only their owner may read; the folder's mode follows the umask.
        part.chmod(staging.stat().st_mode & 0o666)
        _fsync(part)
        os.replace(part, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)
    _fsync(path.parent)


def _new_locked_folder(parent: Path) -> tuple[Path, int | None]:
    """A new folder, locked while its writer lives, and the lock's descriptor; None where folders cannot be opened.

    A folder, because safetensors writes to a temporary file of its own naming, which `sweep` could not recognise
    after a kill.
    """
    while True:
        folder = parent / f".{secrets.token_hex(8)}{STAGING_SUFFIX}"
        folder.mkdir()
        # Another writer may sweep the folder before it is locked: then make another one.
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        except PermissionError:  # Windows opens no folders
            return folder, None
        # On a file system without locks saving works, and nothing is swept.
        if try_lock(descriptor) is not False and folder.exists():
            return folder, descriptor
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove what killed writers left in `folder`: staging folders that nobody holds a lock on."""
    for staging in folder.glob(f".*{STAGING_SUFFIX}"):
        with suppress(OSError), _opened(staging) as descriptor:
            if try_lock(descriptor):
                shutil.rmtree(staging)


@contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _fsync(path: Path) -> None:
    try:
        # Windows syncs only what is open for writing.
        with _opened(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY) as descriptor:
            os.fsync(descriptor)
    except OSError as error:
        # Some network file systems refuse to sync a folder (EINVAL), and Windows to open one (EACCES).
        if error.errno not in (errno.EINVAL, errno.EACCES) or not path.is_dir():
            raise


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> dict[str, int]:
    """Write arrays or views, without copying them as a whole; returns their checksums."""
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    with zipfile.ZipFile(path) as archive:
        return _checksums(archive)


def _checksums(archive: zipfile.ZipFile) -> dict[str, int]:
    return {entry.filename.removesuffix(".npy"): entry.CRC for entry in archive.infolist()}


class SavedArrays(Mapping[str, Array]):
    """What `write_arrays` wrote, as memory maps."""

    def __init__(self, path: Path, checksums: Mapping[str, int] | None = None) -> None:
        """`checksums`: what `write_arrays` returned, if that is known."""
        self.path, self._known = path, checksums

    def problem(self) -> str | None:
        """Why the arrays cannot be used, in one line; reads the whole file, in little memory."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                if self._known not in (None, _checksums(archive)):
                    return f"{str(self.path)!r} belongs to another checkpoint"
                if archive.testzip() is None:
                    for name in self:
                        self[name]
                    return None
        except FlatoutError as error:
            return str(error)
        except (OSError, EOFError, ValueError, NotImplementedError, zipfile.BadZipFile, zlib.error):
            pass
        return str(self._damaged())

    @cached_property
    def _entries(self) -> dict[str, zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                return {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        except (OSError, zipfile.BadZipFile) as error:
            raise self._damaged() from error

    def __getitem__(self, name: str) -> Array:
        entry = self._entries[name]
        with self.path.open("rb") as file:
            file.seek(entry.header_offset + LOCAL_HEADER - 4)
            n_name, n_extra = np.frombuffer(file.read(4), "<u2").tolist()
            first = file.seek(n_name + n_extra, 1)
            try:
                formats = np.lib.format
                is_old = formats.read_magic(file) == (1, 0)
                read = formats.read_array_header_1_0 if is_old else formats.read_array_header_2_0
                shape, _, dtype = read(file)
            except ValueError as error:
                raise self._damaged() from error
            start = file.tell()
        n_bytes = entry.file_size - (start - first)
        # Objects would be pointers.
        is_plain = entry.compress_type == zipfile.ZIP_STORED and not dtype.hasobject
        if not is_plain or n_bytes != math.prod(shape) * dtype.itemsize:
            raise self._damaged()
        if 0 in shape:
            return np.zeros(shape, dtype)
        return np.memmap(self.path, dtype, "r", start, shape)

    def _damaged(self) -> FlatoutError:
        return FlatoutError(f"{str(self.path)!r} is damaged, or is not a replay that flatout saved")

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
