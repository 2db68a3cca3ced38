"""After Stable-Baselines3's documentation, guide/callbacks, "StopTrainingOnMaxEpisodes", with PPO for A2C."""

from stable_baselines3.common.callbacks import StopTrainingOnMaxEpisodes

from flatout.sb3 import PPO

STEPS = 10_000_000

callback_max_episodes = StopTrainingOnMaxEpisodes(max_episodes=5, verbose=1)
model = PPO("MlpPolicy", "Pendulum-v1", verbose=1)
model.learn(STEPS, callback=callback_max_episodes)
assert model.num_timesteps == 1000
