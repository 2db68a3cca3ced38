"""`flatout init NAME`, `flatout list` and `flatout completion SHELL`."""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import gymnasium as gym

from flatout.algorithms import base as algorithms
from flatout.cli.main import VERBS
from flatout.cli.parser import Parser
from flatout.config.fields import all_fields
from flatout.config.run_config import RunConfig
from flatout.errors import FlatoutError, did_you_mean
from flatout.runlog.files import write_text

TEMPLATE = Path(__file__).with_name("template")
LISTS = ("envs", "algorithms", "recipes", "presets")
SHELLS = ("bash", "zsh", "fish")
SHORT_NAMES = ("snake", "crawl", "mission", "market")
Lines: TypeAlias = builtins.list[str]  # `list` is a verb here
WITH_SETTINGS = ("train", "doctor", "tune", "sweep")


def init(argv: Sequence[str]) -> int:
    """Write an env with a test into a new folder and train it; returns the exit code."""
    parser = Parser(
        "init", "Write an env of your own with a test into the folder NAME, and train it for some seconds."
    )
    parser.flag("name", "name of the folder and of the env, such as maze", metavar="NAME")
    parser.flag("--no-train", "only write the files")
    args = parser.parse(argv)
    folder = Path(args.name)
    if not re.fullmatch(r"[A-Za-z]\w*", folder.name):
        raise FlatoutError(f"'{folder.name}' cannot be a Python name; use letters, digits and underscores")
    if folder.exists():
        raise FlatoutError(f"'{folder}' exists already; give another name")
    env = "".join(part.capitalize() for part in folder.name.split("_"))
    for name in ("env.py", "test_env.py"):
        text = (TEMPLATE / f"{name}.txt").read_text().replace("MyEnv", env)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, text)
        print(f"{folder / name}: {len(text.splitlines())} lines")
    source, run = f"{folder / 'env.py'}:{env}", folder / "runs" / "first"
    if not args.no_train:
        from flatout.cli.train import train

        print()
        where = ["--runs-dir", str(run.parent), "--run-name", run.name]
        code = train([source, "--timesteps", "20000", "--n-envs", "8", *where])
        if code:
            return code
    hints = {
        f"flatout train {source}": "train it for longer",
        f"flatout doctor {source}": "what limits its speed",
        f"python -m pytest {folder}": "test it",
    }
    width = max(map(len, hints))
    print("\n" + "\n".join(f"  {command:<{width}}  {text}" for command, text in hints.items()))
    return 0


def list(argv: Sequence[str]) -> int:
    """Print what there is; returns the exit code."""
    parser = Parser("list", "Envs, algorithms, recipes and presets that flatout knows.")
    parser.flag("what", "envs, algorithms, recipes or presets (all of them)", nargs="?", metavar="WHAT")
    what = parser.parse(argv).what
    if what is not None and what not in LISTS:
        raise FlatoutError(
            f"there is no list of '{what}'; there are {', '.join(LISTS)}{did_you_mean(what, LISTS)}"
        )
    for name in LISTS if what is None else (what,):
        print(f"{name}\n" + "\n".join(f"  {line}" for line in LINES[name]()) + "\n")
    return 0


def _envs() -> Lines:
    tuned = {env for name in algorithms.names() for env in algorithms.get(name).recipes}
    own = [f"{name:<28}comes with flatout" for name in SHORT_NAMES]
    others = sorted(
        name for name in gym.registry if not name.startswith(("flatout/", "phys2d/", "tabular/", "GymV"))
    )
    return [*own, *(f"{name:<28}{'tuned' if name in tuned else ''}".rstrip() for name in others)]


def _algorithms() -> Lines:
    shown = []
    for name in algorithms.names():
        kind = "off-policy, with a replay buffer" if algorithms.get(name).config.USES_REPLAY else "on-policy"
        shown.append(f"--algo {name:<21}{kind}")
    return shown


def _recipes() -> Lines:
    found = []
    for name in algorithms.names():
        for env, recipe in algorithms.get(name).recipes.items():
            widths = ",".join(map(str, recipe.network.network_arch))
            found.append(
                f"{env:<28}--algo {name:<14}{recipe.n_envs} envs, {recipe.timesteps:,} steps, network {widths}"
            )
    return found


def _presets() -> Lines:
    found = [f"{'auto':<28}measured on this machine: the default"]
    for name in algorithms.names():
        for preset, it in algorithms.get(name).presets.items():
            widths, steps = ",".join(map(str, it.network.network_arch)), it.algorithm.n_steps
            text = f"{it.n_envs} envs × {steps} steps, batch {it.algorithm.batch_size}, network {widths}"
            found.append(f"{preset:<28}--algo {name:<14}{text}")
    return found


LINES = {"envs": _envs, "algorithms": _algorithms, "recipes": _recipes, "presets": _presets}


def completion(argv: Sequence[str]) -> int:
    """Print a completion script; returns the exit code."""
    parser = Parser(
        "completion",
        "Shell completion. bash: flatout completion bash > ~/.local/share/bash-completion/completions/flatout; zsh: eval "
        '"$(flatout completion zsh)" in ~/.zshrc; fish: flatout completion fish > ~/.config/fish/completions/flatout.fish',
    )
    parser.flag("shell", "bash, zsh or fish", metavar="SHELL")
    shell = parser.parse(argv).shell
    if shell not in SHELLS:
        raise FlatoutError(
            f"there is no completion for '{shell}'; there are {', '.join(SHELLS)}{did_you_mean(shell, SHELLS)}"
        )
    print(_fish() if shell == "fish" else _bash(zsh=shell == "zsh"))
    return 0


def _flags() -> Lines:
    return sorted(
        {field.flag for field in all_fields(RunConfig) if field.name != "env"}
        | {"--config", "--run-name", "--runs-dir", "--quiet", "--json"}
    )


def _env_names() -> Lines:
    return [*SHORT_NAMES, *sorted(name for name in gym.registry if ":" not in name)]


def _bash(*, zsh: bool) -> str:
    head = "autoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    return f"""{head}_flatout() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" verb="${{COMP_WORDS[1]}}"
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(VERBS)}" -- "$word"))
    return
  fi
  case "$verb" in
    {"|".join(WITH_SETTINGS)})
      if [ "${{word#-}}" != "$word" ]; then
        COMPREPLY=($(compgen -W "{" ".join(_flags())}" -- "$word"))
      elif [ "$COMP_CWORD" -eq 2 ]; then
        COMPREPLY=($(compgen -W "{" ".join(_env_names())}" -- "$word") $(compgen -f -- "$word"))
      fi ;;
    list) COMPREPLY=($(compgen -W "{" ".join(LISTS)}" -- "$word")) ;;
    completion) COMPREPLY=($(compgen -W "{" ".join(SHELLS)}" -- "$word")) ;;
    *) COMPREPLY=($(cd runs 2>/dev/null && compgen -d -- "$word") $(compgen -f -- "$word")) ;;
  esac
}}
complete -o default -F _flatout flatout"""


def _fish() -> str:
    lines = [
        f"complete -c flatout -n __fish_use_subcommand -f -a {verb} -d '{text}'"
        for verb, (_, text) in VERBS.items()
    ]
    seen = f"__fish_seen_subcommand_from {' '.join(WITH_SETTINGS)}"
    lines += [f"complete -c flatout -n '{seen}' -l {flag[2:]}" for flag in _flags()]
    lines.append(f"complete -c flatout -n '{seen}' -a '{' '.join(_env_names())}'")
    lines.append(f"complete -c flatout -n '__fish_seen_subcommand_from list' -f -a '{' '.join(LISTS)}'")
    return "\n".join(lines)
