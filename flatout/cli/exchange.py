"""`flatout export RUN` and `flatout import sb3 MODEL.zip`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatout.cli.parser import Parser, add_trust, check_exists, run_parser, run_path
from flatout.errors import FlatoutError, did_you_mean

ALL = "all"


def export(argv: Sequence[str]) -> int:
    """Write a trained policy in one or all formats; returns the exit code."""
    parser = run_parser(
        "export",
        "Write a trained policy for other programs. It acts without exploring, takes observations as the env gives them "
        "and returns actions as the env takes them, in batches of any size.",
        "a run's folder, its name in --runs-dir, or a .flatout file",
    )
    parser.flag("--format", "onnx, safetensors, torch, numpy or all (all)", default=ALL, metavar="FORMAT")
    parser.flag("--out", "file, or folder for policy.* (RUN/export)", type=Path, metavar="PATH")
    parser.flag("--best", "export the best checkpoint, not the newest")
    parser.flag("--network", "where its own network is now, if elsewhere", metavar="FILE.py:NAME")
    add_trust(parser)
    args = parser.parse(argv)
    path = run_path(args.run, args.runs_dir)
    source = path / "checkpoints" / "best.flatout" if args.best else path
    check_exists(source)

    from flatout.agent import load
    from flatout.integrations.export import FORMATS
    from flatout.integrations.export import export as write

    if args.format not in (ALL, *FORMATS):
        known = [*FORMATS, ALL]
        near = did_you_mean(args.format, known)
        raise FlatoutError(f"--format is '{args.format}'; it must be one of {', '.join(known)}{near}")
    code = {"network": args.network} if args.network is not None else {}
    agent = load(source, trust=args.trust, **code)
    folder = path / "export" if path.is_dir() else path.with_suffix("")
    if args.format != ALL:
        suffix, _ = FORMATS[args.format]
        is_file = args.out is not None and args.out.suffix and not args.out.is_dir()
        out = args.out if is_file else (args.out or folder) / f"policy{suffix}"
        _tell(out, write(agent.policy, args.format, out))
        return 0
    folder, n_written = args.out or folder, 0
    for form, (suffix, _) in FORMATS.items():
        out = folder / f"policy{suffix}"
        try:
            _tell(out, write(agent.policy, form, out))
            n_written += 1
        except FlatoutError as error:
            print(f"note: no {out.name}: {error}")
    return 0 if n_written else 1


def _tell(out: Path, worst: float) -> None:
    if out.suffix == ".safetensors":
        checked = "the parameters themselves"
    else:
        checked = (
            f"differs by at most {worst:.1e} over 1,000 observations"
            if worst
            else "equal over 1,000 observations"
        )
    print(f"{out}: {out.stat().st_size:,} bytes, {checked}")


def import_(argv: Sequence[str]) -> int:
    """Write a model of another library as a checkpoint; returns the exit code."""
    parser = Parser(
        "import", "Read a PPO, DQN or SAC model of Stable-Baselines3 as an agent that acts the same."
    )
    parser.flag("library", "sb3", metavar="sb3")
    parser.flag("model", "the zip that model.save() wrote", type=Path, metavar="MODEL.zip")
    parser.flag("--trust", "read the pickles in it, which can run any code")
    parser.flag("--env", "its env, for evaluating and further training; a zip does not say it", metavar="ENV")
    parser.flag("--out", "file for the agent (MODEL.flatout)", type=Path, metavar="FILE")
    args = parser.parse(argv)
    if args.library != "sb3":
        raise FlatoutError(f"cannot import from '{args.library}'; there is sb3")
    if args.env is not None:
        from flatout.envs.make import env_factory

        env_factory(args.env)

    from flatout.sb3.imported import import_model
    from flatout.training.checkpoint import write

    out = args.out or args.model.with_suffix(".flatout")
    write(out, import_model(args.model, trust=args.trust, env=args.env))
    print(
        f"{out}: load it with flatout.load({str(out)!r})"
        + (f" or flatout evaluate {out}" if args.env else "")
    )
    return 0
