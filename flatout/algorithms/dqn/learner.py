"""DQN's learner: stores a rollout, then takes exactly as many updates from the replay as the ratio asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flatout.algorithms.base import scheduled
from flatout.algorithms.dqn import loss as dqn
from flatout.algorithms.dqn.config import DQNConfig
from flatout.algorithms.dqn.experience import Experience
from flatout.algorithms.dqn.fused import HandMadeDQN, can_be_made_by_hand
from flatout.buffers.rollout import Learnable, Rollout, TensorRollout
from flatout.envs.spaces import Array
from flatout.learning.learner import AUTOCAST, Learner, example_obs
from flatout.learning.update import Update
from flatout.models.policy import QNetwork
from flatout.timing import Phase, PhaseClock

NAMES = (*dqn.METRICS, "train/grad_norm")


class DQNLearner(Learner[dqn.Minibatch]):
    """DQN's update from a replay, on one device."""

    def __init__(
        self,
        model: QNetwork,
        config: DQNConfig,
        *,
        n_envs: int,
        seed: int,
        clock: PhaseClock,
        precision: str = "fp32",
    ) -> None:
        super().__init__(model, n_envs=n_envs, seed=seed, clock=clock, normalize_obs=config.normalize_obs)
        self.model, self.config = model, config
        self.twins = dqn.Twins(model, self.params.flat, self.params.views)
        self.update = Update(
            self.twins,
            self.params,
            partial(_loss, self.twins, config),
            len(dqn.METRICS),
            max_grad_norm=config.max_grad_norm,
            batch_size=config.batch_size,
            autocast=AUTOCAST.get(precision),
            row_output=True,
        )
        if precision not in AUTOCAST and can_be_made_by_hand(model, self.device):
            self.update.by_hand = HandMadeDQN(self.twins, self.params, config, self.update)
        model.greedy.epsilon.fill_(config.epsilon(0.0))
        self._experience: Experience | None = None
        self._starts = config.learning_starts
        """Env steps before the first update; later where a run goes on without what it had stored."""

    @property
    def experience(self) -> Experience:
        """What it learns from; memory is taken when it is first needed."""
        if self._experience is None:
            model = self.model
            self._experience = Experience(
                model.obs, model.action, self.config, n_envs=self.n_envs, device=self.device, seed=self.seed
            )
        return self._experience

    def reserve(self) -> None:
        """Take the replay's memory, or refuse with what fits."""
        self.experience  # noqa: B018

    def learn(
        self,
        rollout: Learnable,
        *,
        iteration: int,
        progress: float,
        lag: int = 0,  # noqa: ARG002  what is replayed is old anyway
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Store a rollout and learn; `progress` in [0, 1] drives the schedules. Returns the metrics."""
        config, experience = self.config, self.experience
        learning_rate = scheduled(config.learning_rate, config.learning_rate_schedule, progress)
        beta = config.priority_beta + (1 - config.priority_beta) * min(progress, 1.0)
        self._enter(Phase.STAGE)
        assert isinstance(rollout, Rollout | TensorRollout), "what is stored is read directly"
        experience.add(rollout)
        before = iteration * self.n_envs * config.n_steps
        after = before + self.n_envs * config.n_steps
        n_due = config.updates_after(after - self._starts) - config.updates_after(before - self._starts)
        self.update.begin(learning_rate)
        if n_due:
            self._speed_up(experience.peek, progress)
        self._enter(Phase.UPDATE)
        interval = config.target_update_interval
        if config.tau >= 1 and after // interval > before // interval:
            self.twins.follow()
        self._take(n_due, beta, stop)
        if self._obs_moments:
            data = rollout.tensors(self._staging)
            self._renormalize([leaf[:-1].flatten(0, 1) for leaf in data.obs])
        epsilon = config.epsilon(progress)
        self.model.greedy.epsilon.fill_(epsilon)
        metrics = self._read(NAMES)
        self._leave()
        if not n_due:
            metrics = {name: value for name, value in metrics.items() if name not in NAMES}
        return metrics | {
            "train/learning_rate": learning_rate,
            "rollout/exploration_rate": epsilon,
            "train/buffer_fill": min(after / experience.replay.capacity, 1.0),
            "train/updates_per_step": self.n_updates / after,
        }

    def _take(self, n_updates: int, beta: float, stop: Callable[[], bool]) -> None:
        """The updates, each followed by what depends on it."""
        if n_updates == 0:
            return
        update, twins, experience = self.update, self.twins, self.experience
        soft = self.config.tau if self.config.tau < 1 else None
        prioritized = self.config.prioritized
        by_hand = update.by_hand
        look_ahead = by_hand.look_ahead if isinstance(by_hand, HandMadeDQN) and soft is None else None
        for batch, sample in experience.batches(n_updates, beta, look_ahead):
            update.step(batch)
            if soft is not None:
                twins.follow(soft)
            if prioritized:
                experience.surprise(sample, update.row_output)
            if stop():
                break

    def example_batch(self, n_rows: int) -> dqn.Minibatch:
        """A minibatch of the right shapes, to try things with."""
        obs = example_obs(self.model, n_rows, self.device)
        action = torch.zeros(n_rows, 1, dtype=torch.int64, device=self.device)
        reward = torch.linspace(-1, 1, n_rows).to(self.device)
        ones = torch.ones(n_rows, device=self.device)
        return dqn.Minibatch(obs, tuple(leaf.clone() for leaf in obs), action, reward, ones, ones.clone())

    def loss(self, batch: dqn.Minibatch) -> Tensor:
        """The loss of a minibatch, to see what it takes."""
        return dqn.loss(self.twins, batch, self.config)[0]

    def replay(self) -> Mapping[str, Array] | None:
        """What was stored, if it is to be kept."""
        if not self.config.save_replay:
            return None
        return self.experience.arrays() | {"starts": np.array([self._starts])}

    def restore_replay(self, saved: Mapping[str, Array] | None, env_steps: int) -> None:
        """Go on at so many env steps with what `replay` gave; without it, collect as much as at first before learning."""
        if saved is not None:
            self.experience.restore(saved)
            self._starts = int(saved["starts"][0])
        elif env_steps > 0:
            self._starts = env_steps + self.config.learning_starts
            self.notes.append(
                f"no replay was saved (--save-replay keeps it): {self.config.learning_starts:,} env steps are "
                "collected before learning goes on"
            )

    def state(self) -> dict[str, Tensor]:
        """Everything that learning on needs, by name."""
        return super().state() | {"target": self.twins.target}

    def close(self) -> None:
        """End what is under way."""
        super().close()
        if self._experience is not None:
            self._experience.close()


def _loss(twins: dqn.Twins, config: DQNConfig, batch: dqn.Minibatch, _: Tensor) -> tuple[Tensor, ...]:
    return dqn.loss(twins, batch, config)
