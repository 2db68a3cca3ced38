"""After Stable-Baselines3's documentation, guide/examples, "Multiprocessing with off-policy algorithms"."""

from stable_baselines3.common.env_util import make_vec_env

from flatout.sb3 import SAC

STEPS = 10_000

vec_env = make_vec_env("Pendulum-v1", n_envs=4, seed=0)
model = SAC("MlpPolicy", vec_env, train_freq=1, gradient_steps=2, verbose=1)
model.learn(total_timesteps=STEPS)
