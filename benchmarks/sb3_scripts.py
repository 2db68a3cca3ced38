"""The scripts of tests/sb3/scripts, with flatout and with Stable-Baselines3 itself: wall time and return of each.

    python -m benchmarks.sb3_scripts [NAME …] [--steps N]

Each script runs in a process of its own, with as many steps as the documentation has, at most `--steps`. The only
difference between the two is the import of the algorithm.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "tests" / "sb3" / "scripts" / "mapped"
RESULTS = Path(__file__).parent / "results" / "sb3_scripts.json"
STOPS_ITSELF = ("max_episodes", "no_improvement", "reward_threshold")
"""Scripts that end by a callback: always with their own number of steps."""
TIMED = """
import atexit, json, time
_began = time.perf_counter()

def _tell():
    models = [it for it in globals().values() if hasattr(it, "ep_info_buffer")]
    found = models[-1] if models else None
    returns = [episode["r"] for episode in (found.ep_info_buffer or ())] if found is not None else []
    mean = sum(returns) / len(returns) if returns else None
    print("RESULT " + json.dumps({"seconds": time.perf_counter() - _began, "return": mean, "steps": getattr(found, "num_timesteps", None)}))

atexit.register(_tell)
"""


def run(script: Path, library: str, steps: int | None) -> dict[str, float | None]:
    """Wall time from the first import, the mean return of the last episodes, and the env steps; of one process."""
    text = script.read_text().replace("from flatout.sb3 import", f"from {library} import")
    if steps is not None and script.stem not in STOPS_ITSELF:
        text = re.sub(r"^STEPS = (.*)$", rf"STEPS = min(\1, {steps})", text, flags=re.M)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"script_{script.name}")
        file.write_text(TIMED + text)
        done = subprocess.run(
            [sys.executable, file.name], cwd=folder, capture_output=True, text=True, check=False
        )
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("RESULT ") and done.returncode == 0:
            found: dict[str, float | None] = json.loads(line.removeprefix("RESULT "))
            return found
    return {"seconds": None, "return": None, "steps": None}


def main() -> None:
    """Run the scripts and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument(
        "--steps", type=int, help="at most that many env steps, except where a callback ends the script"
    )
    args = parser.parse_args()
    rows = []
    print("| script | steps | flatout | Stable-Baselines3 | return | its return |\n|---|---|---|---|---|---|")
    for script in sorted(SCRIPTS.glob("*.py")):
        if args.names and script.stem not in args.names:
            continue
        ours, theirs = (run(script, library, args.steps) for library in ("flatout.sb3", "stable_baselines3"))
        rows.append({"script": script.stem, "flatout": ours, "sb3": theirs})
        cells = [_shown(it["seconds"], " s") for it in (ours, theirs)] + [
            _shown(it["return"]) for it in (ours, theirs)
        ]
        print(f"| {script.stem} | {_shown(ours['steps'])} | {' | '.join(cells)} |", flush=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


def _shown(value: float | None, unit: str = "") -> str:
    if value is None:
        return "failed" if unit else ""
    return f"{value:,.1f}{unit}" if unit else f"{value:,.0f}"


if __name__ == "__main__":
    main()
