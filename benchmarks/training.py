"""Training compared with peers: speed, time to a target, envs that wait, and networks of every size.

`python -m benchmarks.training [--seeds 5] [--cases speed,target,overlap,slow,sizes]` → docs/benchmarks.md. Every run is a
fresh process; the libraries alternate, seed by seed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.page import PAGE, conditions, table, write_section

SPEED: dict[str, Any] = {"n_envs": 32, "n_steps": 32, "batch_size": 256, "n_epochs": 4}
SPEED_STEPS = 300_000
SLOW: dict[str, Any] = {"n_envs": 32, "n_steps": 64, "batch_size": 512, "n_epochs": 10}
REMOTE: dict[str, Any] = {
    "n_envs": 32,
    "n_steps": 32,
    "batch_size": 256,
    "n_epochs": 10,
    "network_arch": (256, 256),
}
ZOO: dict[str, Any] = {"n_envs": 8, "n_steps": 32, "batch_size": 256, "n_epochs": 20}
TARGET = 475.0
SIZES = ((64, 64), (256, 256), (512, 512), (1024, 512, 256), (1024, 1024, 512, 256))
BATCHES = (256, 1024)


def flatout_speed(seed: int, **options: Any) -> dict[str, Any]:
    """300,000 steps of CartPole from `learn()` on; start-up is counted separately."""
    import flatout

    agent = flatout.PPO(
        "CartPole-v1", preset="auto", **SPEED, network_arch=(64, 64), learning_rate=3e-4, seed=seed, **options
    )
    began = perf_counter()
    agent.learn(SPEED_STEPS)
    keys = ("wall_seconds", "startup_seconds", "collect_rate", "learn_rate", "learner_busy", "compiled")
    out = {key: agent.summary[key] for key in keys}
    compiling = agent.summary["phases"].get("compile", 0.0)
    total = perf_counter() - began
    return out | {
        "steps_per_second": SPEED_STEPS / (out["wall_seconds"] - compiling),
        "with_all": total,
        "compile_seconds": compiling,
        "return": _mean_return(agent.summary),
    }


def _mean_return(summary: dict[str, Any]) -> float:
    return float(summary["return_mean"])


def sb3_agent(seed: int, library: str, net: tuple[int, ...] = (64, 64), **settings: Any) -> Any:
    """PPO of Stable-Baselines3 or SBX with the given settings."""
    from stable_baselines3.common.env_util import make_vec_env

    peer = importlib.import_module("sbx" if library == "sbx" else "stable_baselines3")
    n_envs = settings.pop("n_envs")
    env = settings.pop("env", "CartPole-v1")
    envs = make_vec_env(env, n_envs=n_envs, seed=seed) if isinstance(env, str) else env
    kwargs: dict[str, Any] = {"net_arch": list(net)}
    if library == "sb3":
        settings["device"] = "cpu"
    return peer.PPO("MlpPolicy", envs, policy_kwargs=kwargs, seed=seed, **settings)


def sb3_speed(seed: int, library: str = "sb3", n_threads: int | None = None) -> dict[str, Any]:
    """The same in Stable-Baselines3 or SBX; a first rollout before the clock starts, for JAX to compile."""
    import torch

    if n_threads:
        torch.set_num_threads(n_threads)
    agent = sb3_agent(seed, library, **SPEED)
    began = perf_counter()
    agent.learn(2 * 32 * 32)
    warm = perf_counter() - began
    began = perf_counter()
    agent.learn(SPEED_STEPS, reset_num_timesteps=False)
    seconds = perf_counter() - began
    returns = [info["r"] for info in agent.ep_info_buffer or ()]
    return {
        "steps_per_second": SPEED_STEPS / seconds,
        "with_all": seconds + warm,
        "return": float(statistics.mean(returns)),
    }


def flatout_target(seed: int, **options: Any) -> dict[str, Any]:
    """Seconds from `learn()` to a mean return of 475 over 100 episodes, with the recipe."""
    import flatout

    agent = flatout.PPO("CartPole-v1", seed=seed, target_return=TARGET, **options)
    began = perf_counter()
    agent.learn(200_000)
    summary = agent.summary
    return {"seconds": perf_counter() - began, "steps": summary["env_steps"], "return": _mean_return(summary)}


def sb3_target(seed: int, n_threads: int | None = None) -> dict[str, Any]:
    """The same in Stable-Baselines3 with rl-zoo's settings."""
    import torch

    def goes_on(names: dict[str, Any], _: dict[str, Any]) -> bool:
        seen = [info["r"] for info in names["self"].ep_info_buffer or ()]
        return len(seen) < 100 or statistics.mean(seen) < TARGET

    if n_threads:
        torch.set_num_threads(n_threads)
    agent = sb3_agent(
        seed,
        "sb3",
        **ZOO,
        gamma=0.98,
        gae_lambda=0.8,
        learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left,
    )
    began = perf_counter()
    agent.learn(100_000, callback=goes_on)
    seconds = perf_counter() - began
    returns = [info["r"] for info in agent.ep_info_buffer or ()]
    return {"seconds": seconds, "steps": agent.num_timesteps, "return": float(statistics.mean(returns))}


def flatout_slow(seed: int, n_envs: int = 32, n_steps: int = 40_960, **options: Any) -> dict[str, Any]:
    """Envs that wait 10 ± 5 ms."""
    import flatout
    from benchmarks.envs import Wait

    agent = flatout.PPO(
        Wait, preset="auto", **(SLOW | {"n_envs": n_envs}), network_arch=(256, 256), seed=seed, **options
    )
    agent.learn(n_steps)
    keys = (
        "steps_per_second",
        "learner_busy",
        "pipeline_efficiency",
        "collect_rate",
        "learn_rate",
        "compiled",
    )
    return {key: agent.summary[key] for key in keys} | {"executor": agent.summary["executor"]["kind"]}


def sb3_slow(seed: int, n_steps: int = 20_480) -> dict[str, Any]:
    """The same in Stable-Baselines3 with a process per env."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    from benchmarks.envs import Wait

    envs = SubprocVecEnv([Wait] * 32)
    agent = sb3_agent(seed, "sb3", (256, 256), env=envs, **SLOW)
    train, busy = agent.train, 0.0

    def timed() -> None:
        nonlocal busy
        began = perf_counter()
        train()
        busy += perf_counter() - began

    agent.train = timed
    began = perf_counter()
    agent.learn(n_steps)
    seconds = perf_counter() - began
    envs.close()
    return {"steps_per_second": n_steps / seconds, "learner_busy": busy / seconds}


def flatout_overlap(seed: int, env: str, overlap: str) -> dict[str, Any]:
    """Seconds from `learn()` to a target, with overlap or without."""
    import flatout
    from benchmarks.envs import remote_cartpole

    cases: dict[str, tuple[Any, float, int, dict[str, Any]]] = {
        "CartPole": ("CartPole-v1", 300.0, 600_000, SPEED),
        "remote": (remote_cartpole, 400.0, 300_000, REMOTE),
    }
    source, target, steps, settings = cases[env]
    agent = flatout.PPO(
        source,
        preset="auto",
        **({"network_arch": (64, 64)} | settings),
        target_return=target,
        seed=seed,
        overlap=overlap,
    )
    agent.learn(steps)
    summary = agent.summary
    assert overlap == "off" or summary["overlap"]["on"]
    return {
        "seconds": summary["target_reached_seconds"] or summary["wall_seconds"],
        "steps": summary["target_reached_steps"] or summary["env_steps"],
        "reached": summary["target_reached_seconds"] is not None,
    }


def _size_steps(net: tuple[int, ...]) -> int:
    return 32_768 if sum(net) < 800 else 16_384


def flatout_size(seed: int, net: tuple[int, ...], batch: int, library: str = "flatout") -> dict[str, Any]:
    """Steps/s with a network and batch size, without any warm-up of a compiler."""
    import flatout

    settings: dict[str, Any] = {"n_envs": 32, "n_steps": 128, "batch_size": batch, "n_epochs": 4}
    if library == "flatout":
        agent = flatout.PPO("CartPole-v1", preset="auto", **settings, network_arch=net, seed=seed)
        agent.learn(_size_steps(net))
        return {"steps_per_second": agent.summary["steps_per_second"]}
    peer = sb3_agent(seed, "sb3", net, **settings)
    began = perf_counter()
    peer.learn(_size_steps(net))
    return {"steps_per_second": _size_steps(net) / (perf_counter() - began)}


RUNS: dict[str, Callable[..., dict[str, Any]]] = {
    "speed/flatout": flatout_speed,
    "speed/flatout, overlap": lambda seed: flatout_speed(seed, overlap="on"),
    "speed/Stable-Baselines3": sb3_speed,
    "speed/Stable-Baselines3, torch on one thread": lambda seed: sb3_speed(seed, n_threads=1),
    "speed/SBX": lambda seed: sb3_speed(seed, "sbx"),
    "target/flatout": flatout_target,
    "target/Stable-Baselines3": sb3_target,
    "target/Stable-Baselines3, torch on one thread": lambda seed: sb3_target(seed, 1),
    "overlap/CartPole-v1, overlap": lambda seed: flatout_overlap(seed, "CartPole", "on"),
    "overlap/CartPole-v1, lockstep": lambda seed: flatout_overlap(seed, "CartPole", "auto"),
    "overlap/CartPole-v1 that waits, overlap": lambda seed: flatout_overlap(seed, "remote", "auto"),
    "overlap/CartPole-v1 that waits, lockstep": lambda seed: flatout_overlap(seed, "remote", "off"),
    "slow/flatout, 32 envs": flatout_slow,
    "slow/Stable-Baselines3, 32 envs": sb3_slow,
    "slow/flatout, 128 envs": lambda seed: flatout_slow(seed, 128, 163_840),
}


def in_a_process(name: str, seed: int, extra: list[str] | None = None) -> dict[str, Any] | None:
    """One run in a process of its own; None where the peer is not installed or fails."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.training",
        "--one",
        name,
        "--seed",
        str(seed),
        *(extra or []),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: {done.stderr.splitlines()[-1] if done.stderr else 'failed'}", flush=True)
        return None
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in out.items()}
    print(f"{name}, seed {seed}: {shown}", flush=True)
    return out


def run_case(case: str, seeds: int) -> dict[str, list[dict[str, Any]]]:
    """Every way of a case for every seed, alternating."""
    names = [name for name in RUNS if name.startswith(f"{case}/")]
    out: dict[str, list[dict[str, Any]]] = {name.partition("/")[2]: [] for name in names}
    for seed in range(1, seeds + 1):
        for name in names:
            result = in_a_process(name, seed)
            if result is not None:
                out[name.partition("/")[2]].append(result)
    return out


def _median(results: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(r[key] for r in results))


def _ratio(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], key: str) -> str:
    pairs = list(zip(ours, theirs, strict=False))
    return f"{statistics.median(a[key] / b[key] for a, b in pairs):.2f}" if pairs else ""


def speed(seeds: int) -> None:
    """Case 1: steps/s and return at equal steps."""
    results = run_case("speed", seeds)
    ours = results["flatout"]
    rows = []
    for name, runs in results.items():
        if runs:
            cells = [f"{_median(runs, 'steps_per_second'):,.0f}", _ratio(ours, runs, "steps_per_second")]
            rows.append(
                [name, *cells, f"{_median(runs, 'with_all'):.1f} s", f"{_median(runs, 'return'):.0f}"]
            )
    text = (
        f"## Training speed\n\n`python -m benchmarks.training`: PPO on CartPole-v1, 32 envs × 32 steps, batch 256, "
        f"4 epochs, two 64-64 networks, {SPEED_STEPS:,} env steps, {seeds} seeds, alternating, each run in a new process; "
        f"medians, and the median of the ratios. The whole run includes starting its processes.\n"
        f"{conditions()}\n\n"
        + table(["", "env steps/s", "flatout ÷ this", "whole run", "mean return of the last 100"], rows)
    )
    write_section("training-speed", text)


def target(seeds: int) -> None:
    """Case 2: wall time to a target return."""
    results = run_case("target", seeds)
    ours = results["flatout"]
    rows = []
    for name, runs in results.items():
        if runs:
            every = ", ".join(f"{r['seconds']:.1f}" for r in runs)
            reached = sum(r["return"] >= TARGET for r in runs)
            ratio = _ratio(runs, ours, "seconds")
            cells = [f"{_median(runs, 'seconds'):.1f} s", ratio, every, f"{_median(runs, 'steps'):,.0f}"]
            rows.append([name, *cells, f"{reached} of {len(runs)}"])
    header = ["", "median", "÷ flatout", "each seed, s", "env steps, median", "reached"]
    text = (
        f"## Time to a target\n\n`python -m benchmarks.training --cases target`: CartPole-v1, from `learn()` to a mean return of {TARGET:.0f} over 100 episodes; "
        f"flatout with its recipe, Stable-Baselines3 with rl-zoo's settings, which are the same.\n{conditions()}\n\n"
        + table(header, rows)
    )
    write_section("training-target", text)


def overlapped(seeds: int) -> None:
    """Wall time to a target with overlap and without."""
    results = run_case("overlap", seeds)
    rows = []
    for name, runs in results.items():
        lockstep = results[name.replace("overlap", "lockstep")]
        every = ", ".join(f"{r['seconds']:.1f}" for r in runs)
        cells = [f"{_median(runs, 'seconds'):.1f} s", _ratio(runs, lockstep, "seconds"), every]
        reached = f"{sum(r['reached'] for r in runs)} of {len(runs)}"
        rows.append([name, *cells, f"{_median(runs, 'steps'):,.0f}", reached])
    text = (
        "## Time to a target with overlap\n\n`python -m benchmarks.training --cases overlap`: the same settings with overlap and without (lockstep): seconds from `learn()` to a mean "
        'return over 100 episodes. CartPole-v1 as in "Training speed", to 300; '
        "CartPole-v1 whose steps wait 10 ± 5 ms, 32 envs × 32 steps, batch 256, 10 epochs, 256-256 networks, to 400.\n"
        f"{conditions()}\n\n"
        + table(["", "median", "÷ lockstep", "each seed, s", "env steps, median", "reached"], rows)
    )
    write_section("training-overlap", text)


def slow(seeds: int) -> None:
    """Case 3: envs that wait."""
    results = run_case("slow", seeds)
    base = results["Stable-Baselines3, 32 envs"]
    rows = []
    for name, runs in results.items():
        if runs:
            efficiency = runs[0].get("pipeline_efficiency")
            shown = f"{_median(runs, 'pipeline_efficiency'):.2f}" if efficiency is not None else ""
            cells = [f"{_median(runs, 'steps_per_second'):,.0f}", _ratio(runs, base, "steps_per_second")]
            rows.append([name, *cells, f"{100 * _median(runs, 'learner_busy'):.0f} %", shown])
    header = ["", "env steps/s", "÷ Stable-Baselines3", "learner busy", "pipeline efficiency"]
    text = (
        "## Envs that wait\n\n`python -m benchmarks.training --cases slow`: envs that wait 10 ± 5 ms per step (observation of 64 floats, 8 actions), rollouts of 64 steps, batch 512, "
        f"10 epochs, 256-256 networks; {seeds} rounds.\n{conditions()}\n\n" + table(header, rows)
    )
    write_section("training-slow", text)


def sizes(seeds: int) -> None:
    """Case 4: steps/s against network and batch size, as a plot and a table."""
    measured: dict[tuple[str, tuple[int, ...], int], list[float]] = {}
    for seed in range(1, seeds + 1):
        for net in SIZES:
            for batch in BATCHES:
                for library in ("flatout", "sb3"):
                    words = [library, ",".join(map(str, net)), str(batch)]
                    result = in_a_process("size", seed, ["--size", *words])
                    if result:
                        measured.setdefault((library, net, batch), []).append(result["steps_per_second"])
    rows = []
    for net in SIZES:
        for batch in BATCHES:
            ours, theirs = (statistics.median(measured[lib, net, batch]) for lib in ("flatout", "sb3"))
            name = "-".join(map(str, net))
            rows.append([name, str(batch), f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.1f}"])
    plot_sizes({key: statistics.median(values) for key, values in measured.items()})
    text = (
        "## Network and batch size\n\n`python -m benchmarks.training --cases sizes`: CartPole-v1, 32 envs × 128 steps, 4 epochs, other settings chosen by flatout, no "
        f"compiled update from earlier runs; each run in a new process, alternating.\n{conditions()}\n\n![steps/s against network size](images/sizes.svg)\n\n"
        + table(["network", "batch", "flatout, steps/s", "Stable-Baselines3, steps/s", "ratio"], rows)
    )
    write_section("training-sizes", text)


def plot_sizes(medians: dict[tuple[str, tuple[int, ...], int], float]) -> None:
    """docs/images/sizes.svg."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for library, color in (("flatout", "tab:blue"), ("sb3", "tab:orange")):
        for batch, style in zip(BATCHES, ("-", "--"), strict=True):
            values = [medians[library, net, batch] for net in SIZES]
            axes.plot(
                range(len(SIZES)), values, style, color=color, marker="o", label=f"{library}, batch {batch}"
            )
    axes.set_xticks(range(len(SIZES)), ["-".join(map(str, net)) for net in SIZES], fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel("env steps/s")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(PAGE.parent / "images" / "sizes.svg")


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cases", default="speed,target,overlap,slow,sizes")
    parser.add_argument("--one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", nargs=3)
    args = parser.parse_args()
    if args.size:
        library, net, batch = args.size
        widths = tuple(int(width) for width in net.split(","))
        print(json.dumps(flatout_size(args.seed, widths, int(batch), library)))
    elif args.one:
        print(json.dumps(RUNS[args.one](args.seed)))
    else:
        cases: dict[str, Callable[[int], None]] = {
            "speed": speed,
            "target": target,
            "overlap": overlapped,
            "slow": slow,
            "sizes": sizes,
        }
        Path(PAGE.parent / "images").mkdir(exist_ok=True)
        for case in args.cases.split(","):
            cases[case](args.seeds)


if __name__ == "__main__":
    main()
