"""After Stable-Baselines3's documentation, guide/examples, "Learning Rate Schedule"."""

from flatout.sb3 import PPO

STEPS = 20_000


def linear_schedule(initial_value):
    def func(progress_remaining):
        return progress_remaining * initial_value

    return func


model = PPO("MlpPolicy", "CartPole-v1", learning_rate=linear_schedule(0.001), verbose=1)
model.learn(total_timesteps=STEPS)
model.learn(total_timesteps=STEPS // 2, reset_num_timesteps=True)
