"""After Stable-Baselines3's documentation, guide/custom_policy, "Custom Network Architecture"."""

import torch as th

from flatout.sb3 import PPO

STEPS = 20_000

policy_kwargs = {"activation_fn": th.nn.ReLU, "net_arch": {"pi": [32, 32], "vf": [32, 32]}}
model = PPO("MlpPolicy", "CartPole-v1", policy_kwargs=policy_kwargs, verbose=1)
env = model.get_env()
model.learn(total_timesteps=STEPS)
model.save("ppo_cartpole")
del model

model = PPO.load("ppo_cartpole", env=env)
model.learn(total_timesteps=STEPS, reset_num_timesteps=False)
