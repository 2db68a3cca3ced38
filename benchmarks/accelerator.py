"""How busy a card is: flatout and unmodified peers on the simulated card in timed mode, at the same settings.

`python -m benchmarks.accelerator [--card rtx4070] [--rounds 3] [--cases fast,heavy,…]` → docs/benchmarks.md. Every run is a
process of its own, and the libraries alternate. Kernels compute nothing on this card; each occupies it for the time that
its data sheet allows (simcard/README.md), while the host's work takes the time that it takes here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.page import conditions, table, write_section

ROOT = Path(__file__).parents[1]
PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"n_envs": 16, "n_steps": 256, "batch_size": 2048, "n_epochs": 15, "network_arch": (512, 512)},
    "heavy": {
        "n_envs": 32,
        "n_steps": 256,
        "batch_size": 4096,
        "n_epochs": 20,
        "network_arch": (1024, 512, 256),
    },
    "beast": {
        "n_envs": 64,
        "n_steps": 512,
        "batch_size": 8192,
        "n_epochs": 30,
        "network_arch": (1024, 512, 512, 256),
    },
    "max": {
        "n_envs": 32,
        "n_steps": 8192,
        "batch_size": 512,
        "n_epochs": 30,
        "network_arch": (1024, 1024, 512, 256),
    },
}
WAITS = {"n_steps": 64, "batch_size": 512, "n_epochs": 10, "network_arch": (256, 256)}
DQN = {"batch_size": 64, "network_arch": (256, 256), "train_ratio": 0.5}


@dataclass(frozen=True)
class Case:
    """Settings that both libraries run with."""

    env: str
    settings: dict[str, Any]
    algo: str = "PPO"
    seconds: float = 8.0
    """How long flatout runs at least; peers take as long as two iterations need, if that is longer."""
    peers: tuple[str, ...] = ("sb3",)
    n_first: int = 3
    """Iterations of flatout that do not count: capturing graphs, filling the pipeline."""


CASES = {
    **{name: Case("CartPole-v1", it) for name, it in PRESETS.items()},
    **{f"mission {name}": Case("flatout/Mission-v0", PRESETS[name]) for name in ("fast", "heavy")},
    "waits 32": Case("benchmarks.envs:Wait", {"n_envs": 32, **WAITS}),
    "waits 128": Case("benchmarks.envs:Wait", {"n_envs": 128, **WAITS}),
    "dqn": Case("CartPole-v1", {"n_envs": 16, **DQN}, "DQN"),
    "dqn ratio 8": Case("CartPole-v1", {"n_envs": 16, **DQN, "batch_size": 256, "train_ratio": 8.0}, "DQN"),
    "snake 256": Case("flatout/Snake-v0", {"n_envs": 256}, "PQN", peers=("loop", "sb3")),
    "snake 4096": Case("flatout/Snake-v0", {"n_envs": 4096}, "PQN", peers=("loop",)),
}


@dataclass
class Window:
    """The part of a run that counts: from its first mark to its last."""

    marks: list[tuple[float, int, int, Any, tuple[float, float]]] = field(default_factory=list)

    def mark(self, env_steps: int, n_updates: int, worked: tuple[float, float] = (0.0, 0.0)) -> None:
        """Between two iterations; `worked`: seconds spent collecting and learning so far."""
        import simcard

        self.marks.append((perf_counter(), env_steps, n_updates, simcard.counters(), worked))

    def figures(self) -> dict[str, float]:
        """What happened between the first mark and the last."""
        (began, steps, updates, before, _), (ended, last_steps, last_updates, after, _) = (
            self.marks[0],
            self.marks[-1],
        )
        seconds, n_updates, n = ended - began, last_updates - updates, len(self.marks) - 1
        return {
            "steps_per_second": (last_steps - steps) / seconds,
            "busy": (after.busy_seconds - before.busy_seconds) / seconds,
            "launches_per_update": (after.launches - before.launches) / max(n_updates, 1),
            "syncs_per_iteration": (after.syncs - before.syncs) / n,
            "updates_per_second": n_updates / seconds,
        }

    def efficiency(self, together: bool) -> float:
        """Share of the time in which the slower of collecting and learning worked; `together`: both, on one device."""
        (began, *_, before), (ended, *_, after) = self.marks[0], self.marks[-1]
        collected, learned = (b - a for a, b in zip(before, after, strict=True))
        return (collected + learned if together else max(collected, learned)) / (ended - began)


def run_flatout(case: Case, card: str) -> dict[str, float]:
    """flatout, with everything but the settings as it comes; overlap on, as in a run of many rollouts."""
    import flatout
    import simcard
    from flatout.timing import busy_seconds, collect_seconds
    from flatout.training.pipeline import Pipeline

    window, iterate, n = Window(), Pipeline.iterate, 0

    def marked(self: Any, total_steps: int, stop: Any) -> Any:
        nonlocal n
        if (
            n == 0
        ):  # until here, because envs on the card are checked before a run: their masks must not be zero
            simcard.mode("timed", card)
        out = iterate(self, total_steps, stop)
        n += 1
        if n >= case.n_first:
            lanes = self.read_lanes()
            worked = collect_seconds(lanes), busy_seconds(lanes)
            window.mark(self._state.env_steps, int(n * agent.config.updates_per_iteration), worked)
        if len(window.marks) > 2 and perf_counter() - window.marks[0][0] > case.seconds:
            stop.requested = True
        return out

    Pipeline.iterate = marked  # type: ignore[method-assign]
    overlap = {} if case.algo == "PQN" else {"overlap": "on"}
    agent = getattr(flatout, case.algo)(case.env, seed=1, device="sim", **overlap, **case.settings)
    agent.learn(1_000_000_000)
    figures = window.figures() | {key: agent.summary[key] for key in ("collect_rate", "learn_rate")}
    figures["pipeline_efficiency"] = window.efficiency(together=case.algo == "PQN")
    way = agent.summary["executor"]
    return figures | {
        "way": f"{way['kind']}, {way['collectors']} collectors",
        "backend": agent.summary["backend"],
        "precision": agent.summary["precision"],
    }


def run_sb3(case: Case, card: str) -> dict[str, float]:
    """Stable-Baselines3 as it is, with one process per env where envs wait."""
    del card
    import torch
    from stable_baselines3 import DQN as PeerDQN
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    torch.distributions.Distribution.set_default_validate_args(False)  # all values are zero on this card
    window = Window()

    class Marks(BaseCallback):  # type: ignore[misc, unused-ignore]  # Any where it is not installed
        """Marks the beginning of every rollout but the first."""

        def _on_step(self) -> bool:
            done = len(window.marks) > 2 and perf_counter() - window.marks[0][0] > case.seconds
            return not done

        def _on_rollout_start(self) -> None:
            if self.num_timesteps:
                n_updates = self.model._n_updates  # of PPO: epochs
                n_each = case.settings["n_steps"] * n_envs // batch_size if case.algo == "PPO" else 1
                window.mark(self.num_timesteps, n_updates * n_each)

    settings = dict(case.settings)
    n_envs, net = settings.pop("n_envs"), list(settings.pop("network_arch", (256, 256)))
    batch_size = settings.setdefault("batch_size", 256)
    env, wrapper = _env_class(case.env)
    waits = "Wait" in case.env
    envs = make_vec_env(
        env, n_envs, vec_env_cls=SubprocVecEnv if waits else DummyVecEnv, wrapper_class=wrapper
    )
    policy = "MultiInputPolicy" if "Dict" in type(envs.observation_space).__name__ else "MlpPolicy"
    how: dict[str, Any] = {"device": "sim", "policy_kwargs": {"net_arch": net}, "seed": 1}
    if case.algo == "PPO":
        agent: Any = PPO(policy, envs, **settings, **how)
    else:
        ratio = settings.pop("train_ratio", 0.5)
        freq = max(256 // n_envs, 1)
        how |= {"train_freq": freq, "gradient_steps": int(ratio * freq * n_envs), "learning_starts": 1000}
        agent = PeerDQN(policy, envs, buffer_size=100_000, **settings, **how)
    agent.learn(1_000_000_000, callback=Marks())
    return window.figures()


def _env_class(name: str) -> tuple[Any, Any]:
    if name.startswith("benchmarks."):
        from benchmarks.envs import Wait

        return Wait, None
    if name.startswith("flatout/"):
        import flatout  # noqa: F401  # registers the env; torch is loaded already, so nothing of it is set
    return name, None


def run_loop(case: Case, card: str) -> dict[str, float]:
    """A plain torch loop of PQN over the same games on the card, at the settings of flatout's recipe, operation by operation."""
    del card
    import torch
    from torch import nn

    from flatout.workloads.snake.games import SnakeGames

    n_envs, n_steps, size, n_epochs, device = case.settings["n_envs"], 32, 2048, 2, torch.device("sim")
    games, window = SnakeGames(n_envs, device), Window()
    obs, _ = games.reset(1)
    layers: list[nn.Module] = []
    for n in (obs["view"].shape[1], 64):
        layers += [nn.Linear(n, 64), nn.LayerNorm(64), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(64, 4)).to(device)
    adam = torch.optim.Adam(net.parameters(), 1e-3)
    steps = updates = 0
    while len(window.marks) < 3 or perf_counter() - window.marks[0][0] < case.seconds:
        rows = []
        for _ in range(n_steps):
            with torch.no_grad():
                view, allowed = obs["view"].clone(), obs["action_mask"]
                best = net(view).masked_fill(~allowed, -1e8).argmax(1)
                any_action = (torch.rand(n_envs, 4, device=device) * allowed).argmax(1)
                action = torch.where(torch.rand(n_envs, device=device) < 0.1, any_action, best)
                obs, reward, ended, _, _ = games.step(action)
                rows.append((view, action, reward, ended.float(), obs["action_mask"].clone()))
        with torch.no_grad():
            following = [*(row[0] for row in rows[1:]), obs["view"]]
            returns, out = torch.zeros(n_envs, device=device), []
            for t in reversed(range(n_steps)):
                _, _, reward, ended, allowed = rows[t]
                value = net(following[t]).masked_fill(~allowed, -1e8).amax(1)
                mixed = value if t == n_steps - 1 else 0.35 * value + 0.65 * returns
                returns = reward + 0.98 * (1 - ended) * mixed
                out.append(returns)
        b_obs, b_action = (torch.cat([row[i] for row in rows]) for i in (0, 1))
        b_return = torch.cat(out[::-1])
        for _ in range(n_epochs):
            for index in torch.randperm(len(b_obs), device=device).split(size):
                q = net(b_obs[index]).gather(1, b_action[index, None]).squeeze(1)
                loss = (q - b_return[index]).square().mean()
                adam.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 10.0)
                adam.step()
                updates += 1
        loss.item()
        steps += n_envs * n_steps
        window.mark(steps, updates)
    return window.figures()


RUNS: dict[str, Callable[[Case, str], dict[str, float]]] = {
    "flatout": run_flatout,
    "sb3": run_sb3,
    "loop": run_loop,
}
NAMES = {"flatout": "flatout", "sb3": "Stable-Baselines3", "loop": "plain torch loop"}


def measure(name: str, library: str, card: str) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.accelerator", "--one", name, library, "--card", card]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{name} {library}: {done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(name, library, figures, flush=True)
    return figures


def median(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure."""
    first = figures[0]
    return {
        k: statistics.median(it[k] for it in figures) if isinstance(v, float) else v for k, v in first.items()
    }


def row(name: str, library: str, it: dict[str, Any], ratio: str) -> list[str]:
    """A line of the table."""
    efficiency = it.get("pipeline_efficiency")
    return [
        name,
        NAMES[library],
        f"{it['steps_per_second']:,.0f}",
        ratio,
        f"{it['busy']:.1%}",
        it.get("precision", "fp32"),
        f"{it['launches_per_update']:,.1f}",
        f"{it['syncs_per_iteration']:,.0f}",
        "" if efficiency is None else f"{efficiency:.2f}",
        str(it["rounds"]),
    ]


def measure_case(name: str, card: str, n_rounds: int) -> dict[str, dict[str, Any]]:
    """Medians of every library, with the median of the rounds' ratios."""
    libraries = (*CASES[name].peers, "flatout")
    runs: dict[str, list[dict[str, Any]]] = {library: [] for library in libraries}
    for _ in range(n_rounds):
        for library in libraries:
            runs[library].append(measure(name, library, card))
    medians = {library: median(it) for library, it in runs.items()}
    for library in libraries:
        pairs = zip(runs["flatout"], runs[library], strict=True)
        medians[library]["flatout_is"] = statistics.median(
            a["steps_per_second"] / b["steps_per_second"] for a, b in pairs
        )
        medians[library]["rounds"] = n_rounds
    return medians


def lines(name: str, medians: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A case's part of the table."""
    return [
        row(name, library, it, "" if library == "flatout" else f"{it['flatout_is']:.1f} ×")
        for library, it in medians.items()
    ]


HEADER = [
    "case",
    "library",
    "env steps/s",
    "flatout is",
    "card busy",
    "precision",
    "launches / update",
    "host waits / iteration",
    "pipeline efficiency",
    "rounds",
]


def main() -> None:
    """Measure the cases, alternating the libraries, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", default="rtx4070")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--one", nargs=2, metavar=("CASE", "LIBRARY"))
    args = parser.parse_args()
    if args.one:
        import simcard

        name, library = args.one
        exact = library == "flatout" and CASES[name].algo == "PQN"
        simcard.install("exact" if exact else "timed", args.card, n_devices=1)
        print(json.dumps(RUNS[library](CASES[name], args.card)))
        return
    path = ROOT / "benchmarks" / "results" / f"accelerator_{args.card}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in args.cases.split(","):
        results[name] = measure_case(name, args.card, args.rounds)
        path.write_text(json.dumps(results, indent=1) + "\n")
    text = f"""## On a simulated {args.card}
`python -m benchmarks.accelerator --card {args.card} [--cases fast,heavy] [--rounds 3]`. {conditions()} The card is
simulated: kernels compute nothing and take the time that the data sheet allows; the host's work is real (simcard/README.md
has all assumptions). Libraries alternate; medians of the rounds. A case's rows come from one machine, those of different cases may not. Both run with the same settings and everything else as it
comes, so flatout computes in the number format that it chooses for such a card (`precision`), Stable-Baselines3 in fp32.

{table(HEADER, [line for name in CASES if name in results for line in lines(name, results[name])])}
"""
    write_section(f"accelerator {args.card}", text)


if __name__ == "__main__":
    main()
