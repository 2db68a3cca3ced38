"""Executor + policy → rollout. Three verbs a step: act, step the envs, store.

While all envs step together a whole time step is stored at once; when an executor returns fewer envs than it
runs, lost one, or one only began an episode, each env goes on with a cursor of its own. Envs that wait need not wait
for the slowest of them: those that are done begin the next rollout as soon as its policy is known, which is the
learner's after the rollout before, so that what is collected with which policy never depends on time.
T: time steps, N: envs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from flatout.buffers.rollout import Rollout
from flatout.collect.filling import Filling
from flatout.collect.noise import USUAL, ActionNoise, Habits
from flatout.envs.spaces import ActionLayout, Array, ObsArrays
from flatout.executors.base import Episode, Executor, Step
from flatout.executors.waiting import WaitingExecutor
from flatout.models.actor import Actor, make_actor
from flatout.models.policy import PolicyNet, copy_parameters
from flatout.timing import ACT, ENV, STORE, TAIL, Lane, Phase, PhaseClock


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

    def offer(self, rollout: R_contra) -> None:
        """The next rollout, to be collected with the policy as it is now: envs that are done with the one under way
        may begin it."""

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


@dataclass(slots=True)
class _Policy:
    model: PolicyNet
    actor: Actor


class _Room:
    """Memory for acting on some envs: what they see, their noise, what they do."""

    def __init__(self, model: PolicyNet, n_envs: int) -> None:
        self.obs = model.obs.alloc(n_envs)
        self.noise = np.zeros((n_envs, model.action.noise_size), np.float32)
        self.action = np.zeros((n_envs, model.action.size), model.action.dtype)
        self.log_prob = np.zeros(n_envs, np.float32)


class Collector:
    """Fills rollouts with what the policy does in the executor's envs."""

    def __init__(
        self,
        executor: Executor,
        model: PolicyNet,
        layout: ActionLayout,
        *,
        device: torch.device,
        seed: int,
        clock: PhaseClock,
        source: PolicyNet | None = None,
        habits: Habits = USUAL,
    ) -> None:
        """`model` acts; with a `source` it is a copy that `publish` renews from there. `habits`: how envs explore."""
        self.executor, self._layout, self._clock = executor, layout, clock
        self._source = source
        self.model, self._head = model, model.head
        # Only executors of batched envs say it: no env of theirs can wait until the others are done.
        self._together = bool(getattr(executor, "steps_together", False))
        self._waiting = executor if isinstance(executor, WaitingExecutor) else None
        self._away = np.zeros(executor.n_envs, bool)
        """Which envs were sent an action and are not back."""
        self._noise = ActionNoise(layout, executor.env_ids, seed, habits)
        self._all = np.arange(executor.n_envs)
        self._room = _Room(model, executor.n_envs)
        self._policy, self._device = _Policy(model, make_actor(model, executor.n_envs, device)), device
        self._spare: _Policy | None = None
        self._offered: tuple[Rollout, _Policy] | None = None
        """The next rollout and its policy, while no env has begun it. Set by the thread that learns."""
        self._ahead: Filling | None = None
        """The next rollout, once some env has begun it."""
        self.n_steps = 0
        """Steps each env has taken for finished rollouts: where its noise stream stands."""

    @property
    def lanes(self) -> list[Lane]:
        """What it spent its time on."""
        return [self._clock]

    def trace(self, spans: bool) -> None:
        """Begin to count time anew, and keep spans or not."""
        self._clock.traced = spans
        self._clock.restart({}, Phase.SLOT)

    def publish(self) -> None:
        """Act with the learner's parameters as they are now, which are also those of what was offered."""
        if self._ahead is not None or self._offered is not None:
            assert self._spare is not None, "who offers has made one"
            self._policy, self._spare, self._offered = self._spare, self._policy, None
        elif self._source is not None:
            copy_parameters(self._source, self._policy.model)

    def offer(self, rollout: Rollout) -> None:
        """Let envs that are done begin this rollout, where they can and acting has parameters of its own."""
        if self._source is None or self._waiting is None:
            return
        if self._spare is None:
            model = copy.deepcopy(self._policy.model)
            self._spare = _Policy(model, make_actor(model, self.executor.n_envs, self._device))
        copy_parameters(self._source, self._spare.model)
        self._spare.actor.bind()
        self._offered = rollout, self._spare

    def reset(self) -> None:
        """Begin new episodes in every env."""
        self._forget_next()
        self.executor.reset()

    def snapshot(self) -> dict[str, Array]:
        """Every env's way back to the end of the last rollout."""
        return self.executor.snapshot()

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Bring the envs back to a snapshot, whoever took it; returns those that began a new episode."""
        self._forget_next()
        return self.executor.restore(snapshot)

    def _forget_next(self) -> None:
        self._offered = self._ahead = None
        self._away[:] = False

    def close(self) -> None:
        """Close every env."""
        self.executor.close()

    def collect(self, rollout: Rollout, stop: Callable[[], bool] = lambda: False) -> list[Episode]:
        """Fill the rollout from where the envs stand; returns the episodes that ended."""
        clock, executor = self._clock, self.executor
        clock.enter(ACT)
        if self._ahead is not None:
            filling, self._ahead = self._ahead, None
            assert filling.rollout is rollout, "another rollout was begun already"
            self._go_on(filling, self._all[:0], stop)
        else:
            filling = self._filling(rollout, self._policy, self.n_steps)
            self._policy.actor.bind()
            filling.begin(executor.current, self._all)
            self._fill(filling, stop)
        self.n_steps += rollout.n_steps
        executor.mark()
        clock.enter(Phase.SLOT)
        clock.cut()
        return filling.episodes

    def _filling(self, rollout: Rollout, policy: _Policy, first_step: int) -> Filling:
        noise = self._noise.draw(first_step, rollout.n_steps).numpy()
        return Filling(rollout, policy.actor, noise, np.zeros(self.executor.n_envs, np.int64))

    def _fill(self, filling: Filling, stop: Callable[[], bool]) -> None:
        """All envs step by step together, for as long as they come back together."""
        clock, executor, rollout = self._clock, self.executor, filling.rollout
        for t in range(rollout.n_steps):
            seen = tuple(leaf[t] for leaf in rollout.obs)
            actions = self._act(filling.actor, seen, filling.noise[t], rollout.action[t], rollout.log_prob[t])
            clock.enter(ENV)
            executor.send(actions, self._all)
            now = executor.recv()
            clock.enter(STORE)
            if len(now.rows) < executor.n_envs or now.restarted:
                filling.cursor[:] = t
                self._away[:] = True
                self._go_on(filling, self._take(filling, now), stop)
                return
            self._store_all(rollout, t, now)
            filling.episodes += now.ended
            if stop():
                raise Interrupted
            clock.enter(ACT)

    def _act(self, actor: Actor, obs: ObsArrays, noise: Array, rows_out: Array, log_prob_out: Array) -> Array:
        """Draw actions for `obs`, keep them with their log-probabilities, and return them for the envs."""
        actor.act(obs, noise, rows_out, log_prob_out)
        if self._head.squashes:
            rows_out = self._head.squash(torch.from_numpy(rows_out)).numpy()
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

    def _go_on(self, filling: Filling, ready: Array, stop: Callable[[], bool]) -> None:
        """Until every env has its steps; those that have theirs begin the next rollout when it is offered."""
        clock, executor = self._clock, self.executor
        while True:
            if stop():
                raise Interrupted
            clock.enter(ACT)
            if self._together:
                self._act_together(filling)
            elif len(ready):
                self._act_rows(filling, ready)
            self._go_ahead(filling)
            if not filling.open.any():
                return
            clock.enter(ENV if self._ahead is not None or filling.open.all() else TAIL)
            now = executor.recv()
            clock.enter(STORE)
            ready = self._take(filling, now)

    def _take(self, filling: Filling, now: Step) -> Array:
        """Store what came back, in the rollout that each env is at; returns those that have more to do in this one."""
        self._away[now.rows] = False
        is_open = filling.open
        own = is_open[now.rows]
        rows, others = now.rows[own], now.rows[~own]
        filling.store(now, rows, [n for n in now.restarted if is_open[n]])
        if self._ahead is None:  # batched envs go on, even those that are done
            filling.episodes += now.ended
        else:
            self._ahead.store(now, others, [n for n in now.restarted if not is_open[n]])
            env_ids = set(self.executor.env_ids[others].tolist())
            filling.episodes += [e for e in now.ended if e.env_id not in env_ids]
            self._ahead.episodes += [e for e in now.ended if e.env_id in env_ids]
        return rows[filling.open[rows]]

    def _go_ahead(self, filling: Filling) -> None:
        """Act in the next rollout in those envs that are done with this one."""
        if self._waiting is None:
            return
        if self._ahead is None and self._offered is not None:
            (rollout, policy), self._offered = self._offered, None
            self._ahead = self._filling(rollout, policy, self.n_steps + filling.rollout.n_steps)
        ahead = self._ahead
        if ahead is None:
            return
        rows = np.flatnonzero(~filling.open & ~self._away & ahead.open)
        new = rows[ahead.cursor[rows] == 0]
        if len(new):
            self._waiting.remember(new)
            ahead.begin(self.executor.current, new)
        if len(rows):
            self._act_rows(ahead, rows)

    def _act_rows(self, filling: Filling, rows: Array) -> None:
        room = self._room
        obs, noise = filling.take(rows, room.obs, room.noise)
        action, log_prob = room.action[: len(rows)], room.log_prob[: len(rows)]
        actions = self._act(filling.actor, obs, noise, action, log_prob)
        filling.put(rows, action, log_prob)
        self._clock.enter(ENV)
        self._away[rows] = True
        self.executor.send(actions, rows)

    def _act_together(self, filling: Filling) -> None:
        """Act in all envs; what those do that have their steps is not stored."""
        rollout, rows = filling.rollout, np.flatnonzero(filling.open)
        if not len(rows):
            return
        at = np.minimum(filling.cursor, rollout.n_steps - 1)
        action, log_prob = rollout.action[at, self._all], rollout.log_prob[at, self._all]
        seen, noise = self.executor.current.obs, filling.noise[at, self._all]
        actions = self._act(filling.actor, seen, noise, action, log_prob)
        rollout.action[at[rows], rows] = action[rows]
        rollout.log_prob[at[rows], rows] = log_prob[rows]
        self._clock.enter(ENV)
        self.executor.send(actions, self._all)
