"""After Stable-Baselines3's documentation, guide/examples, "Advanced Saving and Loading": the policy without its model."""

from flatout.sb3 import SAC

STEPS = 1_000

model = SAC("MlpPolicy", "Pendulum-v1")
model.policy.save("sac_policy_pendulum")
