"""After Stable-Baselines3's documentation, guide/callbacks, "EveryNTimesteps"."""

from stable_baselines3.common.callbacks import CheckpointCallback, EveryNTimesteps

from flatout.sb3 import PPO

STEPS = 20_000

checkpoint_on_event = CheckpointCallback(save_freq=1, save_path="./logs/")
event_callback = EveryNTimesteps(n_steps=500, callback=checkpoint_on_event)
model = PPO("MlpPolicy", "Pendulum-v1", verbose=1)
model.learn(STEPS, callback=event_callback)
PPO.load("./logs/rl_model_500_steps")
