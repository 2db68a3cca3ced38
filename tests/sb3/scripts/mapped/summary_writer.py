"""After Stable-Baselines3's documentation, guide/tensorboard, "Directly Accessing The Summary Writer"."""

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import TensorBoardOutputFormat

from flatout.sb3 import SAC

STEPS = 50_000

model = SAC("MlpPolicy", "Pendulum-v1", tensorboard_log="./sac/", verbose=1)


class SummaryWriterCallback(BaseCallback):
    def _on_training_start(self):
        formats = self.logger.output_formats
        self.tb_formatter = next(it for it in formats if isinstance(it, TensorBoardOutputFormat))

    def _on_step(self):
        if self.n_calls % 100 == 0:
            self.tb_formatter.writer.add_text("direct_access", "this is a value", self.num_timesteps)
            self.tb_formatter.writer.flush()
        return True


model.learn(STEPS, callback=SummaryWriterCallback())
