"""Action distributions: what a network's raw outputs mean, how actions are sampled, their log-probabilities.

Actions are as in ActionLayout: (B, parts) categories, or (B, dims) floats before squashing. Noise is an argument, so
sampling is a pure function. A mask is (B, n_logits), true = allowed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from flatout.envs.spaces import ActionLayout

MASKED = -1e8
"""A forbidden action's logit: its probability is exactly 0 in float32, and 0 x MASKED stays finite."""
LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def masked(out: Tensor, mask: Tensor | None) -> Tensor:
    """Outputs (B, n_logits) with those of forbidden actions replaced."""
    return out if mask is None else out.masked_fill(~mask, MASKED)


class Head(nn.Module, ABC):
    """Turns a network's outputs into actions."""

    n_outputs: int
    squashes = False
    """Whether `squash` changes anything."""
    bound = ""
    """Its parameter or buffer that the compiled function of `kernel.SAMPLERS` takes; "": none."""

    @abstractmethod
    def sample(self, out: Tensor, noise: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Actions before squashing, (B, size), and their log-probabilities, (B,)."""

    @abstractmethod
    def mode(self, out: Tensor, mask: Tensor | None) -> Tensor:
        """The most likely actions, before squashing."""

    def squash(self, actions: Tensor) -> Tensor:
        """Sampled actions as ActionLayout.to_env takes them."""
        return actions


class PolicyHead(Head):
    """A head whose actions have probabilities."""

    @abstractmethod
    def evaluate(self, out: Tensor, actions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Log-probabilities of actions as they were sampled, and the entropy, both (B,)."""


class CategoricalHead(PolicyHead):
    """A categorical distribution for each part of the action; parts of unequal size are padded with masked logits."""

    _columns: Tensor
    _padding: Tensor

    def __init__(self, nvec: tuple[int, ...]) -> None:
        super().__init__()
        self.n_outputs = sum(nvec)
        self._n_parts, self._width = len(nvec), max(nvec)
        self._ragged = len(set(nvec)) > 1
        offsets = torch.tensor([sum(nvec[:i]) for i in range(len(nvec))])
        columns = offsets[:, None] + torch.arange(self._width)
        padding = torch.arange(self._width) >= torch.tensor(nvec)[:, None]
        self.register_buffer("_columns", columns.clamp(max=self.n_outputs - 1).reshape(-1), persistent=False)
        self.register_buffer("_padding", padding, persistent=False)

    def _by_part(self, flat: Tensor, fill: float) -> Tensor:
        """(B, n_logits) → (B, parts, width)."""
        if not self._ragged:
            return flat.view(-1, self._n_parts, self._width)
        grouped = flat[:, self._columns].view(-1, self._n_parts, self._width)
        return grouped.masked_fill(self._padding, fill)

    def _log_probs(self, out: Tensor, mask: Tensor | None) -> Tensor:
        return torch.log_softmax(self._by_part(masked(out, mask), MASKED), -1)

    def sample(self, out: Tensor, noise: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gumbel-max: the argmax of log-probabilities plus Gumbel noise is a sample."""
        log_probs = self._log_probs(out, mask)
        actions = (log_probs + self._by_part(noise, MASKED)).argmax(-1, keepdim=True)
        return actions.squeeze(-1), log_probs.gather(-1, actions).sum((1, 2))

    def mode(self, out: Tensor, mask: Tensor | None) -> Tensor:
        return self._log_probs(out, mask).argmax(-1)

    def evaluate(self, out: Tensor, actions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        log_probs = self._log_probs(out, mask)
        log_prob = log_probs.gather(-1, actions.unsqueeze(-1)).sum((1, 2))
        return log_prob, -(log_probs.exp() * log_probs).sum((1, 2))


class GreedyHead(Head):
    """Epsilon-greedy on Q-values: the best action, or with probability `epsilon` a random one that is allowed.

    Both choices use Gumbel noise, as CategoricalHead does, so collectors draw the same noise for every head. Of K
    Gumbel numbers the position of the largest, M, is uniform; independent of it, exp(-K e^-M) is uniform in (0, 1).
    Adding log c to all the noise of an env makes its epsilon epsilon^c.
    """

    epsilon: Tensor
    bound = "epsilon"

    def __init__(self, n_actions: int) -> None:
        super().__init__()
        self.n_outputs = n_actions
        self.register_buffer("epsilon", torch.ones(1))

    def sample(self, out: Tensor, noise: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        n_allowed = self.n_outputs if mask is None else mask.sum(1)
        max_noise, random_action = masked(noise, mask).max(1)
        explores = n_allowed * (-max_noise.double()).exp() > -self.epsilon.double().log()
        best = self.mode(out, mask).squeeze(1)
        return torch.where(explores, random_action, best).unsqueeze(1), torch.zeros_like(max_noise)

    def mode(self, out: Tensor, mask: Tensor | None) -> Tensor:
        return masked(out, mask).argmax(1, keepdim=True)


class GaussianHead(PolicyHead):
    """Independent normals with a learned standard deviation per dimension; `squash` applies tanh to bounded ones.

    Without squashing the env gets the clipped action, and the log-probability is that of the unclipped one, which was
    sampled. With it, actions are stored before tanh, so tanh is never inverted.
    """

    _squashed: Tensor
    bound = "log_std"

    def __init__(self, layout: ActionLayout, log_std_init: float, *, squash: bool) -> None:
        super().__init__()
        self.n_outputs = layout.size
        self.log_std = nn.Parameter(torch.full((layout.size,), log_std_init))
        self.squashes = squash and bool(layout.bounded.any())
        self.register_buffer("_squashed", torch.as_tensor(layout.bounded), persistent=False)

    def sample(self, out: Tensor, noise: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        actions = out + noise * self.log_std.exp()
        return actions, self._log_prob(noise, actions)

    def mode(self, out: Tensor, mask: Tensor | None) -> Tensor:
        return out

    def evaluate(self, out: Tensor, actions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        std = self.log_std.exp()
        noise = (actions - out) / std
        entropy = (0.5 + LOG_SQRT_2PI + self.log_std).sum().expand(len(out))
        # A squashed normal has no closed-form entropy: one reparameterised sample estimates the effect of tanh.
        return self._log_prob(noise, actions), entropy + self._log_tanh_grad(out + noise.detach() * std)

    def squash(self, actions: Tensor) -> Tensor:
        return torch.where(self._squashed, actions.tanh(), actions) if self.squashes else actions

    def _log_prob(self, noise: Tensor, actions: Tensor) -> Tensor:
        log_prob = (-0.5 * noise.square() - self.log_std - LOG_SQRT_2PI).sum(-1)
        return log_prob - self._log_tanh_grad(actions)

    def _log_tanh_grad(self, actions: Tensor) -> Tensor | float:
        """log |d tanh(x) / dx| summed over the squashed dimensions, in a form that does not overflow."""
        if not self.squashes:
            return 0.0
        log_grad = 2.0 * (math.log(2.0) - actions - nn.functional.softplus(-2.0 * actions))
        return (log_grad * self._squashed).sum(-1)


def make_head(layout: ActionLayout, log_std_init: float, *, squash: bool) -> CategoricalHead | GaussianHead:
    """The head that fits an action space."""
    if layout.continuous:
        return GaussianHead(layout, log_std_init, squash=squash)
    return CategoricalHead(layout.nvec)
