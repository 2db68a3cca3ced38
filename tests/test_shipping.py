"""What `python -m build` packs: the whole package and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_wheel_and_the_sdist_hold_the_package_and_nothing_else(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for folder in ("flatout", "tests/views", "simcard"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "tests/test_imports.py"):
        shutil.copy(ROOT / file, tree / file)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(tree)], check=True, capture_output=True)  # the wheel is built from the sdist

    package = {str(file.relative_to(tree)) for file in (tree / "flatout").rglob("*") if file.is_file()}
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    info = f"{wheel.name.partition('-py3')[0]}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == package
    assert {"flatout/py.typed", "flatout/views/page.css", "flatout/cli/template/env.py.txt"} <= package
    assert {f"{info}licenses/LICENSE", f"{info}entry_points.txt"} <= names

    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as unpacked:
        inside = [name.partition("/")[2] for name in unpacked.getnames()]
    assert not [name for name in inside if name.startswith(("tests", "simcard"))]


def test_make_without_the_python_it_wants_says_how_to_name_another(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for file in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, tmp_path)
    done = subprocess.run(
        ["make", "train", "PYTHON=python2.99"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "there is no python2.99; install it, or name another: make train PYTHON=python3.12" in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_make_check_reads_all_folders_of_the_project_and_no_envs_of_users() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py", "*.ipynb"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone")
    folders = {name.partition("/")[0] for name in listed.stdout.splitlines()}
    commands = subprocess.run(["make", "-n", "check"], cwd=ROOT, capture_output=True, text=True, check=True)
    words = next(line for line in commands.stdout.splitlines() if "ruff check" in line).split()
    assert set(words[words.index("--quiet") + 1 :]) == folders
