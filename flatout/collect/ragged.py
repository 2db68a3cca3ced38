"""Collects with each env at its own pace: for envs that wait, and after an env was lost.

Each env has a cursor into the rollout. Envs that wait need not wait for the slowest of them: those that are done start
the next rollout as soon as its policy is known. That is always the learner's policy after the rollout before, so which
policy collects what never depends on time. T: time steps, N: envs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import TypeAlias

import numpy as np

from flatout.buffers.batch import as_bytes
from flatout.buffers.rollout import Rollout
from flatout.collect.noise import ActionNoise
from flatout.envs.spaces import Array, ObsArrays
from flatout.executors.base import Episode, Executor, Step
from flatout.models.actor import Actor
from flatout.models.policy import PolicyNet
from flatout.timing import ACT, ENV, STORE, Phase, PhaseClock

Act: TypeAlias = Callable[[Actor, ObsArrays, Array, Array, Array], Array]
"""(actor, obs, noise, action out, log-probability out) → actions for the envs."""


class Interrupted(BaseException):
    """Collecting was stopped in the middle of a rollout, which is then discarded.

    Like KeyboardInterrupt it is no Exception: neither an env nor an executor may take it for a fault.
    """


@dataclass(slots=True)
class RolloutWriter:
    """A rollout under way, a cursor for each env, and the policy that it is collected with."""

    rollout: Rollout
    actor: Actor
    noise: Array
    """(T, N, size): an env's noise does not depend on which envs are ready when."""
    first_step: int
    """Steps each env had taken before this rollout."""
    cursor: Array
    """Steps that each env has stored."""
    episodes: list[Episode] = field(default_factory=list)
    _obs_bytes: list[tuple[Array, Array]] = field(init=False)
    """Observations and final ones as rows of bytes."""

    def __post_init__(self) -> None:
        self._obs_bytes = list(
            zip(_bytes(self.rollout.obs, 2), _bytes(self.rollout.final_obs, 2), strict=True)
        )

    @property
    def unfinished(self) -> Array:
        """Mask of the envs that still have steps to take."""
        out: Array = self.cursor < self.rollout.n_steps
        return out

    def begin(self, now: Step, env_indices: Array) -> None:
        """Start these envs with their current observations."""
        for out, obs in zip(self.rollout.obs, now.obs, strict=True):
            out[0, env_indices] = obs[env_indices]

    def store(self, now: Step, env_indices: Array, restarted: list[int]) -> None:
        """Store the steps of these envs; the step in which an env was lost is not stored."""
        rollout = self.rollout
        for n in restarted:
            self._cut_before(int(self.cursor[n]), n, now)
        if restarted:
            env_indices = env_indices[~np.isin(env_indices, restarted)]
        cursor, flags = self.cursor, (now.terminated, now.truncated)
        _loops().put_steps(
            now.reward, *flags, cursor, env_indices, rollout.reward, rollout.terminated, rollout.truncated
        )
        given = zip(_bytes(now.obs, 1), _bytes(now.final_obs, 1), self._obs_bytes, strict=True)
        for obs, final, (obs_out, final_out) in given:
            _loops().put_obs(obs, final, now.truncated, cursor, env_indices, obs_out, final_out)
        cursor[env_indices] += 1

    def take(self, env_indices: Array, obs: ObsArrays, noise: Array) -> tuple[ObsArrays, Array]:
        """The observations and noise of these envs, copied to the arrays given."""
        n, take_rows = len(env_indices), _loops().take_rows
        for (source, _), out in zip(self._obs_bytes, _bytes(obs, 1), strict=True):
            take_rows(source, self.cursor, env_indices, out)
        take_rows(self.noise, self.cursor, env_indices, noise)
        return tuple([array[:n] for array in obs]), noise[:n]

    def put(self, env_indices: Array, action: Array, log_prob: Array) -> None:
        """Store the actions of these envs."""
        put_rows, rollout = _loops().put_rows, self.rollout
        put_rows(action, self.cursor, env_indices, rollout.action)
        put_rows(log_prob[:, None], self.cursor, env_indices, rollout.log_prob[:, :, None])

    def _cut_before(self, t: int, n: int, now: Step) -> None:
        """End env n's episode with its last whole step, and begin the new episode at `t`."""
        rollout = self.rollout
        if t > 0 and not rollout.terminated[t - 1, n] and not rollout.truncated[t - 1, n]:
            rollout.truncated[t - 1, n] = True
            for final, obs in zip(rollout.final_obs, rollout.obs, strict=True):
                final[t - 1, n] = obs[t, n]
        for out, obs in zip(rollout.obs, now.obs, strict=True):
            out[t, n] = obs[n]


class RaggedCollection:
    """Fills rollouts with each env at its own pace, for a collector."""

    def __init__(
        self, executor: Executor, model: PolicyNet, noise: ActionNoise, act: Act, clock: PhaseClock
    ) -> None:
        n_envs = executor.n_envs
        self._executor, self._noise, self._act, self._clock = executor, noise, act, clock
        self._all = np.arange(n_envs)
        self._away = np.zeros(n_envs, bool)
        """Mask of the envs that were sent an action and are not back."""
        self._obs_in = model.obs.alloc(n_envs)
        self._noise_in = np.zeros((n_envs, model.action.noise_size), np.float32)
        self._action_out = np.zeros((n_envs, model.action.size), model.action.dtype)
        self._log_prob_out = np.zeros(n_envs, np.float32)
        self.offered: tuple[Rollout, Actor] | None = None
        """The next rollout and its policy, while no env has started it. Set by the thread that learns."""
        self.next: RolloutWriter | None = None
        """The next rollout, once some env has started it."""

    def take_over(
        self,
        rollout: Rollout,
        actor: Actor,
        noise: Array,
        first_step: int,
        t: int,
        now: Step,
        stop: Callable[[], bool],
    ) -> list[Episode]:
        """Go on with a rollout at step t, of which `now` has come back; returns the episodes that ended."""
        writer = RolloutWriter(rollout, actor, noise, first_step, np.full(self._executor.n_envs, t))
        self._away[:] = True
        return self._collect(writer, self._store(writer, now), stop)

    def finish_next(self, rollout: Rollout, stop: Callable[[], bool]) -> list[Episode]:
        """Go on with the rollout that envs have already started; returns the episodes that ended."""
        writer, self.next = self.next, None
        assert writer is not None, "no env has started it"
        assert writer.rollout is rollout, "another rollout was started already"
        return self._collect(writer, self._all[:0], stop)

    def discard_next(self) -> None:
        """Forget the next rollout, because the envs begin new episodes."""
        self.offered = self.next = None
        self._away[:] = False

    def _collect(self, writer: RolloutWriter, ready: Array, stop: Callable[[], bool]) -> list[Episode]:
        """Until every env has its steps; those that have theirs start the next rollout when it is offered."""
        clock, executor = self._clock, self._executor
        while True:
            if stop():
                raise Interrupted
            clock.enter(ACT)
            if executor.steps_together:
                self._act_all(writer)
            elif len(ready):
                self._act_some(writer, ready)
            if executor.waits:
                self._start_next(writer)
            unfinished = writer.unfinished
            if not unfinished.any():
                return writer.episodes
            clock.enter(ENV if self.next is not None or unfinished.all() else Phase.TAIL)
            now = executor.recv()
            clock.enter(STORE)
            ready = self._store(writer, now)

    def _store(self, writer: RolloutWriter, now: Step) -> Array:
        """Store what came back in the rollout that each env is at; returns those that go on with this one."""
        self._away[now.env_indices] = False
        unfinished = writer.unfinished
        own = unfinished[now.env_indices]
        mine, others = now.env_indices[own], now.env_indices[~own]
        writer.store(now, mine, [n for n in now.restarted if unfinished[n]])
        if self.next is None:  # batched envs go on stepping, even those that are done
            writer.episodes += now.ended
        else:
            self.next.store(now, others, [n for n in now.restarted if not unfinished[n]])
            env_ids = set(self._executor.env_ids[others].tolist())
            writer.episodes += [e for e in now.ended if e.env_id not in env_ids]
            self.next.episodes += [e for e in now.ended if e.env_id in env_ids]
        return mine[writer.unfinished[mine]]

    def _start_next(self, writer: RolloutWriter) -> None:
        """Act in the next rollout in those envs that are done with this one."""
        if self.next is None and self.offered is not None:
            (rollout, actor), self.offered = self.offered, None
            first_step = writer.first_step + writer.rollout.n_steps
            noise = self._noise.draw(first_step, rollout.n_steps).numpy()
            cursor = np.zeros(self._executor.n_envs, np.int64)
            self.next = RolloutWriter(rollout, actor, noise, first_step, cursor)
        following = self.next
        if following is None:
            return
        ready = np.flatnonzero(~writer.unfinished & ~self._away & following.unfinished)
        new = ready[following.cursor[ready] == 0]
        if len(new):
            following.begin(self._executor.current, new)
        if len(ready):
            self._act_some(following, ready)

    def _act_some(self, writer: RolloutWriter, env_indices: Array) -> None:
        n = len(env_indices)
        obs, noise = writer.take(env_indices, self._obs_in, self._noise_in)
        action, log_prob = self._action_out[:n], self._log_prob_out[:n]
        actions = self._act(writer.actor, obs, noise, action, log_prob)
        writer.put(env_indices, action, log_prob)
        self._clock.enter(ENV)
        self._away[env_indices] = True
        self._executor.send(actions, env_indices)

    def _act_all(self, writer: RolloutWriter) -> None:
        """Act in all envs, because they step together; actions of envs that have their steps are not stored."""
        rollout, unfinished = writer.rollout, np.flatnonzero(writer.unfinished)
        if not len(unfinished):
            return
        t = np.minimum(writer.cursor, rollout.n_steps - 1)
        action, log_prob = rollout.action[t, self._all], rollout.log_prob[t, self._all]
        obs, noise = self._executor.current.obs, writer.noise[t, self._all]
        actions = self._act(writer.actor, obs, noise, action, log_prob)
        rollout.action[t[unfinished], unfinished] = action[unfinished]
        rollout.log_prob[t[unfinished], unfinished] = log_prob[unfinished]
        self._clock.enter(ENV)
        self._executor.send(actions, self._all)


@cache
def _loops() -> ModuleType:
    """The compiled loops; imported here, because importing Numba takes a moment."""
    from flatout.executors import loops

    return loops


def _bytes(arrays: ObsArrays, n_lead: int) -> list[Array]:
    return [as_bytes(array, n_lead) for array in arrays]
