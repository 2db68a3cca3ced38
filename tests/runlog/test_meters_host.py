from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from flatout.runlog import meters
from flatout.runlog.meters import HostMeter, HostSample

IDLE = "import time; print(flush=True); time.sleep(600)"
BUSY = "print(flush=True)\nwhile True: pass"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {IDLE!r}])"

Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[subprocess.Popen[bytes]] = []

    def start_one(code: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()  # it runs, or what it started does
        return child

    yield start_one
    for child in children:
        for process in [*psutil.Process(child.pid).children(), child] if child.poll() is None else []:
            process.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def own_children() -> int:
    return len(psutil.Process().children(recursive=True))


def test_the_machine_is_read(start: Start) -> None:
    meter = HostMeter()
    time.sleep(0.1)
    sample = meter.read()
    assert len(sample.cores) == psutil.cpu_count()
    assert all(0 <= load <= 100 for load in sample.cores)
    assert sample.run_memory > 0
    assert 0 < sample.memory <= psutil.virtual_memory().total


def test_children_and_their_children_count(start: Start) -> None:
    alone = HostMeter().read()
    n_before = own_children()
    start(IDLE)
    start(PARENT)
    sample = HostMeter().read()
    assert sample.n_processes == 1 + n_before + 3
    assert sample.run_memory > alone.run_memory


def test_a_busy_child_shows_in_the_load(start: Start) -> None:
    start(BUSY)
    meter = HostMeter()
    assert wait_for(meter, lambda sample: (sample.run_cpu or 0) > 5)


def test_a_child_that_is_killed_is_left_out(start: Start) -> None:
    child = start(IDLE)
    meter = HostMeter()
    n_before = meter.read().n_processes
    child.kill()
    child.wait()
    sample = meter.read()
    assert sample.n_processes == n_before - 1
    assert sample.run_cpu is not None


def test_a_zombie_child_counts_no_memory(start: Start) -> None:
    child = start(IDLE)
    meter = HostMeter(child.pid)
    assert meter.read().run_memory > 0
    child.kill()
    assert wait_for(meter, lambda sample: sample.run_memory == 0)


def test_a_new_child_is_found_once_the_list_is_renewed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = HostMeter()
    n_before = meter.read().n_processes
    start(IDLE)
    monkeypatch.setattr(meters, "TREE_SECONDS", 0.0)
    assert meter.read().n_processes == n_before + 1


def test_a_process_that_has_ended_gives_no_values(start: Start) -> None:
    child = start(IDLE)
    meter = HostMeter(child.pid)
    child.kill()
    child.wait()
    sample = meter.read()
    assert (sample.n_processes, sample.run_memory) == (0, 0)


def wait_for(meter: HostMeter, holds: Callable[[HostSample], bool]) -> bool:
    """Whether a sample soon fulfils the condition."""
    for _ in range(200):
        time.sleep(0.05)
        if holds(meter.read()):
            return True
    return False
