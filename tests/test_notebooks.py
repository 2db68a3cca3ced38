"""The notebooks of docs/notebooks run from top to bottom, with few steps, and show what they say."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
STEPS = {"first_steps": 4_000, "your_own_env": 12_000, "finding_the_bottleneck": 500}


@cache
def executed(name: str) -> list[Any]:
    """The code cells of a notebook after it was run in a kernel of its own."""
    import nbformat
    from nbclient import NotebookClient

    notebook: Any = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    for cell in notebook.cells:
        assert not cell.get("outputs"), "notebooks are committed without outputs"
        cell.source = re.sub(r"^STEPS = .*", f"STEPS = {STEPS[name]}", cell.source, flags=re.MULTILINE)
    os.environ["PYTHONPATH"] = f"{FOLDER.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": FOLDER}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell: Any, kind: str = "text/plain") -> str:
    """What a cell shows: its results of one kind, or what it has printed."""
    data = [str(output.data.get(kind, "")) for output in cell.outputs if "data" in output]
    return "\n".join([*data, *(output.text for output in cell.outputs if "text" in output)])


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def test_first_steps() -> None:
    made, learned, curve, report, evaluated, _, loaded = executed("first_steps")
    assert "PPO on CartPole-v1" in shown(made, "text/html")
    (progress,) = learned.outputs  # one output that was updated, and no lines below each other
    assert "\n100 %  4,096 steps" in progress.data["text/plain"]
    assert "<progress value=" in progress.data["text/html"]
    assert 'class="mean ' in shown(curve, "image/svg+xml")
    assert "time went to" in shown(report, "text/html")
    assert "20 episodes" in shown(evaluated, "text/html")
    assert re.search(r"\b[01]\b", shown(loaded))


def test_your_own_env() -> None:
    _, mistake, learned, evaluated, stopped = executed("your_own_env")
    assert "shape" in shown(mistake)
    assert 'class="mean ' in shown(learned, "image/svg+xml")
    assert "50 episodes" in shown(evaluated, "text/html")
    assert "env steps, best" in shown(stopped)


def test_finding_the_bottleneck() -> None:
    _, serial, _, compared, diagnosis = executed("finding_the_bottleneck")
    assert "learner busy" in shown(serial, "text/html")
    slow, fast = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) steps/s", shown(compared)))
    assert fast > 2 * slow
    assert "collecting is the limit" in shown(diagnosis, "text/html")
