"""Walk through the code as a short training run does: the files and functions it enters, in order, by stage.

    python tools/walk.py                        # CartPole, serial, lockstep
    python tools/walk.py --files                # the files only
    python tools/walk.py LunarLander-v3 --n-collectors 2

A profiler hook sees every Python function of the package that the main thread calls. `start` ends with the first
iteration, `iteration` is an iteration in the middle of the run, `end` is what follows the last one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FIRST, LAST = 3, 20
"""The iterations that are shown as one: recording is due only every so many seconds, so one alone may lack it."""


@dataclass
class Stage:
    """What one stage of the run entered, in order."""

    name: str
    functions: dict[CodeType, None] = field(default_factory=dict)
    files: dict[str, None] = field(default_factory=dict)
    ways: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of files: control went from the first to the second, by a call or a return."""

    def enter(self, code: CodeType, file: str) -> None:
        """Record a call."""
        self.functions.setdefault(code)
        self.files.setdefault(file)


class Walk:
    """The profiler hook: sorts what the main thread enters into stages."""

    def __init__(self, package: Path) -> None:
        self._package = f"{package}/"
        self._files: dict[str, str | None] = {}
        self._n_iterations = 0
        self.start, self.iteration, self.end = Stage("start"), Stage("iteration"), Stage("end")
        self._stage = self.start

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Called by the interpreter at every call and return."""
        code = frame.f_code
        file = self._file(code)
        if file is None or not code.co_flags & CO_OPTIMIZED or self._importing(frame):
            return
        if event == "call":
            self._follow(code, file)
            self._stage.enter(code, file)
        if event in ("call", "return"):
            caller = self._caller(frame)
            if caller not in (None, file):
                self._stage.ways.add((caller, file) if event == "call" else (file, caller))
        if event == "return" and self._is_iterate(code, file) and self._n_iterations > LAST:
            self._stage = self.end = Stage("end")

    def _follow(self, code: CodeType, file: str) -> None:
        """Change the stage where an iteration begins."""
        if self._is_iterate(code, file):
            self._n_iterations += 1
            shown = FIRST <= self._n_iterations <= LAST
            self._stage = self.iteration if shown else Stage("not shown")

    def _importing(self, frame: FrameType) -> bool:
        """Whether a module of the package is being imported: a reader does not follow what that runs."""
        above = frame.f_back
        while above is not None:
            if above.f_code.co_name == "<module>" and self._file(above.f_code) is not None:
                return True
            above = above.f_back
        return False

    def _is_iterate(self, code: CodeType, file: str) -> bool:
        return code.co_name == "iterate" and file.endswith(("pipeline.py", "trainer.py", "run.py"))

    def _caller(self, frame: FrameType) -> str | None:
        """The file of the nearest caller inside the package."""
        above = frame.f_back
        while above is not None:
            file = self._file(above.f_code)
            if file is not None:
                return file
            above = above.f_back
        return None

    def _file(self, code: CodeType) -> str | None:
        name = code.co_filename
        if name not in self._files:
            self._files[name] = name.removeprefix(self._package) if name.startswith(self._package) else None
        return self._files[name]


def show(stage: Stage, *, files_only: bool) -> None:
    """Print a stage: its files in order, and under each its functions."""
    n_lines = f"{len(stage.files)} files, {len(stage.ways)} ways from one file to another"
    print(f"\n{stage.name}: {n_lines}, {len(stage.functions)} functions")
    for file in stage.files:
        print(f"  {file}")
        if files_only:
            continue
        for code in stage.functions:
            if code.co_filename.endswith(f"/{file}"):
                print(f"      {code.co_firstlineno:4d}  {code.co_qualname}")


def main() -> None:
    """Run a training under the hook and print the stages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("env", nargs="?", default="CartPole-v1")
    parser.add_argument("--files", action="store_true", help="the files only, without their functions")
    args, flags = parser.parse_known_args()
    flags = flags or ["--executor", "serial", "--overlap", "off", "--n-envs", "8", "--n-steps", "32"]
    cli = importlib.import_module("flatout.cli.main")
    walk = Walk(Path(str(cli.__file__)).parents[1])
    with tempfile.TemporaryDirectory() as runs:
        command = ["train", args.env, "--quiet", "--timesteps", "8192", "--runs-dir", runs, *flags]
        sys.setprofile(walk)
        try:
            code = cli.run(command)
        finally:
            sys.setprofile(None)
    if code:
        sys.exit(code)
    print(f"flatout {' '.join(command)}")
    for stage in (walk.start, walk.iteration, walk.end):
        show(stage, files_only=args.files)


if __name__ == "__main__":
    main()
