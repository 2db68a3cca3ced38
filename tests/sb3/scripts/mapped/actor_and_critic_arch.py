"""After Stable-Baselines3's documentation, guide/custom_policy, "Off-Policy Algorithms"."""

from flatout.sb3 import SAC

STEPS = 5_000

policy_kwargs = {"net_arch": {"pi": [64, 64], "qf": [400, 300]}}
model = SAC("MlpPolicy", "Pendulum-v1", policy_kwargs=policy_kwargs, verbose=1)
model.learn(STEPS)
