"""After Stable-Baselines3's documentation, guide/examples, "Hindsight Experience Replay (HER)"."""

from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv

from flatout.sb3 import SAC

STEPS = 1_000

SAC("MultiInputPolicy", BitFlippingEnv(continuous=True), replay_buffer_class=HerReplayBuffer).learn(STEPS)
