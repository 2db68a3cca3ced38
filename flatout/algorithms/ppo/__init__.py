"""Proximal policy optimization (Schulman et al. 2017).

Where to read, and which code runs when:

- `config.py`: the hyperparameters; `recipes.py`: tuned values per env, and presets.
- `learner.py`: what happens to a rollout: advantages, then epochs of shuffled minibatches.
- `loss.py`: advantages, loss and metrics in PyTorch. It is the definition of the algorithm: `--compile off` runs it
  with autograd, `--compile on` runs code compiled from it, and on an accelerator it is captured as a graph.
- `fused.py`: the same loss and its gradient written out for plain MLPs on the CPU, where it is faster. `--compile auto`
  uses it where it applies; tests hold it equal to `loss.py`.

The optimizer step around the loss (gradient clipping, Adam, skipped steps) is `flatout/learning/update.py`.
"""

from __future__ import annotations

from flatout.algorithms.base import Algorithm, imported
from flatout.algorithms.ppo.config import PPOConfig
from flatout.algorithms.ppo.recipes import AUTO, AUTO_CONTINUOUS, PRESETS, RECIPES
from flatout.algorithms.space import GAMMA, NETWORK, ROLLOUTS, Space, between, one_of

SPACE: Space = {
    **ROLLOUTS,
    "learning_rate": between(5e-5, 5e-3, log=True),
    "learning_rate_schedule": one_of("constant", "linear"),
    "gamma": GAMMA,
    "gae_lambda": one_of(0.8, 0.9, 0.95, 0.98, 1.0),
    "clip_range": one_of(0.1, 0.2, 0.3),
    "ent_coef": between(1e-6, 0.1, log=True),
    "max_grad_norm": one_of(0.3, 0.5, 1.0, 2.0),
    "normalize_obs": one_of(False, True),
    "normalize_reward": one_of(False, True),
    **NETWORK,
}
"""What `flatout sweep` searches."""

ALGORITHM = Algorithm(
    name="ppo",
    config=PPOConfig,
    make_learner=imported("flatout.algorithms.ppo.learner:PPOLearner"),
    recipes=RECIPES,
    presets=PRESETS,
    auto=AUTO,
    auto_continuous=AUTO_CONTINUOUS,
    space=SPACE,
)
