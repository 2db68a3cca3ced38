"""After Stable-Baselines3's documentation, guide/plotting, "Single Training Run": Monitor files, read without pandas."""

import csv
from pathlib import Path

import gymnasium as gym
from stable_baselines3.common.monitor import Monitor

from flatout.sb3 import PPO

STEPS = 10_000

env = Monitor(gym.make("CartPole-v1"), "./monitor/")
model = PPO("MlpPolicy", env, verbose=0)
model.learn(STEPS)
with next(Path("monitor").glob("*monitor.csv")).open() as file:
    next(file)
    lengths = [int(row["l"]) for row in csv.DictReader(file)]
assert 10 < sum(lengths) <= model.num_timesteps
