"""Parallelised Q-learning (Gallici et al. 2024): Q-learning from rollouts of many envs, without replay or target network.

It shares epsilon-greedy exploration and the loss of a TD error with DQN, which is where it takes them from.
"""

from __future__ import annotations

from flatout.algorithms.base import Algorithm, imported
from flatout.algorithms.dqn import exploration, make_q_network
from flatout.algorithms.pqn.config import PQNConfig
from flatout.algorithms.pqn.recipes import AUTO, RECIPES

ALGORITHM = Algorithm(
    name="pqn",
    config=PQNConfig,
    make_learner=imported("flatout.algorithms.pqn.learner:PQNLearner"),
    make_model=make_q_network,
    exploration=exploration,
    recipes=RECIPES,
    auto=AUTO,
    first_choice_for=("flatout/Snake-v0",),
)
