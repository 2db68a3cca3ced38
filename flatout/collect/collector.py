"""Executor + policy → rollout. Three verbs a step: act, step the envs, store.

While all envs step together a whole time step is stored at once; when an executor returns fewer envs than it
runs, lost one, or one only began an episode, each env goes on with a cursor of its own. T: time steps, N: envs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
import torch

from flatout.buffers.rollout import Rollout
from flatout.collect.noise import ActionNoise
from flatout.envs.spaces import ActionLayout, Array, Leaves
from flatout.executors.base import Episode, Executor, Step
from flatout.models.actor import make_actor
from flatout.models.policy import ActorCritic, copy_parameters
from flatout.trace.phases import Lane, PhaseClock


class Interrupted(BaseException):
    """Collecting was given up in the middle of a rollout, which then counts for nothing.

    Like KeyboardInterrupt no Exception: neither an env nor an executor may take it for a fault.
    """


R_contra = TypeVar("R_contra", contravariant=True)


class Collects(Protocol[R_contra]):
    """What the pipeline needs of a collector of such rollouts, wherever it lives."""

    n_steps: int
    """Steps each env has taken for finished rollouts."""

    @property
    def lanes(self) -> Sequence[Lane]:
        """What each collector spent its time on."""
        ...

    def trace(self, spans: bool) -> None:
        """Begin to count time anew, and keep spans or not; nothing may be collecting."""

    def publish(self) -> None:
        """Let the next rollout be collected with the policy as it is now; nothing may be collecting."""

    def reset(self) -> None:
        """Begin new episodes in every env."""

    def collect(self, rollout: R_contra, stop: Callable[[], bool]) -> list[Episode]:
        """Fill the rollout; returns the episodes that ended."""
        ...

    def snapshot(self) -> dict[str, Array]:
        """Every env's way back to the end of the last rollout."""
        ...

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Bring the envs back to a snapshot; returns those that began a new episode."""
        ...

    def close(self) -> None:
        """Close every env."""


class Collector:
    """Fills rollouts with what the policy does in the executor's envs."""

    def __init__(
        self,
        executor: Executor,
        model: ActorCritic,
        layout: ActionLayout,
        *,
        device: torch.device,
        seed: int,
        clock: PhaseClock,
        source: ActorCritic | None = None,
    ) -> None:
        """`model` acts; with a `source` it is a copy that `publish` renews from there."""
        self.executor, self._layout, self._clock = executor, layout, clock
        self._source = source
        self.model, self._head = model, model.head
        # Only executors of batched envs say it: no env of theirs can wait until the others are done.
        self._together = bool(getattr(executor, "steps_together", False))
        self._noise = ActionNoise(layout, executor.env_ids, seed)
        self._all = np.arange(executor.n_envs)
        self._actor = make_actor(model, executor.n_envs, device)
        self.n_steps = 0
        """Steps each env has taken for finished rollouts: where its noise stream stands."""

    @property
    def lanes(self) -> list[Lane]:
        """What it spent its time on."""
        return [self._clock]

    def trace(self, spans: bool) -> None:
        """Begin to count time anew, and keep spans or not."""
        self._clock.traced = spans
        self._clock.restart({}, "slot")

    def publish(self) -> None:
        """Act with the learner's parameters as they are now."""
        if self._source is not None:
            copy_parameters(self._source, self.model)

    def reset(self) -> None:
        """Begin new episodes in every env."""
        self.executor.reset()

    def snapshot(self) -> dict[str, Array]:
        """Every env's way back to the end of the last rollout."""
        return self.executor.snapshot()

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Bring the envs back to a snapshot, whoever took it; returns those that began a new episode."""
        return self.executor.restore(snapshot)

    def close(self) -> None:
        """Close every env."""
        self.executor.close()

    def collect(self, rollout: Rollout, stop: Callable[[], bool] = lambda: False) -> list[Episode]:
        """Fill the rollout from where the envs stand; returns the episodes that ended."""
        clock, executor = self._clock, self.executor
        episodes: list[Episode] = []
        clock.enter("act")
        self._actor.bind()
        noise = self._noise.draw(self.n_steps, rollout.n_steps).numpy()
        for leaf, obs in zip(rollout.obs, executor.current.obs, strict=True):
            leaf[0] = obs
        for t in range(rollout.n_steps):
            seen = tuple(leaf[t] for leaf in rollout.obs)
            actions = self._act(seen, noise[t], rollout.action[t], rollout.log_prob[t])
            clock.enter("env")
            executor.send(actions, self._all)
            now = executor.recv()
            clock.enter("store")
            if len(now.rows) < executor.n_envs or now.restarted:
                self._collect_ragged(rollout, t, now, noise, episodes, stop)
                break
            self._store_all(rollout, t, now)
            episodes += now.ended
            if stop():
                raise Interrupted
            clock.enter("act")
        self.n_steps += rollout.n_steps
        executor.mark()
        clock.enter("slot")
        clock.cut()
        return episodes

    def _act(self, obs: Leaves, noise: Array, rows_out: Array, log_prob_out: Array) -> Array:
        """Draw actions for `obs`, keep them with their log-probabilities, and return them for the envs."""
        self._actor.act(obs, noise, rows_out, log_prob_out)
        if self._head.squashes:
            rows_out = self._head.to_action(torch.from_numpy(rows_out)).numpy()
        return self._layout.to_env(rows_out)

    def _store_all(self, rollout: Rollout, t: int, now: Step) -> None:
        rollout.reward[t] = now.reward
        rollout.terminated[t] = now.terminated
        rollout.truncated[t] = now.truncated
        for leaf, obs in zip(rollout.obs, now.obs, strict=True):
            leaf[t + 1] = obs
        if now.ended:
            cut = now.truncated.nonzero()[0]
            for leaf, final in zip(rollout.final_obs, now.final_obs, strict=True):
                leaf[t, cut] = final[cut]

    def _collect_ragged(
        self,
        rollout: Rollout,
        t: int,
        now: Step,
        noise: Array,
        episodes: list[Episode],
        stop: Callable[[], bool],
    ) -> None:
        """Go on from step `t`, of which `now` has come back, until every env has its `n_steps`."""
        clock, executor = self._clock, self.executor
        cursor = np.full(executor.n_envs, t)
        some_are_done = False
        while True:
            episodes += now.ended
            self._store_rows(rollout, cursor, self._still_wanted(now, cursor < rollout.n_steps))
            if stop():
                raise Interrupted
            ready = now.rows[cursor[now.rows] < rollout.n_steps]
            if len(ready):
                clock.enter("act")
                if self._together:
                    self._act_together(rollout, cursor, now, noise)
                else:
                    self._act_rows(rollout, cursor[ready], ready, noise)
            elif (cursor == rollout.n_steps).all():
                return
            some_are_done = some_are_done or bool((cursor == rollout.n_steps).any())
            clock.enter("tail" if some_are_done else "env")
            now = executor.recv()
            clock.enter("store")

    def _act_rows(self, rollout: Rollout, at: Array, rows: Array, noise: Array) -> None:
        obs = tuple(leaf[at, rows] for leaf in rollout.obs)
        action, log_prob = rollout.action[at, rows], rollout.log_prob[at, rows]
        actions = self._act(obs, noise[at, rows], action, log_prob)
        rollout.action[at, rows], rollout.log_prob[at, rows] = action, log_prob
        self._clock.enter("env")
        self.executor.send(actions, rows)

    def _still_wanted(self, now: Step, filling: Array) -> Step:
        """The step without those envs that have their `n_steps` and only went on because others had not."""
        if not self._together or filling.all():
            return now
        restarted = [n for n in now.restarted if filling[n]]
        return replace(now, rows=np.flatnonzero(filling), restarted=restarted)

    def _act_together(self, rollout: Rollout, cursor: Array, now: Step, noise: Array) -> None:
        """Act in all envs; what those do that have their `n_steps` is not stored."""
        at, rows = np.minimum(cursor, rollout.n_steps - 1), np.flatnonzero(cursor < rollout.n_steps)
        action, log_prob = rollout.action[at, self._all], rollout.log_prob[at, self._all]
        actions = self._act(now.obs, noise[at, self._all], action, log_prob)
        rollout.action[at[rows], rows] = action[rows]
        rollout.log_prob[at[rows], rows] = log_prob[rows]
        self._clock.enter("env")
        self.executor.send(actions, self._all)

    def _store_rows(self, rollout: Rollout, cursor: Array, now: Step) -> None:
        """Store each env at its own cursor; a step that was lost with its env is never stored."""
        for n in now.restarted:
            self._cut_before(rollout, int(cursor[n]), n, now)
        rows = now.rows[~np.isin(now.rows, now.restarted)] if now.restarted else now.rows
        at = cursor[rows]
        rollout.reward[at, rows] = now.reward[rows]
        rollout.terminated[at, rows] = now.terminated[rows]
        rollout.truncated[at, rows] = now.truncated[rows]
        for leaf, obs in zip(rollout.obs, now.obs, strict=True):
            leaf[at + 1, rows] = obs[rows]
        cut = now.truncated[rows]
        for leaf, final in zip(rollout.final_obs, now.final_obs, strict=True):
            leaf[at[cut], rows[cut]] = final[rows[cut]]
        cursor[rows] += 1

    def _cut_before(self, rollout: Rollout, t: int, n: int, now: Step) -> None:
        """End env n's episode with its last whole step, and begin at `t` with the new episode."""
        if t > 0 and not rollout.terminated[t - 1, n] and not rollout.truncated[t - 1, n]:
            rollout.truncated[t - 1, n] = True
            for leaf, obs in zip(rollout.final_obs, rollout.obs, strict=True):
                leaf[t - 1, n] = obs[t, n]
        for leaf, obs in zip(rollout.obs, now.obs, strict=True):
            leaf[t, n] = obs[n]
