"""Collecting from batched envs: tensors that stay on one device, or NumPy.

With tensors the host only launches work; it reads the ended episodes once per rollout. T: time steps, N: envs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.buffers.rollout import Rollout, TensorRollout
from flatout.collect.collector import Collector, Collects, LocalCollector
from flatout.collect.memory import MemoryTensorExecutor
from flatout.collect.noise import NO_EXPLORATION, Exploration
from flatout.collect.ragged import Interrupted
from flatout.device.accelerator import (
    Graph,
    can_capture,
    current_stream,
    is_out_of_memory,
    new_event,
    pinned,
    short_reason,
)
from flatout.envs.check import same_device
from flatout.envs.spaces import ActionLayout, Array
from flatout.envs.validate import nan_message
from flatout.errors import EnvError, FlatoutError
from flatout.executors.base import EnvSet, Episode
from flatout.executors.batched import BatchedExecutor
from flatout.executors.tensors import TensorExecutor, open_batched
from flatout.models.actor import KernelActor, is_small
from flatout.models.params import ParamCopy, floats
from flatout.models.policy import PolicyNet
from flatout.timing import ACT, ENV, STORE, Phase, PhaseClock

KERNEL_ROWS = 512
"""Number of envs up to which the compiled policy acts faster on the CPU than torch, which is better at many rows."""


class TensorActions:
    """`ActionLayout.to_env` on the device."""

    def __init__(self, layout: ActionLayout, device: torch.device) -> None:
        zero = layout.to_env(np.zeros((1, layout.size), layout.dtype))
        self._shape = zero.shape[1:]
        self._dtype = torch.from_numpy(zero).dtype
        self._continuous = layout.continuous
        if layout.continuous:
            low, high, bounded = (
                torch.as_tensor(x, device=device) for x in (layout.low, layout.high, layout.bounded)
            )
            self._low, self._high = low, high
            self._half = torch.where(bounded, (high - low) / 2, 1.0)
            self._mid = torch.where(bounded, low + self._half, 0.0)
        else:
            self._start = torch.as_tensor(zero.reshape(-1), device=device)
            self._as_they_are = not zero.any() and zero.dtype == np.int64

    def to_env(self, actions: Tensor) -> Tensor:
        """Actions (N, size) of the policy in the envs' own units; continuous ones are rescaled and clipped."""
        if self._continuous:
            actions = torch.clamp(actions * self._half + self._mid, self._low, self._high)
        elif not self._as_they_are:
            actions = actions + self._start
        return actions.to(self._dtype).reshape(actions.shape[0], *self._shape)


class DeviceNoise:
    """Gumbel or normal noise drawn on the device; a rollout's depends on the seed and its first step only."""

    def __init__(
        self,
        layout: ActionLayout,
        n_envs: int,
        seed: int,
        device: torch.device,
        exploration: Exploration = NO_EXPLORATION,
    ) -> None:
        self._shift = (
            None if exploration.shift is None else torch.from_numpy(exploration.shift).to(device)[:, None]
        )
        self._hold = exploration.hold
        self._continuous, self._size = layout.continuous, layout.noise_size
        self._n_envs, self._seed = n_envs, seed
        self._generator = torch.Generator(device)

    def draw(self, first_step: int, n_steps: int) -> Tensor:
        """Noise (n_steps, n_envs, size)."""
        words = np.random.SeedSequence([self._seed, first_step]).generate_state(1, np.uint64)
        self._generator.manual_seed(int(words[0] >> np.uint64(1)))
        noise = torch.empty(n_steps, self._n_envs, self._size, device=self._generator.device)
        if self._continuous:
            noise.normal_(generator=self._generator)
        else:  # -log of an exponential is Gumbel; an exponential of 0 would make it infinite
            noise.exponential_(generator=self._generator).clamp_(min=1e-38).log_().neg_()
        if self._hold > 1:  # starts again with every rollout
            noise = noise[:: self._hold].repeat_interleave(self._hold, 0)[:n_steps]
        return noise if self._shift is None else noise.add_(self._shift)


class TensorCollector(LocalCollector):
    """Fills tensor rollouts by acting in the executor's envs."""

    executor: TensorExecutor | MemoryTensorExecutor

    def __init__(
        self,
        executor: TensorExecutor,
        model: PolicyNet,
        *,
        seed: int,
        clock: PhaseClock,
        source: PolicyNet | None = None,
        exploration: Exploration = NO_EXPLORATION,
    ) -> None:
        envs = MemoryTensorExecutor(executor, model.state_size) if model.state_size else executor
        super().__init__(envs, clock, executor.device)
        self.model, self._copy = model, None if source is None else ParamCopy(source, floats(model))
        self._actions = TensorActions(model.action, executor.device)
        self._noise = DeviceNoise(model.action, executor.n_envs, seed, executor.device, exploration)
        small = executor.n_envs <= KERNEL_ROWS and is_small(model, executor.device)
        self._actor = KernelActor(model) if small else None
        self._returns = torch.zeros(executor.n_envs, dtype=torch.float64, device=executor.device)
        self._lengths = torch.zeros(executor.n_envs, dtype=torch.int64, device=executor.device)
        self._next_noise: tuple[int, Tensor | None] = 0, None
        """The first time step of a rollout, and its noise."""
        self._graphs: dict[int, _CapturedSteps | None] = {}
        """By rollout; None: it has been collected once."""

    def publish(self) -> None:
        if self._copy is not None:
            self._copy.begin()

    def offer_next(self, rollout: TensorRollout) -> None:
        """Nothing: all envs are done at the same time."""

    def reset(self) -> None:
        self.executor.reset()
        self._returns.zero_()
        self._lengths.zero_()

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Begin new episodes in every env, not those with which the run began."""
        self._returns.zero_()
        self._lengths.zero_()
        return self.executor.restore(snapshot)

    # No inference mode: an env could not change tensors elsewhere that it made there.
    @torch.no_grad()
    def collect(self, rollout: TensorRollout, stop: Callable[[], bool] = lambda: False) -> list[Episode]:
        clock, executor = self.clock, self.executor
        clock.enter(ACT)
        with self.on_stream():
            if self._copy is not None:
                self._copy.finish()
            noise = self._drawn_noise(rollout.n_steps)
            _copy(rollout.obs_at[0], executor.current.obs)
            steps = self._captured(rollout)
            if steps is None:
                self._step_all(rollout, noise, stop)
            else:
                steps.run(noise, stop)
            self.n_steps += rollout.n_steps
            if steps is None:
                episodes = self.retries.attempt(lambda: self._read_episodes(rollout))
            else:
                self._next_noise = (
                    self.n_steps,
                    self._drawn_noise(rollout.n_steps),
                )  # while the device has work
                episodes = self._episodes(*steps.read_episodes(), rollout)
        clock.enter(Phase.SLOT)
        clock.cut()
        return episodes

    def _drawn_noise(self, n_steps: int) -> Tensor:
        """The noise of the next rollout, which may have been drawn before."""
        drawn_for, drawn = self._next_noise
        if drawn is not None and (drawn_for, len(drawn)) == (self.n_steps, n_steps):
            return drawn
        return self.retries.attempt(lambda: self._noise.draw(self.n_steps, n_steps))

    def _step_all(self, rollout: TensorRollout, noise: Tensor, stop: Callable[[], bool]) -> None:
        """Act, step and store, operation by operation."""
        clock, executor, attempt = self.clock, self.executor, self.retries.attempt
        on_host = executor.device.type == "cpu"
        act = self._acting(rollout, noise)
        for t in range(rollout.n_steps):
            act(t)
            actions = attempt(partial(self.for_envs, rollout.action[t]))
            clock.enter(ENV)
            now = attempt(partial(executor.step, actions))
            clock.enter(STORE)
            rollout.reward[t] = now.reward
            rollout.terminated[t] = now.terminated
            rollout.truncated[t] = now.truncated
            _copy(rollout.obs_at[t + 1], now.obs)
            # On the host this test is cheap; on a device it would wait, so all rows are copied.
            if not on_host or now.truncated.any():
                _copy(tuple(final[t] for final in rollout.final_obs), now.final_obs)
            if stop():
                raise Interrupted
            clock.enter(ACT)

    def sample(self, obs: tuple[Tensor, ...], noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions and their log-probabilities; the envs are told the new states of the policy's memory, if it has one."""
        if not isinstance(self.executor, MemoryTensorExecutor):
            return self.model.sample(obs, noise)
        action, log_prob, self.executor.next_state = self.model.act(obs, noise)
        return action, log_prob

    def for_envs(self, action: Tensor) -> Tensor:
        """Actions of the policy as the envs take them."""
        return self._actions.to_env(self.model.head.squash(action))

    def _captured(self, rollout: TensorRollout) -> _CapturedSteps | None:
        """The time steps of this rollout as a graph; None: the env or the device cannot, or not yet."""
        if not (self.executor.capturable and can_capture(self.executor.device)):
            return None
        # The first rollout is stepped as it is: that initializes whatever a capture must not.
        if id(rollout) not in self._graphs:
            self._graphs[id(rollout)] = None
        elif self._graphs[id(rollout)] is None:
            try:
                self._graphs[id(rollout)] = self.retries.attempt(lambda: _CapturedSteps(self, rollout))
            except (RuntimeError, EnvError) as error:  # nothing has run
                # If it is not memory, which may be free at the next rollout, the env reads something back after all.
                self.executor.capturable = is_out_of_memory(error)
                if not self.executor.capturable:
                    self.retries.notes.append(f"the env's steps are not captured: {short_reason(error)}")
        return self._graphs[id(rollout)] if self.executor.capturable else None

    def _acting(self, rollout: TensorRollout, noise: Tensor) -> Callable[[int], None]:
        """A function that acts in one time step of the rollout, with the current parameters."""
        actor = self._actor
        if actor is None:

            def act(t: int) -> None:
                action, log_prob = self.retries.attempt(lambda: self.sample(rollout.obs_at[t], noise[t]))
                rollout.action[t].copy_(action)
                rollout.log_prob[t].copy_(log_prob)

            return act
        actor.bind()
        places, given = rollout.arrays_at, noise.numpy()

        def act_compiled(t: int) -> None:
            obs, action, log_prob = places[t]
            actor.begin(obs, given[t], action, log_prob)

        return act_compiled

    def sum_episodes(self, rollout: TensorRollout) -> tuple[Tensor, Tensor, Tensor]:
        """Which steps (T, N) ended an episode, and the return and length so far; launches only, and changes nothing."""
        ended = rollout.terminated | rollout.truncated
        return ended, *episode_sums(rollout.reward, ended, self._returns, self._lengths)

    def keep_sums(self, ended: Tensor, returns: Tensor, lengths: Tensor) -> None:
        """Go on from these returns and lengths in the next rollout."""
        self._returns.copy_(returns[-1].masked_fill(ended[-1], 0.0))
        self._lengths.copy_(lengths[-1].masked_fill(ended[-1], 0))

    def _read_episodes(self, rollout: TensorRollout) -> list[Episode]:
        """The episodes that ended in the rollout; only here the host waits for the device.

        Out of memory leaves no trace.
        """
        ended, returns, lengths = self.sum_episodes(rollout)
        n_ended, n_cut = torch.stack([ended.sum(), rollout.cut().sum()]).tolist()
        places = ended.view(-1).nonzero_static(size=n_ended).squeeze(1)
        columns = (places, returns.view(-1)[places], lengths.view(-1)[places])
        # Sums are a cheap first test for NaN.
        sums = [values.sum().double() for _, values, _ in _floats_seen(rollout, places)]
        read = torch.cat([*(column.double() for column in columns), torch.stack(sums)]).cpu()
        self.keep_sums(ended, returns, lengths)
        rows = read[: 3 * n_ended].view(3, n_ended)
        return self._episodes(rows, [n_cut, *read[3 * n_ended :].tolist()], rollout)

    def _episodes(self, rows: Tensor, n_cut_and_sums: list[float], rollout: TensorRollout) -> list[Episode]:
        """The episodes of (3, n) places, returns and lengths, if the sums over the rollout are finite."""
        n_cut, *sums = n_cut_and_sums
        rollout.n_cut = int(n_cut)
        places, returns, lengths = rows.tolist()
        if not all(map(math.isfinite, sums)):
            self._refuse_nan(rollout)
        table, n, ids = zip(places, returns, lengths, strict=True), rollout.n_envs, self.executor.env_ids
        return [Episode(int(ids[int(place) % n]), total, int(length)) for place, total, length in table]

    def _refuse_nan(self, rollout: TensorRollout) -> None:
        """Raise for the first env with a NaN or infinite observation or reward, if there is one."""
        ended = (rollout.terminated | rollout.truncated).view(-1).nonzero().squeeze(1)
        for what, values, places in _floats_seen(rollout, ended):
            bad = ~values.reshape(len(places) or 1, -1).isfinite().all(1)
            if bad.any():  # a float32 sum may overflow although every value is finite
                t, n = divmod(int(places[bad.nonzero()[0]]), rollout.n_envs)
                step = self.executor.n_steps - rollout.n_steps + t + 1
                raise EnvError(nan_message(what, int(self.executor.env_ids[n]), step))


class _CapturedSteps:
    """A time step of acting, stepping and storing as a graph, for one rollout: a launch per time step.

    Another graph makes one tensor of all that the host reads after the last step.
    """

    def __init__(self, collector: TensorCollector, rollout: TensorRollout) -> None:
        executor = collector.executor
        self._executor, self._rollout = executor, rollout
        device, n_steps_before = executor.device, executor.n_steps
        self._t = torch.zeros(1, dtype=torch.int64, device=device)
        size = collector.model.action.noise_size
        self._noise = torch.zeros(rollout.n_steps, rollout.n_envs, size, device=device)

        def step() -> None:
            t, after = self._t, self._t + 1
            obs = tuple(x.index_select(0, t).squeeze(0) for x in rollout.obs)
            action, log_prob = collector.sample(obs, self._noise.index_select(0, t).squeeze(0))
            now = executor.step(collector.for_envs(action))
            values = action, log_prob, now.reward, now.terminated, now.truncated
            for column, value in zip(
                (*rollout.columns, *rollout.final_obs), (*values, *now.final_obs), strict=True
            ):
                column.index_copy_(0, t, value[None].to(column.dtype))
            for column, value in zip(rollout.obs, now.obs, strict=True):
                column.index_copy_(0, after, value[None])
            t.add_(1)

        floats = [
            (obs, final)
            for obs, final in zip(rollout.obs, rollout.final_obs, strict=True)
            if obs.is_floating_point()
        ]
        n = rollout.n_transitions
        self._seen = torch.zeros(2 * n + 2 + 2 * len(floats), dtype=torch.float64, device=device)
        self._read = pinned(torch.zeros(self._seen.shape, dtype=torch.float64), device)
        self._is_read = new_event(device)

        def end() -> None:
            ended, returns, lengths = collector.sum_episodes(rollout)
            sums = [rollout.reward.sum()]
            for obs, final in floats:
                kept = ended.view(*ended.shape, *(1,) * (final.ndim - 2))
                sums += [obs[1:].sum(), torch.where(kept, final, 0).sum()]
            torch.cat(
                [
                    returns.view(-1),
                    torch.where(ended, lengths, 0).view(-1).double(),
                    torch.stack([rollout.cut().sum().double(), *(x.double() for x in sums)]),
                ],
                out=self._seen,
            )
            collector.keep_sums(ended, returns, lengths)

        # A capture records and does not run: the envs stay where they are.
        try:
            self._graph = Graph(step, device, lambda: collector.sample(rollout.obs_at[0], self._noise[0]))
            self._end = Graph(end, device, lambda: collector.sum_episodes(rollout))
        finally:
            executor.n_steps = n_steps_before

    def run(self, noise: Tensor, stop: Callable[[], bool]) -> None:
        """Step to the end of the rollout."""
        self._noise.copy_(noise)
        self._t.zero_()
        for _ in range(self._rollout.n_steps):
            self._graph.replay()
            if stop():
                raise Interrupted
        self._end.replay()
        self._read.copy_(self._seen, non_blocking=True)
        self._is_read.record(current_stream(self._executor.device))
        self._executor.n_steps += self._rollout.n_steps
        self._executor.current.obs = self._rollout.obs_at[-1]

    def read_episodes(self) -> tuple[Tensor, list[float]]:
        """Places, returns and lengths (3, n) of the episodes that ended, the number of those that were cut, and sums over
        everything that must be finite; only here the host waits for the device."""
        self._is_read.synchronize()
        returns, lengths = self._read[: 2 * self._rollout.n_transitions].view(2, -1)
        places = lengths.nonzero().squeeze(1)
        rest: list[float] = self._read[2 * self._rollout.n_transitions :].tolist()
        return torch.stack([places.double(), returns[places], lengths[places]]), rest


def _floats_seen(rollout: TensorRollout, ended: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """What must be finite: its name, the values, and where in the rollout each is."""
    everywhere = torch.arange(rollout.n_transitions, device=ended.device)
    seen = [("reward", rollout.reward, everywhere)]
    for obs, final in zip(rollout.obs, rollout.final_obs, strict=True):
        if obs.is_floating_point():
            seen.append(("observation", obs[1:], everywhere))
            seen.append(("observation", final.flatten(0, 1)[ended], ended))
    return seen


def episode_sums(reward: Tensor, ended: Tensor, returns: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return and length (T, N), after each step, of the episode it belongs to.

    `returns` and `lengths` (N,) are those of the episodes under way before the first step.
    """
    total = torch.cat([returns[None], reward.double()]).cumsum(0)
    step = torch.arange(1, len(reward) + 1, device=reward.device)[:, None]
    # The step that the episode before ended with; 0 where that was before this rollout.
    last_end = torch.where(ended, step, 0).cummax(0).values
    began = torch.cat([torch.zeros_like(last_end[:1]), last_end[:-1]])
    before = torch.where(began == 0, 0.0, total.gather(0, began))
    return total[1:] - before, step - began + torch.where(began == 0, lengths, 0)


def _copy(out: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
    for tensor, value in zip(out, values, strict=True):
        tensor.copy_(value)


def batched_collector(
    envs: EnvSet,
    model: PolicyNet,
    *,
    n_steps: int,
    device: torch.device,
    clock: PhaseClock,
    n_slots: int = 1,
    source: PolicyNet | None = None,
    exploration: Exploration = NO_EXPLORATION,
) -> tuple[Collects[Any], list[Rollout] | list[TensorRollout]]:
    """A collector over the batched env, and rollouts on the side where the env's observations are."""
    assert envs.action is not None, "collectors choose actions"
    executor, action = open_batched(envs), envs.action
    if isinstance(executor, BatchedExecutor):
        collector = Collector(
            executor,
            model,
            device=device,
            seed=envs.seed,
            clock=clock,
            source=source,
            exploration=exploration,
        )
        return collector, [Rollout.alloc(model.obs, action, n_steps, executor.n_envs) for _ in range(n_slots)]
    if not same_device(device, executor.device):
        raise FlatoutError(
            f"the env's tensors are on {executor.device} and the policy is on {device}; "
            f"pass --device {executor.device}"
        )
    slots, n_envs = range(n_slots), executor.n_envs
    rollouts = [TensorRollout(model.obs, action, n_steps, n_envs, executor.device) for _ in slots]
    return TensorCollector(
        executor, model, seed=envs.seed, clock=clock, source=source, exploration=exploration
    ), rollouts
