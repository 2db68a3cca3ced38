"""Recurrent PPO's hyperparameters: PPO's, the memory, and the length of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flatout.algorithms.base import check, choose_batch_size
from flatout.algorithms.ppo.config import PPOConfig
from flatout.errors import FlatoutError

KINDS = ("lstm", "gru")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentPPOConfig(PPOConfig):
    """Recurrent PPO's hyperparameters."""

    COMPILES: ClassVar[bool] = False

    n_steps: int = 128
    batch_size: int = 256
    """Transitions in a minibatch of whole sequences; must divide n_envs x n_steps. auto: by the device."""
    n_epochs: int = 10
    memory: str = "lstm:128"
    """Memory before the hidden layers: lstm:N or gru:N, N numbers wide; given without --algo, it chooses recurrent-ppo."""
    sequence_length: int = 0
    """Steps of a sequence, through which gradients flow back; must divide n_steps. 0: the whole rollout."""

    def __post_init__(self) -> None:
        PPOConfig.__post_init__(self)
        check(self, "at least 0", "sequence_length")
        kind, _, width = self.memory.partition(":")
        if kind not in KINDS or not width.isdecimal() or int(width) < 1:
            raise FlatoutError(f"--memory is '{self.memory}'; it must be lstm:N or gru:N, such as lstm:128")

    @property
    def memory_parts(self) -> tuple[str, int]:
        """Kind and width of the memory."""
        kind, _, width = self.memory.partition(":")
        return kind, int(width)

    @property
    def length(self) -> int:
        """Steps of a sequence."""
        return self.sequence_length or self.n_steps

    @property
    def batch_rows(self) -> int:
        """Sequences in a minibatch."""
        return max(self.batch_size // self.length, 1)

    def fit_batch_size(self, total_batch: int, target: int) -> int:
        length = self.length
        return choose_batch_size(max(total_batch // length, 1), max(target // length, 1)) * length

    def check_rollout(self, n_envs: int) -> None:
        """Refuse sequences that do not divide a rollout, and minibatches that are not whole sequences."""
        length = self.length
        if self.n_steps % length:
            raise FlatoutError(f"--sequence-length {length} does not divide --n-steps {self.n_steps}")
        if self.batch_size % length:
            near = max(self.batch_size // length, 1) * length
            raise FlatoutError(
                f"--batch-size {self.batch_size} is not a multiple of the sequence length {length}: use {near}, or "
                "another --sequence-length"
            )
        PPOConfig.check_rollout(self, n_envs)

    def arithmetic(self, n_envs: int) -> str:
        n, kind = self.batch_rows, self.memory.replace(":", " of ").upper().replace(" OF ", " of ")
        line = PPOConfig.arithmetic(self, n_envs)
        return f"{line}; {kind}, {n} sequence{'s' * (n != 1)} of {self.length} steps in a minibatch"
