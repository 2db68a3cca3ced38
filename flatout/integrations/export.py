"""Trained policies for other programs: safetensors + JSON, ONNX, torch.export, and NumPy alone.

All formats hold the deterministic policy with everything that belongs to it: normalisation of observations, action masks,
rescaling and clipping of actions, the state of a memory. Inputs are observations as the env gives them, in batches of
any size; outputs are actions as the env takes them, the network's raw outputs, and the new state of a memory.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from flatout.collect.tensors import TensorActions
from flatout.envs.spaces import Array, ArraySpec, space_to_json
from flatout.errors import FlatoutError, did_you_mean, one_line
from flatout.integrations import numpy_policy
from flatout.models.encoders import ImageEncoder
from flatout.models.heads import masked
from flatout.models.policy import OBS_CLIP, Encoder, Policy

TOLERANCE = 1e-5
"""Largest difference of an exported policy's outputs, relative to 1 or to their size."""
N_CHECKED = 1000
"""Random observations that an export is compared on."""


class DeployedPolicy(nn.Module):
    """The deterministic policy as a function of observations as the env gives them."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.model
        self._specs = policy.obs.specs
        self._actions = TensorActions(policy.action, policy.device)
        memory: Any = getattr(policy.model, "pi_memory", None)
        self.n_state = 0 if memory is None else int(memory.n_state)
        """Numbers in the state of the policy's memory; acting does not need that of the value function."""

    def forward(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        """Actions, raw outputs with those of forbidden actions replaced, and the new state of a memory if there is one."""
        obs = [_as_stored(spec, array) for spec, array in zip(self._specs, arrays, strict=False)]
        model: Any = self.model
        state: tuple[Tensor, ...] = ()
        if self.n_state:
            state = (model.pi_state([*obs, arrays[-1]]),)
            out = model.pi_out(model.pi_body(state[0][:, : model.pi_memory.width]))
        else:
            out = model.policy(obs)
        mask = model.mask(obs)
        action = self._actions.to_env(model.head.squash(model.head.mode(out, mask)))
        return action, masked(out, mask), *state


def _as_stored(spec: ArraySpec, array: Tensor) -> Tensor:
    if spec.kind == "mask":
        return array.flatten(1) > 0
    return array.permute(0, 3, 1, 2) if spec.channels_last else array


class Exported:
    """What all formats need to know of a policy: names, examples, and what its outputs are."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.module = DeployedPolicy(policy).eval()
        self.names = [".".join(["obs", *map(str, spec.path)]) for spec in policy.obs.specs]
        self.outputs = ["action", "outputs"]
        if self.module.n_state:
            self.names.append("state")
            self.outputs.append("new_state")

    def examples(self, n: int, seed: int = 0) -> list[Array]:
        """Random observations as the env gives them, and states of a memory."""
        rng = np.random.default_rng(seed)
        arrays = [_random(spec, n, rng) for spec in self.policy.obs.specs]
        if n_state := self.module.n_state:
            arrays.append(rng.normal(size=(n, n_state)).astype(np.float32))
        return arrays

    @torch.no_grad()
    def answers(self, arrays: list[Array]) -> list[Array]:
        """What the policy itself gives for these."""
        device = self.policy.device
        return [out.cpu().numpy() for out in self.module(*(torch.from_numpy(a).to(device) for a in arrays))]

    def check(self, run: Callable[[list[Array]], list[Array]], n: int = N_CHECKED) -> float:
        """Compare another form of the policy with it; the largest relative difference, or an error.

        Two actions may differ where their outputs are equal up to the tolerance.
        """
        arrays = self.examples(n)
        expected, found = self.answers(arrays), run(arrays)
        scale = np.maximum(np.abs(expected[1]), 1.0)
        worst = float((np.abs(expected[1] - found[1]) / scale).max())
        for a, b in zip(expected[2:], found[2:], strict=True):
            worst = max(worst, float(np.abs(a - b).max()))
        actions = (expected[0] != found[0]).reshape(n, -1).any(1)
        if self.policy.action.continuous:
            worst = max(worst, float(np.abs(expected[0] - found[0]).max()))
            actions[:] = False
        ties = actions & (_margin(expected[1], self.policy.action.nvec) < 10 * TOLERANCE)
        if worst > TOLERANCE or (actions & ~ties).any():
            raise FlatoutError(
                f"the exported policy differs by {worst:.1e} and in {int(actions.sum())} of {n} actions; nothing was written"
            )
        return worst

    def describe(self) -> dict[str, Any]:
        """The policy's inputs and outputs, for people and programs."""
        policy, arrays = self.policy, self.examples(1)
        return {
            "inputs": {
                name: {"shape": ["batch", *array.shape[1:]], "dtype": str(array.dtype)}
                for name, array in zip(self.names, arrays, strict=True)
            },
            "outputs": self.outputs,
            "observation_space": space_to_json(policy.obs.space),
            "action_space": space_to_json(policy.action.space),
        }


def _random(spec: ArraySpec, n: int, rng: np.random.Generator) -> Array:
    shape = (*spec.shape[1:], spec.shape[0]) if spec.channels_last else spec.shape
    if spec.kind == "discrete":
        low = np.array(spec.start).reshape(spec.shape)
        return rng.integers(low, low + np.array(spec.nvec).reshape(spec.shape), (n, *spec.shape))
    if spec.kind == "mask":
        mask = rng.random((n, *shape)) < 0.7
        mask[:, 0] = True
        return mask
    if spec.dtype == np.uint8 or spec.kind == "binary":
        return rng.integers(0, 256 if spec.kind == "image" else 2, (n, *shape)).astype(spec.dtype)
    return rng.normal(size=(n, *shape)).astype(np.float32)


def _margin(out: Array, nvec: tuple[int, ...]) -> Array:
    """By how much the best action of each observation is better than the second best, at least."""
    if not nvec:
        return np.full(len(out), np.inf)
    parts = [np.sort(part, 1) for part in np.split(out, np.cumsum(nvec)[:-1], 1) if part.shape[1] > 1]
    least: Array = np.min([part[:, -1] - part[:, -2] for part in parts] or [np.full(len(out), np.inf)], 0)
    return least


def to_safetensors(exported: Exported, out: Path) -> float:
    """The parameters, and beside them a JSON file that says what they are."""
    from safetensors.torch import save_file

    model = exported.policy.model
    # Copies: safetensors refuses names that share memory, as DQN's epsilon does.
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in model.state_dict().items()}, out)
    out.with_suffix(".json").write_text(json.dumps(exported.describe() | {"model": str(model)}, indent=2))
    return 0.0


def to_torch(exported: Exported, out: Path) -> float:
    """A program of torch.export, with any batch size; loads with torch.export.load, without flatout."""
    program = _program(exported)
    module = program.module()

    def run(arrays: list[Array]) -> list[Array]:
        with torch.no_grad():
            return [it.numpy() for it in module(*map(torch.from_numpy, arrays))]

    worst = exported.check(run)
    torch.export.save(program, out, extra_files={"flatout.json": json.dumps(exported.describe())})
    return worst


def _program(exported: Exported) -> Any:
    """The policy as torch.export sees it."""
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    arrays = tuple(map(torch.from_numpy, exported.examples(2)))
    return torch.export.export(
        exported.module, arrays, dynamic_shapes={"arrays": tuple({0: batch} for _ in arrays)}
    )


def to_onnx(exported: Exported, out: Path) -> float:
    """An ONNX file, compared with onnxruntime before it counts."""
    runtime = _extra("onnxruntime")
    _extra("onnxscript")
    with _silent("torch.onnx"):
        torch.onnx.export(
            _program(exported),
            (),
            str(out),
            input_names=exported.names,
            output_names=exported.outputs,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    session = runtime.InferenceSession(str(out), providers=["CPUExecutionProvider"])

    def run(arrays: list[Array]) -> list[Array]:
        return list(session.run(exported.outputs, dict(zip(exported.names, arrays, strict=True))))

    return exported.check(run)


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Without the warnings of a library about itself."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def to_numpy(exported: Exported, out: Path) -> float:
    """A .npz, and beside it a policy.py that acts with NumPy alone."""
    arrays: dict[str, Any] = _arrays(exported.policy)
    with out.open("wb") as file:  # of any name: given a path, NumPy adds .npz
        np.savez(file, **arrays)
    shutil.copyfile(numpy_policy.__file__, out.with_suffix(".py"))
    policy = numpy_policy.Policy(out)

    def run(arrays: list[Array]) -> list[Array]:
        n_obs = len(exported.policy.obs.specs)
        found, state = policy.outputs(arrays[:n_obs], arrays[-1] if policy.state_size else None)
        return [policy._actions(found), found, *([state] if policy.state_size else [])]

    return exported.check(run)


def _arrays(policy: Policy) -> dict[str, Array]:
    """Everything that `numpy_policy.Policy` needs."""
    model, action = policy.model, policy.action
    encoder = model.pi_encoder
    if not isinstance(encoder, Encoder):
        raise FlatoutError("a network of your own cannot be exported to NumPy; use --format onnx or torch")
    tensors: dict[str, Tensor] = {}
    for k, (weight, bias) in enumerate(model.acting_layers()):
        tensors |= {f"layer{k}.weight": weight, f"layer{k}.bias": bias}
    for k, (weight, bias) in enumerate(model.acting_norms()):
        tensors |= {f"norm{k}.weight": weight, f"norm{k}.bias": bias}
    if model.normalizes:
        for i in model.vector_indices:
            tensors |= {
                f"mean{i}": model.get_buffer(f"obs_mean_{i}"),
                f"scale{i}": model.get_buffer(f"obs_scale_{i}"),
            }
    observation = []
    for i, spec in enumerate(policy.obs.specs):
        shape = (*spec.shape[1:], spec.shape[0]) if spec.channels_last else spec.shape
        about: dict[str, Any] = {
            "path": list(spec.path),
            "kind": spec.kind,
            "shape": list(shape),
            "nvec": list(spec.nvec),
        }
        about |= {"start": list(spec.start), "channels_last": spec.channels_last}
        if spec.kind == "image":
            image = encoder.images[str(i)]
            assert isinstance(image, ImageEncoder), "images have one"
            convs: Any = list(image.convs)
            about |= {"scale": image._scale}
            about["convs"] = [{"stride": conv.stride[0], "padding": conv.padding[0]} for conv in convs]
            for k, conv in enumerate(convs):
                tensors |= {f"conv{i}.{k}.weight": conv.weight, f"conv{i}.{k}.bias": conv.bias}
            out: Any = image.out
            tensors |= {f"image{i}.weight": out.weight, f"image{i}.bias": out.bias}
        observation.append(about)
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    zero = action.to_env(np.zeros((1, action.size), action.dtype))
    about_action: dict[str, Any] = {"nvec": list(action.nvec), "size": action.size, "dtype": str(zero.dtype)}
    about_action |= {"shape": list(zero.shape[1:]), "is_scalar": isinstance(action.space, spaces.Discrete)}
    if action.continuous:
        squashed = action.bounded & bool(model.head.squashes)
        arrays |= {
            "low": action.low,
            "high": action.high,
            "half": action._half,
            "mid": action._mid,
            "squashed": squashed,
        }
    else:
        about_action["start"] = zero.reshape(-1).tolist()
    about_all: dict[str, Any] = {
        "observation": observation,
        "action": about_action,
        "activation": model.activation,
        "layer_norm": bool(model.acting_norms()),
        "n_layers": len(model.acting_layers()),
        "obs_clip": OBS_CLIP if model.normalizes else 0.0,
        "state_size": 0,
    }
    if model.state_size:
        memory: Any = model.pi_memory
        arrays |= {
            f"memory.{name}.{part}": getattr(getattr(memory, f"gates_{name}"), part).detach().cpu().numpy()
            for name in ("in", "back")
            for part in ("weight", "bias")
        }
        about_all |= {
            "state_size": memory.n_state,
            "memory": {"kind": type(memory).__name__.lower(), "width": memory.width},
        }
    return arrays | {"about": np.array(json.dumps(about_all))}


FORMATS: dict[str, tuple[str, Callable[[Exported, Path], float]]] = {
    "onnx": (".onnx", to_onnx),
    "safetensors": (".safetensors", to_safetensors),
    "torch": (".pt2", to_torch),
    "numpy": (".npz", to_numpy),
}
"""Suffix and function of each format."""


def export(policy: Policy, form: str, out: Path) -> float:
    """Write the policy in one of FORMATS; returns the largest difference over N_CHECKED random observations.

    The file is compared with the policy; one that differs is removed again.
    """
    if form not in FORMATS:
        raise FlatoutError(
            f"--format is '{form}'; it must be one of {', '.join(FORMATS)}{did_you_mean(form, FORMATS)}"
        )
    on_cpu = Policy(
        model=policy.model.cpu(), obs=policy.obs, action=policy.action, device=torch.device("cpu")
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return FORMATS[form][1](Exported(on_cpu), out)
    except BaseException as error:
        out.unlink(missing_ok=True)
        if isinstance(error, FlatoutError) or not isinstance(error, Exception):
            raise
        raise FlatoutError(f"cannot export to {form}: {one_line(error)}") from error


def _extra(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise FlatoutError(f"--format onnx needs {module}; pip install 'flatout[export]'") from error
