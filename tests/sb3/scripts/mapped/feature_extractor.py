"""After Stable-Baselines3's documentation, guide/custom_policy, "Custom Feature Extractor", with images that need no Atari."""

import torch as th
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from flatout.sb3 import PPO

STEPS = 1_000


class CustomCNN(BaseFeaturesExtractor):
    def __init__(self, observation_space, features_dim=256):
        super().__init__(observation_space, features_dim)
        channels = observation_space.shape[0]
        self.cnn = nn.Sequential(nn.Conv2d(channels, 8, kernel_size=8, stride=4), nn.ReLU(), nn.Flatten())
        with th.no_grad():
            n_flatten = self.cnn(th.as_tensor(observation_space.sample()[None]).float()).shape[1]
        self.linear = nn.Sequential(nn.Linear(n_flatten, features_dim), nn.ReLU())

    def forward(self, observations):
        return self.linear(self.cnn(observations))


policy_kwargs = {"features_extractor_class": CustomCNN, "features_extractor_kwargs": {"features_dim": 128}}
env = FakeImageEnv(screen_height=40, screen_width=40, n_channels=3, discrete=True)
model = PPO("CnnPolicy", env, policy_kwargs=policy_kwargs, n_steps=128, n_epochs=1, verbose=1)
model.learn(STEPS)
model.save("ppo_images")
PPO.load("ppo_images").predict(env.observation_space.sample())
