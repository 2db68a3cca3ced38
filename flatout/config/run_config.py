"""RunConfig: the complete settings of a run, and where they come from.

Later sources override earlier ones: the env's recipe or the preset, a config file, the user's own settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatout.algorithms import base as algorithms
from flatout.algorithms.base import (
    UNKNOWN_TRAITS,
    Algorithm,
    AlgorithmConfig,
    EnvTraits,
    LearnerSpec,
    Recipe,
    check,
)
from flatout.config.fields import all_fields, convert, flatten_json, replace, sections
from flatout.config.trust import CODE, SIGNATURE, code_in, require_trust, signed
from flatout.device.accelerator import accelerators
from flatout.device.cards import replay_batch_size
from flatout.device.machine import read_cache, write_cache
from flatout.envs.loader import Code
from flatout.envs.make import env_id, is_atari
from flatout.errors import FlatoutError
from flatout.executors.base import EXECUTORS, check_kind
from flatout.models.config import NetworkConfig, split_arch

if TYPE_CHECKING:
    from flatout.envs.spaces import ActionLayout, ObsLayout

ATARI_FRAMES = 4
"""Frames that an Atari agent sees unless --frame-stack says otherwise."""


NEWER = {"network", "vf_arch", "optimizer", "exploration_steps"}
"""Settings of networks and algorithms that older files do not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The complete settings of a run."""

    env: str
    """A Gymnasium id, module:Id, or file.py:factory."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the env's constructor, as JSON."""
    algo: str = algorithms.DEFAULT
    """Algorithm; default: the one that learns the env fastest, where that is known, else ppo."""
    preset: Literal["auto", "cpu", "gpu", "fast", "heavy", "beast", "max"] | None = None
    """Settings to start from; none, the default: the env's recipe if it has one, else auto."""
    timesteps: int
    """Total env steps, summed over all envs."""
    n_envs: int
    """Number of envs."""
    atari: bool | None = None
    """Atari's preprocessing of frames (grey, 84x84, 4 frames a step, up to 30 no-ops); default: for ids of ale-py."""
    frame_stack: int = 0
    """Show the agent the last N frames; 0: 4 with --atari, else 1."""
    seed: int = 0
    """Random seed; the same seed gives the same run."""
    executor: str = "auto"
    """How envs are stepped: auto, serial, process, thread, async, batched, ray, or your own as FILE.py:NAME."""
    ray_address: str | None = None
    """Cluster of `--executor ray` or `sweep --ray`, such as 10.0.0.1:6379 or auto; none: one on this machine for this run."""
    n_collectors: int = 0
    """Number of collectors in subprocesses or Ray actors; 0: chosen by measurement, possibly none."""
    n_workers: int = 0
    """Worker processes of `--executor process`; 0: two per core, or one per env if envs wait."""
    step_timeout: float = 60.0
    """Seconds that one reset or step of an env may take; an env that takes longer is replaced."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Collect the next rollout while the learner updates from this one; auto: if that is predicted to pay."""
    device: str = "auto"
    """Device of the learner and of envs made of tensors: auto, cpu, cuda[:N] (ROCm too), xpu[:N] or mps."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Floating-point format of the update."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Backend of the update: off is eager PyTorch; on is compiled, on a GPU a CUDA graph; auto is the fastest available."""
    accumulate: int = 1
    """Split each minibatch into this many parts and sum their gradients: the same result with less memory."""
    target_return: float | None = None
    """Stop when the mean return of the last 100 episodes, or of an evaluation, reaches this value."""
    eval_every: int = 0
    """Env steps between evaluations of the deterministic policy; 0: never."""
    eval_episodes: int = 20
    """Episodes per evaluation."""
    eval_max_steps: int = 20_000
    """Steps after which an episode of an evaluation is cut; it counts with its return so far."""
    checkpoint_every: int = 100_000
    """Env steps between checkpoints; 0: only at the end."""
    log: tuple[Literal["wandb", "mlflow", "tensorboard"], ...] = ()
    """Where metrics, config and summary go too: wandb, mlflow, with commas between; TensorBoard's events are always written."""
    algorithm: AlgorithmConfig
    """The algorithm's settings."""
    network: NetworkConfig
    """The network's settings."""

    def __post_init__(self) -> None:
        check(self, "at least 1", "timesteps", "n_envs", "eval_episodes", "eval_max_steps")
        check(self, "at least 0", "seed", "eval_every", "checkpoint_every", "n_collectors", "n_workers")
        check(self, "at least 0", "frame_stack")
        if not 0.0 < self.step_timeout < float("inf"):
            raise FlatoutError(
                f"--step-timeout is {self.step_timeout:g}; it must be a positive number of seconds"
            )
        check_kind(self.executor, "--executor", ("auto", "ray", *EXECUTORS))
        if self.n_collectors and self.executor not in ("auto", "ray"):
            raise FlatoutError(
                f"--n-collectors {self.n_collectors} needs --executor auto or ray, not {self.executor}"
            )
        if self.ray_address is not None and self.executor != "ray":
            raise FlatoutError(f"--ray-address {self.ray_address} needs --executor ray")
        if self.compile == "on" and not self.algorithm.COMPILES:
            raise FlatoutError(
                f"--compile on cannot compile {self.algo}, whose fused update is fast: use --compile auto"
            )
        self.algorithm.check_rollout(self.n_envs)
        size = self.algorithm.batch_rows
        if not 1 <= self.accumulate <= size:
            raise FlatoutError(
                f"--accumulate is {self.accumulate}; it must be from 1 to the batch size, {size}"
            )

    @property
    def descriptor(self) -> Algorithm:
        """The algorithm."""
        return algorithms.get(self.algo)

    def learner_spec(self, obs: ObsLayout, action: ActionLayout) -> LearnerSpec:
        """What makes the run's model and learner."""
        return LearnerSpec(
            algorithm=self.descriptor,
            config=self.algorithm,
            network=self.network,
            obs=obs,
            action=action,
            seed=self.seed,
            n_envs=self.n_envs,
        )

    @property
    def total_batch(self) -> int:
        """Transitions in one rollout."""
        return self.n_envs * self.algorithm.n_steps

    @property
    def part_size(self) -> int:
        """Rows of a minibatch that are differentiated at once."""
        return -(-self.algorithm.batch_rows // self.accumulate)

    @property
    def updates_per_iteration(self) -> float:
        """Optimizer steps per rollout."""
        return self.algorithm.updates_per_iteration(self.total_batch)

    def arithmetic(self) -> str:
        """The batch arithmetic in one line."""
        return self.algorithm.arithmetic(self.n_envs)

    def frames(self) -> str:
        """What an agent sees of its env's frames, in one line."""
        stack = f"{self.frame_stack} frames stacked" if self.frame_stack > 1 else "single frames"
        if not self.atari:
            return f"observations: {stack}"
        why = " (an Atari game; --no-atari turns it off)" if is_atari(self.env) else ""
        return f"observations: Atari preprocessing{why}, grey 84x84, every 4th frame, {stack}"

    def to_json(self) -> dict[str, Any]:
        """Nested plain data for `from_json`, signed if it names code."""
        names = {attribute: section for section, attribute in sections(self).items()}
        values = {names.get(name, name): value for name, value in asdict(self).items()}
        nested = (part for part in values.values() if isinstance(part, dict))
        names_code = any(":" in str(values[name]) for name in CODE)
        names_code = names_code or any(isinstance(value, Code) for part in nested for value in part.values())
        return signed(values) if names_code else values

    @staticmethod
    def from_json(data: Any, source: str) -> RunConfig:
        """A complete config from what `to_json` gave; settings of the run may be newer than the file."""
        values = _flatten(data, source)
        algorithm = _algorithm(values)
        others = set(algorithms.names()) - {algorithm.name}
        newer = {field.name for field in fields(RunConfig) if field.default is not MISSING} | NEWER
        missing = [f.name for f in all_fields(RunConfig) if f.name not in values and f.section not in others]
        missing = [name for name in missing if name not in newer]
        if missing:
            raise FlatoutError(f"{source}: misses {', '.join(missing[:3])}; it is not a complete config")
        blank = Recipe(n_envs=256, algorithm=algorithm.config(), network=NetworkConfig())
        return _with(blank, values)


def resolve(
    env: str | None,
    settings: Mapping[str, Any],
    *,
    device: str,
    n_cores: int,
    file: Path | None = None,
    trust: bool = False,
    traits: EnvTraits = UNKNOWN_TRAITS,
) -> RunConfig:
    """The complete config for an env, from its recipe or preset, a config file and the user's settings.

    `trust`: whether the file may name code that this user's runs did not write. `traits`: what the defaults of an env without
    a recipe depend on.
    """
    given = split_arch(settings) if "network_arch" in settings else dict(settings)
    if file is not None:
        given = split_arch(read_file(file, given | ({"env": env} if env else {}), trust)) | given
    env = env or given.get("env")
    if not env:
        raise FlatoutError("no env given; name one, such as CartPole-v1")
    given["env"] = env = env_id(env)
    given |= _frame_settings(env, given)
    given["algo"] = _variant(given.get("algo") or _first_choice(env, given), given)
    recipe = _recipe(env, given, device, n_cores, traits)
    if given.get("preset") == "auto":
        given = tuned_settings(env, given, device, n_cores) | given
    return _with(recipe, _with_batch_size(given, recipe, device))


def _frame_settings(env: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Whether frames get Atari's preprocessing and how many are stacked, where the user does not say; empty for most."""
    atari = _value(given, "atari", None)
    if atari is None:
        kwargs = given.get("env_kwargs") or {}
        atari = is_atari(env) and "-ram" not in env and "obs_type" not in kwargs
    stack = _value(given, "frame_stack", 0)
    if not atari and not stack:
        return {}
    return {"atari": atari, "frame_stack": stack or (ATARI_FRAMES if atari else 1)}


def _with(recipe: Recipe, values: Mapping[str, Any]) -> RunConfig:
    """A recipe with these settings, all at once, because every config is validated when it is made."""
    config = RunConfig(
        env=values["env"],
        algo=values["algo"],
        timesteps=recipe.timesteps,
        n_envs=recipe.n_envs,
        algorithm=recipe.algorithm,
        network=recipe.network,
    )
    return replace(config, values)


TUNED_KEYS = ("n_envs", "n_steps", "executor", "n_collectors", "n_workers", "overlap")
"""Settings that `flatout tune` decides."""


def save_tuned(config: RunConfig, device: str, n_cores: int) -> None:
    """Save the settings that tuning found for an env on this machine, for `--preset auto`."""
    facts = _tuned_for(config.env, config.descriptor.name, config.env_kwargs, device, n_cores)
    values = {name: getattr(config.algorithm if name == "n_steps" else config, name) for name in TUNED_KEYS}
    write_cache("tuned", facts, {"env": config.env, "settings": values})


def tuned_settings(env: str, given: Mapping[str, Any], device: str, n_cores: int) -> dict[str, Any]:
    """The settings that tuning found for an env on this machine; empty if there are none, or if envs or steps are given."""
    if any(name in given for name in ("n_envs", "n_steps")):
        return {}
    facts = _tuned_for(env, _algorithm(given).name, given.get("env_kwargs") or {}, device, n_cores)
    return read_cache("tuned", facts, "settings") or {}


def _tuned_for(env: str, algo: str, *others: Any) -> list[Any]:
    return [env, *others] if algo == algorithms.DEFAULT else [env, algo, *others]


def memory_needed(n_transitions: int, widths: Sequence[int], obs_bytes: int) -> int:
    """Bytes that a run needs at least: its rollout, the shuffled copy, parameters and Adam's state."""
    n_params = 2 * sum(a * b for a, b in pairwise([obs_bytes // 4, *widths]))
    return 3 * n_transitions * (obs_bytes + 32) + 5 * 4 * n_params


def preset_note(
    presets: Mapping[str, Recipe], preset: str, n_cores: int, memory_bytes: int, obs_bytes: int
) -> str | None:
    """A warning if a preset needs more cores or memory than the machine has, with the preset that fits."""

    def memory(recipe: Recipe) -> int:
        total = recipe.n_envs * recipe.algorithm.n_steps
        return memory_needed(total, recipe.network.network_arch, obs_bytes)

    recipe = presets[preset]
    needed = memory(recipe)
    if recipe.n_cores > n_cores:
        needs, has = f"{recipe.n_cores} cores", f"{n_cores}"
    elif needed > memory_bytes:
        needs, has = f"{needed / 1e9:.1f} GB of memory", f"{memory_bytes / 1e9:.1f} GB free"
    else:
        return None
    fitting = [
        name for name, other in presets.items() if other.n_cores <= n_cores and memory(other) <= memory_bytes
    ]
    fits = max(fitting, key=lambda name: presets[name].n_cores, default="auto")
    return f"preset {preset} needs {needs}; this machine has {has}; --preset {fits} fits"


def read_algorithm(path: Path, trust: bool) -> None:
    """Load the algorithm that a config file names, so that its settings are known."""
    data = _read_json(path)
    require_trust(data, f"--config {path}", trust=trust, names=("algo",))
    _flatten(data, f"--config {path}")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise FlatoutError(f"--config {path}: {error.strerror}") from error
    except ValueError as error:
        raise FlatoutError(f"--config {path} is not JSON: {error}") from error


def read_file(path: Path, given: Mapping[str, Any], trust: bool) -> dict[str, Any]:
    """The settings in a JSON config file, by name.

    Code that it names must be in `given`, the user's own settings, or signed, or trusted.
    """
    data = _read_json(path)
    # The file's algorithm is loaded even if the user names another: its settings are read.
    named = code_in(data) if isinstance(data, dict) else ()
    names = [name for name in named if name == "algo" or name not in given]
    require_trust(data, f"--config {path}", trust=trust, typed=list(given.values()), names=names)
    return _flatten(data, f"--config {path}")


def _flatten(data: Any, source: str) -> dict[str, Any]:
    """The settings in nested JSON by name; settings of another algorithm are refused."""
    if isinstance(data, dict):
        data = {name: value for name, value in data.items() if name != SIGNATURE}
    algorithm = _algorithm(data if isinstance(data, dict) else {})
    values = flatten_json(RunConfig, data, source)
    for other in algorithms.names():
        if other in data and other != algorithm.name:
            raise FlatoutError(f"{source}: has settings of {other.upper()}, but its algo is {algorithm.name}")
    return values


def _algorithm(given: Mapping[str, Any]) -> Algorithm:
    return algorithms.get(str(given.get("algo", algorithms.DEFAULT)))


def _first_choice(env: str, given: Mapping[str, Any]) -> str:
    """The algorithm with the fastest recipe for the env; the default if a given setting does not belong to it."""
    known = (algorithms.get(name) for name in algorithms.names())
    choice = next((it.name for it in known if env in it.first_choice_for), algorithms.DEFAULT)
    fitting = {f.name for f in all_fields(RunConfig) if f.section in (None, "network", choice)}
    fits = given.keys() <= fitting and given.get("preset") in (None, "none")
    return choice if fits else algorithms.DEFAULT


def _variant(algo: str, given: Mapping[str, Any]) -> str:
    """The algorithm, or its variant that has a given setting that it does not have itself."""
    sections: dict[str, set[str | None]] = {}
    for it in all_fields(RunConfig):
        sections.setdefault(it.name, set()).add(it.section)
    for name in algorithms.names():
        variant = algorithms.get(name)
        if variant.variant_of == algo and any(sections.get(key) == {name} for key in given):
            return name
    return algo


def _recipe(env: str, given: Mapping[str, Any], device: str, n_cores: int, traits: EnvTraits) -> Recipe:
    algorithm, preset = _algorithm(given), given.get("preset")
    if preset in (None, "none") and env in algorithm.recipes:
        return algorithm.recipes[env]
    preset = _value(given, "preset", None)
    if preset in (None, "auto"):
        return algorithm.auto_recipe(device != "cpu", n_cores, traits, _value(given, "n_envs", None))
    return algorithm.preset(preset)


def _with_batch_size(given: dict[str, Any], recipe: Recipe, device: str) -> dict[str, Any]:
    """The settings with a batch size that divides the rollout, unless the user gave one other than `auto`."""
    wanted, it = given.get("batch_size"), recipe.algorithm
    if wanted not in (None, "auto"):
        return given
    own = {field.name for field in fields(it)} - {"batch_size"}
    it = replace(it, {name: value for name, value in given.items() if name in own})
    total = _value(given, "n_envs", recipe.n_envs) * it.n_steps
    target = _auto_batch_size(it, device) if wanted == "auto" else it.batch_size
    return given | {"batch_size": it.fit_batch_size(max(total, 1), target)}


def _auto_batch_size(algorithm: AlgorithmConfig, device: str) -> int:
    """What `--batch-size auto` aims at; with a replay buffer it goes by the card, on the CPU it is the default."""
    if not algorithm.USES_REPLAY:
        return algorithm.AUTO_BATCH[device != "cpu"]
    if device == "cpu":
        return algorithm.batch_size
    gpus, index = accelerators(), int(device.partition(":")[2] or 0)
    if index >= len(gpus) or not gpus[index].memory_bytes:
        return algorithm.AUTO_BATCH[True]
    return replay_batch_size(gpus[index].name, gpus[index].memory_bytes)


def _value(given: Mapping[str, Any], name: str, default: Any) -> Any:
    """A given setting in its own type; the default if it is not given."""
    setting = next(f for f in all_fields(RunConfig) if f.name == name)
    return convert(setting, given[name]) if name in given else default
