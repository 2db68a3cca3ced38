"""After Stable-Baselines3's documentation, guide/examples, "Basic Usage: Training, Saving, Loading"."""

import gymnasium as gym
from stable_baselines3.common.evaluation import evaluate_policy

from flatout.sb3 import DQN

STEPS = 200_000

env = gym.make("LunarLander-v3", render_mode="rgb_array")
model = DQN("MlpPolicy", env, verbose=1)
model.learn(total_timesteps=int(STEPS), progress_bar=True)
model.save("dqn_lunar")
del model

model = DQN.load("dqn_lunar", env=env)
mean_reward, std_reward = evaluate_policy(model, model.get_env(), n_eval_episodes=2)
print(f"evaluated: {mean_reward:.1f} +/- {std_reward:.1f}")

vec_env = model.get_env()
obs = vec_env.reset()
for _ in range(20):
    action, _states = model.predict(obs, deterministic=True)
    obs, rewards, dones, info = vec_env.step(action)
