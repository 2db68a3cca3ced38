"""After Stable-Baselines3's documentation, modules/ppo, "Example": four envs, train, save, load, act."""

from stable_baselines3.common.env_util import make_vec_env

from flatout.sb3 import PPO

STEPS = 25_000

vec_env = make_vec_env("CartPole-v1", n_envs=4)
model = PPO("MlpPolicy", vec_env, verbose=1)
model.learn(total_timesteps=STEPS)
model.save("ppo_cartpole")
del model

model = PPO.load("ppo_cartpole")
obs = vec_env.reset()
for _ in range(20):
    action, _states = model.predict(obs)
    obs, rewards, dones, info = vec_env.step(action)
