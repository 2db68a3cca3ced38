"""Two ranks, each on a simulated device of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import ranks

pytestmark = pytest.mark.card
CASES = ["ppo", "truncated", "overlap", "pqn", "prioritized"]


def test_two_devices_learn_the_same_to_the_bit_and_what_one_process_learns_on_the_cpu(tmp_path: Path) -> None:
    learned = ranks.run(tmp_path, CASES, "sim")
    for case, (first, second) in learned.items():
        for ours, theirs in zip(first, second, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), case
        alone = ranks.learn(case, "cpu")[-1]
        for name in (name for name in alone if name.startswith(("model.", "target", "obs_moments"))):
            assert torch.allclose(alone[name], first[-1][name], rtol=0, atol=1e-5), (case, name)
