"""Stable-Baselines3's PPO, DQN and SAC, trained by flatout: scripts run with one import changed.

`from flatout.sb3 import PPO` takes the arguments of `from stable_baselines3 import PPO`; envs, wrappers, callbacks,
loggers and `evaluate_policy` stay Stable-Baselines3's own. An argument that has no counterpart is refused in one line.
"""

from __future__ import annotations

from flatout.sb3.algorithms import DQN, PPO, SAC

__all__ = ["DQN", "PPO", "SAC"]
