"""flatout: reinforcement learning with the accelerator flat out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.advice.doctor import doctor
    from flatout.advice.tune import tune
    from flatout.agent import DQN, PPO, PQN, SAC, Agent, RecurrentPPO, load
    from flatout.algorithms.base import Algorithm, AlgorithmConfig, choose_batch_size, register_algorithm
    from flatout.errors import EnvError, FlatoutError
    from flatout.training.callbacks import Callback
    from flatout.vector import make_vec

import flatout.workloads  # noqa: F401  # registers flatout/Snake-v0 and the others with Gymnasium
from flatout.device.machine import wait_without_spinning

wait_without_spinning()

__version__ = "0.1.0"
__all__ = [
    "DQN",
    "PPO",
    "PQN",
    "SAC",
    "Agent",
    "Algorithm",
    "AlgorithmConfig",
    "Callback",
    "EnvError",
    "FlatoutError",
    "RecurrentPPO",
    "choose_batch_size",
    "doctor",
    "load",
    "make_vec",
    "register_algorithm",
    "tune",
]

_HOMES = {
    "PPO": "agent",
    "DQN": "agent",
    "PQN": "agent",
    "RecurrentPPO": "agent",
    "SAC": "agent",
    "load": "agent",
    "Agent": "agent",
    "Algorithm": "algorithms.base",
    "AlgorithmConfig": "algorithms.base",
    "register_algorithm": "algorithms.base",
    "choose_batch_size": "algorithms.base",
    "make_vec": "vector",
    "Callback": "training.callbacks",
    "doctor": "advice.doctor",
    "tune": "advice.tune",
    "EnvError": "errors",
    "FlatoutError": "errors",
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch alone takes over a second, and `flatout --help` needs none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'flatout' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"flatout.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
