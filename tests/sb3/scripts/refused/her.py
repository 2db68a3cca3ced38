"""After Stable-Baselines3's documentation, guide/examples, "Hindsight Experience Replay (HER)"."""

from flatout.sb3 import SAC
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv

STEPS = 1_000

SAC("MultiInputPolicy", BitFlippingEnv(continuous=True), replay_buffer_class=HerReplayBuffer).learn(STEPS)
