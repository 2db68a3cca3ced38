"""What holds a run back, what to change, and what that is predicted to give.

Data only; nothing here computes or imports.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One bottleneck, with its evidence and its remedy."""

    kind: str
    """Its short name, such as `envs wait`."""

    what: str
    """What is wrong, in a sentence."""

    evidence: str
    """The measured figures that show it."""

    change: str
    """What to do about it, in a sentence."""

    flags: tuple[str, ...] = ()
    """The same as flags of `flatout train`."""

    steps_per_second: float | None = None
    """Predicted with the change."""

    learner_busy: float | None = None
    """Predicted with the change."""

    gain: float | None = None
    """Predicted steps/s ÷ steps/s now."""
