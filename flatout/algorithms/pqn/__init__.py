"""Parallelised Q-learning (Gallici et al. 2024): Q-learning from rollouts of many envs, without replay or target network.

It shares epsilon-greedy exploration and the loss of a TD error with DQN, which is where it takes them from.
"""

from __future__ import annotations

from flatout.algorithms.base import Algorithm, imported
from flatout.algorithms.dqn import exploration, make_q_network
from flatout.algorithms.pqn.config import PQNConfig
from flatout.algorithms.pqn.recipes import AUTO, RECIPES
from flatout.algorithms.space import GAMMA, NETWORK, ROLLOUTS, Space, between, one_of

SPACE: Space = {
    **ROLLOUTS,
    "n_envs": one_of(8, 16, 32, 64, 128),
    "learning_rate": between(1e-4, 3e-3, log=True),
    "gamma": GAMMA,
    "q_lambda": one_of(0.0, 0.3, 0.65, 0.8, 0.95),
    "exploration_fraction": between(0.02, 0.5, log=True),
    "exploration_final_eps": between(0.005, 0.1, log=True),
    **NETWORK,
}
"""What `flatout sweep` searches."""

ALGORITHM = Algorithm(
    name="pqn",
    config=PQNConfig,
    make_learner=imported("flatout.algorithms.pqn.learner:PQNLearner"),
    make_model=make_q_network,
    exploration=exploration,
    recipes=RECIPES,
    auto=AUTO,
    first_choice_for=("flatout/Snake-v0",),
    space=SPACE,
)
