"""Envs without a recipe: flatout's defaults against Stable-Baselines3's defaults, at equal env steps.

`python -m benchmarks.untuned [--envs Taxi-v4,…] [--seeds 1,2,3] [--libraries flatout,sb3]` trains, evaluates and writes
docs/untuned.md; `--speed` times both libraries instead. The envs were chosen before anything was tuned on them. Every run is a
process of its own, and a peer's process imports no flatout. Results are kept in results/untuned.json as they come: the same
command continues where it was stopped, and commands for different runs may run side by side.

Returns do not depend on what else the machine does, wall times do. So `--speed` is a measurement of its own: both libraries
train in turn, with the whole machine and as they come. flatout's time includes starting its collectors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.kept import FOLDER, add, read
from benchmarks.page import conditions, table

RESULTS = FOLDER / "untuned.json"
PAGE = Path(__file__).parents[1] / "docs" / "untuned.md"
BEGIN, END = "<!-- results -->", "<!-- /results -->"
ENVS = {
    "Taxi-v4": 100_000,
    "CliffWalking-v1": 100_000,
    "FrozenLake-v1": 100_000,
    "FrozenLake8x8-v1": 200_000,
    "Blackjack-v1": 100_000,
    "BipedalWalkerHardcore-v3": 300_000,
    "InvertedPendulum-v5": 100_000,
    "InvertedDoublePendulum-v5": 200_000,
    "Reacher-v5": 200_000,
    "Pusher-v5": 200_000,
    "Swimmer-v5": 200_000,
    "Ant-v5": 300_000,
    "HumanoidStandup-v5": 200_000,
}
"""Env steps by env; the last seven need the package mujoco."""
EPISODES, MAX_STEPS, EVAL_SEED = 50, 1000, 12345
BY_CHANCE = {"FrozenLake-v1": 1000, "FrozenLake8x8-v1": 1000, "Blackjack-v1": 1000}
"""Episodes of envs in which each return is 0 or 1, or −1 to 1, by chance: 50 would tell 0.7 from 0.8 no better than a coin does."""
SPEED_STEPS = {"flatout": 98_304, "sb3": 8_192}
"""Env steps that are timed: whole rollouts of both libraries, a few seconds of each and more of slow envs."""
N_PAIRS = 2
LIBRARIES = ("flatout", "sb3")


def run_flatout(env: str, seed: int, steps: int, evaluates: bool = True) -> dict[str, Any]:
    """Train and evaluate flatout's defaults."""
    import flatout

    agent = flatout.Agent(env, seed=seed)
    began = perf_counter()
    agent.learn(steps)
    result = {"seconds": perf_counter() - began, "algo": agent.config.algo}
    if evaluates:
        played = agent.evaluate(BY_CHANCE.get(env, EPISODES), max_steps=MAX_STEPS, seed=EVAL_SEED)
        result |= {"deterministic": played.return_mean, "training": agent.summary["return_mean"]}
    return result | {"env_steps": agent.summary["env_steps"]}


def run_sb3(env: str, seed: int, steps: int, evaluates: bool = True) -> dict[str, Any]:
    """Train and evaluate the defaults of Stable-Baselines3's PPO."""
    import torch
    from stable_baselines3 import PPO

    if evaluates:  # several run side by side
        torch.set_num_threads(1)
    model = PPO("MlpPolicy", _flat(env), seed=seed, device="cpu")
    began = perf_counter()
    model.learn(steps)
    result: dict[str, Any] = {"seconds": perf_counter() - began, "algo": "ppo"}
    if evaluates:
        made = _flat(env)
        returns = [episode(model, made, EVAL_SEED + i) for i in range(BY_CHANCE.get(env, EPISODES))]
        last = [info["r"] for info in model.ep_info_buffer or ()]
        result["deterministic"] = statistics.fmean(returns)
        result["training"] = statistics.fmean(last) if last else None
    return result | {"env_steps": model.num_timesteps}


def _flat(env: str) -> gym.Env[Any, Any]:
    """The env as Stable-Baselines3 can take it: it refuses Tuple observations, such as Blackjack's."""
    made = gym.make(env)
    is_tuple = isinstance(made.observation_space, gym.spaces.Tuple)
    return gym.wrappers.FlattenObservation(made) if is_tuple else made


def episode(model: Any, env: gym.Env[Any, Any], seed: int) -> float:
    """The return of one episode of the deterministic policy, cut after MAX_STEPS."""
    obs, _ = env.reset(seed=seed)
    total = 0.0
    for _ in range(MAX_STEPS):
        action, _ = model.predict(obs, deterministic=True)
        scalar = int(np.asarray(action)) if isinstance(env.action_space, gym.spaces.Discrete) else action
        obs, reward, terminated, truncated, _ = env.step(scalar)
        total += float(reward)
        if terminated or truncated:
            break
    return total


def measure(library: str, env: str, seed: int, steps: int, *, timed: bool = False) -> dict[str, Any] | None:
    """One run in a process of its own; None if it fails, which is shown. `timed`: without evaluation."""
    job = [library, env, str(seed), str(steps), str(int(timed))]
    command = [sys.executable, "-m", "benchmarks.untuned", "--one", *job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{library} {env} seed {seed} failed: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return None
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    shown = "" if timed else f"{result['deterministic']:.1f} in "
    print(f"{library} {env} seed {seed}: {shown}{result['seconds']:.1f} s", flush=True)
    return result


def main() -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--envs", default=",".join(ENVS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--speed", action="store_true", help="time both libraries instead of their returns")
    parser.add_argument("--again", action="store_true", help="run what is there already, too")
    parser.add_argument("--steps", type=int, default=0, help="env steps of every env, to try the benchmark")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        library, env, seed, steps, timed = args.one
        run = run_flatout if library == "flatout" else run_sb3
        print(json.dumps(run(env, int(seed), int(steps), evaluates=timed == "0")))
        return
    for env in args.envs.split(","):
        if args.speed:
            if args.again or f"{env} speed" not in read(args.results):
                time_both(env, args.results)
            continue
        for seed in args.seeds.split(","):
            for library in args.libraries.split(","):
                key = f"{env} {library} {seed}"
                if args.again or key not in read(args.results):
                    result = measure(library, env, int(seed), args.steps or ENVS[env])
                    if result is not None:
                        del result["seconds"]  # by whatever else ran: `--speed` compares times
                    add(args.results, key, result)
    if args.results == RESULTS:
        write_page(read(RESULTS))


def time_both(env: str, results: Path) -> None:
    """Microseconds of wall time per env step of both libraries, in turn; the median of some pairs."""
    took: dict[str, list[float]] = {library: [] for library in LIBRARIES}
    for _ in range(N_PAIRS):
        for library, seconds in took.items():
            result = measure(library, env, 1, SPEED_STEPS[library], timed=True)
            if result is None:
                return
            seconds.append(1e6 * result["seconds"] / result["env_steps"])
    add(results, f"{env} speed", {library: statistics.median(each) for library, each in took.items()})


def write_page(known: dict[str, dict[str, Any]]) -> None:
    """The table of all results so far, in docs/untuned.md."""
    names = "env|env steps|flatout|Stable-Baselines3|not below|above|µs a step: flatout, SB3|share of SB3's wall time"
    rows = [row for env in ENVS if (row := _row(env, known)) is not None]
    text = f"{conditions()}\n\n{table(names.split('|'), rows)}"
    before, rest = PAGE.read_text().split(BEGIN, 1)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}")
    print(text)


def _row(env: str, known: dict[str, dict[str, Any]]) -> list[str] | None:
    ours, theirs = (
        [v for k, v in known.items() if k.startswith(f"{env} {library} ")] for library in LIBRARIES
    )
    if not ours or not theirs:
        return None
    a, b = ([it["deterministic"] for it in runs] for runs in (ours, theirs))
    cells = [f"{statistics.median(it):.4g} ({', '.join(f'{r:.4g}' for r in it)})" for it in (a, b)]
    speed = known.get(f"{env} speed")
    times = ["", "not timed"]
    if speed is not None:
        times = [f"{speed['flatout']:.0f}, {speed['sb3']:.0f}", f"{speed['flatout'] / speed['sb3']:.2f}"]
    return [f"{env} ({ours[0]['algo']})", f"{ours[0]['env_steps']:,}", *cells, *_verdicts(a, b), *times]


def _verdicts(ours: list[float], theirs: list[float]) -> list[str]:
    """Not below, above; with a single seed of one library there is no noise to compare with."""
    gap = statistics.median(ours) - statistics.median(theirs)
    if min(len(ours), len(theirs)) < 2:
        return ["one seed: " + ("higher" if gap > 0 else "equal" if gap == 0 else "lower"), "?"]
    noise = max(statistics.stdev(ours), statistics.stdev(theirs))
    return ["yes" if gap >= -noise else "NO", "yes" if gap > noise else "no"]


if __name__ == "__main__":
    main()
