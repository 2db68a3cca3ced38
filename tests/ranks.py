"""A program of several ranks for tests: trains agents, and keeps what each rank has learned after every iteration.

`run` starts it as `flatout train --devices` starts ranks, on the CPU or on the simulated card.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.known import Match

ROOT = Path(__file__).parents[1]
N_ENVS, N_STEPS = 8, 16
ITERATION = N_ENVS * N_STEPS
"""Env steps of an iteration."""
N_ITERATIONS = 10
SMALL: dict[str, Any] = {
    "seed": 3,
    "n_envs": N_ENVS,
    "n_steps": N_STEPS,
    "batch_size": 64,
    "network_arch": "32,32",
    "learning_rate": 1e-3,
    "gamma": 0.9,
    "overlap": "off",
    "executor": "serial",
}
REPLAY = {"buffer_size": "2000", "learning_starts": ITERATION, "train_ratio": 0.05}
CASES: dict[str, dict[str, Any]] = {
    "ppo": {"algo": "ppo", "n_epochs": 2, "normalize_obs": True, "normalize_reward": True},
    "truncated": {"algo": "ppo", "n_epochs": 2},
    "eager": {"algo": "ppo", "n_epochs": 2, "compile": "off", "target_kl": 0.01},
    "overlap": {"algo": "ppo", "n_epochs": 2, "overlap": "on"},
    "collectors": {"algo": "ppo", "n_epochs": 2, "executor": "auto", "n_collectors": 2},
    "box": {"algo": "ppo", "n_epochs": 2, "env_kwargs": {"action_kind": "box"}},
    "recurrent": {"algo": "recurrent-ppo", "n_epochs": 2, "memory": "gru:8", "sequence_length": 8},
    "pqn": {"algo": "pqn", "n_epochs": 2},
    "dqn": {"algo": "dqn", **REPLAY},
    "prioritized": {"algo": "dqn", "prioritized": True, "multi_step": 3, "tau": 0.05, **REPLAY},
    "sac": {"algo": "sac", "env_kwargs": {"action_kind": "box"}, **REPLAY},
}


class Truncated(Match):
    """Its episodes end by a time limit, so the value of their last observation counts."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, ended, _, info = super().step(action)
        return obs, reward, False, ended, info


def learn(case: str, device: str) -> list[dict[str, torch.Tensor]]:
    """What a small run has learned after every iteration."""
    import flatout

    settings = SMALL | {"device": device} | CASES.get(case, CASES["ppo"])
    agent = flatout.Agent(Truncated if case == "truncated" else Match, **settings)
    states: list[dict[str, torch.Tensor]] = []

    def keep(_: Any) -> None:
        learned = agent.trainer().learner.state()
        states.append({name: tensor.detach().cpu().clone() for name, tensor in learned.items()})
        if case == "damaged" and len(states) == 2 and os.environ["RANK"] == "1":
            agent.trainer().learner.params.flat.view(torch.int32)[5] ^= 1  # the last bit of one parameter

    agent.learn(N_ITERATIONS * ITERATION, callback=keep)
    print(case, agent.summary["device"], agent.summary["backend"], flush=True)
    agent.close()
    return states


def start(folder: Path, cases: list[str], device: str = "cpu", n: int = 2) -> tuple[list[int | None], str]:
    """Exit codes of the ranks, and what those but the first have said."""
    from flatout.cli.devices import RankProcesses

    command = [sys.executable, "-m", "tests.ranks", str(folder), device, *cases]
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        processes = RankProcesses(command, n, 0, folder)
    finally:
        os.chdir(before)
    processes.watch()
    return processes.codes, "\n".join(path.read_text() for path in folder.glob("rank-*.txt"))


def run(folder: Path, cases: list[str], device: str = "cpu", n: int = 2) -> dict[str, list[Any]]:
    """The states of each rank, by case."""
    codes, said = start(folder, cases, device, n)
    assert codes == [0] * n, said
    return {
        case: [torch.load(folder / f"{case}-{rank}.pt", weights_only=True) for rank in range(n)]
        for case in cases
    }


def main() -> None:
    """A rank: trains every case, one after the other."""
    folder, device, *cases = sys.argv[1:]
    if device == "sim":
        import simcard

        simcard.install("exact", "rtx4070", n_devices=2, memory_bytes=1 << 30)
    for case in cases:
        torch.save(learn(case, device), Path(folder) / f"{case}-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
