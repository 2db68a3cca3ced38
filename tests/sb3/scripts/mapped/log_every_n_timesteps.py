"""After Stable-Baselines3's documentation, guide/callbacks, "LogEveryNTimesteps"."""

from stable_baselines3.common.callbacks import LogEveryNTimesteps

from flatout.sb3 import PPO

STEPS = 10_000

event_callback = LogEveryNTimesteps(n_steps=1_000)
model = PPO("MlpPolicy", "Pendulum-v1", verbose=1)
model.learn(STEPS, callback=event_callback, log_interval=None)
