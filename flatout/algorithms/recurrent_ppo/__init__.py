"""PPO with a memory: an LSTM or a GRU before the hidden layers, for envs whose observations do not show everything.

The loss and the advantages are PPO's. What is different:

- `config.py`: the memory, and the sequences that minibatches are made of.
- `learner.py`: a rollout becomes sequences instead of single samples.
- `flatout/models/memory.py`: the network; the state of its memory is part of the observations that a rollout stores.
- `flatout/models/memory_kernel.py`: the same on the CPU as compiled loops, for acting and for updates.
- `flatout/collect/memory.py`: keeps the state of each env while collecting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.algorithms.base import Algorithm, Recipe, imported
from flatout.algorithms.recurrent_ppo.config import RecurrentPPOConfig
from flatout.algorithms.space import GAMMA, ROLLOUTS, Space, between, one_of
from flatout.models.config import NetworkConfig

if TYPE_CHECKING:
    from flatout.envs.spaces import ActionLayout, ObsLayout
    from flatout.models.memory import RecurrentActorCritic


def make_recurrent(
    obs: ObsLayout, action: ActionLayout, network: NetworkConfig, config: RecurrentPPOConfig, seed: int
) -> RecurrentActorCritic:
    """A policy and a value function with memories."""
    from flatout.models.memory import build

    kind, width = config.memory_parts
    return build(obs, action, network, seed, kind=kind, width=width, normalize_obs=config.normalize_obs)


def _auto(batch_size: int) -> Recipe:
    config = RecurrentPPOConfig(batch_size=batch_size)
    return Recipe(n_envs=8, algorithm=config, network=NetworkConfig(network_arch=(64, 64)))


SPACE: Space = {
    **ROLLOUTS,
    "memory": one_of("lstm:64", "lstm:128", "gru:64", "gru:128"),
    "learning_rate": between(1e-4, 3e-3, log=True),
    "gamma": GAMMA,
    "gae_lambda": one_of(0.8, 0.9, 0.95, 0.98),
    "ent_coef": between(1e-6, 0.1, log=True),
    "max_grad_norm": one_of(0.3, 0.5, 1.0, 2.0),
}
"""What `flatout sweep` searches."""

ALGORITHM = Algorithm(
    name="recurrent-ppo",
    config=RecurrentPPOConfig,
    make_learner=imported("flatout.algorithms.recurrent_ppo.learner:RecurrentPPOLearner"),
    make_model=make_recurrent,
    auto=(_auto(256), _auto(1024)),
    variant_of="ppo",
    space=SPACE,
)
