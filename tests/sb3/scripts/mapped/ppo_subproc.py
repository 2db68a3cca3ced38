"""After Stable-Baselines3's documentation, modules/ppo, "Example" on the CPU with SubprocVecEnv."""

from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv

from flatout.sb3 import PPO

STEPS = 25_000

if __name__ == "__main__":
    env = make_vec_env("CartPole-v1", n_envs=2, vec_env_cls=SubprocVecEnv)
    model = PPO("MlpPolicy", env, device="cpu")
    model.learn(total_timesteps=STEPS)
    env.close()
