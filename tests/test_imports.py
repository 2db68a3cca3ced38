"""Imports go down only and without cycles, and the training column never imports the observing column.

Files are parsed with `ast`, not imported, so imports inside functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flatout"

# From the top down; a room may import itself, its neighbours on the same floor, and what is below.
FLOORS = [
    {"cli", "__main__"},
    {"__init__"},
    {"scale"},
    {"advice"},
    {"sb3"},
    {"agent"},
    {"training"},
    {"views", "integrations"},
    {"vector"},
    {"perf"},
    {"runlog"},
    {"config"},
    {"algorithms"},
    {"learning"},
    {"collect"},
    {"buffers"},
    {"executors"},
    {"models"},
    {"workloads"},
    {"envs"},
    {"device"},
    {"timing"},
    {"errors"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
TRAINING = {"algorithms", "learning", "collect", "buffers", "executors", "models", "envs", "workloads"}
OBSERVING = {"runlog", "views", "integrations"}
MAY_IMPORT_THE_API = {"cli", "__main__"}
HOST_SYNCS = {"item", "cpu", "numpy"}


@dataclass(frozen=True)
class Import:
    file: str
    module: str
    target: str
    """the module that is imported, as exactly as the tree can tell"""
    source: str
    """what stands after `from` or `import`, made absolute"""

    def __str__(self) -> str:
        return f"{self.file}: imports {self.target}"


def room(module: str) -> str:
    """The room of a dotted module name; the package itself is `__init__`."""
    return module.split(".")[1] if "." in module else "__init__"


def modules(package: Path) -> dict[str, Path]:
    """Every module under `package` by its dotted name."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imports(package: Path) -> list[Import]:
    """Every import of one of the package's modules by another."""
    known = modules(package)
    found = []
    for module, file in known.items():
        name = file.relative_to(package.parent).as_posix()
        inside = module if file.stem == "__init__" else module.rpartition(".")[0]
        for source, target in _statements(ast.parse(file.read_text()), inside, known):
            if target.split(".")[0] == package.name:
                found.append(Import(name, module, target, source))
    return found


def _statements(tree: ast.AST, inside: str, known: dict[str, Path]) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            parents = inside.split(".")
            above = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                target = f"{source}.{alias.name}"
                yield source, target if target in known else source


def without_room(package: Path) -> list[str]:
    """Modules in a room that no floor has."""
    known = modules(package).items()
    return [
        f"{file.relative_to(package.parent).as_posix()}: is on no floor"
        for m, file in known
        if room(m) not in FLOOR
    ]


def upward(package: Path) -> list[str]:
    """Imports of a module on a higher floor."""
    lowest = len(FLOORS)
    found = imports(package)
    return [str(i) for i in found if FLOOR.get(room(i.target), lowest) < FLOOR.get(room(i.module), lowest)]


def of_the_api(package: Path) -> list[str]:
    """Imports of the package itself by its inside."""
    found = imports(package)
    return [str(i) for i in found if i.source == package.name and room(i.module) not in MAY_IMPORT_THE_API]


def of_the_workloads(package: Path) -> list[str]:
    """Imports of the envs that come with flatout; only `__init__` imports them, to register them."""
    outside = [i for i in imports(package) if room(i.module) not in ("workloads", "__init__")]
    return [str(i) for i in outside if room(i.target) == "workloads"]


def across(package: Path) -> list[str]:
    """Imports of the observing column by the training column."""
    return [str(i) for i in imports(package) if room(i.module) in TRAINING and room(i.target) in OBSERVING]


def circular(package: Path) -> list[str]:
    """Imports that lead back to the importing module."""
    found = imports(package)
    below: dict[str, set[str]] = {}
    for i in found:
        below.setdefault(i.module, set()).add(i.target)
    return [str(i) for i in found if _reaches(i.target, i.module, below)]


def _reaches(start: str, goal: str, below: dict[str, set[str]]) -> bool:
    seen: set[str] = set()
    ahead = {start}
    while ahead:
        if goal in ahead:
            return True
        seen |= ahead
        ahead = set().union(*(below.get(module, set()) for module in ahead)) - seen
    return False


def waits_for_the_device(package: Path) -> list[str]:
    """Calls in the update's code that make the host wait, or print."""
    found = []
    files = [*sorted(package.glob("algorithms/**/*.py")), *package.glob("learning/update.py")]
    for file in files:
        if file.stem == "fused":  # runs on the CPU alone
            continue
        calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        syncs = [
            f".{call.attr}()" for call in calls if isinstance(call, ast.Attribute) and call.attr in HOST_SYNCS
        ]
        prints = ["print()" for call in calls if isinstance(call, ast.Name) and call.id == "print"]
        found += [f"{file.relative_to(package.parent).as_posix()}: calls {name}" for name in syncs + prints]
    return found


CHECKS = [without_room, upward, of_the_api, of_the_workloads, across, circular, waits_for_the_device]


@pytest.mark.parametrize("check", CHECKS)
def test_the_package_has_no_violation(check: Callable[[Path], list[str]]) -> None:
    assert len(imports(PACKAGE)) > 10
    violations = check(PACKAGE)
    assert not violations, "\n" + "\n".join(violations)


def make_package(parent: Path, files: dict[str, str]) -> Path:
    """A `flatout` of the given files, with an `__init__.py` in each folder."""
    package = parent / "flatout"
    for name, text in files.items():
        file = package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in (package, file.parent):
            (folder / "__init__.py").touch()
        file.write_text(text)
    return package


SOUND = {
    "__init__.py": "from flatout.agent import PPO",
    "__main__.py": "import flatout\nfrom flatout.cli.train import main",
    "cli/train.py": "from flatout import PPO",
    "agent.py": "from .learning.learner import Learner\nimport torch",
    "learning/__init__.py": "from .learner import Learner",
    "learning/learner.py": "from . import update\nfrom ..errors import FlatoutError",
    "learning/update.py": "import flatout.errors as errors\nx = errors.cpu\ny = print",
    "errors.py": "import numpy",
}


@pytest.mark.parametrize("check", CHECKS)
def test_a_sound_package_has_no_violation(check: Callable[[Path], list[str]], tmp_path: Path) -> None:
    assert check(make_package(tmp_path, SOUND)) == []


@pytest.mark.parametrize(
    ("check", "files", "expected"),
    [
        (
            without_room,
            {"attic/box.py": ""},
            ["attic/__init__.py: is on no floor", "attic/box.py: is on no floor"],
        ),
        (
            upward,
            {"envs/a.py": "from flatout.learning.learner import x"},
            ["envs/a.py: imports flatout.learning.learner"],
        ),
        (
            upward,
            {"envs/a.py": "from ..learning import update"},
            ["envs/a.py: imports flatout.learning.update"],
        ),
        (
            upward,
            {"envs/a.py": "def f():\n    import flatout.training.trainer"},
            ["envs/a.py: imports flatout.training.trainer"],
        ),
        (
            upward,
            {"envs/a.py": "if TYPE_CHECKING:\n    from ..training.trainer import x"},
            ["envs/a.py: imports flatout.training.trainer"],
        ),
        (
            upward,
            {"envs/a/b.py": "from ...training.trainer import x"},
            ["envs/a/b.py: imports flatout.training.trainer"],
        ),
        (of_the_api, {"run.py": "import flatout"}, ["run.py: imports flatout"]),
        (of_the_api, {"run.py": "from flatout import PPO"}, ["run.py: imports flatout"]),
        (of_the_api, {"run.py": "from flatout import errors"}, ["run.py: imports flatout.errors"]),
        (of_the_api, {"run.py": "from . import errors"}, ["run.py: imports flatout.errors"]),
        (
            of_the_workloads,
            {"agent.py": "from flatout.workloads.snake import x", "workloads/snake.py": ""},
            ["agent.py: imports flatout.workloads.snake"],
        ),
        (of_the_workloads, {"__init__.py": "import flatout.workloads", "workloads/a.py": ""}, []),
        (
            across,
            {"learning/a.py": "from flatout.runlog.csv import x"},
            ["learning/a.py: imports flatout.runlog.csv"],
        ),
        (
            across,
            {"envs/a.py": "from flatout import runlog", "runlog/a.py": ""},
            ["envs/a.py: imports flatout.runlog"],
        ),
        (
            circular,
            {
                "envs/a.py": "from .b import x",
                "envs/b.py": "from . import c",
                "envs/c.py": "import flatout.envs.a",
            },
            [
                "envs/a.py: imports flatout.envs.b",
                "envs/b.py: imports flatout.envs.c",
                "envs/c.py: imports flatout.envs.a",
            ],
        ),
        (circular, {"envs/__init__.py": "from .a import x", "envs/a.py": ""}, []),
        (waits_for_the_device, {"algorithms/a.py": "x.sum().item()"}, ["algorithms/a.py: calls .item()"]),
        (waits_for_the_device, {"algorithms/a.py": "x.cpu()"}, ["algorithms/a.py: calls .cpu()"]),
        (waits_for_the_device, {"learning/update.py": "x.numpy()"}, ["learning/update.py: calls .numpy()"]),
        (waits_for_the_device, {"learning/update.py": "print(x)"}, ["learning/update.py: calls print()"]),
        (waits_for_the_device, {"learning/other.py": "print(x.item())"}, []),
    ],
)
def test_each_kind_of_violation_is_found(
    check: Callable[[Path], list[str]], files: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    assert check(make_package(tmp_path, SOUND | files)) == [f"flatout/{line}" for line in expected]


def test_only_the_device_layer_names_a_kind_of_accelerator() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path != PACKAGE / "device" / "accelerator.py":
            for kind in ("cuda", "xpu", "mps"):
                assert f"torch.{kind}" not in path.read_text(), f"{path} names torch.{kind}"
