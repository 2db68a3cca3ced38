"""After Stable-Baselines3's documentation, guide/examples, "Dict Observations"."""

from stable_baselines3.common.envs import SimpleMultiObsEnv

from flatout.sb3 import PPO

STEPS = 100_000

env = SimpleMultiObsEnv(random_start=False)
model = PPO("MultiInputPolicy", env, verbose=1)
model.learn(total_timesteps=STEPS)
