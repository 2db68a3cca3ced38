"""A network of action values: the same encoders and body as a policy, values of all actions out."""

from __future__ import annotations

from torch import Tensor, nn

from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.errors import FlatoutError
from flatout.models.config import NetworkConfig
from flatout.models.heads import GreedyHead
from flatout.models.mlp import linear
from flatout.models.policy import Obs, PolicyNet


class QNetwork(PolicyNet):
    """Values (B, actions); `dueling` makes them a state's value plus advantages (Wang et al. 2016)."""

    def __init__(
        self,
        obs: ObsLayout,
        action: ActionLayout,
        config: NetworkConfig,
        *,
        normalize_obs: bool = False,
        dueling: bool = False,
        layer_norm: bool = False,
    ) -> None:
        if len(action.nvec) != 1:
            raise FlatoutError(
                f"DQN and PQN choose among Discrete actions; this env has {action.space}: use PPO (--algo ppo)"
            )
        head = GreedyHead(action.nvec[0])
        super().__init__(
            obs, action, config, head, normalize_obs=normalize_obs, out_gain=0.01, layer_norm=layer_norm
        )
        self.greedy = head
        self.v_out = linear(config.network_arch[-1], 1, gain=0.01) if dueling else None

    def forward(self, obs: Obs) -> Tensor:
        """Values of all actions."""
        weight, bias = self._output()
        return nn.functional.linear(self.pi_body(self.features(obs)), weight, bias)

    policy = forward

    def _output(self) -> tuple[Tensor, Tensor]:
        # V + A - mean A is linear in what the body gives: one layer, made of two.
        weight, bias = self.pi_out.weight, self.pi_out.bias
        if self.v_out is None:
            return weight, bias
        return weight - weight.mean(0) + self.v_out.weight, bias - bias.mean() + self.v_out.bias

    def acting_layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of every layer from features to values."""
        return [*super().acting_layers()[:-1], self._output()]
