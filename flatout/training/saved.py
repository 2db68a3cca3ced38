"""Large arrays in one file, written a piece at a time and read where they lie: no second copy in memory, no pickles.

The file is what numpy calls npz: a zip of npy files, not compressed.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from flatout.envs.spaces import Array
from flatout.errors import FlatoutError

LOCAL_HEADER = 30
"""Bytes before the name in a zip's entry, whose last four are the lengths of name and extra field."""


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays, views too, without copying them as a whole."""
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


class SavedArrays(Mapping[str, Array]):
    """What `write_arrays` wrote, read from the file as it is looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _entries(self) -> dict[str, zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                return {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        except (OSError, zipfile.BadZipFile) as error:
            raise FlatoutError(
                f"{str(self.path)!r} is no replay that flatout saved, or damaged; delete it to go on without"
            ) from error

    def __getitem__(self, name: str) -> Array:
        entry = self._entries[name]
        with self.path.open("rb") as file:
            file.seek(entry.header_offset + LOCAL_HEADER - 4)
            n_name, n_extra = np.frombuffer(file.read(4), "<u2").tolist()
            file.seek(n_name + n_extra, 1)
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0
            shape, _, dtype = read(file) if version == (1, 0) else np.lib.format.read_array_header_2_0(file)
            start = file.tell()
        if 0 in shape:
            return np.zeros(shape, dtype)
        return np.memmap(self.path, dtype, "r", start, shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
