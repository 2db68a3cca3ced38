"""SAC's networks: an actor with a squashed normal distribution, and two critics computed side by side."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, softplus

from flatout.algorithms.sac.config import SACConfig
from flatout.algorithms.sac.noise import kept
from flatout.envs.spaces import ActionLayout, Array, ObsLayout
from flatout.errors import FlatoutError
from flatout.models.config import NetworkConfig
from flatout.models.heads import LOG_SQRT_2PI, Head
from flatout.models.kernel import ROWS, Network, add_sampler, contracted, forward
from flatout.models.policy import ACTIVATIONS, HIDDEN_GAIN, OUT_GAIN, Obs, PolicyNet, make_encoder, seeded

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
"""Bounds of the logarithm of the policy's standard deviation."""
_MIN, _MAX = np.float32(LOG_STD_MIN), np.float32(LOG_STD_MAX)


class SquashedNormalHead(Head):
    """Independent normals whose means and standard deviations are outputs of the network; tanh bounds bounded actions.

    While `random` is 1, before learning starts, actions are uniform within their bounds instead.
    """

    random: Tensor
    _squashed: Tensor
    bound = "random"

    def __init__(self, layout: ActionLayout) -> None:
        super().__init__()
        self.n_outputs = 2 * layout.size
        self.squashes, self._squashes_all = bool(layout.bounded.any()), bool(layout.bounded.all())
        self.register_buffer("_squashed", torch.as_tensor(layout.bounded), persistent=False)
        self.register_buffer("random", torch.ones(1))

    def draw(self, out: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The policy's actions with this noise, before squashing, and their log-probabilities after it."""
        mean, log_std = out.chunk(2, -1)
        log_std = log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)
        actions = mean + noise * log_std.exp()
        log_prob = -0.5 * noise.square() - log_std - LOG_SQRT_2PI
        # log |d tanh(x) / dx| in a form that does not overflow
        log_grad = 2.0 * (math.log(2.0) - actions - softplus(-2.0 * actions))
        return actions, (log_prob - log_grad * self._squashed).sum(-1)

    def sample(self, out: Tensor, noise: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Actions for exploring; without log-probabilities, which nothing here learns from."""
        actions, _ = self.draw(out, noise)
        # tanh of it is uniform in (-1, 1), as noise is normal
        spread = 0.5 * (torch.special.log_ndtr(noise) - torch.special.log_ndtr(-noise))
        at_random = torch.where(self._squashed, spread, noise)
        return torch.where(self.random > 0, at_random, actions), torch.zeros_like(actions[:, 0])

    def mode(self, out: Tensor, mask: Tensor | None) -> Tensor:  # noqa: ARG002
        return out.chunk(2, -1)[0]

    def squash(self, actions: Tensor) -> Tensor:
        if self._squashes_all:
            return actions.tanh()
        return torch.where(self._squashed, actions.tanh(), actions) if self.squashes else actions


@contracted
def sample_squashed(
    x: Array,
    network: Network,
    random: Array,
    squashed: Array,
    noise: Array,
    action_out: Array,
    log_prob_out: Array,
) -> None:
    """`SquashedNormalHead.sample`; the network does not run while actions are random."""
    n = len(squashed)
    for i in range(len(x)):
        log_prob_out[i] = 0
        if random[0] > 0:
            for j in range(n):
                size = np.float64(noise[i, j]) * math.sqrt(0.5)
                spread = 0.5 * math.log(math.erfc(-size) / math.erfc(size))
                action_out[i, j] = spread if squashed[j] else noise[i, j]
            continue
        if i % ROWS == 0:
            outs = forward(x[i : i + ROWS], network)
        out = outs[i % ROWS]
        for j in range(n):
            log_std = min(max(out[n + j], _MIN), _MAX)
            action_out[i, j] = out[j] + noise[i, j] * math.exp(log_std)


add_sampler(SquashedNormalHead.bound, sample_squashed)


class Critics(nn.Module):
    """Two Q-functions of observation and action, each layer of both in one product. They share an image's encoder."""

    def __init__(self, obs: ObsLayout, n_actions: int, network: NetworkConfig, config: SACConfig) -> None:
        super().__init__()
        self.encoder = make_encoder(obs, network)
        arch = network.network_arch if network.vf_arch is None else network.vf_arch
        widths = [self.encoder.n_features + n_actions, *arch, 1]
        gains = [*(HIDDEN_GAIN for _ in arch), OUT_GAIN]
        pairs = zip(pairwise(widths), gains, strict=True)
        self.weights = nn.ParameterList([_two_orthogonal(a, b, gain) for (a, b), gain in pairs])
        self.biases = nn.ParameterList([torch.zeros(2, 1, b) for b in widths[1:]])
        normed = arch if config.layer_norm else ()
        self.gains = nn.ParameterList([torch.ones(2, 1, b) for b in normed])
        self.shifts = nn.ParameterList([torch.zeros(2, 1, b) for b in normed])
        self.activation, self.dropout = ACTIVATIONS[network.activation](), config.dropout

    def forward(self, obs: Obs, action: Tensor, bits: Tensor, salt: int, frozen: bool = False) -> Tensor:
        """Q-values (2, B). `bits`, of each sample, and `salt` decide what dropout drops.

        `frozen`: with a gradient w.r.t. the actions only.
        """
        params = [self.weights, self.biases, self.gains, self.shifts]
        weights, biases, gains, shifts = ([p.detach() if frozen else p for p in it] for it in params)
        features = self.encoder(obs)
        x = torch.cat([features.detach() if frozen else features, action], -1).expand(2, -1, -1)
        last = len(weights) - 1
        for k, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            if k == last:
                break
            if self.dropout:
                x = x * kept(bits, x.shape[-1], 16 * salt + k, self.dropout)
            if gains:
                x = layer_norm(x, x.shape[-1:]) * gains[k] + shifts[k]
            x = self.activation(x)
        return x.squeeze(-1).float()


def _two_orthogonal(n_in: int, n_out: int, gain: float) -> Tensor:
    both = torch.empty(2, n_in, n_out)
    for weight in both:
        nn.init.orthogonal_(weight, gain)
    return both


class SACModel(PolicyNet):
    """The actor, its critics, and the temperature."""

    head: SquashedNormalHead

    def __init__(
        self, obs: ObsLayout, action: ActionLayout, network: NetworkConfig, config: SACConfig
    ) -> None:
        if not action.continuous:
            raise FlatoutError(
                f"SAC chooses continuous actions; this env has {action.space}: use PPO (--algo ppo) or DQN (--algo dqn)"
            )
        super().__init__(obs, action, network, SquashedNormalHead(action), normalize_obs=config.normalize_obs)
        with torch.no_grad():
            self.pi_out.bias[action.size :] = network.log_std_init
        self.critics = Critics(obs, action.size, network, config)
        self.log_ent_coef = nn.Parameter(torch.tensor([math.log(config.ent_coef)]))

    def normalized(self, obs: Obs) -> Obs:
        """Observations as the encoders take them."""
        return self._normalized(obs)


def make_model(
    obs: ObsLayout, action: ActionLayout, network: NetworkConfig, config: SACConfig, seed: int
) -> SACModel:
    """A model with initial parameters from the seed."""
    with seeded(seed):
        return SACModel(obs, action, network, config)
