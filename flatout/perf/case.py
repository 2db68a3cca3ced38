"""A run to be diagnosed: what it costs, how it is set, what it reached; and what it would reach if set otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from flatout.perf.costs import Costs, Settings, UpdateCost
from flatout.perf.finding import Finding
from flatout.perf.simulate import Forecast, simulate


@dataclass(frozen=True, kw_only=True)
class Case:
    """Measurements of one run; what is not known is None or empty."""

    costs: Costs
    settings: Settings
    steps_per_second: float
    """Measured."""
    learner_busy: float
    """Measured, share of wall time."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Measured share of wall time of each phase of the run."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The learner's, of the last iteration."""
    network_arch: tuple[int, ...] = ()
    smaller: tuple[tuple[int, ...], UpdateCost] | None = None
    """A smaller network and what its update costs."""
    on_cpu: UpdateCost | None = None
    """The same update on the CPU, if the learner is on a GPU."""
    eval_every: int = 0
    checkpoint_every: int = 0
    memory_share: float | None = None
    """Of the device's memory, or the machine's, in use."""
    device_utilization: float | None = None
    throttled: tuple[str, ...] = ()
    blas_threads: int | None = None
    """What the user's environment sets OMP_NUM_THREADS to."""
    timesteps: int | None = None

    @cached_property
    def now(self) -> Forecast:
        """What the simulation says of the run as it is."""
        return simulate(self.costs, self.settings)

    def predict(self, settings: Settings, costs: Costs | None = None) -> tuple[float, float]:
        """Steps/s and learner busy with other settings: simulated, and corrected by what was measured."""
        after = simulate(costs or self.costs, settings)
        steps = self.steps_per_second * after.steps_per_second / self.now.steps_per_second
        return steps, min(after.learner_busy, 1.0)

    def finding(
        self,
        kind: str,
        what: str,
        evidence: str,
        change: str,
        flags: tuple[str, ...] = (),
        *,
        settings: Settings | None = None,
        costs: Costs | None = None,
        predicted: tuple[float, float] | None = None,
    ) -> Finding:
        """A finding whose prediction is that of other settings or costs, if any."""
        if predicted is None and (settings is not None or costs is not None):
            predicted = self.predict(settings or self.settings, costs)
        steps, busy = predicted or (None, None)
        return Finding(
            kind=kind,
            what=what,
            evidence=evidence,
            change=change,
            flags=flags,
            steps_per_second=steps,
            learner_busy=busy,
            gain=steps / self.steps_per_second if steps else None,
        )

    def with_envs(self, n_envs: int) -> Settings:
        """So many envs, with the same transitions in a rollout; rollouts as long as before if that cannot be."""
        settings, total = self.settings, self.settings.total_batch
        n_steps = total // n_envs if total % n_envs == 0 else settings.n_steps
        return replace(settings, n_envs=n_envs, n_steps=max(n_steps, 1), n_workers=self._workers(n_envs))

    def _workers(self, n_envs: int) -> int:
        return n_envs if self.settings.executor == "thread" else self.settings.n_workers
