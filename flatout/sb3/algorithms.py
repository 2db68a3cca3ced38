"""Stable-Baselines3's PPO, DQN and SAC, trained by flatout."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from flatout.errors import FlatoutError
from flatout.sb3.arguments import DQNArguments, PPOArguments, SACArguments, refuse
from flatout.sb3.files import place_of
from flatout.sb3.model import Model


class PPO(Model):
    """Stable-Baselines3's PPO, trained by flatout."""

    ARGUMENTS = PPOArguments
    LOG_INTERVAL = 1


class ReplayModel(Model):
    """A model with a replay buffer."""

    LOG_INTERVAL = 4

    @property
    def replay_buffer(self) -> ReplayBuffer:
        """Its size."""
        return ReplayBuffer(self)

    def save_replay_buffer(self, path: Any) -> None:
        """Write the replay buffer, as arrays in NumPy's format, whatever the file's suffix says."""
        learner: Any = self._agent.trainer().learner
        arrays = learner.experience.arrays() | {"starts": np.array([learner._starts])}
        place = place_of(path, ".pkl", reading=False)
        with place if isinstance(place, io.IOBase) else place.open("wb") as file:
            np.savez(file, n_stored=np.array([self._n_stored]), **arrays)

    def load_replay_buffer(self, path: Any, truncate_last_traj: bool = True) -> None:  # noqa: ARG002
        """Read what `save_replay_buffer` wrote, into a model that has not learned since it was made or loaded."""
        try:
            with np.load(place_of(path, ".pkl", reading=True), allow_pickle=False) as saved:
                arrays = dict(saved)
        except ValueError as error:
            if isinstance(error, FlatoutError):
                raise
            raise refuse(
                f"{str(path)!r} was not written by flatout's save_replay_buffer", "collect anew"
            ) from error
        self._n_stored = int(arrays.pop("n_stored")[0])
        agent = self._agent
        if agent._trainer is not None:
            learner: Any = agent._trainer.learner
            learner.restore_replay(arrays, agent._trainer.state.env_steps)
        elif agent._checkpoint is None:
            agent.trainer().learner.restore_replay(arrays, 0)
        else:
            self._replay = arrays


class ReplayBuffer:
    """`model.replay_buffer`."""

    def __init__(self, model: ReplayModel) -> None:
        self._model = model

    def size(self) -> int:
        """Transitions in it."""
        return min(self._model._n_stored, int(self._model.buffer_size))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"flatout.sb3: model.replay_buffer has no {name}, only size(); see docs/migrating.md"
        )


class DQN(ReplayModel):
    """Stable-Baselines3's DQN, trained by flatout."""

    ARGUMENTS = DQNArguments

    @property
    def exploration_rate(self) -> float:
        """The probability of a random action now."""
        return float(self._agent.policy.model.get_buffer("head.epsilon"))


class SAC(ReplayModel):
    """Stable-Baselines3's SAC, trained by flatout."""

    ARGUMENTS = SACArguments
