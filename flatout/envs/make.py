"""Envs by name: an id, a file's factory, a class or a function becomes an `EnvFactory`.

In: what the user typed or passed. Out: a picklable callable that makes one `gym.Env`, or N at once.
Whatever a user can get wrong here ends in one line, the original exception being its cause.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.error import DependencyNotInstalled
from gymnasium.wrappers import HumanRendering, RenderCollection, TimeLimit

from flatout.envs.awaitable import AsyncTimeLimit, is_async
from flatout.envs.batched import BatchedEnvs, batched_kind
from flatout.envs.masks import mask_from_info
from flatout.errors import EnvError, FlatoutError, did_you_mean
from flatout.workloads.catalog import AWAITABLE, BATCHED, WORKLOADS

Creator = Callable[..., gym.Env[Any, Any] | BatchedEnvs]
EnvSource = str | Creator | BatchedEnvs

SHORT_NAMES = {name: workload.env_id for name, workload in WORKLOADS.items()}
ENGINE_FOLDERS = (f"{Path(gym.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
IMPORT_MACHINERY = ("<frozen", f"{Path(importlib.__file__).parent}{os.sep}")
LIBRARY_FOLDERS = tuple(sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFactory:
    """Makes one env at each call; picklable when its source is."""

    name: str
    source: EnvSource
    kwargs: dict[str, Any] = field(default_factory=dict)
    mask_in_info: bool = False
    device: str | None = None
    """Where batched envs are made that step as tensors and let choose; None: where they like."""

    def __call__(self, render_mode: str | None = None) -> gym.Env[Any, Any]:
        """A new env, or a FlatoutError of one line that says why there is none."""
        kwargs = dict(self.kwargs)
        if render_mode is not None:
            kwargs["render_mode"] = render_mode
        env = self._make(kwargs, None)
        if not isinstance(env, gym.Env):
            raise EnvError(
                f"env '{self.name}' made a batched {type(env).__name__}; here one that steps alone is needed"
            )
        return env

    def make(self, n_envs: int) -> gym.Env[Any, Any] | BatchedEnvs:
        """A new env; of a source that makes batched ones, `n_envs` of them at once if it lets choose."""
        return self._make(dict(self.kwargs), n_envs)

    @property
    def is_instance(self) -> bool:
        """Whether there is only this one batched env, made and kept by the user."""
        return batched_kind(self.source) is not None

    @property
    def n_envs(self) -> int | None:
        """How many envs that one steps at once; None where it is still to be made."""
        return self.source.num_envs if _is_batched(self.source) else None

    def _make(self, kwargs: dict[str, Any], n_envs: int | None) -> gym.Env[Any, Any] | BatchedEnvs:
        with _importable(self.source):
            target = _resolve(self.source)
            if _is_batched(target):
                return target
            if n_envs is not None and isinstance(target, EnvSpec) and target.id in BATCHED:
                target = load_env_creator(BATCHED[target.id])
            env = _create(target, kwargs, self.name, n_envs, self.device)  # type: ignore[arg-type]  # not batched by now
        return mask_from_info(env) if self.mask_in_info and isinstance(env, gym.Env) else env


def env_factory(source: EnvSource, kwargs: Mapping[str, Any] | None = None) -> EnvFactory:
    """The factory for an id, `module:Id`, `file.py:factory`, a gym.Env class, a function that makes envs, or a
    batched env itself."""
    if isinstance(source, str):
        source = SHORT_NAMES.get(source, source)
    elif _is_batched(source):
        if kwargs:
            raise FlatoutError("env_kwargs go to what makes an env; this batched env is made already")
    elif isinstance(source, gym.Env) or not callable(source):
        raise FlatoutError(
            f"an env is given as an id, 'file.py:factory', a gym.Env class or a function that makes one, "
            f"because several copies are made, or as a batched env; got {_type_name(source)}"
        )
    with _importable(source):
        _resolve(source)
    name = source if isinstance(source, str) else _callable_name(source)
    return EnvFactory(name=name, source=_absolute(source), kwargs=dict(kwargs or {}))


def where(error: BaseException) -> str:
    """`file.py:40` of the innermost frame in the user's own code, or the innermost one there is."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    frames = [frame for frame in frames if not frame[0].startswith(IMPORT_MACHINERY)]
    own = [frame for frame in frames if not frame[0].startswith(ENGINE_FOLDERS + LIBRARY_FOLDERS)]
    outside = [frame for frame in frames if not frame[0].startswith(ENGINE_FOLDERS)]
    best = own or outside or frames
    return f"{Path(best[-1][0]).name}:{best[-1][1]}" if best else ""


def one_line(error: BaseException) -> str:
    """`KeyError: 'x' (file.py:40)`, on one line whatever the message holds."""
    # A SyntaxError's text repeats the file and line that `where` adds.
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = where(error)
    return f"{named} ({place})" if place else named


def _is_batched(source: object) -> TypeGuard[BatchedEnvs]:
    return batched_kind(source) is not None


def _resolve(source: EnvSource) -> EnvSpec | Creator | BatchedEnvs:
    if not isinstance(source, str):
        return source
    file, _, attribute = source.rpartition(":")
    if file.endswith(".py"):
        return _from_file(file, attribute)
    if source.endswith(".py"):
        raise FlatoutError(
            f"env '{source}' is a file; add what makes the env, a function or gym.Env class: '{source}:name'"
        )
    module, colon, env_id = source.partition(":")
    return _from_module(module, env_id) if colon else _registered(source)


def _registered(env_id: str) -> EnvSpec:
    if env_id not in gym.registry:
        raise FlatoutError(_unknown(env_id))
    spec = gym.spec(env_id)
    # Both wrappers cost time at every step and find nothing that the check has not found.
    spec = replace(spec, order_enforce=False, disable_env_checker=True)
    return replace(spec, entry_point=AWAITABLE[env_id]) if env_id in AWAITABLE else spec


def _unknown(env_id: str) -> str:
    by_version = sorted(gym.registry, key=lambda known: (len(known), known))
    stem, _, version = env_id.rpartition("-v")
    versions = [repr(known) for known in by_version if known.rpartition("-v")[0] == stem]
    if version.isdigit() and versions:
        return f"unknown env '{env_id}'; '{stem}' is registered as {', '.join(versions)}"
    namespace, slash, _ = env_id.partition("/")
    if slash and not any(known.startswith(f"{namespace}/") for known in gym.registry):
        return (
            f"unknown env '{env_id}'; nothing registers '{namespace}/': "
            f"name the installed package that does, as in 'package:{env_id}'"
        )
    newest = {known.rpartition("-v")[0]: known for known in by_version}
    hint = did_you_mean(env_id, newest.values(), n=1)
    return f"unknown env '{env_id}'" + (hint or "; give a Gymnasium id, 'module:Id-v0' or 'file.py:factory'")


def _from_module(module: str, name: str) -> EnvSpec | Creator:
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            line = f"env '{module}:{name}': there is no module '{module}' in this folder or installed"
        else:
            line = f"env '{module}:{name}': importing '{module}' failed: {one_line(error)}"
        raise EnvError(line) from error
    if name in gym.registry:
        return _registered(name)
    callables = [key for key, value in vars(loaded).items() if callable(value)]
    if name not in callables:
        hint = did_you_mean(name, [*gym.registry, *callables], n=1)
        raise FlatoutError(f"module '{module}' has no env '{name}'{hint}")
    return getattr(loaded, name)  # type: ignore[no-any-return]  # what it makes is verified when it has made it


def _from_file(file: str, attribute: str) -> Creator:
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        neighbours = (neighbour.name for neighbour in path.parent.glob("*.py"))
        raise FlatoutError(f"env file '{file}' does not exist{did_you_mean(path.name, neighbours)}")
    module = _load(path, file)
    found = getattr(module, attribute, None)
    if found is None:
        names = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        hint = did_you_mean(attribute, names) or f"; it has {', '.join(names) or 'no function or class'}"
        raise FlatoutError(f"env file '{file}' has no '{attribute}'{hint}")
    if not callable(found):
        raise FlatoutError(
            f"'{attribute}' in env file '{file}' is {_type_name(found)}, "
            "not a gym.Env class or a function that makes an env"
        )
    return found  # type: ignore[no-any-return]  # what it makes is verified when it has made it


def _load(path: Path, shown: str) -> ModuleType:
    # The same name in every process, so that what the file defines can be pickled between them.
    name = f"flatout_env_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    importlib.invalidate_caches()
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise EnvError(f"env file '{shown}' could not be imported: {one_line(error)}") from error
    return module


def _create(
    target: EnvSpec | Creator, kwargs: dict[str, Any], name: str, n_envs: int | None, device: str | None
) -> gym.Env[Any, Any] | BatchedEnvs:
    try:
        if isinstance(target, EnvSpec) and target.entry_point is None:
            if n_envs is None:
                raise FlatoutError(f"env '{name}' is batched only; here one that steps alone is needed")
            env: object = gym.make_vec(
                target, num_envs=n_envs, vectorization_mode="vector_entry_point", **kwargs
            )
        elif isinstance(target, EnvSpec):
            entry = target.entry_point
            creator = load_env_creator(entry) if isinstance(entry, str) else entry
            _refuse_bad_kwargs(creator, {**target.kwargs, **kwargs}, name, _MAKE_KWARGS)
            env = _awaitable(gym.make(target, **kwargs), target)
        else:
            if n_envs is not None and _lets_choose(target, kwargs, "num_envs"):
                if device is not None and _lets_choose(target, kwargs, "device"):
                    kwargs = {**kwargs, "device": device}
                kwargs = {**kwargs, "num_envs": n_envs}
            _refuse_bad_kwargs(target, kwargs, name)
            env = target(**kwargs)
    except FlatoutError:
        raise
    except Exception as error:
        raise EnvError(_creation_failure(error, name)) from error
    return _verified(env, name)


def _lets_choose(creator: Creator, kwargs: dict[str, Any], setting: str) -> bool:
    """Whether the creator asks for a setting, such as how many envs to step at once, and nobody has told it yet."""
    told = kwargs | (creator.keywords if isinstance(creator, functools.partial) else {})
    if setting in told:
        return False
    try:
        return setting in inspect.signature(creator).parameters
    except (TypeError, ValueError):
        return False


def _awaitable(env: gym.Env[Any, Any], spec: EnvSpec) -> gym.Env[Any, Any]:
    """A registered env as it is, unless it is async: then without Gymnasium's wrappers, which cannot await."""
    if not is_async(env):
        return env
    if spec.additional_wrappers:
        raise EnvError(
            f"env '{spec.id}' is async and registered with additional wrappers, which cannot await it; "
            "put async ones around it in its entry point"
        )
    limit = env.spec.max_episode_steps if env.spec else None
    while isinstance(env, TimeLimit | RenderCollection | HumanRendering):
        env = env.env
    return AsyncTimeLimit(env, limit) if limit else env


_MAKE_KWARGS = ("max_episode_steps", "disable_env_checker")


def _refuse_bad_kwargs(
    creator: object, kwargs: dict[str, Any], name: str, also_accepted: tuple[str, ...] = ()
) -> None:
    try:
        parameters = inspect.signature(creator).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return  # written in C: the call itself will tell
    by_keyword = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepted = [p.name for p in by_keyword] + list(also_accepted)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in kwargs:
        if key not in accepted and not open_ended:
            raise FlatoutError(
                f"env '{name}' takes no argument '{key}'; it takes {', '.join(accepted) or 'none'}"
            )
    missing = [p.name for p in by_keyword if p.default is p.empty and p.name not in kwargs]
    if missing:
        raise FlatoutError(f"env '{name}' needs the argument '{missing[0]}'; give it in its env kwargs")


def _creation_failure(error: Exception, name: str) -> str:
    if isinstance(error, DependencyNotInstalled):
        return f"env '{name}' needs an extra package: {' '.join(str(error).split())}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return (
            f"env '{name}' needs the package '{package}', which is not installed ({where(error)}); "
            f"pip install {package}"
        )
    # gym.make re-raises a TypeError with its own text around it; the constructor's own is the clearer one.
    if isinstance(error, TypeError) and isinstance(error.__cause__, TypeError):
        error = error.__cause__
    return f"env '{name}' could not be created: {one_line(error)}"


def _verified(env: object, name: str) -> gym.Env[Any, Any] | BatchedEnvs:
    if isinstance(env, gym.Env) or _is_batched(env):
        return env
    if any(base.__module__.partition(".")[0] == "gym" for base in type(env).__mro__):
        raise EnvError(
            f"env '{name}' made {_type_name(env)}, an env of the old gym; port it to gymnasium: "
            "import gymnasium as gym, reset() returns obs, info and step() returns 5 values"
        )
    raise EnvError(f"env '{name}' made {_type_name(env)}; return an instance of gymnasium.Env")


@contextmanager
def _importable(source: EnvSource) -> Iterator[None]:
    """Lets the env's own imports find its neighbours: the file's folder, or else the current one."""
    if not isinstance(source, str):
        yield
        return
    file = source.rpartition(":")[0]
    folder = str(Path(file).expanduser().resolve().parent) if file.endswith(".py") else ""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _absolute(source: EnvSource) -> EnvSource:
    """A file's source by its full path, so that a later change of folder does not lose it."""
    if not isinstance(source, str):
        return source
    file, _, attribute = source.rpartition(":")
    return f"{Path(file).expanduser().resolve()}:{attribute}" if file.endswith(".py") else source


def _callable_name(source: Creator | BatchedEnvs) -> str:
    target: Any = source.func if isinstance(source, functools.partial) else source
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}:{named.__qualname__}"


def _type_name(value: object) -> str:
    if value is None:
        return "None"
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"an object of type {prefix}{kind.__qualname__}"
