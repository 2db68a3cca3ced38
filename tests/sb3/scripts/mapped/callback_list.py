"""After Stable-Baselines3's documentation, guide/callbacks, "CallbackList"."""

import gymnasium as gym
from stable_baselines3.common.callbacks import CallbackList, CheckpointCallback, EvalCallback

from flatout.sb3 import SAC

STEPS = 5_000

checkpoint_callback = CheckpointCallback(save_freq=1000, save_path="./logs/")
eval_env = gym.make("Pendulum-v1")
eval_callback = EvalCallback(
    eval_env, best_model_save_path="./logs/best_model", log_path="./logs/results", eval_freq=500
)
model = SAC("MlpPolicy", "Pendulum-v1")
model.learn(STEPS, callback=CallbackList([checkpoint_callback, eval_callback]))
