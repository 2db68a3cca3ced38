"""Collectors and evaluation envs over envs that step N at once, in NumPy or as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from flatout.buffers.rollout import Rollout, TensorRollout
from flatout.collect.collector import Collector, Collects
from flatout.collect.noise import USUAL, Habits
from flatout.collect.tensors import TensorCollector
from flatout.envs.batched import batched_kind
from flatout.envs.check import EnvInfo
from flatout.envs.check_batched import same_device
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.errors import FlatoutError
from flatout.executors.base import Executor
from flatout.executors.batched import BatchedExecutor
from flatout.executors.host import HostExecutor
from flatout.executors.tensors import TensorExecutor
from flatout.models.policy import PolicyNet
from flatout.timing import PhaseClock


def batched_collector(
    env: EnvInfo,
    model: PolicyNet,
    obs: ObsLayout,
    action: ActionLayout,
    *,
    n_envs: int,
    n_steps: int,
    device: torch.device,
    seed: int,
    clock: PhaseClock,
    n_slots: int = 1,
    source: PolicyNet | None = None,
    habits: Habits = USUAL,
) -> tuple[Collects[Any], list[Rollout] | list[TensorRollout]]:
    """A collector over the batched env, and rollouts on the side where the env's observations are."""
    executor = _open(env, obs, n_envs, seed)
    if isinstance(executor, BatchedExecutor):
        collector = Collector(
            executor,
            model,
            action,
            device=device,
            seed=seed,
            clock=clock,
            source=source,
            habits=habits,
        )
        return collector, [Rollout.alloc(obs, action, n_steps, n_envs) for _ in range(n_slots)]
    if not same_device(device, executor.device):
        raise FlatoutError(
            f"the env's tensors are on {executor.device} and the policy is on {device}; "
            f"pass --device {executor.device}"
        )
    rollouts = [TensorRollout(obs, action, n_steps, n_envs, executor.device) for _ in range(n_slots)]
    return TensorCollector(
        executor, model, action, seed=seed, clock=clock, source=source, habits=habits
    ), rollouts


def batched_eval_executor(env: EnvInfo, obs: ObsLayout, n_envs: int, seed: int) -> Executor:
    """The batched env to evaluate in: a new one, or the user's own where there is only that."""
    executor = _open(env, obs, n_envs, seed)
    return executor if isinstance(executor, BatchedExecutor) else HostExecutor(executor, obs)


def _open(env: EnvInfo, obs: ObsLayout, n_envs: int, seed: int) -> BatchedExecutor | TensorExecutor:
    envs = env.factory.make(n_envs)
    kind, keep_open = batched_kind(envs), env.factory.is_instance
    if kind != env.batched:
        raise FlatoutError(
            f"env '{env.factory.name}' made a batched env at first and now {type(envs).__name__}"
        )
    env_ids = np.arange(envs.num_envs)  # type: ignore[union-attr]
    if isinstance(envs, VectorEnv):
        return BatchedExecutor(envs, obs, env_ids, seed, keep_open=keep_open)
    return TensorExecutor(envs, obs, env_ids, seed, keep_open=keep_open)  # type: ignore[arg-type]
