"""After Stable-Baselines3's documentation, guide/examples, "Advanced Saving and Loading"."""

from stable_baselines3.common.evaluation import evaluate_policy

from flatout.sb3 import SAC

STEPS = 6_000

model = SAC("MlpPolicy", "Pendulum-v1", verbose=1, learning_rate=1e-3)
model.learn(total_timesteps=STEPS)
model.save("sac_pendulum")

loaded_model = SAC.load("sac_pendulum")
assert loaded_model.replay_buffer.size() == 0
model.save_replay_buffer("sac_replay_buffer")
loaded_model.load_replay_buffer("sac_replay_buffer")
assert loaded_model.replay_buffer.size() == model.replay_buffer.size() == STEPS

policy = model.policy
mean_reward, std_reward = evaluate_policy(policy, model.get_env(), n_eval_episodes=1, deterministic=True)
print(f"mean_reward={mean_reward:.2f} +/- {std_reward}")
