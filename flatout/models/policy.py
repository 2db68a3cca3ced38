"""Networks: encoders and MLPs, PolicyNet, which acts, and the actor-critic and Q-network made of it.

Observation arrays in, raw outputs for a head out. Weights are initialised orthogonally (Engstrom et al. 2020).
Observation normalisation is part of the model (two buffers per vector), so it is published, saved and frozen with the
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from flatout.envs.spaces import ActionLayout, ArraySpec, ObsLayout
from flatout.errors import FlatoutError
from flatout.models.config import NetworkConfig
from flatout.models.encoders import ImageEncoder
from flatout.models.heads import GreedyHead, Head, PolicyHead, make_head

if TYPE_CHECKING:
    from flatout.models.own import OwnEncoder

Obs: TypeAlias = Sequence[Tensor]

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}
HIDDEN_GAIN, OUT_GAIN = 2**0.5, 0.01
OBS_CLIP = 10.0


def linear(n_in: int, n_out: int, gain: float) -> nn.Linear:
    """A linear layer with orthogonal weights and zero bias."""
    layer = nn.Linear(n_in, n_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(n_in: int, widths: Sequence[int], activation: str, *, layer_norm: bool = False) -> nn.Sequential:
    """Hidden layers of the given widths, each with layer normalisation, if asked for, and the activation."""
    layers: list[nn.Module] = []
    for a, b in pairwise([n_in, *widths]):
        layers.append(linear(a, b, HIDDEN_GAIN))
        if layer_norm:
            layers.append(nn.LayerNorm(b))
        layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers)


class Encoder(nn.Module):
    """Encodes each observation array but the mask by its kind and concatenates the features."""

    def __init__(self, specs: Sequence[ArraySpec]) -> None:
        super().__init__()
        self._parts = [(i, spec) for i, spec in enumerate(specs) if spec.kind != "mask"]
        self.images = nn.ModuleDict()
        self.n_features = self.n_multiplies = 0
        for i, spec in self._parts:
            if spec.kind == "image":
                self.images[str(i)] = image = ImageEncoder(spec.shape, scale=spec.dtype == "uint8")
                self.n_features += image.n_features
                self.n_multiplies += image.n_multiplies
            elif spec.kind == "discrete":
                self.n_features += sum(spec.nvec)
                ends = torch.tensor([sum(spec.nvec[:k]) for k in range(len(spec.nvec))])
                self.register_buffer(f"_offset_{i}", ends - torch.tensor(spec.start), persistent=False)
            else:
                self.n_features += math.prod(spec.shape)

    def forward(self, obs: Obs) -> Tensor:
        features = [self._encode(i, spec, obs[i]) for i, spec in self._parts]
        return features[0] if len(features) == 1 else torch.cat(features, -1)

    def _encode(self, i: int, spec: ArraySpec, value: Tensor) -> Tensor:
        if spec.kind == "image":
            out: Tensor = self.images[str(i)](value)
            return out
        n = value.shape[0]  # not len(), which torch.export would take for a constant
        flat = value.reshape(n, -1)
        if spec.kind == "discrete":  # one-hot of every element, side by side
            hot = torch.zeros(n, sum(spec.nvec), device=value.device)
            return hot.scatter_(1, flat + self.get_buffer(f"_offset_{i}"), 1.0)
        return flat.float()


def make_encoder(obs: ObsLayout, config: NetworkConfig) -> Encoder | OwnEncoder:
    """What turns observations into features: every network of every algorithm begins with one."""
    if config.network is None:
        return Encoder(obs.specs)
    from flatout.models.own import OwnEncoder

    return OwnEncoder(config.network, obs, lambda: Encoder(obs.specs))


def last_width(n_features: int, widths: Sequence[int]) -> int:
    """Inputs of the output layer after hidden layers of these widths."""
    return [n_features, *widths][-1]


@cache
def rounding_block() -> int:
    """The fewest observations of which all multiples are rounded alike by this machine's matrix products.

    They round differently for different batch sizes; in whole blocks a result does not depend on the rest of the batch, nor
    on how envs are split. MKL needs blocks of 4 on a Zen 5 and of 16 on a Xeon with AVX-512.
    """
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(n, k, generator=generator) for n, k in ((2, 3), (11, 11), (2, 200), (200, 200))]
    inputs = [torch.randn(64, layer.shape[1], generator=generator) for layer in layers]
    sizes = (it for it in (4, 8, 16, 32) if all(map(partial(_same_rounding, it), inputs, layers)))
    return next(sizes, 64)


def _same_rounding(block: int, x: Tensor, weight: Tensor) -> bool:
    first = x[:block] @ weight.T
    return all(torch.equal((x[:n] @ weight.T)[:block], first) for n in range(block, len(x) + 1, block))


class PolicyNet(nn.Module):
    """Encoder, hidden layers, output layer, and the head that turns outputs into actions."""

    block = 0
    """In torch the policy acts on multiples of this many observations; 0: of `rounding_block()`."""
    state_size = 0
    """Numbers in the state of its memory, which is then the last array of an observation; 0: it has no memory."""
    own_actor: Any
    """(max_batch, device, next_state) → actor, of a model with a memory."""
    act: Any
    """(obs, noise) → actions, log-probabilities, new states, of a model with a memory."""

    def __init__(
        self,
        obs: ObsLayout,
        action: ActionLayout,
        config: NetworkConfig,
        head: Head,
        *,
        normalize_obs: bool = False,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.obs, self.action = obs, action
        self._mask_index = obs.mask_index
        if obs.mask_index is not None:
            _check_mask(obs.specs[obs.mask_index], action)
        self.head = head
        self.vector_indices = tuple(i for i, spec in enumerate(obs.specs) if spec.kind == "vector")
        for i in self.vector_indices:
            self.register_buffer(f"obs_mean_{i}", torch.zeros(obs.specs[i].shape))
            self.register_buffer(f"obs_scale_{i}", torch.ones(obs.specs[i].shape))
        self.normalizes, self.activation, self.layer_norm = normalize_obs, config.activation, layer_norm
        self.is_plain = config.network is None
        """Whether all of it is flatout's own."""
        self.pi_encoder = make_encoder(obs, config)
        self.independent_rows = self.is_plain or bool(self.pi_encoder.independent_rows)
        """Whether outputs of an observation do not depend on the others in the batch."""
        n_features, widths = self.pi_encoder.n_features, config.network_arch
        if not widths and self.is_plain and not any(spec.kind == "image" for spec in obs.specs):
            raise FlatoutError(
                "--network-arch none: only after images or a network of your own; give widths such as 64,64"
            )
        self.pi_body = mlp(n_features, widths, config.activation, layer_norm=layer_norm)
        self.pi_out = linear(last_width(n_features, widths), head.n_outputs, OUT_GAIN)

    @property
    def n_multiplies(self) -> int:
        """About how many multiplications an observation takes: a convolution uses its weights many times."""
        return sum(p.numel() for p in self.parameters()) + getattr(self.pi_encoder, "n_multiplies", 0)

    def whole_blocks(self, n: int) -> int:
        """`n` observations, rounded up to whole blocks."""
        block = self.block or rounding_block()
        return -(-n // block) * block

    def features(self, obs: Obs) -> Tensor:
        """Inputs of the first hidden layer."""
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
        """Weight and bias of every LayerNorm, if there are any."""
        return [(layer.weight, layer.bias) for layer in self.pi_body if isinstance(layer, nn.LayerNorm)]

    def mask(self, obs: Obs) -> Tensor | None:
        """Which actions are allowed, or None where the env has no mask."""
        return None if self._mask_index is None else obs[self._mask_index]

    def sample(self, obs: Obs, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions drawn with the given noise, before squashing, and their log-probabilities."""
        return self.head.sample(self.policy(obs), noise, self.mask(obs))

    def mode(self, obs: Obs) -> Tensor:
        """The most likely actions, before squashing."""
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
    """Policy and value network: separate, with one encoder, or with all hidden layers shared."""

    head: PolicyHead

    def __init__(
        self, obs: ObsLayout, action: ActionLayout, config: NetworkConfig, *, normalize_obs: bool = False
    ) -> None:
        head = make_head(action, config.log_std_init, squash=config.squash)
        super().__init__(obs, action, config, head, normalize_obs=normalize_obs)
        is_image = any(spec.kind == "image" for spec in obs.specs)
        self.shared = config.trunk == "shared" or (
            config.trunk == "auto" and is_image and config.vf_arch is None
        )
        n_features, widths = self.pi_encoder.n_features, config.network_arch
        if not self.shared:
            widths = config.network_arch if config.vf_arch is None else config.vf_arch
            self.vf_encoder = self.pi_encoder if config.trunk == "encoder" else make_encoder(obs, config)
            self.vf_body = mlp(n_features, widths, config.activation)
        self.vf_out = linear(last_width(n_features, widths), 1, gain=1.0)

    def value(self, obs: Obs) -> Tensor:
        """Values (B,)."""
        obs = self._normalized(obs)
        if self.shared:
            out: Tensor = self.vf_out(self.pi_body(self.pi_encoder(obs)))
        else:
            out = self.vf_out(self.vf_body(self.vf_encoder(obs)))
        return out.squeeze(-1)

    def value_layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of every layer from features to values; of separate networks only."""
        return _weights((*self.vf_body, self.vf_out))

    def both(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """Policy outputs and values in one pass."""
        obs = self._normalized(obs)
        features = self.pi_encoder(obs)
        hidden = vf_hidden = self.pi_body(features)
        if not self.shared:
            vf_hidden = self.vf_body(features if self.vf_encoder is self.pi_encoder else self.vf_encoder(obs))
        return self.pi_out(hidden), self.vf_out(vf_hidden).squeeze(-1)

    def evaluate(self, obs: Obs, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of actions as they were sampled, entropy, and values."""
        out, value = self.both(obs)
        log_prob, entropy = self.head.evaluate(out.float(), actions, self.mask(obs))
        return log_prob, entropy, value.float()


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A model on a device, and the layouts of its observations and actions."""

    model: PolicyNet
    obs: ObsLayout
    action: ActionLayout
    device: torch.device

    @property
    def n_params(self) -> int:
        """Number of the model's parameters."""
        return sum(p.numel() for p in self.model.parameters())


class QNetwork(PolicyNet):
    """Q-values of all actions, (B, actions); `dueling` composes them of value and advantages (Wang et al. 2016)."""

    def __init__(
        self,
        obs: ObsLayout,
        action: ActionLayout,
        config: NetworkConfig,
        *,
        dueling: bool = False,
        **options: bool,
    ) -> None:
        """`options`: the keywords of `PolicyNet`."""
        if len(action.nvec) != 1:
            raise FlatoutError(
                f"DQN and PQN choose among Discrete actions; this env has {action.space}: use PPO (--algo ppo)"
            )
        head = GreedyHead(action.nvec[0])
        super().__init__(obs, action, config, head, **options)
        self.greedy = head
        self.v_out = linear(self.pi_out.in_features, 1, OUT_GAIN) if dueling else None

    def forward(self, obs: Obs) -> Tensor:
        """Q-values of all actions."""
        weight, bias = self._output()
        return nn.functional.linear(self.pi_body(self.features(obs)), weight, bias)

    policy = forward

    def _output(self) -> tuple[Tensor, Tensor]:
        # V + A - mean A is linear in the last hidden layer, so both output layers can be one.
        if self.v_out is None:
            return self.pi_out.weight, self.pi_out.bias
        weight, bias = (
            self.pi_out.weight.float(),
            self.pi_out.bias.float(),
        )  # an update may have them in 16 bits
        return weight - weight.mean(0) + self.v_out.weight, bias - bias.mean() + self.v_out.bias

    def acting_layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of every layer from features to Q-values."""
        return [*super().acting_layers()[:-1], self._output()]


def _weights(layers: Sequence[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    return [(layer.weight, layer.bias) for layer in layers if isinstance(layer, nn.Linear)]


def _check_mask(spec: ArraySpec, action: ActionLayout) -> None:
    if action.continuous:
        raise FlatoutError("the observation has an action_mask, but Box actions cannot be masked")
    if spec.shape != (action.n_logits,):
        raise FlatoutError(
            f"action_mask has {spec.shape[0]} entries; this action space needs {action.n_logits}, one per choice"
        )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside it, torch draws random numbers, such as initial parameters, from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def build(
    obs: ObsLayout, action: ActionLayout, config: NetworkConfig, seed: int, *, normalize_obs: bool = False
) -> ActorCritic:
    """An actor-critic with initial parameters from the seed."""
    with seeded(seed):
        return ActorCritic(obs, action, config, normalize_obs=normalize_obs)
