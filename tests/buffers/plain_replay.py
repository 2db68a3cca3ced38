"""A replay of plain lists as reference, and envs whose observations contain their episode and step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from flatout.buffers.device_replay import TensorReplay
from flatout.buffers.replay import Replay
from flatout.buffers.rollout import Rollout
from flatout.envs.spaces import ActionLayout, Array, ObsArrays, ObsLayout

OBS = ObsLayout(
    spaces.Dict({"at": spaces.Box(-1000, 1000, (2,)), "seen": spaces.Box(0, 255, (7, 7, 1), np.uint8)})
)
ACTION = ActionLayout(spaces.Discrete(1000))
CPU = torch.device("cpu")

Place = tuple[int, int]
"""An observation: the number of its episode, and its step there."""


def leaves_of(places: list[Place]) -> ObsArrays:
    """Distinct observations, as arrays."""
    images = [np.full((1, 7, 7), (31 * episode + step) % 256, np.uint8) for episode, step in places]
    return np.array(places, np.float32), np.array(images)


@dataclass
class PlainStep:
    """One transition, with its true next observation."""

    number: int
    """The slot it takes in its env's ring, counted for ever."""
    obs: Place
    action: int
    reward: float
    terminated: bool
    truncated: bool
    followed: Place


@dataclass
class PlainReplay:
    """N envs that take random steps, all of which are kept; a ring holds the last `n_slots` of them."""

    n_envs: int
    n_slots: int
    rng: np.random.Generator
    p_terminated: float = 0.1
    p_truncated: float = 0.1
    steps: list[list[PlainStep]] = field(default_factory=list)
    now: list[Place] = field(default_factory=list)
    head: list[int] = field(default_factory=list)
    n_episodes: int = 0

    def __post_init__(self) -> None:
        self.steps = [[] for _ in range(self.n_envs)]
        self.head = [0] * self.n_envs
        self.now = [self._new_episode() for _ in range(self.n_envs)]

    def _new_episode(self) -> Place:
        self.n_episodes += 1
        return self.n_episodes, 0

    def restart(self, n: int) -> None:
        """The env is lost between two steps and begins a new episode."""
        if self.now[n][1] > 0:
            self.steps[n][-1].truncated = True
            self.head[n] += 1
        self.now[n] = self._new_episode()

    def step(self, n: int) -> PlainStep:
        """One random step of an env."""
        rng, obs = self.rng, self.now[n]
        terminated, truncated = rng.random() < self.p_terminated, rng.random() < self.p_truncated
        followed = obs[0], obs[1] + 1
        reward = float(np.float32(rng.normal()))
        action = int(rng.integers(1000))
        step = PlainStep(self.head[n], obs, action, reward, terminated, truncated, followed)
        self.steps[n].append(step)
        self.head[n] += 1 + (truncated and not terminated)
        self.now[n] = self._new_episode() if terminated or truncated else followed
        return step

    def window(self, n: int, k: int, gamma: float, n_step: int) -> tuple[float, float, Place, bool]:
        """Return, discount and bootstrap observation of env n's step k, and whether all steps of the window are stored."""
        total, discount = 0.0, 1.0
        for m, step in enumerate(self.steps[n][k : k + n_step], 1):
            total += discount * step.reward
            discount *= gamma
            if step.terminated:
                return total, 0.0, step.followed, True
            if step.truncated or m == n_step:
                return total, discount, step.followed, True
        return total, discount, step.followed, False

    def eligible(self, n_step: int) -> dict[int, tuple[int, int]]:
        """Slot → env and step, of all that may be sampled."""
        return {
            n * self.n_slots + step.number % self.n_slots: (n, k)
            for n in range(self.n_envs)
            for k, step in enumerate(self.steps[n])
            if step.number > self.head[n] - self.n_slots and self.window(n, k, 0.5, n_step)[3]
        }


class Filled:
    """A plain replay, and real ones with the same steps."""

    def __init__(
        self, n_envs: int, per_env: int, seed: int, *, p_terminated: float = 0.1, p_truncated: float = 0.1
    ) -> None:
        rng = np.random.default_rng(seed)
        self.plain = PlainReplay(n_envs, per_env + 1, rng, p_terminated, p_truncated)
        self.replay = Replay(OBS, ACTION, n_envs, n_envs * per_env)
        self.tensors = TensorReplay(OBS, ACTION, n_envs, n_envs * per_env, CPU)
        self._rng = rng

    def step(self) -> None:
        """One step of all envs."""
        self.rollout(1)

    def rollout(self, n_steps: int) -> None:
        """A whole rollout, as collectors make it: final observations of steps that ended no episode are arbitrary."""
        n_envs = self.plain.n_envs
        out = Rollout.alloc(OBS, ACTION, n_steps, n_envs)
        for leaf in out.final_obs:
            leaf.fill(77)
        for t in range(n_steps + 1):
            for leaf, obs in zip(out.obs, leaves_of(self.plain.now), strict=True):
                leaf[t] = obs
            for n in range(n_envs if t < n_steps else 0):
                step = self.plain.step(n)
                out.action[t, n], out.reward[t, n] = step.action, step.reward
                out.terminated[t, n], out.truncated[t, n] = step.terminated, step.truncated
                if step.truncated:
                    for leaf, final in zip(out.final_obs, leaves_of([step.followed]), strict=True):
                        leaf[t, n] = final[0]
        self.replay.add_rollout(out)
        self.tensors.add_rollout(out)

    def anything(self) -> None:
        """One random event: a step or a rollout is added, before it sometimes an env is lost."""
        kind = self._rng.integers(8)
        if kind == 0:
            self.plain.restart(int(self._rng.integers(self.plain.n_envs)))
        self.rollout(int(self._rng.integers(1, 12)) if kind < 3 else 1)


def expected(plain: PlainReplay, index: Array, gamma: float, n_step: int) -> dict[str, Any]:
    """What a batch of these slots must hold."""
    found = plain.eligible(1)
    steps = [plain.steps[n][k] for n, k in (found[int(i)] for i in index)]
    windows = [plain.window(*found[int(i)], gamma, n_step) for i in index]
    return {
        "obs": leaves_of([s.obs for s in steps]),
        "action": np.array([[s.action] for s in steps]),
        "reward": np.array([w[0] for w in windows], np.float32),
        "discount": np.array([w[1] for w in windows], np.float32),
        "next_obs": leaves_of([w[2] for w in windows]),
        "serial": np.array([s.number for s in steps]),
    }
