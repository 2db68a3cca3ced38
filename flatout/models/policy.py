"""The actor-critic, and what every network that acts has: leaves of observations in, raw outputs for a head out.

Observation normalisation is part of the model (two buffers per float leaf), so it is published, saved
and frozen with the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from flatout.envs.spaces import ActionLayout, ArraySpec, ObsLayout
from flatout.errors import FlatoutError
from flatout.models.cnn import ImageEncoder
from flatout.models.config import NetworkConfig
from flatout.models.heads import Head, PolicyHead, make_head
from flatout.models.mlp import linear, mlp

Obs: TypeAlias = Sequence[Tensor]
OBS_CLIP = 10.0


class Encoder(nn.Module):
    """All leaves but the mask, each as its kind wants it, concatenated to one feature vector."""

    def __init__(self, leaves: Sequence[ArraySpec]) -> None:
        super().__init__()
        self._parts = [(i, leaf) for i, leaf in enumerate(leaves) if leaf.kind != "mask"]
        self.images = nn.ModuleDict()
        self.n_features = 0
        for i, leaf in self._parts:
            if leaf.kind == "image":
                self.images[str(i)] = ImageEncoder(leaf.shape, scale=leaf.dtype == "uint8")
                self.n_features += ImageEncoder.n_features
            elif leaf.kind == "discrete":
                self.n_features += sum(leaf.nvec)
                ends = torch.tensor([sum(leaf.nvec[:k]) for k in range(len(leaf.nvec))])
                self.register_buffer(f"_offset_{i}", ends - torch.tensor(leaf.start), persistent=False)
            else:
                self.n_features += _n_elements(leaf)

    def forward(self, obs: Obs) -> Tensor:
        features = [self._encode(i, leaf, obs[i]) for i, leaf in self._parts]
        return features[0] if len(features) == 1 else torch.cat(features, -1)

    def _encode(self, i: int, leaf: ArraySpec, value: Tensor) -> Tensor:
        if leaf.kind == "image":
            out: Tensor = self.images[str(i)](value)
            return out
        flat = value.reshape(len(value), -1)
        if leaf.kind == "discrete":  # one-hot of every element, side by side
            hot = torch.zeros(len(value), sum(leaf.nvec), device=value.device)
            return hot.scatter_(1, flat + self.get_buffer(f"_offset_{i}"), 1.0)
        return flat.float()


class PolicyNet(nn.Module):
    """Encoder, body and output layer of what acts, with the head that makes actions of the outputs."""

    def __init__(
        self,
        obs: ObsLayout,
        action: ActionLayout,
        config: NetworkConfig,
        head: Head,
        *,
        normalize_obs: bool,
        out_gain: float,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.obs, self.action = obs, action
        self._mask_index = obs.mask_index
        if obs.mask_index is not None:
            _check_mask(obs.specs[obs.mask_index], action)
        self.head = head
        self.vector_indices = tuple(i for i, leaf in enumerate(obs.specs) if leaf.kind == "vector")
        for i in self.vector_indices:
            self.register_buffer(f"obs_mean_{i}", torch.zeros(obs.specs[i].shape))
            self.register_buffer(f"obs_scale_{i}", torch.ones(obs.specs[i].shape))
        self.normalizes, self.activation, self.layer_norm = normalize_obs, config.activation, layer_norm
        self.pi_encoder = Encoder(obs.specs)
        widths = config.network_arch
        self.pi_body = mlp(self.pi_encoder.n_features, widths, config.activation, layer_norm=layer_norm)
        self.pi_out = linear(widths[-1], head.n_outputs, gain=out_gain)

    def features(self, obs: Obs) -> Tensor:
        """What the policy's first layer sees."""
        out: Tensor = self.pi_encoder(self._normalized(obs))
        return out

    def policy(self, obs: Obs) -> Tensor:
        """Raw outputs for the head."""
        out: Tensor = self.pi_out(self.pi_body(self.features(obs)))
        return out

    def acting_layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of every layer from features to raw outputs."""
        return _weights((*self.pi_body, self.pi_out))

    def acting_norms(self) -> list[tuple[Tensor, Tensor]]:
        """Gain and shift of every hidden layer's normalisation; none where layers are not normalised."""
        return [(layer.weight, layer.bias) for layer in self.pi_body if isinstance(layer, nn.LayerNorm)]

    def mask(self, obs: Obs) -> Tensor | None:
        """Which actions are allowed, or None where the env has no mask."""
        return None if self._mask_index is None else obs[self._mask_index]

    def sample(self, obs: Obs, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and log-probabilities of actions drawn with the given noise."""
        return self.head.sample(self.policy(obs), noise, self.mask(obs))

    def mode(self, obs: Obs) -> Tensor:
        """The most likely rows."""
        return self.head.mode(self.policy(obs), self.mask(obs))

    def _normalized(self, obs: Obs) -> Obs:
        if not self.normalizes:
            return obs
        out = list(obs)
        for i in self.vector_indices:
            mean, scale = self.get_buffer(f"obs_mean_{i}"), self.get_buffer(f"obs_scale_{i}")
            out[i] = ((out[i] - mean) * scale).clamp(-OBS_CLIP, OBS_CLIP)
        return out


class ActorCritic(PolicyNet):
    """Policy and value networks, apart or on one trunk."""

    head: PolicyHead

    def __init__(
        self, obs: ObsLayout, action: ActionLayout, config: NetworkConfig, *, normalize_obs: bool = False
    ) -> None:
        head = make_head(action, config.log_std_init, squash=config.squash)
        super().__init__(obs, action, config, head, normalize_obs=normalize_obs, out_gain=0.01)
        self.shared = config.trunk == "shared" or (
            config.trunk == "auto" and any(leaf.kind == "image" for leaf in obs.specs)
        )
        widths = config.network_arch
        if not self.shared:
            self.vf_encoder = Encoder(obs.specs)
            self.vf_body = mlp(self.vf_encoder.n_features, widths, config.activation)
        self.vf_out = linear(widths[-1], 1, gain=1.0)

    def value(self, obs: Obs) -> Tensor:
        """Values (B,)."""
        obs = self._normalized(obs)
        if self.shared:
            out: Tensor = self.vf_out(self.pi_body(self.pi_encoder(obs)))
        else:
            out = self.vf_out(self.vf_body(self.vf_encoder(obs)))
        return out.squeeze(-1)

    def value_layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of every layer from features to values, where they are its own."""
        return _weights((*self.vf_body, self.vf_out))

    def both(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """Policy outputs and values in one pass."""
        obs = self._normalized(obs)
        features = self.pi_body(self.pi_encoder(obs))
        vf_features = features if self.shared else self.vf_body(self.vf_encoder(obs))
        return self.pi_out(features), self.vf_out(vf_features).squeeze(-1)

    def evaluate(self, obs: Obs, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the rows, entropy, and values."""
        out, value = self.both(obs)
        log_prob, entropy = self.head.evaluate(out.float(), rows, self.mask(obs))
        return log_prob, entropy, value.float()


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A model on a device, and how the env's spaces map to it."""

    model: PolicyNet
    obs: ObsLayout
    action: ActionLayout
    device: torch.device

    @property
    def n_params(self) -> int:
        """Number of the model's parameters."""
        return sum(p.numel() for p in self.model.parameters())


def _weights(layers: Sequence[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    return [(layer.weight, layer.bias) for layer in layers if isinstance(layer, nn.Linear)]


def _n_elements(leaf: ArraySpec) -> int:
    n = 1
    for side in leaf.shape:
        n *= side
    return n


def _check_mask(leaf: ArraySpec, action: ActionLayout) -> None:
    if action.continuous:
        raise FlatoutError("the observation has an action_mask, but Box actions cannot be masked")
    if leaf.shape != (action.n_logits,):
        raise FlatoutError(
            f"action_mask has {leaf.shape[0]} entries; this action space wants {action.n_logits}, one per choice"
        )


def build(
    obs: ObsLayout, action: ActionLayout, config: NetworkConfig, seed: int, *, normalize_obs: bool = False
) -> ActorCritic:
    """An actor-critic whose first parameters depend on nothing but the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ActorCritic(obs, action, config, normalize_obs=normalize_obs)


@torch.no_grad()
def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Give a model all that another one of the same kind has learned."""
    pairs = ((source.parameters(), target.parameters()), (source.buffers(), target.buffers()))
    for theirs, ours in pairs:
        for tensor, value in zip(ours, theirs, strict=True):
            tensor.copy_(value)
