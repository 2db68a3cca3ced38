"""Any executor as a `gymnasium.vector.VectorEnv`, for the user's own training loops.

Unlike training, it keeps the space's own dtypes and the envs' infos, and lets the caller choose seeds and reach the envs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from operator import methodcaller
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from flatout.envs.make import EnvFactory, EnvSource, env_factory
from flatout.envs.spaces import ActionLayout, Array, ObsArrays, ObsLayout, brackets
from flatout.envs.validate import OUTSIDE, bounds, fitting_parts, is_outside, validate_spaces
from flatout.envs.wrappers import Blocking, NextStepReset
from flatout.errors import EnvError, FlatoutError, did_you_mean, one_line
from flatout.executors.base import (
    EXECUTORS,
    EnvSet,
    Executor,
    Step,
    check_kind,
    make_executor,
    option_names,
    step,
)
from flatout.perf.probe import rank_kinds, time_steps
from flatout.perf.trial import Make, tried, unknown_costs

STEP_TIMEOUT = 60.0
CHECKED_STEPS = 4
"""Steps of each env whose observations are checked for kind and shape, which takes longer than a step of CartPole."""
BOUNDS_STEPS = 1_000
"""Steps in which all observations are compared with their space's bounds."""
KINDS = ("auto", *(kind for kind in EXECUTORS if kind != "batched"))


def make_vec(
    env: EnvSource,
    n_envs: int | None = None,
    executor: str = "auto",
    *,
    num_envs: int | None = None,
    seed: int = 0,
    env_kwargs: Mapping[str, Any] | None = None,
    autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
    copy: bool = True,
    **options: Any,
) -> VecEnv:
    """`n_envs` copies of an env as one `gymnasium.vector.VectorEnv`.

    `executor` is auto, a built-in kind or FILE.py:NAME; `options` are the executor's own. `num_envs` is Gymnasium's name for
    `n_envs`. With `autoreset_mode=AutoresetMode.NEXT_STEP` the step after an episode's end resets, which some of
    Gymnasium's vector wrappers need.
    """
    n_envs = _n_envs(n_envs, num_envs)
    next_step = _is_next_step(autoreset_mode)
    return VecEnv(open_envs(env, n_envs, executor, seed, env_kwargs, options, next_step=next_step), copy=copy)


def _n_envs(n_envs: int | None, num_envs: int | None) -> int:
    if n_envs is not None and num_envs is not None and n_envs != num_envs:
        raise FlatoutError(f"n_envs is {n_envs} and num_envs {num_envs}; both mean the same, so give one")
    given = n_envs if num_envs is None else num_envs
    if not isinstance(given, int | np.integer | None):
        raise FlatoutError(f"n_envs must be a whole number, got {given!r}")
    return 1 if given is None else int(given)


def _is_next_step(mode: AutoresetMode | str) -> bool:
    names = {form: known for known in AutoresetMode for form in (known, known.name, known.value)}
    if names.get(mode) not in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
        raise FlatoutError(f"autoreset_mode is {mode!r}; it must be 'SAME_STEP' or 'NEXT_STEP'")
    return names[mode] is AutoresetMode.NEXT_STEP


class Received(NamedTuple):
    """What `recv` returns: one row for each env index in `rows`, in that order; infos are by env as in `step`."""

    rows: Array
    obs: Any
    rewards: Array
    terminations: Array
    truncations: Array
    infos: dict[str, Any]


class VecEnv(VectorEnv[Any, Any, Array]):
    """A VectorEnv over an executor, plus `send` and `recv`.

    With `copy=False` the arrays returned by `reset` and `step` are the executor's own and change with the next step.
    """

    def __init__(self, envs: OpenEnvs, *, copy: bool = True) -> None:
        executor, env = envs.executor, envs.sample
        self.kind, self._notes = envs.kind, envs.notes
        self.executor, self._layout, self._copy = executor, envs.layout, copy
        self.num_envs = executor.n_envs
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(env.observation_space, self.num_envs)
        self.action_space = batch_space(env.action_space, self.num_envs)
        self._next_step = envs.next_step
        mode = AutoresetMode.NEXT_STEP if envs.next_step else AutoresetMode.SAME_STEP
        self.metadata = {**env.metadata, "autoreset_mode": mode}
        self.spec, self.render_mode = env.spec, env.render_mode
        self._lowest, self._highest = bounds(env.action_space)
        self._all = np.arange(self.num_envs)
        self._has_begun = False
        self._bounded = self._layout.bounded
        self._n_compared = 0

    @property
    def notes(self) -> list[str]:
        """Why `auto` chose this kind, which kinds could not start, which envs were replaced; one line each."""
        return [*self._notes, *self.executor.notes]

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes; an int seeds env i with `seed + i`, None leaves each env's generator as it is."""
        self._refuse_if_closed()
        env_indices = _masked(options, self.num_envs)
        if options is not None:
            options = {key: value for key, value in options.items() if key != "reset_mask"}
        if seed is None and options is None and not self._has_begun:
            now = self.executor.reset()  # with the seed that make_vec was given
        else:
            now = self.executor.reset_envs(self._seeds(seed), [options] * self.num_envs, env_indices)
        self._has_begun = True
        infos: dict[str, Any] = {}
        if any(self.executor.infos):
            for i in range(self.num_envs) if env_indices is None else env_indices:
                infos = self._add_info(infos, self.executor.infos[i], i)
        return self._obs(now.obs), infos

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """One step of all envs; where an episode ended, `infos["final_obs"]` is its last observation.

        With NEXT_STEP the last observation is returned itself, and the env's next step resets it.
        """
        now = lost_as_truncated(step(self.executor, self._checked(actions, self._all)))
        if self._next_step and now.restarted:
            now = self._put_off(now)
        obs, infos = self._obs(now.obs), self._infos(now)
        if not self._copy:
            return obs, now.reward, now.terminated, now.truncated, infos
        return obs, now.reward.copy(), now.terminated.copy(), now.truncated.copy(), infos

    def send(self, actions: Any, rows: Array | None = None) -> None:
        """Send actions to the envs with these indices, or to all; `recv` returns their steps."""
        if self._next_step:
            raise FlatoutError("send and recv are for autoreset_mode 'SAME_STEP'; use step")
        rows = self._all if rows is None else np.asarray(rows)
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or not np.isin(rows, self._all).all():
            raise FlatoutError(f"rows must be env indices from 0 to {self.num_envs - 1}, got {rows.tolist()}")
        self.executor.send(self._checked(actions, rows), rows)

    def recv(self) -> Received:
        """Wait for envs to finish their step: all of them, or with a waiting executor those that are ready."""
        self._refuse_if_closed()
        now = lost_as_truncated(self.executor.recv())
        rows = now.env_indices
        obs = self._layout.build([array[rows] for array in now.obs])
        return Received(
            rows.copy(), obs, now.reward[rows], now.terminated[rows], now.truncated[rows], self._infos(now)
        )

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Each env's attribute of this name, called with the arguments if it can be."""
        self._refuse_if_closed()
        return tuple(self.executor.apply(partial(_get_or_call, name, args, kwargs)))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Each env's attribute of this name."""
        self._refuse_if_closed()
        return tuple(self.executor.apply(methodcaller("get_wrapper_attr", name)))

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env, from a list with a value for each or to one value."""
        self._refuse_if_closed()
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise FlatoutError(f"set_attr got {len(values)} values for {self.num_envs} envs")
        for i, value in enumerate(values):
            self.executor.apply(methodcaller("set_wrapper_attr", name, value), [i])

    def render(self) -> tuple[Any, ...]:
        """Each env's rendered frame."""
        return self.call("render")

    def close_extras(self) -> None:
        """Close every env."""
        self.executor.close()

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int | np.integer):
            return [int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise FlatoutError(f"reset got {len(seed)} seeds for {self.num_envs} envs")
        return list(seed)

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise FlatoutError("the envs are closed; make new ones with flatout.make_vec")

    def _checked(self, actions: Any, rows: Array) -> Array:
        """The actions as an array; raises unless there is one of the action space for each of these envs."""
        self._refuse_if_closed()
        space = self.single_action_space
        array, shape = np.asarray(actions), (len(rows), *(space.shape or ()))
        if array.shape != shape:
            is_count = array.ndim and array.shape[1:] == shape[1:]
            got = f"{len(array)} actions" if is_count else f"actions of shape {array.shape}"
            raise FlatoutError(f"{got} for {len(rows)} envs; give an array of shape {shape}")
        is_box = isinstance(space, spaces.Box)
        if array.dtype.kind not in ("iubf" if is_box else "iub"):
            numbers = "numbers" if is_box else "integers"
            raise FlatoutError(f"actions are {array.dtype}; the action space {space} takes {numbers}")
        if not is_box and ((array < self._lowest) | (array > self._highest)).any():
            i = int(np.argwhere(is_outside(space, array))[0][0])
            raise FlatoutError(
                f"action {array[i].tolist()} of env {rows[i]} is outside the action space {space}"
            )
        return array

    def _put_off(self, now: Step) -> Step:
        """NEXT_STEP for envs that were replaced: their last observation now, a new episode at the next step."""
        self.executor.apply(methodcaller("reset_at_next_step"), now.restarted)
        obs = tuple(array.copy() for array in now.obs)
        for array, final in zip(obs, now.final_obs, strict=True):
            array[now.restarted] = final[now.restarted]
        return replace(now, obs=obs)

    def _compare_with_bounds(self, arrays: ObsArrays) -> None:
        """Note the first observation that is out of its space's bounds."""
        self._n_compared += 1
        for k, space, path in self._bounded:
            outside = is_outside(space, arrays[k]).reshape(self.num_envs, -1).any(axis=1)
            if outside.any():
                self._notes.append(f"env {outside.argmax()}: {OUTSIDE.format(path)}")
                self._bounded = []
                return

    def _obs(self, arrays: ObsArrays) -> Any:
        if self._bounded and self._n_compared < BOUNDS_STEPS:
            self._compare_with_bounds(arrays)
        return self._layout.build([array.copy() for array in arrays] if self._copy else arrays)

    def _infos(self, now: Step) -> dict[str, Any]:
        """The envs' infos by key, each with a mask of the envs that gave it."""
        infos: dict[str, Any] = {}
        if self._next_step:
            for i in now.restarted:
                infos = self._add_info(infos, {"restarted": True}, i)
        elif now.ended or now.restarted:
            told, done = self.executor.final_infos, now.terminated | now.truncated
            finals = {i: told.get(i, {}) for i in now.env_indices.tolist() if done[i]}
            finals |= {i: {"restarted": True} for i in now.restarted}
            infos = self._final(now.final_obs, finals)
        if any(self.executor.infos):  # most envs have none, and that is cheap to see
            for i in now.env_indices.tolist():
                if not (self._next_step and i in now.restarted):  # its new episode has not begun yet
                    infos = self._add_info(infos, self.executor.infos[i], i)
        return infos

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        """Like Gymnasium's own, without making an array over all envs for each key that is there already."""
        others: dict[str, Any] = {}
        for key, value in env_info.items():
            mask = vector_infos.get(f"_{key}") if key in vector_infos else None
            if mask is None or key == "final_obs" or isinstance(value, dict):
                others[key] = value
            else:
                vector_infos[key][env_num] = value
                mask[env_num] = True
        return super()._add_info(vector_infos, others, env_num) if others else vector_infos

    def _final(self, arrays: ObsArrays, finals: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """The infos of ended episodes as `_add_info` would build them, without its cost for each of them."""
        obs = np.empty(self.num_envs, np.object_)  # of None
        mask = np.zeros(self.num_envs, np.bool_)
        told: dict[str, Any] = {}
        for i, info in finals.items():
            mask[i] = True
            obs[i] = self._layout.build([array[i].copy() for array in arrays])
            if info:
                told = self._add_info(told, info, i)
        return {"final_obs": obs, "_final_obs": mask, "final_info": told, "_final_info": mask.copy()}


def _get_or_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], env: gym.Env[Any, Any]) -> Any:
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute


def _masked(options: Mapping[str, Any] | None, n_envs: int) -> list[int] | None:
    """Gymnasium's `options["reset_mask"]` as env indices, None for all."""
    mask = (options or {}).get("reset_mask")
    if mask is None:
        return None
    if not (isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (n_envs,)):
        raise FlatoutError(f"options['reset_mask'] must be an array of {n_envs} bools")
    return [int(i) for i in np.flatnonzero(mask)]


class ExactLayout(ObsLayout):
    """Observation arrays with the shapes and dtypes of the space, where training would convert them.

    The first `n_checked` observations are compared with the space, because NumPy stores many that do not fit it.
    """

    def __init__(self, space: gym.Space[Any], n_checked: int = 0) -> None:
        super().__init__(space)
        self._n_unchecked = n_checked
        as_given = [replace(spec, channels_last=False) for spec in self.specs]
        declared = [spec.pick(space) for spec in as_given]
        self.specs = tuple(
            replace(spec, shape=sub.shape, dtype=np.dtype(sub.dtype))
            for spec, sub in zip(as_given, declared, strict=True)
        )
        self.is_plain = len(self.specs) == 1 and not self.specs[0].path
        """Whether an observation is one array, not a structure of several."""
        self.stored_as_given = False  # so that `write` is called for each observation
        named = zip(declared, (f"observation{brackets(spec.path)}" for spec in self.specs), strict=True)
        self.bounded = [(k, part, path) for k, (part, path) in enumerate(named) if _has_bounds(part)]
        """Index, space and name of the arrays that can be out of bounds."""

    def write(self, out: ObsArrays, index: int | tuple[int, ...], obs: Any) -> None:
        """Copy one observation to `index` of each array in `out`; raises EnvError if it does not fit its space."""
        try:
            if self._n_unchecked > 0:
                self._n_unchecked -= 1
                list(fitting_parts(self.space, obs))
            if self.is_plain:
                out[0][index] = obs
            else:
                super().write(out, index, obs)
        except EnvError:
            raise
        except Exception as error:
            list(fitting_parts(self.space, obs))  # says what is wrong
            raise EnvError(one_line(error)) from None

    def build(self, arrays: Iterable[Any]) -> Any:
        """The arrays in the structure of the space."""
        return next(iter(arrays)) if self.is_plain else _build(self.space, iter(arrays))


def _has_bounds(space: gym.Space[Any]) -> bool:
    """Whether values of this Box can be outside its bounds; others are checked as they are stored."""
    if not isinstance(space, spaces.Box):
        return False
    if space.dtype == np.uint8:
        return bool((space.low > 0).any() or (space.high < 255).any())
    return bool(np.isfinite(space.low).any() or np.isfinite(space.high).any())


def _build(space: gym.Space[Any], arrays: Iterator[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _build(sub, arrays) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_build(sub, arrays) for sub in space.spaces)
    return next(arrays)


class Sample(NamedTuple):
    """What is known of an env like the executor's."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    metadata: dict[str, Any]
    spec: EnvSpec | None
    render_mode: str | None
    is_async: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvs:
    """An executor and what its caller has to know about the envs."""

    executor: Executor
    layout: ExactLayout
    sample: Sample
    kind: str
    """The executor's kind, never `auto`."""
    next_step: bool = False
    """Whether an ended episode's env is reset at its next step, not in the same one."""
    notes: list[str] = field(default_factory=list)
    """Why `auto` chose this kind, and which kinds could not start; one line each."""


def open_envs(
    env: EnvSource,
    n_envs: int,
    kind: str,
    seed: int,
    env_kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    *,
    next_step: bool = False,
) -> OpenEnvs:
    """`n_envs` copies of an env in an executor of this kind; `options` are the executor's own."""
    if n_envs < 1:
        raise FlatoutError(f"n_envs must be at least 1, got {n_envs}")
    _check_options(kind, options)
    factory = env_factory(env, env_kwargs)
    factory.refuse_copies(n_envs)
    if factory.is_instance and kind == "auto":
        kind = "serial"
    in_turn = n_envs == 1 or kind not in ("auto", "process")  # then they share this process anyway
    look = partial(_look, seed=seed, timed=kind == "auto" and n_envs > 1)
    (sample, *costs), fault = tried(
        factory, look, options.get("step_timeout", STEP_TIMEOUT), isolated=not in_turn
    )
    awaits = sample.is_async
    if awaits and kind in EXECUTORS and kind != "async":
        raise FlatoutError(f"executor '{kind}' cannot run an async env; use 'async'")
    if kind == "async" and not awaits:
        raise FlatoutError(
            "executor 'async' is for envs with async def reset and step; use 'thread' or 'auto'"
        )
    layout = ExactLayout(sample.observation_space, CHECKED_STEPS * n_envs)
    notes: list[str] = []
    ranked: Sequence[str] = [kind]
    if kind == "auto":
        ranked = ["async" if awaits else "serial"]
        if n_envs > 1 and not awaits:
            ranked, notes = rank_kinds(costs[0] if costs else unknown_costs(fault), n_envs)
    options = dict(options)
    envs = EnvSet(
        partial(_with_next_step_reset, factory) if next_step else factory,
        layout,
        np.arange(n_envs),
        seed,
        action=ActionLayout(sample.action_space),
        replayable=False,
        infos=options.pop("infos", True),
    )
    for this, following in zip_longest(ranked, ranked[1:]):
        try:
            executor = make_executor(this, envs, **options)
            if kind == "auto":
                try:
                    executor.apply(id)  # worker processes fail only after they have started
                except BaseException:
                    executor.close()
                    raise
            return OpenEnvs(
                executor=executor, layout=layout, sample=sample, kind=this, next_step=next_step, notes=notes
            )
        except Exception as error:
            if following is None:
                raise
            notes.append(f"executor {this} could not start ({one_line(error)}); using {following}")
    raise AssertionError("serial is always among them")


def _look(factory: EnvFactory, make: Make, *, seed: int, timed: bool) -> Iterator[Any]:
    """A Sample of the env and, if `timed`, the costs of its steps, unless it is async."""
    env = make(factory)
    try:
        validate_spaces(env, text=False)
    except EnvError as error:
        raise EnvError(f"{factory.name}: {error}") from error
    finally:
        env.close()
    inner = env.env if isinstance(env, Blocking) else env
    spaces = inner.observation_space, inner.action_space
    yield Sample(*spaces, inner.metadata, inner.spec, inner.render_mode, isinstance(env, Blocking))
    if timed and inner is env:
        yield time_steps(factory, ActionLayout(env.action_space), seed=seed, make=make)


def _with_next_step_reset(factory: EnvFactory) -> gym.Env[Any, Any]:
    return NextStepReset(factory())


def _check_options(kind: str, options: Mapping[str, Any]) -> None:
    check_kind(kind, known=KINDS)
    known_options = ["infos", *(option_names(kind) if kind != "auto" else ())]
    for name in options:
        if name not in known_options:
            hint = did_you_mean(name, known_options)
            raise FlatoutError(f"executor '{kind}' takes no option '{name}'{hint}")
    n_workers = options.get("n_workers")
    if n_workers is not None and n_workers < 1:
        raise FlatoutError(f"n_workers must be at least 1, got {n_workers}")


def lost_as_truncated(now: Step) -> Step:
    """Where an env was lost during its step and replaced: a step without reward that truncates its episode."""
    if not now.restarted:
        return now
    now = replace(now, reward=now.reward.copy(), truncated=now.truncated.copy())
    now.reward[now.restarted] = 0.0
    now.truncated[now.restarted] = True
    return now
