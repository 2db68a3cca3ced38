"""The costs of a run in seconds, and the settings that spend them: the input of every prediction of speed.

Times of env steps, acting and updates are measured for each run. What stays the same from run to run is a constant or
a default here, with the measurement it comes from (2 cores of an AMD EPYC, Python 3.11, torch 2.13).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import accumulate

from flatout.device.machine import torch_threads

START_SECONDS = 2.5
"""Starting the first worker process or subprocess collector: a fork server that imports torch."""
THREAD_SECONDS = 60e-6
"""A step's way through a thread, without what the collector does for it."""
COROUTINE_SECONDS = 35e-6
"""A step's way through the event loop."""
COMPILED_PYTHON = 0.05e-3
"""Seconds of a compiled or fused update that hold Python's lock."""
WORKERS_PER_CORE = 2
"""Env workers for envs that compute: 0.95 of the speed of two processes that share nothing, 0.70 with one per core."""
MAX_WAITING_WORKERS = 32
"""Env workers for envs that wait."""
WAITING_SHARE = 0.5
"""An env that computes less than this share of its step time is one that waits."""
WAITING_SECONDS = 200e-6
"""A quicker step is not worth a thread of its own."""
WORTH = 1.1
"""A more complicated way to run, or a change of settings, must promise to be this much faster."""

Points = tuple[tuple[int, float], ...]
"""Seconds by batch size, ascending."""


def at(points: Points, n: float) -> float:
    """The seconds for a batch of n: linear between two points and beyond the last, constant before the first."""
    smallest, seconds = points[0]
    if len(points) == 1 or n <= smallest:
        return seconds * max(n / smallest, 1.0)
    place = min(bisect_left([size for size, _ in points], n), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1 : place + 1]
    return max(y0 + (y1 - y0) * (n - x0) / (x1 - x0), seconds)


def rising(points: Points) -> Points:
    """The points with seconds that never fall as the batch grows, whatever the noise."""
    return tuple(accumulate(points, lambda last, it: (it[0], max(it[1], last[1]))))


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateCost:
    """What one update takes."""

    python: float
    """Seconds that hold Python's lock: launching operations."""
    points: Points
    """Seconds of the whole update by batch size."""

    def seconds(self, batch_size: int) -> float:
        """The whole update with this batch size."""
        return max(at(self.points, batch_size), self.python)


NO_UPDATE = UpdateCost(python=0.0, points=((1, 0.0),))
"""For ranking ways to collect where updates are not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds measured for one env, one policy and one machine."""

    wait: tuple[float, ...]
    """A sample of env steps: seconds in which nothing is computed."""
    compute: tuple[float, ...]
    """The same steps: seconds on a core."""
    slowness: tuple[float, ...] = (1.0,)
    """Each env's mean step time ÷ that of the median env; 1 unless it is more than twice as slow."""
    picklable: bool = True
    """Whether the env can be made in another process."""
    fault: str = ""
    """Why the steps could not be timed, in one line; their times are then zero."""
    act: Points = ((1, 0.0),)
    """Acting in the learner's process, by number of observations."""
    act_apart: Points | None = None
    """Acting in a subprocess collector, on the CPU; None: as in the learner's process."""
    act_on_device: float = 0.0
    """How long acting in one time step occupies the device that learns."""
    update: UpdateCost = NO_UPDATE
    compiled: UpdateCost | None = None
    """The update in its compiled or fused form; None: not known."""
    beside: UpdateCost | None = None
    """The update on the threads it has while subprocess collectors use other cores; None: as alone."""
    learn_overhead: float = 1.3
    """Learning from a rollout ÷ its updates at their fastest: advantages, shuffling, interruptions."""
    iteration: float = 1e-3
    """An iteration's work besides collecting and learning: publishing parameters, metrics, records. CartPole with 256
    steps per rollout spends 1.2 ms of 8.5 ms on it."""
    store: float = 25e-6
    """A collector's own work per time step: noise, storing, counting."""
    handover: float = 150e-6
    """A message to a worker process and its answer, half of it in either process. CartPole with 32 envs on 4 workers
    took 772 µs a time step, of which stepping is 60 µs; 32 envs that wait 10 ms on 32 workers took 15.3 ms."""
    ray_call: float = 1.3e-3
    """A Ray actor's call and its answer, on the learner's core: 1.3 ms by the clock of the process, on a loaded machine."""
    passing: float = THREAD_SECONDS
    """A step's way through a thread or an event loop."""
    hold: float = 0.025
    """Share of a step time for which envs that are ready wait for others, to be acted on together."""
    busy: float = 1.25
    """How much longer work takes while other cores work too: they share caches, and often a core's arithmetic units."""
    crowded: float = 1.3
    """How much longer work takes with more collectors and learner threads than cores: CartPole ran at 47 k steps/s with
    two collectors beside a learner on two cores, at 53 k with one. Env workers, which sleep between steps, lose nothing."""

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        return (sum(self.wait) + sum(self.compute)) / len(self.wait)

    @property
    def compute_share(self) -> float:
        """Share of a step that is spent computing."""
        return sum(self.compute) / max(sum(self.wait) + sum(self.compute), 1e-12)

    @property
    def waits(self) -> bool:
        """Whether stepping is mostly waiting."""
        return self.compute_share < WAITING_SHARE and self.step_seconds > WAITING_SECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The way between the learner's machine and those on which Ray's actors collect, each on a core of its own."""

    latency: float = 0.0
    """Seconds of a message and its answer."""
    bandwidth: float = float("inf")
    """Bytes a second, in each direction, of the learner's machine."""
    cores: int = 1
    """Collectors on each machine, which gets the parameters once per version."""
    param_bytes: int = 0
    step_bytes: int = 0
    """Of one transition in a rollout."""

    def n_machines(self, n_collectors: int) -> int:
        """Machines for so many collectors."""
        return -(-n_collectors // self.cores)

    def out_seconds(self, n_collectors: int) -> float:
        """From the learner to the collectors: a call, then its parameters, which are asked for."""
        return 1.5 * self.latency + self.n_machines(n_collectors) * self.param_bytes / self.bandwidth

    def back_seconds(self, total_batch: int) -> float:
        """The other way: an answer, then the rollout, which is asked for. All collectors share the link."""
        return 1.5 * self.latency + total_batch * self.step_bytes / self.bandwidth


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of a run that decide its speed."""

    n_envs: int
    n_steps: int
    batch_size: int
    n_epochs: int = 1
    train_ratio: float | None = None
    """Updates per env step, for algorithms in which they do not follow from batch size and epochs."""
    executor: str = "serial"
    n_collectors: int = 1
    in_subprocesses: bool = False
    """Whether each collector is a process of its own."""
    n_workers: int = 0
    overlap: bool = False
    compiled: bool = False
    n_cores: int = 1
    on_device: bool = False
    """Whether the learner computes on a GPU."""
    n_params: int = 0
    network: Network | None = None
    """None: collectors use this machine's cores."""
    extra_seconds: float = 0.0
    """Evaluation and checkpoints, per iteration."""

    @property
    def executor_name(self) -> str:
        """The executor, and where its collectors run."""
        return f"{self.executor} in subprocesses" if self.in_subprocesses else self.executor

    @property
    def total_batch(self) -> int:
        """Transitions in one rollout."""
        return self.n_envs * self.n_steps

    @property
    def n_updates(self) -> float:
        """Updates per iteration."""
        if self.train_ratio is not None:
            return self.train_ratio * self.total_batch
        return max(self.total_batch // self.batch_size, 1) * self.n_epochs

    @property
    def learn_threads(self) -> int:
        """Threads of an update."""
        n_taken = self.n_collectors if self.overlap and self.in_subprocesses else 0
        return torch_threads(self.n_params, self.batch_size, self.n_cores, n_taken)

    @property
    def starts_processes(self) -> bool:
        """Whether the run starts other processes."""
        return self.in_subprocesses or self.executor == "process"

    @property
    def in_one_process(self) -> Settings:
        """The simplest way to run it: one env after the other."""
        return replace(self, executor="serial", n_collectors=1, in_subprocesses=False, n_workers=0)


def update_cost(costs: Costs, settings: Settings) -> UpdateCost:
    """The update in the form that such a run uses."""
    if settings.overlap and settings.in_subprocesses and costs.beside is not None:
        return costs.beside
    return costs.compiled if settings.compiled and costs.compiled else costs.update


def update_seconds(costs: Costs, settings: Settings) -> float:
    """One update."""
    return update_cost(costs, settings).seconds(settings.batch_size)


def learn_seconds(costs: Costs, settings: Settings) -> float:
    """Learning from one rollout, alone on its cores."""
    return costs.learn_overhead * settings.n_updates * update_seconds(costs, settings)
