"""After Stable-Baselines3's documentation, guide/callbacks, "StopTrainingOnRewardThreshold"."""

import gymnasium as gym
from stable_baselines3.common.callbacks import EvalCallback, StopTrainingOnRewardThreshold

from flatout.sb3 import PPO

STEPS = 10_000_000

eval_env = gym.make("CartPole-v1")
callback_on_best = StopTrainingOnRewardThreshold(reward_threshold=60, verbose=1)
eval_callback = EvalCallback(eval_env, callback_on_new_best=callback_on_best, eval_freq=2000, verbose=1)
model = PPO("MlpPolicy", "CartPole-v1", verbose=1)
model.learn(STEPS, callback=eval_callback)
assert model.num_timesteps < 10_000_000
