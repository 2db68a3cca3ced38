"""After Stable-Baselines3's documentation, modules/dqn, "Example": an env that is made already."""

import gymnasium as gym

from flatout.sb3 import DQN

STEPS = 10_000

env = gym.make("CartPole-v1", render_mode="rgb_array")
model = DQN("MlpPolicy", env, verbose=1)
model.learn(total_timesteps=STEPS, log_interval=4)
model.save("dqn_cartpole")
del model

model = DQN.load("dqn_cartpole")
obs, info = env.reset()
for _ in range(50):
    action, _states = model.predict(obs, deterministic=True)
    obs, reward, terminated, truncated, info = env.step(action)
    if terminated or truncated:
        obs, info = env.reset()
