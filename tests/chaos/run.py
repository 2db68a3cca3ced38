"""The command line of flatout, with a check of every rollout that a learner gets: no transition spans two episodes."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

SPANS = "CHAOS: a transition spans two episodes or a lost step"


def check(rollout: Any) -> None:
    """Exit at once if a stored transition is not one that its env has made."""
    obs, final = (np.asarray(arrays[0]) for arrays in (rollout.obs, rollout.final_obs))
    terminated, truncated = np.asarray(rollout.terminated, bool), np.asarray(rollout.truncated, bool)
    goes_on = ~(terminated | truncated)
    before, after = obs[:-1], obs[1:]
    follows = (before[..., 0] == after[..., 0]) & (before[..., 1] + 1 == after[..., 1])
    # A step that was lost ends its episode before it: the final observation is then the last one that was seen.
    ends = (before[..., 0] == final[..., 0]) & (final[..., 1] == before[..., 1] + 1)
    if not follows[goes_on].all() or not ends[truncated].all():
        print(SPANS, file=sys.stderr, flush=True)
        os._exit(99)


def run() -> None:
    """Run the command line."""
    from flatout.__main__ import main
    from flatout.training.pipeline import Pipeline

    count: Any = Pipeline._count

    def checked(pipeline: Any, collected: Any) -> None:
        check(pipeline.rollouts[collected.slot])
        count(pipeline, collected)

    Pipeline._count = checked  # type: ignore[method-assign, assignment]
    main()


if __name__ == "__main__":
    run()
