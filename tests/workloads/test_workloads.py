"""The envs that come with flatout are known to Gymnasium, whoever is imported first."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flatout.workloads.catalog import WORKLOADS


@pytest.mark.parametrize("imports", ["gymnasium, flatout", "flatout, gymnasium", "flatout, torch, gymnasium"])
def test_the_envs_are_registered_in_whichever_order_things_are_imported(imports: str) -> None:
    code = (
        f"import {imports}; print(sorted(name for name in gymnasium.registry if name.startswith('flatout/')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(sorted(workload.env_id for workload in WORKLOADS.values()))


def test_importing_flatout_does_not_import_gymnasium() -> None:
    code = "import sys, flatout; print('gymnasium' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
