"""What every minibatch can do, whatever its columns are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from torch import Tensor


class Rows(ABC):
    """Tensors with one row for each transition, in any order."""

    __slots__ = ()

    def take(self, index: Tensor | slice) -> Self:
        """The rows named by the index."""
        if isinstance(index, slice):
            return self.like([tensor[index] for tensor in self.tensors()])
        return self.like([tensor.index_select(0, index) for tensor in self.tensors()])

    def __len__(self) -> int:
        return len(self.tensors()[0])

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All of its tensors, in a fixed order."""

    @abstractmethod
    def like(self, tensors: Sequence[Tensor]) -> Self:
        """The same kind of minibatch with other tensors."""
