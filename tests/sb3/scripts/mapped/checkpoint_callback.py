"""After Stable-Baselines3's documentation, guide/callbacks, "CheckpointCallback", with the replay buffer."""

from stable_baselines3.common.callbacks import CheckpointCallback

from flatout.sb3 import SAC

STEPS = 2_000

checkpoint_callback = CheckpointCallback(
    save_freq=STEPS // 2,
    save_path="./logs/",
    name_prefix="rl_model",
    save_replay_buffer=True,
    save_vecnormalize=True,
)
model = SAC("MlpPolicy", "Pendulum-v1")
model.learn(STEPS, callback=checkpoint_callback)
SAC.load(f"./logs/rl_model_{STEPS}_steps.zip")
