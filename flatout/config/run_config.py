"""RunConfig: everything that decides what a run does, made of the parts' own configs; JSON in and out.

Resolved from, in this order: the env's recipe or the preset, a config file, the user's own settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatout.algorithms import base as algorithms
from flatout.algorithms.base import Algorithm, AlgorithmConfig, LearnerSpec, Recipe
from flatout.config.fields import all_fields, convert, flag, flatten_json, to_json
from flatout.config.fields import replace as replace_fields
from flatout.device.machine import cache_folder
from flatout.envs.make import env_id
from flatout.errors import FlatoutError
from flatout.models.config import NetworkConfig

if TYPE_CHECKING:
    from flatout.envs.spaces import ActionLayout, ObsLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The complete settings of a run."""

    env: str
    """A Gymnasium id, module:Id, or file.py:factory."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keywords for the env's constructor, as JSON."""
    algo: str = algorithms.DEFAULT
    """Algorithm; not given: the one whose recipe learns the env soonest, else PPO."""
    preset: Literal["auto", "cpu", "gpu", "fast", "heavy", "beast", "max"] | None = None
    """Where settings come from that are not given; none: the env's recipe if it has one, else auto."""
    timesteps: int
    """Env steps to train for, over all envs together."""
    n_envs: int
    """Envs that run at once."""
    seed: int = 0
    """The same seed gives the same run."""
    executor: Literal["auto", "serial", "process", "thread", "async", "batched", "ray"] = "auto"
    """How envs are run."""
    n_collectors: int = 0
    """Collectors in processes of their own; 0: as many as suit the cores, or none."""
    n_workers: int = 0
    """Worker processes of `--executor process`; 0: as many as suit the cores."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Collect the next rollout while learning from this one."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Number format of the update."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the update."""
    target_return: float | None = None
    """Stop when the mean return of the last 100 episodes reaches this."""
    eval_every: int = 0
    """Evaluate the deterministic policy every so many env steps; 0: never."""
    eval_episodes: int = 20
    """Episodes of each such evaluation."""
    checkpoint_every: int = 100_000
    """Save a checkpoint every so many env steps; 0: only at the end."""
    algorithm: AlgorithmConfig
    """The algorithm's settings."""
    network: NetworkConfig
    """The network's settings."""

    def __post_init__(self) -> None:
        for name, least in (("timesteps", 1), ("n_envs", 1), ("eval_episodes", 1), ("seed", 0)):
            _at_least(name, getattr(self, name), least)
        for name in ("eval_every", "checkpoint_every", "n_collectors", "n_workers"):
            _at_least(name, getattr(self, name), 0)
        for name, (usable, missing) in _NOT_YET.items():
            value = getattr(self, name)
            if value in missing:
                raise FlatoutError(f"{flag(name)} {value} is not in this version yet; use {usable}")
        if self.n_collectors and self.executor != "auto":
            raise FlatoutError(
                f"--n-collectors {self.n_collectors} goes with --executor auto, not {self.executor}"
            )
        self.algorithm.check_rollout(self.n_envs)

    @property
    def descriptor(self) -> Algorithm:
        """The algorithm."""
        return algorithms.get(self.algo)

    def learner_spec(self, obs: ObsLayout, action: ActionLayout) -> LearnerSpec:
        """Makes the run's model and learner for such observations and actions."""
        return LearnerSpec(
            algorithm=self.descriptor,
            config=self.algorithm,
            network=self.network,
            obs=obs,
            action=action,
            seed=self.seed,
        )

    @property
    def total_batch(self) -> int:
        """Transitions in one rollout."""
        return self.n_envs * self.algorithm.n_steps

    @property
    def updates_per_iteration(self) -> float:
        """Optimizer steps per rollout."""
        return self.algorithm.updates_per_iteration(self.total_batch)

    def arithmetic(self) -> str:
        """The batch arithmetic in one line."""
        return self.algorithm.arithmetic(self.n_envs)

    def to_json(self) -> dict[str, Any]:
        """Nested plain data that `from_json` takes back."""
        return to_json(self)

    @staticmethod
    def from_json(data: Any, source: str) -> RunConfig:
        """A complete config from what `to_json` gave."""
        values = _flatten(data, source)
        algorithm = _algorithm(values)
        others = set(algorithms.names()) - {algorithm.name}
        missing = [f.name for f in all_fields(RunConfig) if f.name not in values and f.section not in others]
        if missing:
            raise FlatoutError(f"{source}: lacks {', '.join(missing[:3])}; it is not a complete config")
        blank = RunConfig(
            env="",
            algo=values["algo"],
            timesteps=1,
            n_envs=256,
            algorithm=algorithm.config(),
            network=NetworkConfig(),
        )
        return _replace(blank, values)


_NOT_YET: dict[str, tuple[str, tuple[str, ...]]] = {
    "executor": ("auto", ("ray",)),
}
"""Settings whose feature is still to come: refused, never ignored."""


def resolve(
    env: str | None,
    settings: Mapping[str, Any],
    *,
    device: str,
    n_cores: int,
    file: Path | None = None,
) -> RunConfig:
    """The complete config for an env, from its recipe or preset, a config file and the user's settings."""
    given = dict(settings)
    if file is not None:
        given = read_file(file) | given
    env = env or given.get("env")
    if not env:
        raise FlatoutError("no env given; name one, such as CartPole-v1")
    given["env"] = env = env_id(env)
    given.setdefault("algo", _first_choice(env, given))
    recipe = _recipe(env, _algorithm(given), given.get("preset"), device, n_cores)
    if given.get("preset") == "auto":
        given = tuned_settings(env, given, device, n_cores) | given
    config = RunConfig(
        env=env,
        algo=given["algo"],
        timesteps=recipe.timesteps,
        n_envs=recipe.n_envs,
        algorithm=recipe.algorithm,
        network=recipe.network,
    )
    return _replace(config, _with_batch_size(given, recipe, device))


TUNED_KEYS = ("n_envs", "n_steps", "executor", "n_collectors", "n_workers", "overlap")
"""What tuning decides."""


def save_tuned(config: RunConfig, device: str, n_cores: int) -> None:
    """Keep what was found for an env on this machine, for `--preset auto`."""
    path = _tuned_path(config.env, config.descriptor.name, config.env_kwargs, device, n_cores)
    values = {name: getattr(config.algorithm if name == "n_steps" else config, name) for name in TUNED_KEYS}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"env": config.env, "settings": values}, indent=2))


def tuned_settings(env: str, given: Mapping[str, Any], device: str, n_cores: int) -> dict[str, Any]:
    """What tuning found for this env on this machine; nothing if it never ran, or if envs or steps are given."""
    if any(name in given for name in ("n_envs", "n_steps")):
        return {}
    path = _tuned_path(env, _algorithm(given).name, given.get("env_kwargs") or {}, device, n_cores)
    with suppress(OSError, ValueError, KeyError):
        settings: dict[str, Any] = json.loads(path.read_text())["settings"]
        return settings
    return {}


def _tuned_path(env: str, algo: str, env_kwargs: Any, device: str, n_cores: int) -> Path:
    named = [env] if algo == algorithms.DEFAULT else [env, algo]
    facts = json.dumps([*named, env_kwargs, device, n_cores], sort_keys=True, default=str)
    return cache_folder() / "tuned" / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.json"


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a JSON config file, by name."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise FlatoutError(f"--config {path}: {error.strerror}") from error
    except ValueError as error:
        raise FlatoutError(f"--config {path} is not JSON: {error}") from error
    return _flatten(data, f"--config {path}")


def _flatten(data: Any, source: str) -> dict[str, Any]:
    """The settings in nested JSON; those of another algorithm than its own are refused."""
    algorithm = _algorithm(data if isinstance(data, dict) else {})
    values = flatten_json(RunConfig, data, source)
    for other in algorithms.names():
        if other in data and other != algorithm.name:
            raise FlatoutError(f"{source}: has settings of {other.upper()}, but its algo is {algorithm.name}")
    return values


def _algorithm(given: Mapping[str, Any]) -> Algorithm:
    return algorithms.get(str(given.get("algo", algorithms.DEFAULT)))


def _first_choice(env: str, given: Mapping[str, Any]) -> str:
    """The algorithm whose recipe learns the env soonest, unless what is given is of another one."""
    known = (algorithms.get(name) for name in algorithms.names())
    choice = next((it.name for it in known if env in it.first_choice_for), algorithms.DEFAULT)
    fitting = {f.name for f in all_fields(RunConfig) if f.section in (None, "network", choice)}
    fits = given.keys() <= fitting and given.get("preset") in (None, "none")
    return choice if fits else algorithms.DEFAULT


def _recipe(env: str, algorithm: Algorithm, preset: Any, device: str, n_cores: int) -> Recipe:
    if preset in (None, "none") and env in algorithm.recipes:
        return algorithm.recipes[env]()
    known = next(f for f in all_fields(RunConfig) if f.name == "preset")
    preset = convert(known, preset)
    if preset in (None, "auto"):
        return algorithm.auto_recipe(device != "cpu", n_cores)
    return algorithm.preset(preset)


def _with_batch_size(given: dict[str, Any], recipe: Recipe, device: str) -> dict[str, Any]:
    """A batch size of the recipe, or `auto`, becomes the nearest that divides; an explicit one stays."""
    by_name = {f.name: f for f in all_fields(RunConfig)}

    def number(name: str, default: int) -> int:
        return int(convert(by_name[name], given[name])) if name in given else default

    total = number("n_envs", recipe.n_envs) * number("n_steps", recipe.algorithm.n_steps)
    wanted = given.get("batch_size")
    if wanted not in (None, "auto"):
        return given
    it = recipe.algorithm
    target = it.AUTO_BATCH[device != "cpu"] if wanted == "auto" else it.batch_size
    return given | {"batch_size": it.fit_batch_size(max(total, 1), target)}


def _replace(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """All changes at once, so that no half-changed config is ever checked."""
    out: RunConfig = replace_fields(config, values)
    return out


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise FlatoutError(f"{flag(name)} is {value}; it must be at least {least}")
