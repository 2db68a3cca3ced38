"""After Stable-Baselines3's documentation, guide/tensorboard, "Logging More Values"."""

from stable_baselines3.common.callbacks import BaseCallback

from flatout.sb3 import SAC

STEPS = 50_000

model = SAC("MlpPolicy", "Pendulum-v1", tensorboard_log="./sac/", verbose=1)


class TensorboardCallback(BaseCallback):
    def _on_step(self):
        self.logger.record("angle", float(self.locals["new_obs"][0, 0]))
        return True


model.learn(STEPS, callback=TensorboardCallback())
