"""After Stable-Baselines3's documentation, guide/tensorboard, "Logging Hyperparameters", and common/logger, with PPO for A2C."""

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import HParam, configure

from flatout.sb3 import PPO

STEPS = 50_000


class HParamCallback(BaseCallback):
    def _on_training_start(self):
        hparam_dict = {
            "algorithm": self.model.__class__.__name__,
            "learning rate": self.model.learning_rate,
            "gamma": self.model.gamma,
        }
        metric_dict = {"rollout/ep_len_mean": 0, "train/value_loss": 0.0}
        self.logger.record(
            "hparams", HParam(hparam_dict, metric_dict), exclude=("stdout", "log", "json", "csv")
        )

    def _on_step(self):
        return True


model = PPO("MlpPolicy", "CartPole-v1", verbose=1)
model.set_logger(configure("./log/", ["stdout", "csv", "tensorboard"]))
model.learn(total_timesteps=int(STEPS), callback=HParamCallback())
