"""SAC beside Stable-Baselines3 and SBX: updates/s at equal settings, returns of MuJoCo envs, and the recipes' returns.

`python -m benchmarks.sac [--cases speed,mujoco,returns] [--envs ID,ID] [--rounds 3]` → docs/benchmarks.md. Every run is a
fresh process, and the peers' never load flatout; the libraries alternate. Stable-Baselines3 counts with the better of one
and two torch threads. SBX is left out where it is not installed.

Returns are kept in results/sac.json as they come, so commands for different `--envs` may run side by side: returns do not
depend on what else the machine does, seconds do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from time import perf_counter
from typing import Any

from benchmarks.kept import FOLDER, add, read
from benchmarks.page import conditions, table, write_section

SETTINGS: dict[str, Any] = {"batch_size": 256, "learning_rate": 3e-4, "gamma": 0.99, "tau": 0.005}
"""Those of all three libraries; networks are 256-256, with one update after every env step of one env."""
NET = (256, 256)
WARM_UP, TIMED = 300, 1000
"""Env steps before the clock starts, in which code is compiled, and those that it counts."""
MUJOCO_STEPS, MUJOCO_STARTS = 100_000, 10_000
BARS = {
    "Pendulum-v1": (-160.0, -157.0),
    "MountainCarContinuous-v0": (94.0, 94.7),
    "LunarLanderContinuous-v3": (250.0, 260.0),
    "BipedalWalker-v3": (290.0, 298.0),
}
"""The return that a recipe has to reach within its steps, and what rl-zoo reports for SAC."""
FEW_SEEDS = {"LunarLanderContinuous-v3": 2, "BipedalWalker-v3": 2}
"""Envs whose runs are long."""
EPISODES = 100
RESULTS = FOLDER / "sac.json"


def flatout_agent(env: str, seed: int, starts: int) -> Any:
    """flatout's SAC."""
    import flatout

    how: dict[str, Any] = {"n_envs": 1, "n_steps": 1, "train_ratio": 1.0, "learning_starts": starts}
    how |= {"network_arch": NET, "activation": "relu", "overlap": "off", "executor": "serial"}
    return flatout.SAC(env, preset="auto", seed=seed, **SETTINGS, **how)


def sb3_agent(env: str, seed: int, starts: int, *, n_threads: int) -> Any:
    """Stable-Baselines3's SAC."""
    import torch
    from stable_baselines3 import SAC

    torch.set_num_threads(n_threads)
    return SAC("MlpPolicy", env, learning_starts=starts, seed=seed, device="cpu", **SETTINGS)


def sbx_agent(env: str, seed: int, starts: int) -> Any:
    """SBX's SAC."""
    from sbx import SAC

    return SAC("MlpPolicy", env, learning_starts=starts, seed=seed, **SETTINGS)


AGENTS: dict[str, Callable[[str, int, int], Any]] = {
    "flatout": flatout_agent,
    "Stable-Baselines3, 1 thread": partial(sb3_agent, n_threads=1),
    "Stable-Baselines3, 2 threads": partial(sb3_agent, n_threads=2),
    "SBX": sbx_agent,
}


def speed(library: str, env: str, seed: int) -> dict[str, float]:
    """Updates/s of training: one update after every env step, with all that belongs to it."""
    agent = AGENTS[library](env, seed, 100)
    agent.learn(WARM_UP)
    began = perf_counter()
    agent.learn(TIMED, reset_num_timesteps=False) if library != "flatout" else agent.learn(TIMED)
    return {"rate": TIMED / (perf_counter() - began)}


def mujoco(library: str, env: str, seed: int) -> dict[str, float]:
    """The deterministic policy's return after as many steps at equal settings."""
    agent = AGENTS[library](env, seed, MUJOCO_STARTS)
    began = perf_counter()
    agent.learn(MUJOCO_STEPS)
    seconds = perf_counter() - began
    if library == "flatout":
        return {"return": agent.evaluate(EPISODES).return_mean, "seconds": seconds}
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    mean: Any = evaluate_policy(agent, make_vec_env(env, 10, seed=seed + 1000), EPISODES)[0]
    return {"return": float(mean), "seconds": seconds}


def recipe(library: str, env: str, seed: int) -> dict[str, float]:  # noqa: ARG001
    """The return of flatout's recipe after its own number of steps."""
    import flatout

    agent = flatout.SAC(env, seed=seed).learn()
    seconds, steps = agent.summary["wall_seconds"], agent.summary["env_steps"]
    return {"return": agent.evaluate(EPISODES).return_mean, "seconds": seconds, "steps": steps}


CASES: dict[str, Callable[[str, str, int], dict[str, float]]] = {
    "speed": speed,
    "mujoco": mujoco,
    "returns": recipe,
}


def in_a_process(case: str, library: str, env: str, seed: int) -> dict[str, float]:
    """One run in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.sac", "--one", case, library, env, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case} {library} {env}: {done.stderr.strip().splitlines()[-1]}")
    out: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(case, library, env, seed, out, flush=True)
    return out


def kept(case: str, library: str, env: str, seed: int) -> dict[str, float]:
    """A run that may have been made before."""
    key = f"{case} {library} {env} {seed}"
    if key not in read(RESULTS):
        add(RESULTS, key, in_a_process(case, library, env, seed))
    return read(RESULTS)[key]


def speed_section(envs: list[str], rounds: int) -> str:
    """Updates/s, and the medians of the ratios within a round."""
    peers, rows = ["Stable-Baselines3", "SBX"], []
    libraries = [name for name in AGENTS if name != "SBX" or find_spec("sbx")]
    for env in envs:
        found: dict[str, list[float]] = {"flatout": [], "Stable-Baselines3": [], "SBX": []}
        for seed in range(1, rounds + 1):
            rates = {name: in_a_process("speed", name, env, seed)["rate"] for name in libraries}
            found["flatout"].append(rates["flatout"])
            found["Stable-Baselines3"].append(max(v for name, v in rates.items() if "Stable" in name))
            found["SBX"] += [rates["SBX"]] if "SBX" in rates else []
        ratios = [
            f"{statistics.median(a / b for a, b in zip(found['flatout'], found[peer], strict=True)):.2f} ×"
            if found[peer]
            else "–"
            for peer in peers
        ]
        medians = [f"{statistics.median(found[name]):.0f}" if found[name] else "–" for name in found]
        rows.append([env, *medians, *ratios])
    header = [
        "updates/s",
        "flatout",
        "Stable-Baselines3",
        "SBX",
        "flatout ÷ Stable-Baselines3",
        "flatout ÷ SBX",
    ]
    return f"""## SAC: updates
`python -m benchmarks.sac --cases speed`: one env, one update of 256 after every env step, 256-256 networks; updates/s of whole
training. {rounds} rounds, alternating, each run in a new process; medians, and the medians of the ratios within a round.
Stable-Baselines3 with the better of one and two torch threads. {conditions()}

{table(header, rows)}
"""


def returns_section(case: str, envs: list[str], rounds: int) -> str:
    """Returns by seed."""
    libraries = ["flatout"] if case == "returns" else ["flatout", "SBX"]
    rows = []
    for env in envs:
        for library in libraries:
            n_seeds = min(rounds, FEW_SEEDS.get(env, rounds))
            runs = [kept(case, library, env, seed) for seed in range(1, n_seeds + 1)]
            returns = " ".join(f"{run['return']:,.1f}" for run in runs)
            steps = f"{runs[0].get('steps', MUJOCO_STEPS):,.0f}"
            bar = "{:g} ({:g})".format(*BARS[env]) if case == "returns" else "–"
            seconds = f"{statistics.median(run['seconds'] for run in runs):,.0f}"
            rows.append([env, library, steps, returns, bar, seconds])
    what = (
        f"the settings of the updates above, {MUJOCO_STEPS:,} steps"
        if case == "mujoco"
        else "the recipes; in brackets what rl-zoo reports"
    )
    header = ["env", "", "steps", f"return over {EPISODES} episodes, by seed", "bar", "seconds"]
    title = "MuJoCo" if case == "mujoco" else "recipes"
    return f"""## SAC: {title}
`python -m benchmarks.sac --cases {case}`: {what}. Several runs side by side, which the seconds include. {conditions()}

{table(header, rows)}
"""


def main() -> None:
    """Run the cases and write their sections."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="speed,mujoco,returns")
    parser.add_argument("--envs", help="of the cases; default: their own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        case, library, env, seed = args.one
        print(json.dumps(CASES[case](library, env, int(seed))))
        return
    own = {
        "speed": ["Pendulum-v1", "HalfCheetah-v5"],
        "mujoco": ["HalfCheetah-v5", "Hopper-v5"],
        "returns": list(BARS),
    }
    for case in args.cases.split(","):
        envs = args.envs.split(",") if args.envs else own[case]
        section = (
            speed_section(envs, args.rounds) if case == "speed" else returns_section(case, envs, args.rounds)
        )
        if case != "speed" and args.envs:
            print(section)  # a piece
        else:
            write_section(f"sac-{case}", section)


if __name__ == "__main__":
    main()
