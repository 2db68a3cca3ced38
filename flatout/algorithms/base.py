"""What the rest of the package may know of an algorithm: its descriptor, its config, and the registry of both.

An algorithm is one folder here, or one file of a user's. Its `Algorithm` descriptor says how to build its model and
its learner; its config dataclass, a subclass of `AlgorithmConfig`, becomes flags and JSON. Nothing here loads torch,
so that a command line parses quickly; `make_model` and `make_learner` do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from hashlib import sha256
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from flatout.algorithms.space import Space
from flatout.envs.loader import Code, absolute, load_object, read_code
from flatout.errors import FlatoutError, did_you_mean
from flatout.models.config import NetworkConfig
from flatout.timing import PhaseClock

if TYPE_CHECKING:
    from flatout.collect.noise import Exploration
    from flatout.envs.spaces import ActionLayout, ObsLayout
    from flatout.learning.learner import Learner
    from flatout.models.policy import ActorCritic, PolicyNet

Schedule = Literal["constant", "linear"] | Code
"""How a setting changes over the run; a user's function takes the progress, from 0 to 1, and returns a factor."""
DEFAULT = "ppo"
"""The algorithm of a run that names none."""
BUILT_IN = ("ppo", "dqn", "pqn", "sac", "recurrent-ppo")
"""Packages of `flatout.algorithms`, with underscores, each with its descriptor as `ALGORITHM`."""


RANGES: dict[str, Callable[[Any], bool]] = {
    "at least 1": lambda value: value >= 1,
    "at least 0": lambda value: value >= 0,
    "0 or more": lambda value: value >= 0,
    "above 0": lambda value: value > 0,
    "above 0, or none": lambda value: value is None or value > 0,
    "above 0 and at most 1": lambda value: 0 < value <= 1,
    "at least 0 and below 1": lambda value: 0 <= value < 1,
    "between 0 and 1": lambda value: 0 <= value <= 1,
}


def check(config: Any, wanted: str, *names: str) -> None:
    """Refuse values of these settings outside one of RANGES."""
    for name in names:
        if not RANGES[wanted](getattr(config, name)):
            raise FlatoutError(f"--{name.replace('_', '-')} is {getattr(config, name)}; it must be {wanted}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """Base of an algorithm's config, with the settings that `Learner` reads and the batch arithmetic of rollouts."""

    NOT_IN_UPDATE: ClassVar[frozenset[str]] = frozenset()
    """Fields that the code of an update does not depend on; a compiled update is reused when only these change."""
    AUTO_BATCH: ClassVar[tuple[int, int]] = (256, 2048)
    """What `--batch-size auto` aims at, on a CPU and on an accelerator; with a replay buffer it goes by the card."""
    USES_REPLAY: ClassVar[bool] = False
    """Whether updates draw from a replay buffer instead of the newest rollout."""
    COMPILES: ClassVar[bool] = True
    """Whether its update can be compiled ahead of time."""

    n_steps: int = 256
    """Env steps of each env in a rollout."""
    batch_size: int = 256
    """Transitions in a minibatch; must divide n_envs x n_steps, except for DQN. auto: by the device."""
    learning_rate: float = 3e-4
    """Learning rate of Adam, or of your own optimizer."""
    learning_rate_schedule: Schedule = "constant"
    """`linear` lowers the learning rate to zero over the run; your own function, FILE.py:NAME, takes the progress from 0 to
    1 and returns a factor."""
    optimizer: Code | None = None
    """Your own optimizer instead of Adam, FILE.py:NAME: a torch.optim class, or a function of the parameters."""
    gamma: float = 0.99
    """Discount per step."""
    max_grad_norm: float = 0.5
    """Clip the gradient to this norm, over all parameters together."""
    normalize_obs: bool = False
    """Normalize float observations by their running mean and standard deviation."""
    clip_reward: bool = False
    """Learn from the sign of rewards, as is usual for Atari; returns are reported as they are."""

    def __post_init__(self) -> None:
        check(self, "at least 1", "n_steps", "batch_size")
        check(self, "above 0", "learning_rate", "max_grad_norm")
        check(self, "between 0 and 1", "gamma")

    @property
    def epochs(self) -> int:
        """Passes over each rollout."""
        return getattr(self, "n_epochs", 1)

    @property
    def batch_rows(self) -> int:
        """Rows of a minibatch: its transitions, unless a row is a sequence."""
        return self.batch_size

    def updates_per_iteration(self, total_batch: int) -> float:
        """Optimizer steps per rollout, on average."""
        return total_batch // self.batch_size * self.epochs

    def fit_batch_size(self, total_batch: int, target: int) -> int:
        """The batch size nearest to `target` that such a rollout allows, and not above it."""
        return choose_batch_size(total_batch, target)

    def check_rollout(self, n_envs: int) -> None:
        """Raise where rollouts of this many envs do not suit these settings."""
        total = n_envs * self.n_steps
        if total % self.batch_size:
            near = " or ".join(map(str, nearest_batch_sizes(total, self.batch_size)))
            raise FlatoutError(
                f"--batch-size {self.batch_size} does not divide the rollout of {n_envs} envs x "
                f"{self.n_steps} steps = {total}; the nearest that do are {near}"
            )

    def arithmetic(self, n_envs: int) -> str:
        """The batch arithmetic in one line."""
        total = n_envs * self.n_steps
        n_minibatches, n_epochs = total // self.batch_size, self.epochs
        n_updates = n_minibatches * n_epochs
        return (
            f"{n_envs} envs × {self.n_steps} steps = {total:,} total batch, "
            f"{n_minibatches} {'minibatch' if n_minibatches == 1 else 'minibatches'} of {self.batch_size} "
            f"× {n_epochs} epoch{'s' * (n_epochs != 1)} = {n_updates} update{'s' * (n_updates != 1)} per iteration"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Settings that decide how well an env is learned, for one env or one kind of machine; any flag overrides them."""

    n_envs: int
    algorithm: AlgorithmConfig
    network: NetworkConfig
    timesteps: int = 1_000_000
    n_cores: int = 1
    """Cores it is made for; a run on fewer gets a warning."""


def imported(target: str) -> Callable[..., Any]:
    """A function that calls `module:name`, imported at the first call; keeps torch out of parsing."""
    module, _, name = target.partition(":")
    return lambda *args, **keywords: getattr(import_module(module), name)(*args, **keywords)


def make_actor_critic(
    obs: ObsLayout, action: ActionLayout, network: NetworkConfig, config: AlgorithmConfig, seed: int
) -> ActorCritic:
    """A policy and a value function."""
    from flatout.models.policy import build

    return build(obs, action, network, seed, normalize_obs=config.normalize_obs)


LARGE = 6.0
"""Root mean square beyond which observations, median beyond which rewards are normalized by default. Observations: not Ant's (4.6 to
5.1), which learns less so, but HalfCheetah's (7), Walker2d's (8), Reacher's (7 to 11) and Humanoid's (400). Rewards:
InvertedDoublePendulum's (8) and HumanoidStandup's (32), which learn more so."""
SHORT_ROLLOUT = 256
"""Steps of each env in the shortest rollout that `auto_continuous` is split into."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvTraits:
    """What defaults depend on and only the env itself can tell."""

    continuous: bool = False
    """Whether its actions are."""
    large_obs: bool = False
    """Whether its observations are beyond LARGE."""
    large_rewards: bool = False
    """Whether its rewards are."""


UNKNOWN_TRAITS = EnvTraits()
"""Before the env has been made."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What the rest of the package knows of an algorithm. `config` below is an instance of its config class."""

    name: str
    """Its name on the command line, and of its section in JSON configs."""
    config: type[AlgorithmConfig]
    """Its config dataclass; every field becomes a flag."""
    make_learner: Callable[..., Learner[Any]]
    """(model, config, *, n_envs, seed, clock, precision) → learner of that model."""
    make_model: Callable[..., PolicyNet] = make_actor_critic
    """(obs, action, network, config, seed) → model on the CPU, which depends on nothing but these."""
    exploration: Callable[[Any, int], Exploration] | None = None
    """(config, n_envs) → how envs explore; None: as the policy samples."""
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """Tuned settings by env id."""
    presets: Mapping[str, Recipe] = field(default_factory=dict)
    """Settings by name of a preset."""
    auto: tuple[Recipe, Recipe] | None = None
    """Settings for an env without a recipe, on a CPU and on an accelerator; their number of envs is for up to four cores,
    and more cores have more. None: the config's defaults."""
    auto_continuous: tuple[Recipe, Recipe] | None = None
    """The same for envs with continuous actions, whose rollout has as many transitions with more envs; None: as `auto`."""
    metrics: tuple[str, ...] = ()
    """Metrics of its own, for columns of metrics.csv besides the usual ones."""
    space: Space = field(default_factory=dict)
    """What `flatout sweep` searches, unless the user brings a space."""
    first_choice_for: tuple[str, ...] = ()
    """Env ids that use this algorithm unless another one is named."""
    variant_of: str = ""
    """The algorithm that this one replaces where a setting is given that only this one has."""
    source: str = ""
    """The FILE.py:NAME that it was loaded from; set by `get`."""
    code: bytes | None = field(default=None, repr=False)
    """That file's content at the time; set by `get`."""

    def __reduce__(self) -> Any:
        """Pickled by name where another process can find it by that: a built-in one, or one in a file."""
        if self.source:
            return _load, (self.source, self.code)
        return (get, (self.name,)) if self.name in BUILT_IN else super().__reduce__()

    def source_hash(self) -> str:
        """A hash of the user's file that it was loaded from; "" for a built-in one."""
        return sha256(self.code).hexdigest() if self.code else ""

    @property
    def title(self) -> str:
        """Its name as people write it."""
        return self.name.upper()

    def auto_recipe(
        self, on_accelerator: bool, n_cores: int, traits: EnvTraits, n_envs: int | None = None
    ) -> Recipe:
        """Settings for an env without a recipe, by the machine and the env; `n_envs`: if their number is given."""
        recipe = Recipe(n_envs=8, algorithm=self.config(), network=NetworkConfig())
        if self.auto is not None:
            recipe = self.auto[on_accelerator]
        long = self.auto_continuous if traits.continuous else None
        if long is not None:
            recipe = long[on_accelerator]
        few = recipe.n_envs
        config: Any = recipe.algorithm
        usual = min(max(few, few * n_cores // 4), 32)
        if long is not None:  # more envs share the transitions of its rollout
            n_steps = max(few * config.n_steps // (n_envs or usual) // SHORT_ROLLOUT, 1) * SHORT_ROLLOUT
            config = replace(config, n_steps=n_steps)
        if traits.large_obs:
            config = replace(config, normalize_obs=True)
        if traits.large_rewards and hasattr(config, "normalize_reward"):
            config = replace(config, normalize_reward=True)
        return replace(recipe, n_envs=usual, algorithm=config)

    def preset(self, name: str) -> Recipe:
        """A preset's settings; one that the algorithm does not have is refused."""
        if name not in self.presets:
            there = ", ".join([*self.presets, "auto"])
            are = "are" if self.presets else "is"
            raise FlatoutError(f"--preset {name} has no settings for {self.title}; there {are} {there}")
        return self.presets[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerSpec:
    """Makes a run's model and learner; picklable, so that other processes can make the same ones."""

    algorithm: Algorithm  # first: unpickling it loads the file that may define the config's class
    config: AlgorithmConfig
    network: NetworkConfig
    obs: ObsLayout
    action: ActionLayout
    seed: int
    n_envs: int

    def make_model(self) -> PolicyNet:
        """A new model on the CPU."""
        model = self.algorithm.make_model(self.obs, self.action, self.network, self.config, self.seed)
        if self.n_envs == 1:  # one env cannot be split
            model.block = 1
        return model

    def make_learner(self, device: str, precision: str) -> Learner[Any]:
        """A learner of a new model, for one env."""
        model, clock = self.make_model().to(device), PhaseClock()
        return self.algorithm.make_learner(
            model, self.config, n_envs=1, seed=self.seed, clock=clock, precision=precision
        )

    def update_facts(self) -> dict[str, Any]:
        """Everything in these settings that the code of an update depends on, as JSON."""
        from flatout.envs.spaces import space_to_json

        settings = asdict(self.config)
        return {
            "algorithm": [self.algorithm.name, self.algorithm.source_hash()],
            "settings": {k: v for k, v in settings.items() if k not in self.config.NOT_IN_UPDATE},
            "network": asdict(self.network),
            "code": self.network.network.source_hash() if self.network.network is not None else "",
            "obs": space_to_json(self.obs.space),
            "action": space_to_json(self.action.space),
        }


_registry: dict[str, Algorithm] = {}


def register_algorithm(algorithm: Algorithm) -> Algorithm:
    """Make an algorithm known under its name; one of the built-in names is refused."""
    known = get(algorithm.name) if algorithm.name in BUILT_IN else algorithm
    if known is not algorithm:
        raise FlatoutError(f"an algorithm is called '{algorithm.name}' already; give yours another name")
    _registry[algorithm.name] = algorithm
    return algorithm


def get(name: str) -> Algorithm:
    """The algorithm of this name, or the one that FILE.py:NAME or module:NAME names, which is registered by this."""
    if name in BUILT_IN and name not in _registry:
        _registry[name] = import_module(f"flatout.algorithms.{name.replace('-', '_')}").ALGORITHM
    if ":" in name:
        return _loaded(absolute(name))
    if name not in _registry:
        known = names()
        near = did_you_mean(name, known)
        raise FlatoutError(f"--algo is '{name}'; it must be one of {', '.join(known)}, or FILE.py:NAME{near}")
    return _registry[name]


@cache
def _loaded(source: str) -> Algorithm:
    return _load(source, read_code(source, "algorithm"))


@cache
def _load(source: str, code: bytes | None) -> Algorithm:
    """The algorithm in this code of its file; a child process gets it from its parent, as the file may have changed."""
    found = load_object(
        source, "algorithm", lambda it: isinstance(it, Algorithm), "a flatout.Algorithm", code
    )
    return register_algorithm(replace(found, source=source, code=code))


def names() -> list[str]:
    """Names of all algorithms, the built-in ones first."""
    return [*BUILT_IN, *(name for name in _registry if name not in BUILT_IN)]


def choose_batch_size(total_batch: int, target: int) -> int:
    """The largest divisor of `total_batch` that is not above `target`."""
    if total_batch < 1 or target < 1:
        raise FlatoutError(f"total_batch {total_batch} and target {target} must be at least 1")
    return max(d for d in divisors(total_batch) if d <= target)


def nearest_batch_sizes(total_batch: int, batch_size: int) -> list[int]:
    """The divisors of `total_batch` just below and just above `batch_size`."""
    below = [d for d in divisors(total_batch) if d < batch_size]
    above = [d for d in divisors(total_batch) if d > batch_size]
    return below[-1:] + above[:1]


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
