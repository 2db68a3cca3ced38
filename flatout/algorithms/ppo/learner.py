"""PPO's learner: advantages of a rollout, then some epochs of shuffled minibatches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from flatout.algorithms.base import scheduled
from flatout.algorithms.ppo import loss as ppo
from flatout.algorithms.ppo.config import PPOConfig
from flatout.algorithms.ppo.fused import HandMadePPO, can_be_made_by_hand
from flatout.buffers.rollout import Learnable
from flatout.learning.epochs import Epochs
from flatout.learning.learner import AUTOCAST, Learner, example_obs
from flatout.learning.memory import PartSize, in_parts
from flatout.learning.normalize import RewardScaler
from flatout.learning.transitions import Transitions, as_transitions
from flatout.learning.update import Update
from flatout.models.policy import ActorCritic
from flatout.timing import Phase, PhaseClock

KL_SLACK = 1.5
"""Updates stop at this multiple of target_kl, as in OpenAI's and Stable-Baselines3's PPO."""


class PPOLearner(Learner[ppo.Minibatch]):
    """PPO's update over rollouts of one shape, on one device."""

    def __init__(
        self,
        model: ActorCritic,
        config: PPOConfig,
        *,
        n_envs: int,
        seed: int,
        clock: PhaseClock,
        precision: str = "fp32",
    ) -> None:
        super().__init__(model, n_envs=n_envs, seed=seed, clock=clock, normalize_obs=config.normalize_obs)
        self.model, self.config = model, config
        self.update = Update(
            model,
            self.params,
            partial(_loss, model, config),
            len(ppo.METRICS),
            max_grad_norm=config.max_grad_norm,
            batch_size=config.batch_size,
            prepare=partial(ppo.prepare, config=config),
            kl_index=ppo.KL,
            kl_limit=config.target_kl and config.target_kl * KL_SLACK,
            autocast=AUTOCAST.get(precision),
        )
        if precision not in AUTOCAST and can_be_made_by_hand(model, self.device):
            self.update.by_hand = HandMadePPO(model, self.params, config, self.update)
        self._epochs = Epochs(self.update, seed=seed, batch_size=config.batch_size)
        self._n_rows = n_envs * config.n_steps
        self._value_parts = PartSize(self._n_rows)
        self._reward_scaler = (
            RewardScaler(n_envs, config.gamma, self.device) if config.normalize_reward else None
        )

    def learn(
        self,
        rollout: Learnable,
        *,
        iteration: int,
        progress: float,
        lag: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Learn from one rollout; `progress` in [0, 1] drives the schedules. Returns the metrics.

        `lag`: how many versions the policy that collected it is behind.
        """
        config = self.config
        learning_rate = scheduled(config.learning_rate, config.learning_rate_schedule, progress)
        clip_range = scheduled(config.clip_range, config.clip_range_schedule, progress)

        self._enter(Phase.STAGE)
        data = self._transitions(rollout)
        self._enter(Phase.ADVANTAGE)
        log_ratio = self._value_parts.attempt(lambda: self._log_ratio(data)) if lag else None
        weigh_by = log_ratio if config.vtrace else None
        batch = self._value_parts.attempt(lambda: ppo.advantages(self._values, data, config, weigh_by))
        # Before anything is compared: at a clip range of 0 rounding alone would decide about gradients.
        self.update.begin(learning_rate, clip_range)
        self._speed_up(lambda: batch.take(slice(0, config.batch_size)), progress)

        self._enter(Phase.UPDATE)
        self._epochs.begin(iteration)
        sums = [self._kl_so_far()]
        for _ in range(config.n_epochs):
            if stop() or self._epochs.run(batch, stop) or self._has_stopped():
                break
            sums.append(self._kl_so_far())
        self._renormalize(batch.obs)
        spread = batch.returns.var()
        explained = 1 - (batch.returns - batch.value).var() / spread
        names = (*ppo.METRICS, "train/grad_norm", "train/explained_variance")
        metrics = self._read(names, explained) | _settled(sums)
        self._leave()
        if log_ratio is not None:
            metrics |= dict(zip(ppo.DRIFT, ppo.drift(log_ratio).tolist(), strict=True))
        return metrics | {"train/learning_rate": learning_rate, "train/clip_range": clip_range}

    def _has_stopped(self) -> bool:
        """Whether the remaining epochs would change nothing."""
        return self.config.target_kl is not None and bool(self.update.stopped)

    def _kl_so_far(self) -> Tensor:
        """Sum of the updates' KL and their number, left on the device."""
        return torch.stack([self.update.metrics[ppo.KL], self.update.n_taken])

    def _by_hand(self, n_rows: int) -> HandMadePPO | None:
        """The hand-made code, if there is any and memory for a whole rollout at once."""
        by_hand, whole = self.update.by_hand, self._n_rows == n_rows == self._value_parts.n_rows
        return by_hand if whole and isinstance(by_hand, HandMadePPO) else None

    def _values(self, obs: tuple[Tensor, ...]) -> Tensor:
        size = self._value_parts.n_rows
        if (by_hand := self._by_hand(len(obs[0]))) is not None:
            return by_hand.values(obs)
        return in_parts(lambda rows: self.model.value(tuple(leaf[rows] for leaf in obs)), len(obs[0]), size)

    def _log_ratio(self, data: Transitions) -> Tensor:
        obs = tuple(leaf.flatten(0, 1) for leaf in data.obs_tn)
        action, log_prob = data.action_tn.flatten(0, 1), data.log_prob_tn.flatten()
        if (by_hand := self._by_hand(len(log_prob))) is not None:
            return (by_hand.log_prob(obs, action) - log_prob).view(data.log_prob_tn.shape)
        flat = in_parts(
            lambda rows: ppo.log_ratio(
                self.model, tuple(leaf[rows] for leaf in obs), action[rows], log_prob[rows]
            ),
            len(log_prob),
            self._value_parts.n_rows,
        )
        return flat.view(data.log_prob_tn.shape)

    def example_batch(self, n_rows: int) -> ppo.Minibatch:
        """A minibatch of the right shapes, to try things with."""
        action = self.model.action
        kind = torch.float32 if action.continuous else torch.int64
        rows = torch.zeros(n_rows, action.size, dtype=kind, device=self.device)
        columns = [torch.linspace(-1, 1, n_rows).to(self.device) for _ in range(4)]
        return ppo.Minibatch(example_obs(self.model, n_rows, self.device), rows, *columns)

    def loss(self, batch: ppo.Minibatch) -> Tensor:
        """The loss of a minibatch, to see what it takes."""
        return _loss(self.model, self.config, batch, self.update.coefficient)[0]

    def _parts(self) -> list[PartSize]:
        return [self.update.parts, self._value_parts]

    def _transitions(self, rollout: Learnable) -> Transitions:
        data = rollout.tensors(self._staging)
        reward = data.reward
        if self._reward_scaler is not None:
            reward = self._reward_scaler.scale(reward, data.terminated | data.truncated)
        return as_transitions(data, reward)

    def state(self) -> dict[str, Tensor]:
        """Everything that learning on needs, by name."""
        tensors = super().state()
        if self._reward_scaler is not None:
            state = self._reward_scaler.state()
            tensors |= {f"reward_scaler.{name}": value for name, value in state.items()}
        return tensors


def _settled(sums: list[Tensor]) -> dict[str, float]:
    """How far the policy had moved in the middle epoch, as a share of how far in the last: near 1, the rest did nothing."""
    if len(sums) < 5:
        return {}
    kl_sums, counts = torch.stack(sums).diff(dim=0).T.tolist()
    means = [kl / max(n, 1.0) for kl, n in zip(kl_sums, counts, strict=True)]
    middle, last = means[len(means) // 2 - 1], means[-1]
    return {"train/kl_settled": min(middle / last, 1.0)} if last > 0 else {}


def _loss(
    model: ActorCritic, config: PPOConfig, batch: ppo.Minibatch, clip_range: Tensor
) -> tuple[Tensor, Tensor]:
    return ppo.loss(model, batch, clip_range, config)
