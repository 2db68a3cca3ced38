"""After Stable-Baselines3's documentation, modules/sac, "Example"."""

import gymnasium as gym

from flatout.sb3 import SAC

STEPS = 10_000

env = gym.make("Pendulum-v1", render_mode="rgb_array")
model = SAC("MlpPolicy", env, verbose=1)
model.learn(total_timesteps=STEPS, log_interval=4)
model.save("sac_pendulum")
del model

model = SAC.load("sac_pendulum")
obs, info = env.reset()
for _ in range(50):
    action, _states = model.predict(obs, deterministic=True)
    obs, reward, terminated, truncated, info = env.step(action)
    if terminated or truncated:
        obs, info = env.reset()
