"""Acts with a policy that flatout exported, with NumPy alone: `Policy("policy.npz").predict(observation)`.

This file is a part of flatout and of every export in NumPy's format; it needs nothing but NumPy and the .npz beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

MASKED = np.float32(-1e8)


def _relu(x: Any) -> Any:
    return np.maximum(x, 0)


def _elu(x: Any) -> Any:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


ACTIVATIONS: dict[str, Any] = {"tanh": np.tanh, "relu": _relu, "elu": _elu, "silu": lambda x: x * _sigmoid(x)}


class Policy:
    """The most likely action of an exported policy."""

    def __init__(self, file: str | Path | None = None) -> None:
        """`file`: the .npz; the one beside this file by default."""
        file = Path(__file__).with_suffix(".npz") if file is None else file
        with np.load(file, allow_pickle=False) as saved:
            self._arrays = {name: saved[name] for name in saved.files}
        self.about: dict[str, Any] = json.loads(str(self._arrays.pop("about")))
        self.state_size: int = self.about["state_size"]

    def predict(self, observation: Any, state: Any = None) -> tuple[Any, Any]:
        """The action for one observation or a batch of them, and the new state of its memory, if it has one.

        Pass the state that the last call returned, and None at the beginning of an episode.
        """
        specs = self.about["observation"]
        arrays = [np.asarray(_pick(observation, spec["path"])) for spec in specs]
        single = arrays[0].ndim == len(specs[0]["shape"])
        batch = [array[None] if single else array for array in arrays]
        for spec, array in zip(specs, batch, strict=True):
            if list(array.shape[1:]) != spec["shape"]:
                raise ValueError(
                    f"observation{spec['path']} has shape {array.shape[1:]}, not {tuple(spec['shape'])}"
                )
        out, state = self.outputs(batch, state)
        actions = self._actions(out)
        return (actions[0] if single else actions), state

    def outputs(self, batch: list[Any], state: Any = None) -> tuple[Any, Any]:
        """Logits, means or Q-values for a batch of observation arrays, and the new state of the memory."""
        x = np.concatenate(
            [part for part in map(self._encoded, range(len(batch)), batch) if part is not None], 1
        )
        if self.state_size:
            state = np.zeros((len(x), self.state_size), np.float32) if state is None else np.asarray(state)
            state = self._remember(self.about["memory"], x, state)
            x = state[:, : self.about["memory"]["width"]]
        activate, n_layers = ACTIVATIONS[self.about["activation"]], self.about["n_layers"]
        for k in range(n_layers):
            x = x @ self._arrays[f"layer{k}.weight"].T + self._arrays[f"layer{k}.bias"]
            if k == n_layers - 1:
                break
            if self.about["layer_norm"]:
                x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
                x = x * self._arrays[f"norm{k}.weight"] + self._arrays[f"norm{k}.bias"]
            x = activate(x)
        for spec, array in zip(self.about["observation"], batch, strict=True):
            if spec["kind"] == "mask":
                x = np.where(array.reshape(len(x), -1) > 0, x, MASKED)
        return x, state

    def _encoded(self, i: int, array: Any) -> Any:
        """An observation array as inputs of the network; None for a mask."""
        spec = self.about["observation"][i]
        if spec["kind"] == "mask":
            return None
        if spec["kind"] == "image":
            x = np.moveaxis(array, -1, 1) if spec["channels_last"] else array
            return self._convolved(i, x.astype(np.float32) * np.float32(spec["scale"]))
        if spec["kind"] == "discrete":
            flat = array.reshape(len(array), -1).astype(np.int64) - np.array(spec["start"])
            hot = [np.eye(n, dtype=np.float32)[flat[:, k]] for k, n in enumerate(spec["nvec"])]
            return np.concatenate(hot, 1)
        x = array.astype(np.float32)
        if spec["kind"] == "vector" and self.about["obs_clip"]:
            clip = np.float32(self.about["obs_clip"])
            x = np.clip((x - self._arrays[f"mean{i}"]) * self._arrays[f"scale{i}"], -clip, clip)
        return x.reshape(len(x), -1)

    def _convolved(self, i: int, x: Any) -> Any:
        for k, conv in enumerate(self.about["observation"][i]["convs"]):
            weight, bias = self._arrays[f"conv{i}.{k}.weight"], self._arrays[f"conv{i}.{k}.bias"]
            x = _relu(_convolve(x, weight, bias, conv["stride"], conv["padding"]))
        flat = x.reshape(len(x), -1)
        return _relu(flat @ self._arrays[f"image{i}.weight"].T + self._arrays[f"image{i}.bias"])

    def _remember(self, memory: dict[str, Any], x: Any, state: Any) -> Any:
        """The state of the memory after this input."""
        weights, width = self._arrays, memory["width"]
        gates = x @ weights["memory.in.weight"].T + weights["memory.in.bias"]
        back = state[:, :width] @ weights["memory.back.weight"].T + weights["memory.back.bias"]
        if memory["kind"] == "gru":
            (gate_r, gate_z, gate_n), (back_r, back_z, back_n) = np.split(gates, 3, 1), np.split(back, 3, 1)
            new = np.tanh(gate_n + _sigmoid(gate_r + back_r) * back_n)
            return new + _sigmoid(gate_z + back_z) * (state - new)
        gate_i, gate_f, gate_g, gate_o = np.split(gates + back, 4, 1)
        cell = _sigmoid(gate_f) * state[:, width : 2 * width] + _sigmoid(gate_i) * np.tanh(gate_g)
        return np.concatenate([_sigmoid(gate_o) * np.tanh(cell), cell], 1)

    def _actions(self, out: Any) -> Any:
        """The most likely actions as envs take them."""
        action = self.about["action"]
        if not action["nvec"]:
            mean = out[:, : action["size"]]
            squashed = self._arrays["squashed"]
            mean = np.where(squashed, np.tanh(mean), mean) if squashed.any() else mean
            low, high = self._arrays["low"], self._arrays["high"]
            chosen = np.clip(mean * self._arrays["half"] + self._arrays["mid"], low, high)
            return chosen.astype(action["dtype"]).reshape(len(out), *action["shape"])
        ends = np.cumsum(action["nvec"])[:-1]
        parts = [part.argmax(1) for part in np.split(out, ends, 1)]
        chosen = np.stack(parts, 1) + np.array(action["start"])
        if action["is_scalar"]:
            return chosen[:, 0]
        return chosen.astype(action["dtype"]).reshape(len(out), *action["shape"])


def _convolve(x: Any, weight: Any, bias: Any, stride: int, padding: int) -> Any:
    """A convolution of images (B, C, H, W) with weights (out, C, k, k)."""
    side = weight.shape[2]
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (side, side), (2, 3))[:, :, ::stride, ::stride]
    return np.moveaxis(np.tensordot(windows, weight, ((1, 4, 5), (1, 2, 3))) + bias, -1, 1)


def _pick(observation: Any, path: list[Any]) -> Any:
    for key in path:
        observation = observation[key]
    return observation


if __name__ == "__main__":
    policy = Policy(*sys.argv[1:])
    print(json.dumps(policy.about, indent=2))
