"""Models that Stable-Baselines3 has saved, as flatout agents that act the same.

A model's zip holds its weights as tensors and its spaces and arguments as pickles, which run code when they are read.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout.config.run_config import RunConfig, resolve
from flatout.device.machine import usable_cores
from flatout.envs.make import is_atari
from flatout.envs.spaces import ActionLayout, ObsLayout, space_to_json
from flatout.errors import FlatoutError, one_line
from flatout.models.encoders import NATURE, image_layers
from flatout.sb3.arguments import Arguments, DQNArguments, PPOArguments, SACArguments, refuse
from flatout.timing import PhaseClock
from flatout.training.checkpoint import Checkpoint
from flatout.training.state import TrainState

PICKLED = ":serialized:"
"""Key of a pickle in Stable-Baselines3's JSON."""
KINDS: dict[str, tuple[type[Arguments], str]] = {
    "PPO": (PPOArguments, "clip_range"),
    "DQN": (DQNArguments, "exploration_fraction"),
    "SAC": (SACArguments, "target_entropy"),
}
"""The arguments of each algorithm, and one that no other has."""
UNKNOWN_ENV = "unknown"
"""The env of an imported agent whose env was not named; a zip does not say it."""


def import_model(path: Path, *, trust: bool, env: str | None = None) -> Checkpoint:
    """A checkpoint of the model in a zip of Stable-Baselines3."""
    if not path.is_file():
        raise FlatoutError(f"{str(path)!r} does not exist")
    if not trust:
        raise FlatoutError(
            f"{str(path)!r} holds pickles, which can run any code when they are read; pass --trust if you trust its author"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            data = json.loads(archive.read("data"))
            weights = torch.load(
                io.BytesIO(archive.read("policy.pth")), map_location="cpu", weights_only=True
            )
        return _checkpoint(dict(data), weights, env)
    except FlatoutError:
        raise
    except pickle.UnpicklingError as error:
        raise FlatoutError(f"{str(path)!r}: its policy.pth holds more than tensors") from error
    except Exception as error:  # a file of any content
        raise FlatoutError(f"{str(path)!r} is no model of Stable-Baselines3: {one_line(error)}") from error


def _checkpoint(data: Mapping[str, Any], weights: Mapping[str, Tensor], env: str | None) -> Checkpoint:
    found = [name for name, (_, mark) in KINDS.items() if mark in data]
    if len(found) != 1:
        raise refuse("this is no model of PPO, DQN or SAC", "others cannot be imported")
    algorithm = found[0]
    if _value(data, "use_sde", False):
        raise refuse("the model was trained with use_sde", "such a policy cannot be imported")
    obs, action = ObsLayout(_value(data, "observation_space")), ActionLayout(_value(data, "action_space"))
    _check_images(obs, data)
    config = _config(algorithm, data, obs, env)
    model = config.learner_spec(obs, action).make_model()
    tensors = {"PPO": _ppo, "DQN": _dqn, "SAC": _sac}[algorithm](weights, action) | _convolutions(
        weights, model
    )
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    known = ("obs_mean", "obs_scale", "head.", "greedy.", "log_ent_coef")
    wrong = [*unexpected, *(name for name in missing if not name.startswith(known))]
    if wrong:
        raise refuse(
            f"the model's network has other layers ({wrong[0]})", "its policy_kwargs cannot be imported"
        )
    if algorithm == "SAC":
        model.get_buffer("head.random").zero_()
    elif algorithm == "DQN":
        model.get_buffer("head.epsilon").fill_(float(data.get("exploration_rate", 0.05)))
    learner = config.descriptor.make_learner(
        model, config.algorithm, n_envs=config.n_envs, seed=config.seed, clock=PhaseClock(), precision="fp32"
    )
    state = {
        "config": config.to_json(),
        "observation_space": space_to_json(obs.space),
        "action_space": space_to_json(action.space),
        "mask_in_info": False,
        "progress": TrainState().to_json(),
    }
    return Checkpoint({name: t.detach().cpu() for name, t in learner.state().items()}, state, None)


def _config(algorithm: str, data: Mapping[str, Any], obs: ObsLayout, env: str | None) -> RunConfig:
    """The model's settings; schedules are imported as their value at the beginning."""
    kind, _ = KINDS[algorithm]
    known = {field.name for field in fields(kind)} - {
        "policy_kwargs",
        "device",
        "tensorboard_log",
        "seed",
        *kind.REFUSED,
    }
    plain = {name: data[name] for name in known if isinstance(data.get(name), int | float | str)}
    every = data.get("train_freq")
    if isinstance(every, list):
        plain["train_freq"] = tuple(every) if every[1] == "step" else 1
    given = kind.of((), plain | {"policy_kwargs": _policy_kwargs(data)})
    image = obs.specs[0] if obs.specs[0].kind == "image" else None
    policy = "MultiInputPolicy" if hasattr(obs.space, "spaces") else "CnnPolicy" if image else "MlpPolicy"
    n_envs = int(data.get("n_envs", 1))
    settings = given.settings(policy, obs, n_envs)
    settings |= {"algo": kind.ALGO, "n_envs": n_envs, "device": "auto", "atari": False, "network": None}
    if image and env is not None and is_atari(env):
        settings |= {"atari": True, "frame_stack": image.shape[0]}
    return resolve(env or UNKNOWN_ENV, settings, device="cpu", n_cores=usable_cores())


def _check_images(obs: ObsLayout, data: Mapping[str, Any]) -> None:
    """Refuse images, except those whose convolutions are the same in both libraries."""
    images = [spec.shape for spec in obs.specs if spec.kind == "image"]
    if not images:
        return
    if len(obs.specs) > 1:
        raise refuse("the model sees images and more", "only models of images alone can be imported")
    if image_layers(*images[0][1:]) is not NATURE:
        raise refuse(
            f"the model sees images of {images[0][1]}x{images[0][2]}",
            "sides must be from 36 to 127, as Atari's 84",
        )
    extractor = (_value(data, "policy_kwargs", None) or {}).get("features_extractor_class")
    if extractor is not None and extractor.__name__ != "NatureCNN":
        raise refuse(
            f"the model has a features extractor of its own ({extractor.__name__})", "it cannot be imported"
        )


def _policy_kwargs(data: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the network; initial values do not matter any more."""
    kwargs = dict(_value(data, "policy_kwargs", None) or {})
    return {
        name: kwargs[name]
        for name in ("net_arch", "activation_fn", "features_extractor_class")
        if name in kwargs
    }


def _value(data: Mapping[str, Any], name: str, *default: Any) -> Any:
    """An entry, unpickled if it is a pickle."""
    if name not in data:
        if default:
            return default[0]
        raise refuse(f"the model has no {name}", "it cannot be imported")
    value = data[name]
    if isinstance(value, dict) and PICKLED in value:
        try:
            return pickle.loads(base64.b64decode(value[PICKLED]))
        except Exception as error:
            raise FlatoutError(f"the model's {name} cannot be read: {one_line(error)}") from error
    return value


def _layers(weights: Mapping[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    """The layers of a Sequential under another name."""
    return {ours + name[len(theirs) :]: t for name, t in weights.items() if name.startswith(theirs)}


def _convolutions(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The layers of NatureCNN for each encoder of images that the model has."""
    theirs = {
        "pi_encoder": ("pi_features_extractor", "q_net.features_extractor", "actor.features_extractor"),
        "vf_encoder": ("vf_features_extractor",),
        "critics.encoder": ("critic.features_extractor",),
    }
    parts = {"cnn.0": "convs.0", "cnn.2": "convs.1", "cnn.4": "convs.2", "linear.0": "out"}
    wanted = model.state_dict()
    return {
        ours: weights[name]
        for encoder, extractors in theirs.items()
        for extractor in extractors
        for part, layer in parts.items()
        for kind in ("weight", "bias")
        if (ours := f"{encoder}.images.0.{layer}.{kind}") in wanted
        and (name := f"{extractor}.{part}.{kind}") in weights
    }


def _ppo(weights: Mapping[str, Tensor], action: ActionLayout) -> dict[str, Tensor]:
    pi, vf = (
        _layers(weights, "mlp_extractor.policy_net.", "pi_body."),
        _layers(weights, "mlp_extractor.value_net.", "vf_body."),
    )
    out = {"pi_out.weight": weights["action_net.weight"], "pi_out.bias": weights["action_net.bias"]}
    if action.continuous:  # flatout's means are in [-1, 1] where actions are bounded
        half, mid = torch.from_numpy(action._half), torch.from_numpy(action._mid)
        out = {
            "pi_out.weight": out["pi_out.weight"] / half[:, None],
            "pi_out.bias": (out["pi_out.bias"] - mid) / half,
        }
        out["head.log_std"] = weights["log_std"] - half.log()
    return (
        pi
        | vf
        | out
        | {"vf_out.weight": weights["value_net.weight"], "vf_out.bias": weights["value_net.bias"]}
    )


def _dqn(weights: Mapping[str, Tensor], action: ActionLayout) -> dict[str, Tensor]:  # noqa: ARG001
    layers = _layers(weights, "q_net.q_net.", "pi_body.")
    last = max(int(name.split(".")[1]) for name in layers)
    return {name.replace(f"pi_body.{last}.", "pi_out."): t for name, t in layers.items()}


def _sac(weights: Mapping[str, Tensor], action: ActionLayout) -> dict[str, Tensor]:  # noqa: ARG001
    tensors = _layers(weights, "actor.latent_pi.", "pi_body.")
    for part in ("weight", "bias"):
        tensors[f"pi_out.{part}"] = torch.cat([weights[f"actor.mu.{part}"], weights[f"actor.log_std.{part}"]])
    names = [name for name in weights if name.startswith("critic.qf0.") and name.endswith(".weight")]
    for k, name in enumerate(sorted(names, key=lambda it: int(it.split(".")[2]))):
        both = [weights[name.replace("qf0", f"qf{i}")] for i in (0, 1)]
        biases = [weights[name.replace("qf0", f"qf{i}").replace("weight", "bias")] for i in (0, 1)]
        tensors[f"critics.weights.{k}"] = torch.stack([weight.t() for weight in both])
        tensors[f"critics.biases.{k}"] = torch.stack(biases)[:, None]
    return tensors
