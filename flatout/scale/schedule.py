"""How many runs go side by side, and on which cores.

A run is started if cores, memory and card have room for what it needs: predicted by the model of speed, then as measured
while it runs. What another run brought is checked by the total speed with k and with k + 1 of them: if it brought
nothing, no more than k run from then on.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import time

import numpy as np

from flatout.device.machine import usable_cores, usable_memory
from flatout.perf.demand import Demand
from flatout.runlog.files import number, read_json
from flatout.runlog.samples import read_samples

SETTLED_SECONDS = 5.0
"""A run's own figures count after this long."""
WINDOW_SECONDS = 8.0
"""The total speed of a set of runs is measured over at least this long."""
SLACK = 0.25
"""Cores that may be wanted beyond those there are: what is wanted on average is seldom wanted at once."""
DEVICE_SLACK = 0.2
MEMORY_SHARE = 0.9
"""Of the free memory that runs may plan with."""
BUSY = 0.9
"""Cores of a run that only computes, at least."""
GAIN = 1.03
"""One more run must raise the total speed by this."""
PAID = 0.25
"""If the last run brought this share of what it would do alone, cores that seem full are not: another one is tried."""


@dataclass
class Running:
    """A run that goes on, as the schedule sees it."""

    name: str
    run: Path
    predicted: Demand
    cores: tuple[int, ...] = ()
    device: str = "cpu"
    began: float = field(default_factory=time)
    demand: Demand = field(init=False)
    """Predicted, then measured."""
    is_settled: bool = False
    """Whether it is measured."""
    at: tuple[float, float] | None = None
    """When its progress was written last, and its env steps then."""

    def __post_init__(self) -> None:
        self.demand = self.predicted

    def look(self) -> None:
        """Read how far it is and, once, what it needs."""
        progress = read_json(self.run / "progress.json")
        updated, steps = number(progress.get("updated")), number(progress.get("env_steps"))
        if updated is None or steps is None or updated < self.began:
            return
        self.at = updated, steps
        wall = number(progress.get("wall_seconds")) or 0.0
        if not self.is_settled and wall >= SETTLED_SECONDS:
            self.is_settled = True
            self.demand = self._measured(number(progress.get("learner_busy")) or 0.0)

    @property
    def computes(self) -> bool:
        """Whether it keeps its cores busy if nothing else runs there, as far as the model knows."""
        return self.predicted.cores >= BUSY

    def load(self) -> float:
        """Cores that it has kept busy lately."""
        load = read_samples(self.run / "samples.jsonl").run_cpu[-8:]
        load = load[np.isfinite(load)]
        return float(load.mean()) / 100 if len(load) else self.predicted.cores

    def _measured(self, learner_busy: float) -> Demand:
        demand, memory = self.predicted, read_samples(self.run / "samples.jsonl").run_memory[-8:]
        cores = self.load()
        if self.computes:
            cores = max(cores, demand.cores)  # it may be starved by others, not idle
        used = int(np.nanmax(memory, initial=demand.memory))
        device = learner_busy if self.device != "cpu" else 0.0
        return replace(demand, cores=cores, device=device, memory=used)


class Schedule:
    """Decides when another run begins and on which cores."""

    def __init__(self, at_once: int | None = None) -> None:
        """`at_once`: how many the user wants; None: as many as pay."""
        self._fixed, self._limit = at_once, None if at_once is None else at_once
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.n_cores = usable_cores()
        self._set: frozenset[str] = frozenset()
        """The runs whose total speed is being measured …"""
        self._since: dict[str, tuple[float, float]] = {}
        """… and how far each was when that began."""
        self._rates: dict[str, float] = {}
        """Steps/s of each run of the set that was measured last."""
        self._brought = 0.0
        """What the last run of the set brought, as a share of what it would do alone; 0 if that is not known."""
        self.reason = "" if at_once is None else f"--at-once {at_once}"
        """Why no more run side by side."""

    def admits(self, running: Collection[Running], candidate: Demand, device: str = "cpu") -> bool:
        """Whether one more run may begin."""
        if not running:
            return True
        if self._limit is not None and len(running) >= self._limit:
            return False
        if self._fixed is not None:
            return True
        if any(not it.is_settled and (not it.computes or it.device != "cpu") for it in running):
            return False  # what is predicted of such runs is less certain: see first
        wanted = sum(it.demand.cores for it in running) + candidate.cores
        waits = not any(it.computes for it in running) and candidate.cores < BUSY
        pays = waits and self._brought >= PAID and frozenset(it.name for it in running) == self._set
        if wanted > self.n_cores + SLACK and not pays:
            self.reason = f"{len(running)} keep {self.n_cores} cores busy"
            return False
        on_card = sum(it.demand.device for it in running if it.device == device) + candidate.device
        if device != "cpu" and on_card > 1 + DEVICE_SLACK:
            self.reason = f"{len(running)} keep {device} busy"
            return False
        return self._has_memory(running, candidate)

    def _has_memory(self, running: Collection[Running], candidate: Demand) -> bool:
        # What settled runs use is not free any more; the others will still take theirs.
        coming = sum(it.demand.memory for it in running if not it.is_settled)
        if coming + candidate.memory <= MEMORY_SHARE * usable_memory()[1]:
            return True
        self.reason = f"{len(running)} leave no memory for another"
        return False

    def cores_for(self, running: Collection[Running], candidate: Demand, n_waiting: int) -> tuple[int, ...]:
        """The cores of the next run: its share if as many run as fit, those with the least to do. Empty: all."""
        if len(self._cores) < 2:
            return ()
        fitting = max(int((self.n_cores + SLACK) / max(min(candidate.cores, 1.0), 0.05)), 1)
        expected = min(len(running) + n_waiting, self._limit or fitting, fitting)
        share = max(self.n_cores // max(expected, 1), 1)
        if share >= len(self._cores):
            return ()
        load = dict.fromkeys(self._cores, 0.0)
        for it in running:
            for core in it.cores or self._cores:
                load[core] += it.demand.cores / len(it.cores or self._cores)
        return tuple(sorted(sorted(self._cores, key=lambda core: load[core])[:share]))

    def measure(self, running: Mapping[str, Running]) -> None:
        """Look at the runs, and at the total speed of this set of them."""
        for it in running.values():
            it.look()
        names = frozenset(running)
        if names != self._set:
            self._set, self._since, self._brought = names, {}, 0.0
        if not running or not all(it.is_settled and it.at is not None for it in running.values()):
            return
        if not self._since:
            self._since = {name: it.at for name, it in running.items() if it.at is not None}
            return
        rates = _rates(running.values(), self._since)
        if rates is not None:
            self._correct(running, rates)
            self._rates = rates

    def _correct(self, running: Mapping[str, Running], rates: Mapping[str, float]) -> None:
        """If these are the runs that were measured before and one more: see what that one brought."""
        before = self._rates
        added = [name for name in rates if name not in before]
        if self._fixed is not None or not before or len(added) != 1 or len(rates) != len(before) + 1:
            return
        new, kept = running[added[0]], sum(rates[name] / rate for name, rate in before.items())
        if new.computes and new.device == "cpu":
            # The time in which it has a core, and what an hour of a core brings now.
            share = new.load() / new.predicted.cores * kept / len(before)
        else:
            # What it would do alone is not known: as much as predicted, by how right that was for the others.
            accuracy = median(
                rate / running[name].predicted.steps_per_second for name, rate in before.items()
            )
            share = rates[new.name] / max(accuracy * new.predicted.steps_per_second, 1e-9)
        total = kept + share
        self._brought = total - len(before)
        if total < GAIN * len(before):
            self._limit = len(before)
            brought = f"{total / len(before) - 1:+.0%}"
            self.reason = f"a {_nth(len(rates))} run brought {brought} of total speed"


def _rates(running: Collection[Running], since: Mapping[str, tuple[float, float]]) -> dict[str, float] | None:
    """Steps/s of each run; None if that is measured over too short a time, or one did not move."""
    rates = {}
    for it in running:
        assert it.at is not None
        seconds, steps = it.at[0] - since[it.name][0], it.at[1] - since[it.name][1]
        if seconds < WINDOW_SECONDS or steps <= 0:
            return None
        rates[it.name] = steps / seconds
    return rates


def _nth(n: int) -> str:
    return {2: "second", 3: "third"}.get(n, f"{n}th")
