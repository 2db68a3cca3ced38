"""Makes envs: an id, `file.py:factory`, a class or a function becomes an `EnvFactory`.

Every mistake of a user raises an error of one line, with the original exception as its cause.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeGuard

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import HumanRendering, RenderCollection, TimeLimit

from flatout.envs.libraries import hush_mujoco
from flatout.envs.loader import (
    absolute,
    importable,
    is_file,
    load_module,
    load_object,
    read_code,
    type_name,
)
from flatout.envs.wrappers import AsyncTimeLimit, KeptOpen, MaskFromInfo, run_blocking
from flatout.errors import EnvError, FlatoutError, did_you_mean, one_line, where

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BatchedKind = Literal["numpy", "tensor"]
ENVPOOL = "envpool:"
"""Begins the name of an env of EnvPool."""


class TensorEnvs(Protocol):
    """N envs in one object that takes and returns tensors on `device`, with N as their first dimension.

    Autoreset is SAME_STEP: where an episode ended, `obs` is the first observation of the next one, and
    `info["final_obs"]`, structured like `obs`, holds the last one of the ended episode; for other envs it is not read.
    Dict and Tuple observations are dicts and tuples of tensors. The env may return the same buffers at every step.

    An env whose `step` changes its state only in place, on the device, and reads nothing back to the host can say so with
    `capturable = True`: on an accelerator acting, stepping and storing are then one launch.

    A step that runs out of memory is repeated once, after cached memory was given back: it should change nothing before it
    has all the memory that it needs.
    """

    @property
    def num_envs(self) -> int:
        """Number of envs, N."""

    @property
    def single_observation_space(self) -> gym.Space[Any]:
        """The space of one env's observations."""

    @property
    def single_action_space(self) -> gym.Space[Any]:
        """The space of one env's actions."""

    @property
    def device(self) -> torch.device:
        """Device of observations, rewards and actions."""

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode in every env; returns observations and an info."""

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step every env; returns observations, rewards, terminated, truncated and an info."""


BatchedEnvs: TypeAlias = VectorEnv[Any, Any, Any] | TensorEnvs

_TENSOR_ENVS_MEMBERS = "num_envs single_observation_space single_action_space device reset step".split()
Creator = Callable[..., gym.Env[Any, Any] | BatchedEnvs]
EnvSource = str | Creator | BatchedEnvs | gym.Env[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFactory:
    """Makes envs; picklable if its source is."""

    name: str
    source: EnvSource
    kwargs: dict[str, Any] = field(default_factory=dict)
    mask_in_info: bool = False
    atari: bool = False
    """Whether its frames get Atari's preprocessing."""
    frame_stack: int = 1
    """How many of its last frames are stacked."""
    device: str | None = None
    """Device for batched envs of tensors whose creator takes `device`; None: their default."""
    code: bytes | None = field(default=None, repr=False)
    """Content of the source's file when the factory was made: every process of a run executes this."""
    spec: EnvSpec | None = field(default=None, repr=False)
    """What the source's id stands for, which only the process that registered it knows."""

    def __call__(self, render_mode: str | None = None) -> gym.Env[Any, Any]:
        """A new env that steps alone."""
        kwargs = dict(self.kwargs)
        if render_mode is not None:
            kwargs["render_mode"] = render_mode
        env = self._make(kwargs, None)
        if not isinstance(env, gym.Env):
            raise EnvError(
                f"env '{self.name}' made a batched {type(env).__name__}; a single env is needed here"
            )
        return env

    def make(self, n_envs: int) -> gym.Env[Any, Any] | BatchedEnvs:
        """A new env, or a batched one; with `n_envs` envs if its creator takes `num_envs`."""
        return self._make(dict(self.kwargs), n_envs)

    @property
    def is_instance(self) -> bool:
        """Whether the source is an env itself, batched or not: there is only this one."""
        return self.n_envs is not None

    @property
    def n_envs(self) -> int | None:
        """Number of envs if the source is an env itself; None for other sources."""
        if _is_batched(self.source):
            return self.source.num_envs
        return 1 if isinstance(self.source, gym.Env) else None

    def refuse_copies(self, n_envs: Any) -> None:
        """Raise if a single env that is made already is to be this many; a flag's value may still be text."""
        if isinstance(self.source, gym.Env) and not _is_batched(self.source) and str(n_envs) != "1":
            raise FlatoutError(
                f"an env that is made already cannot be {n_envs} envs; give what makes it, such as "
                f"lambda: {type(self.source.unwrapped).__name__}(…), or n_envs=1"
            )

    @property
    def is_built_in(self) -> bool:
        """Whether the env's code is Gymnasium's or flatout's own."""
        if self.spec is None:
            return isinstance(self.source, type) and _is_engine(self.source.__module__)
        points: tuple[Any, ...] = (self.spec.entry_point, self.spec.vector_entry_point)
        modules = [point if isinstance(point, str) else point.__module__ for point in points if point]
        return not self.spec.additional_wrappers and all(map(_is_engine, modules))

    def load(self) -> EnvSpec | Creator | BatchedEnvs | gym.Env[Any, Any]:
        """What the source stands for; imports the code that it names."""
        if self.spec is not None:
            return self.spec
        if not isinstance(self.source, str):
            return self.source
        if self.source.startswith(ENVPOOL):
            from flatout.envs.libraries import envpool_creator

            return envpool_creator(self.source.removeprefix(ENVPOOL))
        if is_file(self.source):
            return load_object(self.source, "env", _makes_envs, MADE_BY, self.code)  # type: ignore[no-any-return]  # `_verified` checks what it makes
        with importable(self.source):
            return _from_module(self.source)

    def _make(self, kwargs: dict[str, Any], n_envs: int | None) -> gym.Env[Any, Any] | BatchedEnvs:
        with (
            importable(self.source) if isinstance(self.source, str) and ":" in self.source else nullcontext()
        ):
            target = self.load()
            if _is_batched(target):
                env: gym.Env[Any, Any] | BatchedEnvs = target
            elif isinstance(target, gym.Env):
                env = KeptOpen(target)
            else:
                if self.atari and isinstance(target, EnvSpec):
                    kwargs = {"frameskip": 1, **kwargs}  # the preprocessing skips frames
                env = _create(target, kwargs, self.name, n_envs, self.device)  # type: ignore[arg-type]  # a creator
        if self.atari or self.frame_stack > 1:
            env = self._preprocessed(env)
        return MaskFromInfo(env) if self.mask_in_info and isinstance(env, gym.Env) else env

    def _preprocessed(self, env: gym.Env[Any, Any] | BatchedEnvs) -> gym.Env[Any, Any]:
        from flatout.envs.pixels import preprocessed

        if not isinstance(env, gym.Env) or is_async(env):  # a VectorEnv is no Env
            kind = "an async env" if isinstance(env, gym.Env) else "a batched env"
            raise EnvError(
                f"env '{self.name}' is {kind}, whose frames are not preprocessed; it has to stack them itself, "
                "without --frame-stack and --atari"
            )
        try:
            return preprocessed(env, atari=self.atari, frame_stack=self.frame_stack)
        except FlatoutError:
            raise
        except Exception as error:
            raise EnvError(_creation_failure(error, self.name)) from error


def env_factory(source: EnvSource, kwargs: Mapping[str, Any] | None = None) -> EnvFactory:
    """The factory for an id, `module:Id`, `file.py:factory`, a gym.Env class, a function, or an env itself.

    Code that a string names is not imported here: it is first tried in a process of its own.
    """
    if isinstance(source, str):
        source = env_id(source)
        known = EnvFactory(name=source, source=source, kwargs=dict(kwargs or {}))
        if ":" not in source:
            return replace(known, spec=_registered(source))
        return replace(known, source=absolute(source), code=read_code(source, "env"))
    if _is_batched(source) or isinstance(source, gym.Env):
        if kwargs:
            raise FlatoutError("env_kwargs have no effect on an env that is made already; leave them out")
    elif not callable(source):
        if any(base.__module__.startswith("stable_baselines3") for base in type(source).__mro__):
            raise FlatoutError(
                f"{type(source).__name__} is of Stable-Baselines3; give what makes one env, and how many: n_envs=4 (or from "
                "flatout.sb3 import PPO, which takes it)"
            )
        raise FlatoutError(
            "give the env as an id, 'file.py:factory', a gym.Env class, a function that makes one, a gym.Env or a "
            f"batched env; got {type_name(source)}"
        )
    return EnvFactory(name=_callable_name(source), source=source, kwargs=dict(kwargs or {}))


def env_id(name: str) -> str:
    """The id behind a short name: `snake` is flatout/Snake-v0; any other name stays."""
    full = f"flatout/{name.capitalize()}-v0"
    return full if name.islower() and name not in gym.registry and full in gym.registry else name


def is_atari(name: str) -> bool:
    """Whether an id is a game of ale-py that shows its screen."""
    spec = gym.registry.get(name)
    return name.startswith("ALE/") or (spec is not None and str(spec.entry_point).startswith("ale_py"))


def _is_batched(source: object) -> TypeGuard[BatchedEnvs]:
    return batched_kind(source) is not None


def _is_engine(module: str) -> bool:
    return module.startswith(("gymnasium.", "flatout."))


def _registered(env_id: str) -> EnvSpec:
    if env_id not in gym.registry and not env_id.endswith(".py"):
        from flatout.envs.libraries import import_library

        import_library(env_id)
    if env_id not in gym.registry:
        raise FlatoutError(_unknown(env_id))
    spec = gym.spec(env_id)
    # Both wrappers cost time at every step, and flatout checks the env before training.
    return replace(spec, order_enforce=False, disable_env_checker=True)


def _unknown(env_id: str) -> str:
    if env_id.endswith(".py"):
        if not Path(env_id).exists():
            return f"env file '{env_id}' does not exist"
        names = " or ".join(f"'{env_id}:{name}'" for name in _makers_in(env_id)[:3]) or f"'{env_id}:name'"
        return f"env '{env_id}' is a file; add the function or gym.Env class that makes the env: {names}"
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


def _makers_in(file: str) -> list[str]:
    """Names in a Python file that look like envs, or else its functions; the file is not executed."""
    try:
        found = ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    classes = [it for it in found if isinstance(it, ast.ClassDef)]
    envs = [it.name for it in classes if any("Env" in ast.unparse(base) for base in it.bases)]
    return envs or [it.name for it in found if isinstance(it, ast.FunctionDef) and it.name[0] != "_"]


def _from_module(source: str) -> EnvSpec | Creator:
    place, _, name = source.rpartition(":")
    module = load_module(source, "env")
    if name in gym.registry:
        return _registered(name)
    found = getattr(module, name, None)
    if found is None:
        makers = [key for key, value in vars(module).items() if _makes_envs(value)]
        hint = did_you_mean(name, [*gym.registry, *makers], n=1)
        raise FlatoutError(f"module '{place}' has no env '{name}'{hint}")
    if not _makes_envs(found):
        raise FlatoutError(f"'{name}' in module '{place}' is {type_name(found)}, not {MADE_BY}")
    return found  # type: ignore[no-any-return]  # `_verified` checks what it makes


MADE_BY = "a gym.Env class or a Python function that makes an env"


def _makes_envs(named: object) -> bool:
    """Whether what a name stands for may be called: an env's class or a Python function, never os.system."""
    target = named.func if isinstance(named, functools.partial) else named
    if isinstance(target, type):
        return callable(getattr(target, "reset", None)) and callable(getattr(target, "step", None))
    return isinstance(target, FunctionType)


def _create(
    target: EnvSpec | Creator, kwargs: dict[str, Any], name: str, n_envs: int | None, device: str | None
) -> gym.Env[Any, Any] | BatchedEnvs:
    try:
        if isinstance(target, EnvSpec) and target.entry_point is None:
            if n_envs is None:
                raise FlatoutError(f"env '{name}' is batched only; a single env is needed here")
            env: object = gym.make_vec(
                target, num_envs=n_envs, vectorization_mode="vector_entry_point", **kwargs
            )
        elif isinstance(target, EnvSpec):
            creator: Any = target.entry_point
            if isinstance(creator, str):
                creator = load_env_creator(creator)
            hush_mujoco()
            # A registered class may name forms of itself that train faster.
            if n_envs is not None and hasattr(creator, "batched_form"):
                return _create(creator.batched_form, {**target.kwargs, **kwargs}, name, n_envs, device)
            if hasattr(creator, "async_form"):
                creator = creator.async_form
                target = replace(target, entry_point=creator)
            _refuse_bad_kwargs(creator, {**target.kwargs, **kwargs}, name, _MAKE_KWARGS)
            env = _awaitable(gym.make(target, **kwargs), target)
        else:
            if n_envs is not None and _takes(target, kwargs, "num_envs"):
                if device is not None and _takes(target, kwargs, "device"):
                    kwargs = {**kwargs, "device": device}
                kwargs = {**kwargs, "num_envs": n_envs}
            _refuse_bad_kwargs(target, kwargs, name)
            hush_mujoco()
            env = target(**kwargs)
    except FlatoutError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvError(_creation_failure(error, name)) from error
    return _verified(env, name)


def _takes(creator: Creator, kwargs: dict[str, Any], name: str) -> bool:
    """Whether the creator has a parameter of this name that is not set yet."""
    given = kwargs | (creator.keywords if isinstance(creator, functools.partial) else {})
    if name in given:
        return False
    try:
        return name in inspect.signature(creator).parameters
    except (TypeError, ValueError):
        return False


def is_async(env: gym.Env[Any, Any]) -> bool:
    """Whether the unwrapped env has `async def reset` and `async def step`."""
    bare = getattr(env, "unwrapped", env)  # batched envs of tensors have no wrappers
    return inspect.iscoroutinefunction(bare.reset) and inspect.iscoroutinefunction(bare.step)


def blocking(factory: Callable[[], gym.Env[Any, Any]]) -> gym.Env[Any, Any]:
    """The factory's env; an async one is made blocking."""
    env = None
    try:
        env = factory()
        if not is_async(env):
            return env
    except Exception as error:
        if "no running event loop" not in str(error):  # raised by a constructor that opens an async client
            raise
    return run_blocking(factory, env)


def _awaitable(env: gym.Env[Any, Any], spec: EnvSpec) -> gym.Env[Any, Any]:
    """A registered env; an async one without Gymnasium's wrappers, which cannot await."""
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
        return  # written in C: has no signature
    by_keyword = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepted = [p.name for p in by_keyword] + list(also_accepted)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in kwargs:
        if key not in accepted and not open_ended:
            hint = "; to render, let it take render_mode=None and hand it on" if key == "render_mode" else ""
            raise FlatoutError(
                f"env '{name}' takes no argument '{key}'; it takes {', '.join(accepted) or 'none'}{hint}"
            )
    missing = [p.name for p in by_keyword if p.default is p.empty and p.name not in kwargs]
    if missing:
        raise FlatoutError(
            f"env '{name}' needs the argument '{missing[0]}'; give it: --env-kwargs '{{\"{missing[0]}\": …}}', in Python "
            f"env_kwargs={{'{missing[0]}': …}}"
        )


def _creation_failure(error: BaseException, name: str) -> str:
    if "opencv" in str(error).lower() and isinstance(error, ImportError | DependencyNotInstalled):
        return f"env '{name}' needs OpenCV for Atari's preprocessing; pip install \"flatout[atari]\""
    if isinstance(error, DependencyNotInstalled):
        text = " ".join(str(error).split()).replace("gymnasium[mujoco]", "flatout[mujoco]")
        return f"env '{name}' needs an extra package: {text}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return (
            f"env '{name}' needs the package '{package}', which is not installed ({where(error)}); "
            f"pip install {package}"
        )
    # gym.make wraps a TypeError in its own text; the constructor's is clearer.
    if isinstance(error, TypeError) and isinstance(error.__cause__, TypeError):
        error = error.__cause__
    return f"env '{name}' could not be created: {one_line(error)}"


def _verified(env: object, name: str) -> gym.Env[Any, Any] | BatchedEnvs:
    if isinstance(env, gym.Env) or _is_batched(env):
        return env
    if any(base.__module__.partition(".")[0] == "gym" for base in type(env).__mro__):
        raise EnvError(
            f"env '{name}' made {type_name(env)}, an env of the old gym; port it to gymnasium: "
            "import gymnasium as gym, reset() returns obs, info and step() returns 5 values"
        )
    raise EnvError(f"env '{name}' made {type_name(env)}; return an instance of gymnasium.Env")


def _callable_name(source: Creator | BatchedEnvs | gym.Env[Any, Any]) -> str:
    if isinstance(source, gym.Env) and source.spec is not None:
        return source.spec.id
    source = source.unwrapped if isinstance(source, gym.Env) else source
    target: Any = source.func if isinstance(source, functools.partial) else source
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}:{named.__qualname__}"


def batched_kind(envs: object) -> BatchedKind | None:
    """Whether an object is a batched env, of NumPy arrays or of tensors; None if not, also for classes of such."""
    if isinstance(envs, VectorEnv):
        return "numpy"
    if isinstance(envs, gym.Env | type):
        return None
    return "tensor" if all(hasattr(envs, name) for name in _TENSOR_ENVS_MEMBERS) else None
