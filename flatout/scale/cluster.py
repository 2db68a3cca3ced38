"""Commands of flatout on a Ray cluster: an actor on a machine with room for it runs each, and ends with it.

Ray places commands by the resources that they declare and notices lost processes and machines. Everything else is as on one
machine: a command writes its run's folder, which must be on a disk that all machines of the cluster share.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from flatout.collect.ray_actors import connect, ray_module
from flatout.config.run_config import RunConfig
from flatout.device.machine import usable_cores
from flatout.device.shared import no_processes
from flatout.errors import FlatoutError, one_line
from flatout.perf.demand import Demand, predict
from flatout.runlog.folder import is_locked
from flatout.scale.processes import LIFELINE, POLL_SECONDS, SIGNALS, Processes
from flatout.scale.schedule import Running, Schedule

MARK = ".cluster"
"""Begins the name of a file in the folder of the runs, by which every machine shows that it sees that folder."""
LOCK_SECONDS = 60.0
"""How long to wait for a run's lock: a lost machine may end its processes later than the cluster notices."""
LEAST_CPU = 0.05
"""Of a core, for envs that only wait."""


class RayProcesses(Processes):
    """Commands that run at the same time on the machines of a cluster."""

    def __init__(self, address: str | None, folder: Path) -> None:
        """`folder`: of the runs, on a disk that all machines share. `address`: None for a cluster on this machine."""
        super().__init__()
        self._ray = ray_module()
        self._started_here = connect(self._ray, address, usable_cores())
        word = secrets.token_hex(8)
        self._folder, self._mark = folder, (str(folder / f"{MARK}-{word}"), word)
        Path(self._mark[0]).write_text(self._mark[1])

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def demand(self, config: RunConfig) -> tuple[Demand, str]:
        """What a run needs of the machine that it will have, and the kind of device."""
        has_card = any(node["Resources"].get("GPU") for node in self._nodes())
        device = config.device if config.device != "auto" else "cuda" if has_card else "cpu"
        n_cores = max(config.n_collectors, 1)
        demand = predict(config, n_cores=n_cores, on_device=device != "cpu")
        return replace(demand, cores=max(demand.cores, float(config.n_collectors))), device

    def start(
        self,
        name: str,
        words: Collection[str],
        *,
        cores: Collection[int] = (),
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        demand: Demand | None = None,
        pass_fds: Collection[int] = (),
    ) -> dict[str, Any]:
        """Run `flatout` with these words where there is room for what it demands; returns its identity."""
        assert log is not None, "what it prints is on another machine"
        log.write_text("")
        remote = self._ray.remote(max_restarts=0, max_concurrency=2)(CommandActor)
        actor = remote.options(runtime_env=_environment(), **self._needs(demand)).remote(*self._mark)
        call = list(words), str(log), os.getcwd(), str(self._folder / name)
        self.running[name] = RemoteCommand(self, self._ray, actor, call)
        if self.stopped_by is not None:
            self.stop(name, self.stopped_by)
        # By the clock of the disk on which the run will write.
        return {"pid": None, "created": log.stat().st_mtime}

    def _needs(self, demand: Demand | None) -> dict[str, float]:
        """The resources to declare: those that are predicted, at most what the largest machine has."""
        if demand is None:
            return {"num_cpus": 1}
        totals = [node["Resources"] for node in self._nodes()]
        largest = max(totals, key=lambda it: [it.get(key, 0.0) for key in ("GPU", "CPU", "memory")])
        wanted = {"CPU": max(demand.cores, LEAST_CPU), "GPU": demand.device, "memory": demand.memory}
        needs = {key: min(value, largest.get(key) or value) for key, value in wanted.items()}
        return {
            "num_cpus": round(needs["CPU"], 2) if needs["CPU"] < 1 else int(needs["CPU"]),
            "num_gpus": round(max(needs["GPU"], LEAST_CPU), 2) if needs["GPU"] else 0,
            "memory": int(needs["memory"]),
        }

    def free_cores(self, node: str, cores: Collection[int], n: int) -> list[int]:
        """So many of a machine's cores, those that the fewest commands use."""
        used = [core for it in self.commands() if it.node == node for core in it.cores]
        return sorted(sorted(cores, key=used.count)[:n])

    def commands(self) -> list[RemoteCommand]:
        """Those on the cluster; an earlier runner may have left others on this machine."""
        return [it for it in self.running.values() if isinstance(it, RemoteCommand)]

    def close(self) -> None:
        """End every command that still runs, and the cluster if it was started here."""
        for command in self.commands():
            command.kill()
        self.running.clear()
        with suppress(OSError):
            os.unlink(self._mark[0])
        if self._started_here:
            self._started_here = False
            self._ray.shutdown()


class RoomInCluster(Schedule):
    """Decides when another run begins on a cluster: when the one before has found its place."""

    def __init__(self, processes: RayProcesses, at_once: int | None = None) -> None:
        super().__init__(at_once)
        self._processes = processes

    def admits(self, running: Collection[Running], candidate: Demand, device: str = "cpu") -> bool:
        """Whether one more run may begin."""
        if self._fixed is not None and len(running) >= self._fixed:
            return False
        return all(it.node for it in self._processes.commands())

    def cores_for(self, running: Collection[Running], candidate: Demand, n_waiting: int) -> tuple[int, ...]:
        """Not known before the cluster has found a place."""
        return ()

    def measure(self, running: Mapping[str, Running]) -> None:
        """Nothing: runs on different machines do not slow each other down."""


@contextmanager
def on_cluster(address: str | None, folder: Path) -> Iterator[RayProcesses]:
    """Processes on a cluster; none is left at the end."""
    processes = RayProcesses(address, folder)
    try:
        yield processes
    finally:
        processes.close()


class RemoteCommand:
    """A command on the cluster, as its driver sees it."""

    def __init__(self, processes: RayProcesses, ray: Any, actor: Any, call: tuple[Any, ...]) -> None:
        self._processes, self._ray, self._actor, self._call = processes, ray, actor, call
        self._answer = actor.where.remote()
        self.node, self.cores = "", list[int]()
        """Where it runs; empty while there is no room."""
        self.returncode: int | None = None
        self._signals: list[int] = []

    def poll(self) -> int | None:
        """None while it runs or waits for room; the exit code stays None if it was lost."""
        try:
            return self._poll()
        except self._ray.exceptions.RayTaskError as error:
            raise FlatoutError(f"--ray: {one_line(error.cause)}") from None
        except self._ray.exceptions.RayError:
            return 0

    def _poll(self) -> int | None:
        if self._signals and not self.node:
            self.returncode = -self._signals[0]
            self.kill()
            return self.returncode
        while self._signals:
            self._actor.send_signal.remote(self._signals.pop(0))
        if not self._ray.wait([self._answer], timeout=0)[0]:
            return None
        answer = self._ray.get(self._answer)
        if not self.node:
            node, cores, n = answer
            self.cores, self.node = self._processes.free_cores(node, cores, n), node
            self._answer = self._actor.run.remote(*self._call, self.cores)
            return None
        self.returncode = answer
        self.kill()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal with the next look at it: a handler of signals may be in the middle of a call of Ray."""
        self._signals.append(number)

    def kill(self) -> None:
        """End its actor, and with it the command if it still runs."""
        with suppress(Exception):  # the cluster may be gone
            self._ray.kill(self._actor)


class CommandActor:
    """Runs one command on the machine where Ray has put it."""

    def __init__(self, path: str, content: str) -> None:
        self._mark, self._processes, self._signals = (path, content), Processes(), list[int]()

    def where(self) -> tuple[str, list[int], int]:
        """The machine, its cores, and how many of them this command was promised; refused where files would be lost."""
        see(*self._mark)
        context = ray_module().get_runtime_context()
        n_cpus = context.get_assigned_resources().get("CPU", 1.0)
        return context.get_node_id(), sorted(os.sched_getaffinity(0)), max(int(n_cpus), 1)

    def run(self, words: list[str], log: str, folder: str, run: str, cores: list[int]) -> int:
        """Run the command to its end; its exit code."""
        os.chdir(folder if os.path.isdir(folder) else os.path.dirname(run))
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's; flatout sets its own
        until = monotonic() + LOCK_SECONDS
        while is_locked(Path(run)) and monotonic() < until:
            sleep(POLL_SECONDS)
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, SIGNALS
        )  # Ray blocks some, and the command would inherit that
        # The command ends when this process does, even if it is killed.
        read_end, _ = os.pipe()
        lifeline = {} if no_processes() else {LIFELINE: str(read_end)}
        self._processes.start(run, words, cores=cores, log=Path(log), env=lifeline, pass_fds=[read_end])
        os.close(read_end)
        while not (ended := self._processes.ended()):
            while self._signals:
                self._processes.stop(run, self._signals.pop(0))
            sleep(POLL_SECONDS)
        return ended[run] or 0

    def send_signal(self, number: int) -> None:
        """Send a signal to the command."""
        self._signals.append(number)


def see(path: str, content: str) -> None:
    """Refuse a machine on which that file is not the driver's."""
    with suppress(OSError):
        if Path(path).read_text() == content:
            return
    folder = os.path.dirname(path)
    raise FlatoutError(
        f"{os.uname().nodename} does not see {folder}; --runs-dir must be a folder that all machines of the cluster share"
    )


def _environment() -> dict[str, Any]:
    return {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
