"""After Stable-Baselines3's documentation, guide/examples, "Compiling models"."""

import torch as th

from flatout.sb3 import PPO

STEPS = 10_000

model = PPO("MlpPolicy", "CartPole-v1", verbose=1)
model.policy = th.compile(model.policy, backend="eager")
model.learn(total_timesteps=STEPS)
