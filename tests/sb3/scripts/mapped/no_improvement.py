"""After Stable-Baselines3's documentation, guide/callbacks, "StopTrainingOnNoModelImprovement"."""

import gymnasium as gym
from stable_baselines3.common.callbacks import EvalCallback, StopTrainingOnNoModelImprovement

from flatout.sb3 import SAC

STEPS = 10_000_000

eval_env = gym.make("Pendulum-v1")
stop_train_callback = StopTrainingOnNoModelImprovement(max_no_improvement_evals=1, min_evals=2, verbose=1)
eval_callback = EvalCallback(
    eval_env, eval_freq=20, n_eval_episodes=1, callback_after_eval=stop_train_callback, verbose=1
)
model = SAC("MlpPolicy", "Pendulum-v1", learning_rate=1e-3, verbose=1)
model.learn(STEPS, callback=eval_callback)
