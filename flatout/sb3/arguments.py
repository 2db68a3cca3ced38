"""The arguments of Stable-Baselines3's PPO, DQN and SAC, and the settings of flatout that mean the same.

Every class has the fields of Stable-Baselines3 in its order and with its defaults. `settings` names all settings of the
algorithm and its network, so that no default of flatout's own has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from flatout.algorithms.base import AlgorithmConfig
from flatout.algorithms.dqn.config import DQNConfig
from flatout.algorithms.ppo.config import PPOConfig
from flatout.algorithms.sac.config import SACConfig
from flatout.envs.spaces import ObsLayout
from flatout.errors import FlatoutError, did_you_mean
from flatout.sb3.library import library

NEVER = 10**15
"""Env steps that no run reaches."""
ACTIVATIONS = {"Tanh": "tanh", "ReLU": "relu", "ELU": "elu", "SiLU": "silu"}
POLICIES = ("MlpPolicy", "CnnPolicy", "MultiInputPolicy")
WITHOUT_EFFECT = {
    "ortho_init": True,
    "normalize_images": True,
    "squash_output": False,
    "use_sde": False,
    "use_expln": False,
    "full_std": True,
    "n_critics": 2,
}
"""Entries of `policy_kwargs` that flatout has no setting for, with the values that it has built in."""


def refuse(what: str, advice: str) -> FlatoutError:
    """The error for what cannot be mapped."""
    return FlatoutError(f"flatout.sb3: {what}; {advice}")


@dataclass(kw_only=False)
class Arguments:
    """What the three algorithms have in common."""

    ALGO: ClassVar[str]
    CONFIG: ClassVar[type[AlgorithmConfig]]
    NET_ARCH: ClassVar[tuple[int, ...]]
    ACTIVATION: ClassVar[str]
    FUNCTIONS: ClassVar[tuple[str, ...]] = ("learning_rate",)
    """Arguments that may be functions of the remaining progress."""
    REFUSED: ClassVar[dict[str, tuple[Any, str]]] = {}
    """Arguments with the only value that is possible, and what to do instead."""

    @classmethod
    def of(cls, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Self:
        """The arguments of a call; an unknown one is refused with the nearest."""
        known = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in known:
                raise refuse(
                    f"{cls.ALGO.upper()} has no argument '{name}'",
                    "see its signature" + did_you_mean(name, known),
                )
        given = cls(*args, **keywords)
        for name, (possible, advice) in cls.REFUSED.items():
            value = getattr(given, name)
            if value != possible:
                raise refuse(f"{name}={_shown(value)} has no counterpart", advice)
        return given

    def settings(self, policy: Any, obs: ObsLayout, n_envs: int) -> dict[str, Any]:
        """All settings of flatout for these arguments."""
        given: Any = self
        defaults = {field.name: getattr(self.CONFIG(), field.name) for field in fields(self.CONFIG)}
        rate, schedule = scheduled("learning_rate", given.learning_rate)
        return (
            defaults
            | {"learning_rate": rate, "learning_rate_schedule": schedule, "gamma": given.gamma}
            | {"batch_size": given.batch_size, "device": str(given.device)}
            | self.own(n_envs)
            | self.network(policy, obs)
        )

    def own(self, n_envs: int) -> dict[str, Any]:
        """Settings of this algorithm alone."""
        raise NotImplementedError

    def network(self, policy: Any, obs: ObsLayout) -> dict[str, Any]:
        """Settings of the network."""
        given: Any = self
        wanted = dict(given.policy_kwargs or {})
        for name, value in WITHOUT_EFFECT.items():
            if wanted.pop(name, value) != value:
                raise refuse(f"policy_kwargs: {name} is always {value}", "leave it out")
        extractor, shared = self._extractor(check_policy(policy), obs, wanted)
        arch = wanted.pop("net_arch", None)
        arch = arch[0] if isinstance(arch, list) and arch and isinstance(arch[0], dict) else arch
        if arch is None:
            cnn = extractor is not None and extractor[0] is library("common.torch_layers").NatureCNN
            arch = () if cnn and self.ALGO != "sac" else self.NET_ARCH
        pi, critic = (
            (arch.get("pi", ()), arch.get("vf", arch.get("qf", ())))
            if isinstance(arch, dict)
            else (arch, None)
        )
        if self.ALGO == "dqn":
            critic = None
        if not pi and extractor is None:
            raise refuse("net_arch has no hidden layers", "give at least one, such as [64]")
        trunk = "separate"
        if extractor is not None and self.ALGO == "ppo" and shared:
            trunk = "encoder" if pi or critic else "shared"
        settings = {
            "network_arch": tuple(pi),
            "vf_arch": None if critic is None or trunk == "shared" else tuple(critic),
            "trunk": trunk,
            "activation": _activation(wanted.pop("activation_fn", None)) or self.ACTIVATION,
            "log_std_init": float(wanted.pop("log_std_init", 0.0)) if self.ALGO == "ppo" else 0.0,
            "squash": False,
            "network": None
            if extractor is None
            else partial(make_extractor, make=extractor[0], kwargs=extractor[1]),
            "optimizer": _optimizer(wanted),
        }
        if self.ALGO == "sac":
            wanted.pop("log_std_init", None)  # has an effect with use_sde only
        if wanted:
            known = [*WITHOUT_EFFECT, "net_arch", "activation_fn", "log_std_init", "features_extractor_class"]
            name = next(iter(wanted))
            raise refuse(
                f"policy_kwargs: {name} has no counterpart", "leave it out" + did_you_mean(name, known)
            )
        return settings

    def _extractor(
        self, policy: str, obs: ObsLayout, wanted: dict[str, Any]
    ) -> tuple[tuple[Any, dict[str, Any]] | None, bool]:
        """The class of the features extractor and its arguments, None for flatout's own, and whether it is shared."""
        shared = self.ALGO == "ppo"
        if self.ALGO != "dqn":  # it has none
            shared = wanted.pop("share_features_extractor", shared)
        kwargs = dict(wanted.pop("features_extractor_kwargs", None) or {})
        chosen = wanted.pop("features_extractor_class", None)
        has_images = any(spec.kind == "image" for spec in obs.specs)
        if chosen is None and (has_images or policy == "CnnPolicy"):
            layers = library("common.torch_layers")
            by_policy = {"CnnPolicy": layers.NatureCNN, "MultiInputPolicy": layers.CombinedExtractor}
            chosen = by_policy.get(policy, layers.FlattenExtractor)
        if chosen is not None and shared and self.ALGO == "sac":
            raise refuse("SAC's actor and critics cannot share a features extractor", "leave it out")
        return (None if chosen is None else (chosen, kwargs)), shared


@dataclass
class PPOArguments(Arguments):
    """PPO's."""

    ALGO: ClassVar[str] = "ppo"
    CONFIG: ClassVar[type[AlgorithmConfig]] = PPOConfig
    NET_ARCH: ClassVar[tuple[int, ...]] = (64, 64)
    ACTIVATION: ClassVar[str] = "tanh"
    FUNCTIONS: ClassVar[tuple[str, ...]] = ("learning_rate", "clip_range")
    REFUSED: ClassVar[dict[str, tuple[Any, str]]] = {
        "use_sde": (False, "use independent noise"),
        "rollout_buffer_class": (None, "leave it out"),
        "rollout_buffer_kwargs": (None, "leave it out"),
        "_init_setup_model": (True, "leave it out"),
    }

    learning_rate: Any = 3e-4
    n_steps: int = 2048
    batch_size: int = 64
    n_epochs: int = 10
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_range: Any = 0.2
    clip_range_vf: Any = None
    normalize_advantage: bool = True
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    use_sde: bool = False
    sde_sample_freq: int = -1
    rollout_buffer_class: Any = None
    rollout_buffer_kwargs: Any = None
    target_kl: float | None = None
    stats_window_size: int = 100
    tensorboard_log: str | None = None
    policy_kwargs: dict[str, Any] | None = None
    verbose: int = 0
    seed: int | None = None
    device: Any = "auto"
    _init_setup_model: bool = True

    def own(self, n_envs: int) -> dict[str, Any]:  # noqa: ARG002
        if callable(self.clip_range_vf):
            raise refuse("clip_range_vf cannot be a function", "give a number or None")
        clip_range, schedule = scheduled("clip_range", self.clip_range)
        same = "n_steps n_epochs gae_lambda clip_range_vf normalize_advantage ent_coef vf_coef max_grad_norm target_kl"
        own = {name: getattr(self, name) for name in same.split()}
        return own | {"clip_range": clip_range, "clip_range_schedule": schedule}


class ReplayArguments(Arguments):
    """What DQN and SAC have in common."""

    REFUSED: ClassVar[dict[str, tuple[Any, str]]] = {
        "replay_buffer_kwargs": (None, "leave it out"),
        "optimize_memory_usage": (False, "leave it out: flatout stores each observation once"),
        "_init_setup_model": (True, "leave it out"),
    }

    def own(self, n_envs: int) -> dict[str, Any]:
        given: Any = self
        buffer = given.replay_buffer_class
        if buffer is not None and buffer is not library("common.buffers").ReplayBuffer:
            raise refuse(
                f"replay_buffer_class={_shown(buffer)} has no counterpart", "use Stable-Baselines3 for it"
            )
        every = given.train_freq
        if isinstance(every, tuple):
            if every[1] != "step":
                raise refuse(f"train_freq={every} counts episodes", "give a number of steps")
            every = every[0]
        n_updates = every * n_envs if given.gradient_steps < 0 else given.gradient_steps
        return {
            "n_steps": every,
            "train_ratio": n_updates / (every * n_envs),
            "buffer_size": int(given.buffer_size),
            "learning_starts": given.learning_starts,
            "tau": given.tau,
            "multi_step": given.n_steps,
            "save_replay": False,
        }


@dataclass
class DQNArguments(ReplayArguments):
    """DQN's."""

    ALGO: ClassVar[str] = "dqn"
    CONFIG: ClassVar[type[AlgorithmConfig]] = DQNConfig
    NET_ARCH: ClassVar[tuple[int, ...]] = (64, 64)
    ACTIVATION: ClassVar[str] = "relu"

    learning_rate: Any = 1e-4
    buffer_size: int = 1_000_000
    learning_starts: int = 100
    batch_size: int = 32
    tau: float = 1.0
    gamma: float = 0.99
    train_freq: Any = 4
    gradient_steps: int = 1
    replay_buffer_class: Any = None
    replay_buffer_kwargs: Any = None
    optimize_memory_usage: bool = False
    n_steps: int = 1
    target_update_interval: int = 10_000
    exploration_fraction: float = 0.1
    exploration_initial_eps: float = 1.0
    exploration_final_eps: float = 0.05
    max_grad_norm: float = 10
    stats_window_size: int = 100
    tensorboard_log: str | None = None
    policy_kwargs: dict[str, Any] | None = None
    verbose: int = 0
    seed: int | None = None
    device: Any = "auto"
    _init_setup_model: bool = True

    def own(self, n_envs: int) -> dict[str, Any]:
        replay = super().own(n_envs)
        if self.tau < 1 and self.target_update_interval > replay["n_steps"] * n_envs:
            raise refuse(
                f"tau={self.tau} with target_update_interval={self.target_update_interval} has no counterpart",
                "set target_update_interval=1 for soft updates, or tau=1 for copies",
            )
        same = "target_update_interval exploration_fraction exploration_initial_eps exploration_final_eps max_grad_norm"
        own = {name: getattr(self, name) for name in same.split()}
        return replay | own | {"exploration_steps": NEVER, "double": False, "dueling": False, "loss": "huber"}


@dataclass
class SACArguments(ReplayArguments):
    """SAC's."""

    ALGO: ClassVar[str] = "sac"
    CONFIG: ClassVar[type[AlgorithmConfig]] = SACConfig
    NET_ARCH: ClassVar[tuple[int, ...]] = (256, 256)
    ACTIVATION: ClassVar[str] = "relu"
    REFUSED: ClassVar[dict[str, tuple[Any, str]]] = ReplayArguments.REFUSED | {
        "action_noise": (None, "leave it out: SAC explores by its entropy"),
        "target_update_interval": (1, "set tau instead"),
        "use_sde": (False, "use independent noise"),
        "use_sde_at_warmup": (False, "use independent noise"),
    }

    learning_rate: Any = 3e-4
    buffer_size: int = 1_000_000
    learning_starts: int = 100
    batch_size: int = 256
    tau: float = 0.005
    gamma: float = 0.99
    train_freq: Any = 1
    gradient_steps: int = 1
    action_noise: Any = None
    replay_buffer_class: Any = None
    replay_buffer_kwargs: Any = None
    optimize_memory_usage: bool = False
    n_steps: int = 1
    ent_coef: Any = "auto"
    target_update_interval: int = 1
    target_entropy: Any = "auto"
    use_sde: bool = False
    sde_sample_freq: int = -1
    use_sde_at_warmup: bool = False
    stats_window_size: int = 100
    tensorboard_log: str | None = None
    policy_kwargs: dict[str, Any] | None = None
    verbose: int = 0
    seed: int | None = None
    device: Any = "auto"
    _init_setup_model: bool = True

    def own(self, n_envs: int) -> dict[str, Any]:
        is_tuned = isinstance(self.ent_coef, str)
        initial = float(str(self.ent_coef).partition("_")[2] or 1.0) if is_tuned else float(self.ent_coef)
        entropy = None if self.target_entropy == "auto" else float(self.target_entropy)
        return super().own(n_envs) | {
            "ent_coef": initial,
            "tune_ent_coef": is_tuned,
            "target_entropy": entropy,
        }


def scheduled(name: str, value: Any) -> tuple[float, Any]:
    """A number that may be a function of the remaining progress, as its first value and flatout's schedule."""
    if not callable(value):
        return float(value), "constant"
    first = float(value(1.0))
    if first <= 0:
        raise refuse(f"{name}(1.0) is {first:g}", "a schedule has to begin above 0")
    return first, partial(_factor, schedule=value, first=first)


def _factor(progress: float, schedule: Callable[[float], float], first: float) -> float:
    return float(schedule(max(1.0 - progress, 0.0))) / first


def check_policy(policy: Any) -> str:
    """The name of one of Stable-Baselines3's policies; a class of one's own is refused."""
    name = policy if isinstance(policy, str) else getattr(policy, "__name__", str(policy))
    built_in = isinstance(policy, str) or getattr(policy, "__module__", "").startswith("stable_baselines3.")
    aliases = {
        "ActorCriticPolicy": "MlpPolicy",
        "ActorCriticCnnPolicy": "CnnPolicy",
        "SACPolicy": "MlpPolicy",
    }
    aliases |= {"MultiInputActorCriticPolicy": "MultiInputPolicy", "DQNPolicy": "MlpPolicy"}
    name = aliases.get(name, name) if built_in else name
    if name not in POLICIES or not built_in:
        advice = f"use {', '.join(POLICIES)} with policy_kwargs, or flatout.PPO(…, network=…)"
        raise refuse(f"policy '{name}' has no counterpart", advice)
    return name


def make_extractor(
    observation_space: Any, make: Callable[..., nn.Module], kwargs: Mapping[str, Any]
) -> nn.Module:
    """A features extractor of Stable-Baselines3 that takes observations as flatout gives them."""
    return OneHot(observation_space, make(observation_space, **kwargs))


class OneHot(nn.Module):
    """A features extractor that gets categories as one-hot vectors, as Stable-Baselines3 gives them."""

    def __init__(self, space: Any, extractor: nn.Module) -> None:
        super().__init__()
        spaces = dict(space.spaces) if hasattr(space, "spaces") else {None: space}
        self._sizes = {key: _categories(sub) for key, sub in spaces.items()}
        self.extractor = extractor
        self.independent_rows = type(extractor).__module__ == "stable_baselines3.common.torch_layers"

    def forward(self, obs: Any) -> Tensor:
        if isinstance(obs, dict):
            given: Any = {key: _one_hot(value, self._sizes[key]) for key, value in obs.items()}
        else:
            given = _one_hot(obs, self._sizes[None])
        out: Tensor = self.extractor(given)
        return out


def _categories(space: Any) -> tuple[int, ...]:
    if hasattr(space, "nvec"):
        return tuple(int(n) for n in space.nvec.reshape(-1))
    return (int(space.n),) if hasattr(space, "n") and space.shape == () else ()


def _one_hot(value: Tensor, sizes: tuple[int, ...]) -> Tensor:
    if not sizes:
        return value
    parts = value.reshape(len(value), -1).unbind(1)
    hot = [nn.functional.one_hot(part, n) for part, n in zip(parts, sizes, strict=True)]
    return torch.cat(hot, 1).float()


def _activation(kind: Any) -> str | None:
    if kind is None:
        return None
    name = getattr(kind, "__name__", str(kind))
    if name not in ACTIVATIONS:
        raise refuse(f"activation_fn={name} has no counterpart", f"there are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _optimizer(wanted: dict[str, Any]) -> Any:
    """The user's own optimizer; None for Adam as it is."""
    kind, kwargs = wanted.pop("optimizer_class", torch.optim.Adam), wanted.pop("optimizer_kwargs", None) or {}
    if kind is torch.optim.Adam and kwargs in ({}, {"eps": 1e-5}):
        return None
    return partial(kind, **kwargs)


def _shown(value: Any) -> str:
    return str(
        getattr(
            value, "__name__", type(value).__name__ if not isinstance(value, str | int | float) else value
        )
    )
