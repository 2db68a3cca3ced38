"""Loads what a user names as `file.py:NAME` or `module:NAME`: envs, algorithms, executors, networks, optimizers, schedules.

Imports neither Gymnasium nor torch, so that a command line parses quickly.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from inspect import getsourcefile
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Self

from flatout.errors import EnvError, FlatoutError, did_you_mean, one_line

_LOCK = threading.RLock()
"""Envs are made in several threads at once; none may see a module that another one still executes."""


def load_object(
    source: str,
    what: str,
    fits: Callable[[Any], bool] = callable,
    wanted: str = "a class or function",
    code: bytes | None = None,
) -> Any:
    """The object that `file.py:NAME` or `module:NAME` names; `what` is the word for it in errors.

    An object for which `fits` is false is refused; `wanted` describes the right ones. `code`: the file's content, if it
    was read before; the file may have changed since.
    """
    place, _, name = source.rpartition(":")
    with importable(source):
        module = load_module(source, what, code)
    shown = f"{what} file '{place}'" if is_file(source) else f"module '{place}'"
    found = getattr(module, name, None)
    if found is None:
        names = [key for key, value in vars(module).items() if key[0] != "_" and fits(value)]
        hint = did_you_mean(name, names) or f"; it has {', '.join(names) or 'no function or class'}"
        raise FlatoutError(f"{shown} has no '{name}'{hint}")
    if not fits(found):
        raise FlatoutError(f"'{name}' in {shown} is {type_name(found)}, not {wanted}")
    return found


def load_module(source: str, what: str, code: bytes | None = None) -> ModuleType:
    """The module before the last colon of `source`, imported; call it inside `importable(source)`."""
    place = source.rpartition(":")[0]
    if is_file(source):
        return _import_file(place, what, read_code(source, what) if code is None else code)
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
            line = f"{what} '{source}': there is no module '{place}' in this folder or installed"
        else:
            line = f"{what} '{source}': importing '{place}' failed: {one_line(error)}"
        raise EnvError(line) from error


def is_file(source: str) -> bool:
    """Whether a source is of the form `file.py:NAME`."""
    return source.rpartition(":")[0].endswith(".py")


def read_code(source: str, what: str) -> bytes | None:
    """The content of the file in `file.py:NAME`; None for `module:NAME`."""
    if not is_file(source):
        return None
    file = source.rpartition(":")[0]
    path = Path(file).expanduser().resolve()
    try:
        return path.read_bytes()
    except FileNotFoundError:
        neighbours = (neighbour.name for neighbour in path.parent.glob("*.py"))
        hint = did_you_mean(path.name, neighbours)
        raise FlatoutError(f"{what} file '{file}' does not exist{hint}") from None
    except OSError as error:
        raise FlatoutError(f"{what} file '{file}' cannot be read: {error.strerror}") from error


def absolute(source: str) -> str:
    """`file.py:NAME` with the file's full path, so that a later change of folder does not lose it; others as they are."""
    file, _, name = source.rpartition(":")
    return f"{Path(file).expanduser().resolve()}:{name}" if is_file(source) else source


@contextmanager
def importable(source: str) -> Iterator[None]:
    """Lets the source import its neighbours: modules in the file's folder, or else in the current one."""
    file = source.rpartition(":")[0]
    folder = str(Path(file).expanduser().resolve().parent) if is_file(source) else ""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def type_name(value: object) -> str:
    """`an object of type module.Class`."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"an object of type {prefix}{kind.__qualname__}"


class Code(str):
    """The name of a user's object, `file.py:NAME` or `module:NAME`, as settings hold and save it.

    It carries the object where that was given itself, and the file's content where it names a file: every process of a run
    executes the same.
    """

    target: Any = None
    content: bytes | None = None

    @classmethod
    def of(cls, value: Any) -> Self:
        """The code that a setting's value names or is; ValueError if it is neither."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and ":" in value:
            with suppress(FlatoutError):  # told when it is loaded
                return cls._made(absolute(value), None, read_code(value, "code"))
            return cls._made(absolute(value), None, None)
        if not callable(value) or isinstance(value, str):
            raise ValueError
        named: Any = value.func if isinstance(value, partial) else value
        named = named if hasattr(named, "__qualname__") else type(named)
        return cls._made(f"{named.__module__}:{named.__qualname__}", value, None)

    @classmethod
    def _made(cls, name: str, target: Any, content: bytes | None) -> Self:
        code = cls(name)
        code.target, code.content = target, content
        return code

    def __reduce__(self) -> Any:
        return self._made, (str(self), self.target, self.content)

    def __deepcopy__(self, _: Any) -> Self:
        return self

    def load(self, setting: str, base: type | None, wanted: str) -> Any:
        """The object. A named one must be a Python function, or a subclass of `base`: never os.system or Popen."""

        def fits(named: Any) -> bool:
            target = named.func if isinstance(named, partial) else named
            is_class = isinstance(target, type) and base is not None and issubclass(target, base)
            return is_class or isinstance(target, FunctionType)

        return load_object(self, setting, fits, wanted, self.content) if self.target is None else self.target

    def source_hash(self) -> str:
        """A hash of the file that defines it; of its name if there is none."""
        content = self.content
        if content is None:
            try:
                content = Path(getsourcefile(self.target) or "").read_bytes()
            except (TypeError, OSError):
                content = self.encode()
        return sha256(content).hexdigest()


def _import_file(file: str, what: str, code: bytes | None) -> ModuleType:
    path = Path(file).expanduser().resolve()
    assert code is not None
    # Named by path and content: an edited file is a new module, and one content has the same name in every process, so
    # that what it defines can be pickled between them.
    name = f"flatout_file_{path.stem}_{zlib.crc32(code, zlib.crc32(str(path).encode())):08x}"
    with _LOCK:
        if name in sys.modules:
            return sys.modules[name]
        importlib.invalidate_caches()
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            exec(compile(code, str(path), "exec", dont_inherit=True), module.__dict__)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise EnvError(f"{what} file '{file}' could not be imported: {one_line(error)}") from error
        return module
