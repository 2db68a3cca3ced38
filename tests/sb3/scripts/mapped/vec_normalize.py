"""After Stable-Baselines3's documentation, guide/examples, "Normalizing input features", with Pendulum for PyBullet."""

from pathlib import Path

from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from flatout.sb3 import PPO

STEPS = 2_000

vec_env = make_vec_env("Pendulum-v1", n_envs=1)
vec_env = VecNormalize(vec_env, norm_obs=True, norm_reward=True, clip_obs=10.0)
model = PPO("MlpPolicy", vec_env)
model.learn(total_timesteps=STEPS)

log_dir = Path(".")
model.save(log_dir / "ppo_pendulum")
vec_env.save(log_dir / "vec_normalize.pkl")
del model, vec_env

vec_env = make_vec_env("Pendulum-v1", n_envs=1)
vec_env = VecNormalize.load(log_dir / "vec_normalize.pkl", vec_env)
vec_env.training = False
vec_env.norm_reward = False
model = PPO.load(log_dir / "ppo_pendulum", env=vec_env)
assert model.get_vec_normalize_env() is vec_env
