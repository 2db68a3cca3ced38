"""After Stable-Baselines3's documentation, guide/examples, "Callbacks: Evaluate Agent Performance"."""

from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env

from flatout.sb3 import SAC

STEPS = 5_000

train_env = make_vec_env("Pendulum-v1", n_envs=1, seed=0)
eval_env = make_vec_env("Pendulum-v1", n_envs=5, seed=0, env_kwargs={"g": 0.7})
eval_callback = EvalCallback(
    eval_env,
    best_model_save_path="./eval_logs/",
    log_path="./eval_logs/",
    eval_freq=500,
    n_eval_episodes=5,
    deterministic=True,
    render=False,
)
model = SAC("MlpPolicy", train_env)
model.learn(STEPS, callback=eval_callback)
SAC.load("./eval_logs/best_model")
