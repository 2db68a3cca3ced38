"""After Stable-Baselines3's documentation, guide/examples, "Multiprocessing": SubprocVecEnv of own functions."""

import gymnasium as gym
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import SubprocVecEnv

from flatout.sb3 import PPO

STEPS = 25_000


def make_env(env_id, rank, seed=0):
    def _init():
        env = gym.make(env_id, render_mode="rgb_array")
        env.reset(seed=seed + rank)
        return env

    set_random_seed(seed)
    return _init


if __name__ == "__main__":
    vec_env = SubprocVecEnv([make_env("CartPole-v1", i) for i in range(2)])
    model = PPO("MlpPolicy", vec_env, verbose=1)
    model.learn(total_timesteps=STEPS)
    obs = vec_env.reset()
    for _ in range(20):
        action, _states = model.predict(obs)
        obs, rewards, dones, info = vec_env.step(action)
    vec_env.close()
