"""Action distributions as plain functions on raw network outputs: no objects in the hot loop.

Rows are what ActionLayout describes: (B, groups) categories, or (B, dims) floats before any squashing.
Randomness comes in as an argument, so sampling is a pure function. A mask is (B, n_logits), true = allowed.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from flatout.envs.spaces import ActionLayout

MASKED = -1e8
"""A forbidden action's logit: its probability is exactly 0 in float32, and 0 x MASKED stays finite."""
LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class Head(Protocol):
    """Turns a network's output into actions."""

    n_outputs: int
    squashes: bool
    """Whether actions differ from rows."""

    def sample(self, out: Tensor, noise: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows and their log-probabilities, (B, size) and (B,)."""
        ...

    def mode(self, out: Tensor, mask: Tensor | None) -> Tensor:
        """The most likely rows."""
        ...

    def to_action(self, rows: Tensor) -> Tensor:
        """Rows as ActionLayout.to_env takes them."""
        ...


class PolicyHead(Head, Protocol):
    """One whose actions have probabilities."""

    def evaluate(self, out: Tensor, rows: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the rows, and the entropy, both (B,)."""
        ...


class CategoricalHead(nn.Module):
    """One categorical choice per group; groups of unequal size are padded with forbidden logits."""

    squashes = False
    _columns: Tensor
    _padding: Tensor

    def __init__(self, nvec: tuple[int, ...]) -> None:
        super().__init__()
        self.n_outputs = sum(nvec)
        self._groups, self._width = len(nvec), max(nvec)
        self._ragged = len(set(nvec)) > 1
        offsets = torch.tensor([sum(nvec[:i]) for i in range(len(nvec))])
        columns = offsets[:, None] + torch.arange(self._width)
        padding = torch.arange(self._width) >= torch.tensor(nvec)[:, None]
        self.register_buffer("_columns", columns.clamp(max=self.n_outputs - 1).reshape(-1), persistent=False)
        self.register_buffer("_padding", padding, persistent=False)

    def _grouped(self, flat: Tensor, fill: float) -> Tensor:
        """(B, n_logits) → (B, groups, width)."""
        if not self._ragged:
            return flat.view(-1, self._groups, self._width)
        grouped = flat[:, self._columns].view(-1, self._groups, self._width)
        return grouped.masked_fill(self._padding, fill)

    def _log_probs(self, out: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            out = out.masked_fill(~mask, MASKED)
        return torch.log_softmax(self._grouped(out, MASKED), -1)

    def sample(self, out: Tensor, noise: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gumbel-max: the argmax of log-probabilities plus Gumbel noise is a sample."""
        log_probs = self._log_probs(out, mask)
        rows = (log_probs + self._grouped(noise, MASKED)).argmax(-1, keepdim=True)
        return rows.squeeze(-1), log_probs.gather(-1, rows).sum((1, 2))

    def mode(self, out: Tensor, mask: Tensor | None) -> Tensor:
        return self._log_probs(out, mask).argmax(-1)

    def evaluate(self, out: Tensor, rows: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        log_probs = self._log_probs(out, mask)
        log_prob = log_probs.gather(-1, rows.unsqueeze(-1)).sum((1, 2))
        return log_prob, -(log_probs.exp() * log_probs).sum((1, 2))

    def to_action(self, rows: Tensor) -> Tensor:
        return rows


class GreedyHead(nn.Module):
    """Raw outputs are the values of actions: the best one, or with probability `epsilon` any that is allowed.

    Both choices are made by Gumbel noise, so collectors need not know which kind of head they have: of K such
    numbers the place of the largest, M, is uniform, and independent of it exp(-K e^-M) is uniform in (0, 1). Adding
    log c to all the noise of an env makes its own probability epsilon^c.
    """

    squashes = False
    epsilon: Tensor

    def __init__(self, n_actions: int) -> None:
        super().__init__()
        self.n_outputs = n_actions
        self.register_buffer("epsilon", torch.ones(1))

    def sample(self, out: Tensor, noise: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if mask is None:
            n_allowed: Tensor | int = self.n_outputs
        else:
            noise, n_allowed = noise.masked_fill(~mask, MASKED), mask.sum(1)
        loudest, anyone = noise.max(1)
        explores = n_allowed * (-loudest.double()).exp() > -self.epsilon.double().log()
        best = self.mode(out, mask).squeeze(1)
        return torch.where(explores, anyone, best).unsqueeze(1), torch.zeros_like(loudest)

    def mode(self, out: Tensor, mask: Tensor | None) -> Tensor:
        return (out if mask is None else out.masked_fill(~mask, MASKED)).argmax(1, keepdim=True)

    def to_action(self, rows: Tensor) -> Tensor:
        return rows


class GaussianHead(nn.Module):
    """Independent normals with one learned spread per dimension; `squash` bends bounded ones with tanh.

    Without squashing the env gets the clipped action, and the log-probability is that of the unclipped
    one, which is what was sampled. With it rows stay unsquashed, so nothing is ever inverted.
    """

    _squashed: Tensor

    def __init__(self, layout: ActionLayout, log_std_init: float, *, squash: bool) -> None:
        super().__init__()
        self.n_outputs = layout.size
        self.log_std = nn.Parameter(torch.full((layout.size,), log_std_init))
        self.squashes = squash and bool(layout.bounded.any())
        self.register_buffer("_squashed", torch.as_tensor(layout.bounded), persistent=False)

    def sample(self, out: Tensor, noise: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = out + noise * self.log_std.exp()
        log_prob = (-0.5 * noise.square() - self.log_std - LOG_SQRT_2PI).sum(-1)
        return rows, log_prob - self._log_slope(rows)

    def mode(self, out: Tensor, mask: Tensor | None) -> Tensor:
        return out

    def evaluate(self, out: Tensor, rows: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        std = self.log_std.exp()
        noise = (rows - out) / std
        log_prob = (-0.5 * noise.square() - self.log_std - LOG_SQRT_2PI).sum(-1) - self._log_slope(rows)
        entropy = (0.5 + LOG_SQRT_2PI + self.log_std).sum().expand(len(out))
        # A squashed normal has no closed entropy: one reparameterised sample estimates the bend's share.
        return log_prob, entropy + self._log_slope(out + noise.detach() * std)

    def to_action(self, rows: Tensor) -> Tensor:
        return torch.where(self._squashed, rows.tanh(), rows) if self.squashes else rows

    def _log_slope(self, rows: Tensor) -> Tensor | float:
        """log |d tanh(x) / dx| summed over the squashed dimensions, in the form that never overflows."""
        if not self.squashes:
            return 0.0
        slope = 2.0 * (math.log(2.0) - rows - nn.functional.softplus(-2.0 * rows))
        return (slope * self._squashed).sum(-1)


def make_head(layout: ActionLayout, log_std_init: float, *, squash: bool) -> CategoricalHead | GaussianHead:
    """The head that fits an action space."""
    if layout.continuous:
        return GaussianHead(layout, log_std_init, squash=squash)
    return CategoricalHead(layout.nvec)
