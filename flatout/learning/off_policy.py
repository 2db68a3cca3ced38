"""Learning from a replay buffer: store a rollout, then take exactly as many updates as `train_ratio` asks for.

An algorithm adds its loss, its networks with their target, and what a minibatch is; see `OffPolicyLearner`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property, partial
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor

from flatout.buffers.batch import ReplayBatch, alloc_batch
from flatout.buffers.capacity import SPARED, fitting_capacity, parse_capacity, transition_bytes
from flatout.buffers.device_replay import (
    PrioritizedDraws,
    TensorPrioritized,
    TensorReplay,
    TensorUniform,
    UniformDraws,
)
from flatout.buffers.prefetch import Prefetch
from flatout.buffers.priority import Prioritized
from flatout.buffers.replay import Replay, Uniform, minibatches_at_once
from flatout.buffers.rollout import Learnable, Rollout, TensorRollout
from flatout.device.accelerator import Retries, can_capture, has_streams, is_accelerator
from flatout.device.machine import free_memory
from flatout.envs.spaces import Array
from flatout.learning.learner import Learner
from flatout.learning.update import Batch, GraphBackend, PartSize
from flatout.models.params import copy_all
from flatout.models.policy import PolicyNet
from flatout.timing import Phase


class OffPolicyLearner(Learner[Batch]):
    """Improves a model's parameters from a replay buffer, on one device.

    `config` has the settings of `ReplayConfig`.
    """

    networks: Any
    """The model with its target network, whose parameters are the tensor `target`."""
    _graph_batch: Batch
    """What the captured step learns from, if the replay buffer is not on the device."""
    _graph_of_many: GraphBackend[Batch] | None = None
    """Several steps as one graph, if the replay buffer is on the device."""

    def __init__(self, model: PolicyNet, config: Any, **how: Any) -> None:
        """`how`: the keywords of `Learner`."""
        super().__init__(model, config, **how)
        self._starts = config.learning_starts
        """Env steps before the first update; later where a run is resumed without its replay buffer."""

    @abstractmethod
    def minibatch(self, sample: ReplayBatch) -> Batch:
        """The algorithm's minibatch of a sample, in the sample's memory."""

    def explore(self, progress: float, env_steps: int) -> dict[str, float]:  # noqa: ARG002
        """Set how envs explore from now on, after so many env steps; returns metrics."""
        return {}

    def before_updates(self, before: int, after: int) -> None:
        """Called after a rollout is stored that began and ended at these env steps."""

    def drawn(self, whole: Batch, parts: list[Batch]) -> None:
        """Called with several minibatches, together and one by one, before the first of them is learned from."""

    def before_step(self, batch: Batch) -> Batch:
        """The minibatch that a step learns from; part of a captured step."""
        return batch

    def after_step(self) -> None:
        """Called after each step; part of a captured one."""

    @cached_property
    def experience(self) -> Experience[Batch]:
        """The replay buffer; allocated on first use."""
        return Experience(
            self.model, self.config, self.minibatch, n_envs=self.n_envs, device=self.device, seed=self.seed
        )

    def reserve(self) -> None:
        """Allocate the replay buffer, or refuse with the size that fits."""
        self.experience  # noqa: B018

    def memory(self) -> list[str]:
        return [self.experience.replay.memory()]

    def learn(
        self,
        rollout: Learnable,
        *,
        iteration: int,
        progress: float,
        stop: Callable[[], bool] = lambda: False,
        **_unused: Any,  # lag: it is off-policy
    ) -> dict[str, float]:
        """Store a rollout and learn; `progress` in [0, 1] drives the schedules. Returns the metrics."""
        config, experience = self.config, self.experience
        beta = config.priority_beta + (1 - config.priority_beta) * min(progress, 1.0)
        self._enter(Phase.STAGE)
        assert isinstance(rollout, Rollout | TensorRollout), "a replay buffer reads rollouts directly"
        if config.clip_reward:
            reward: Any = rollout.reward
            reward[...] = reward.sign() if isinstance(rollout, TensorRollout) else np.sign(reward)
        experience.add(rollout, capture=self.capture)
        before = iteration * self.n_envs * config.n_steps
        after = before + self.n_envs * config.n_steps
        n_due = config.updates_after(after - self._starts) - config.updates_after(before - self._starts)
        self._begin(progress)
        if n_due and (experience.draws is None or not self.capture):
            self._prepare_backend(experience.peek, progress)
        self._enter(Phase.UPDATE)
        self.before_updates(before, after)
        if n_due:
            self._take(n_due, beta, stop)
        if self._obs_moments:
            data = self._value_parts.attempt(lambda: rollout.tensors(self._staging))
            self._merge_obs_statistics(data.flat_obs())
            self._staging.release()
            self._set_obs_statistics()
        more = self.explore(progress, after)
        more["train/buffer_fill"] = min(after / experience.replay.capacity, 1.0)
        metrics = self._end(more) | {"train/updates_per_step": self.n_updates / after}
        absent = () if n_due else (*self.METRICS, "train/grad_norm")
        return {name: value for name, value in metrics.items() if name not in absent}

    def stage(self, rollout: Learnable, stop: Callable[[], bool]) -> None:
        """Nothing: the replay buffer reads rollouts itself."""

    def _capture(self, n_updates: int = 1) -> None:
        """Capture the step; if the replay buffer is on the device, with sampling and everything that follows.

        `n_updates`: how many an iteration takes; from enough of them on, many steps are captured as one graph, too.
        """
        draws, update = self.experience.draws, self.update
        if draws is None:
            self._graph_batch = example = self.example_batch(update.batch_size)
        else:
            draws.capture()
            example = self.minibatch(draws.next())

        def next_batch() -> Batch:
            return self.before_step(self._graph_batch if draws is None else self.minibatch(draws.next()))

        def after() -> None:
            self.after_step()
            if draws is not None:
                draws.advance(update.sample_output)

        self._graph = GraphBackend(update, next_batch, example, after)
        self._graph_of_many = None
        if draws is not None and n_updates >= draws.n_at_once > 1:
            self._graph_of_many = GraphBackend(update, next_batch, example, after, draws.n_at_once)
        update.backend = self._graph.name

    def _replay_steps(self, n_updates: int, beta: float, stop: Callable[[], bool]) -> None:
        """Take the updates by replays of a graph that samples too."""
        draws, n_done = self.experience.draws, 0
        assert draws is not None, "it samples on the device"
        moved = self.experience.retries.attempt(lambda: draws.begin(n_updates, beta))
        if moved or self._graph is None:
            self.update.parts.attempt(lambda: self._capture(n_updates))
        assert self._graph is not None, "it is captured"
        while n_done < n_updates and not (n_done and stop()):
            draws.refill(n_done)
            many = self._graph_of_many
            graph = self._graph if many is None or n_done + many.n_steps > n_updates else many
            graph.replay()
            n_done += graph.n_steps
        draws.end(n_done)

    def _take(self, n_updates: int, beta: float, stop: Callable[[], bool]) -> None:
        """Take the updates, each followed by `after_step` and new priorities."""
        update, experience = self.update, self.experience
        if self.capture and experience.draws is not None:
            try:
                self._replay_steps(n_updates, beta, stop)
                return
            except RuntimeError as error:
                self._no_graph(error)
                experience.draws.end(0)
        for batch, sample in experience.batches(n_updates, beta, self.drawn):
            if self._graph is not None:
                copy_all(self._graph_batch.tensors(), batch.tensors())
                self._graph.replay()
            else:
                update.step(self.before_step(batch))
                self.after_step()
            if self.config.prioritized:
                experience.update_priorities(sample, update.sample_output)
            if stop():
                break

    def _watched(self) -> list[PartSize | Retries]:
        return super()._watched() + ([self.experience.retries] if "experience" in vars(self) else [])

    def replay(self) -> Mapping[str, Array] | None:
        if not self.config.save_replay:
            return None
        return self.experience.arrays() | {"starts": np.array([self._starts])}

    def restore_replay(self, saved: Mapping[str, Array] | None, env_steps: int) -> None:
        """Continue after so many env steps with what `replay` gave; without it, refill the buffer before learning."""
        if saved is not None:
            self.experience.restore(saved)
            self._starts = int(saved["starts"][0])
        elif env_steps > 0:
            self._starts = env_steps + self.config.learning_starts
            self.notes.append(
                f"no replay was saved (--save-replay keeps it): {self.config.learning_starts:,} env steps are "
                "collected before learning goes on"
            )

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"target": self.networks.target}

    def close(self) -> None:
        super().close()
        if "experience" in vars(self):
            self.experience.close()


class Experience(Generic[Batch]):
    """The replay buffer, where the learner can reach it fast, and minibatches sampled from it.

    On the CPU it is in RAM; for a GPU it is on the device where it fits, else in pinned RAM with prefetching.
    """

    def __init__(
        self,
        model: PolicyNet,
        config: Any,
        minibatch: Callable[[ReplayBatch], Batch],
        *,
        n_envs: int,
        device: torch.device,
        seed: int,
    ) -> None:
        """`minibatch`: the algorithm's minibatch of a sample."""
        obs, action, prioritized = model.obs, model.action, config.prioritized
        self._config, self._device, self._minibatch = config, device, minibatch
        each = transition_bytes(obs, action, prioritized=prioritized)
        capacity = parse_capacity(config.buffer_size, each)
        how: dict[str, Any] = {"gamma": config.gamma, "n_step": config.multi_step, "seed": seed}
        how |= {"alpha": config.priority_alpha} if prioritized else {}
        self._in_ram = not is_accelerator(device)
        self.retries = Retries(device)
        """Of storing and sampling that ran out of memory."""
        self.draws: UniformDraws | PrioritizedDraws | None = None
        """Draws on the device for captured updates, if the replay buffer is there."""
        self.replay: Replay | TensorReplay
        self._sampler: Uniform | Prioritized | TensorUniform | TensorPrioritized
        alloc: Callable[[], ReplayBatch] | None = None
        if not self._in_ram and capacity * each <= free_memory(device) * (1 - SPARED) / 2:
            self.replay = TensorReplay(obs, action, n_envs, capacity, device, self.retries)
            self.replay.captures = can_capture(device)
            size = config.batch_size
            if prioritized:
                self._sampler = by_priority = TensorPrioritized(self.replay, **how)
                self.draws = PrioritizedDraws(by_priority, size)
            else:
                self._sampler = uniform = TensorUniform(self.replay, **how)
                self.draws = UniformDraws(uniform, size)
        else:
            capacity = fitting_capacity(config.buffer_size, each, torch.device("cpu"))
            self.replay = Replay(obs, action, n_envs, capacity, pin=has_streams(device))
            self._sampler = (Prioritized if prioritized else Uniform)(self.replay, **how)
            alloc = partial(alloc_batch, obs, action, config.batch_size, pin=not self._in_ram)
        self._buffer = cache(self._alloc)
        in_thread = None if has_streams(device) and self.draws is None else False
        self._prefetch = Prefetch(
            self._sampler,
            config.batch_size,
            device,
            alloc=alloc,
            background=in_thread,
            retries=self.retries,
        )

    def add(self, rollout: Rollout | TensorRollout, *, capture: bool) -> None:
        """Store a rollout; `capture`: by a graph, where that is possible."""
        if isinstance(self.replay, TensorReplay) and not capture:
            self.replay.captures = False
        self.replay.add_rollout(rollout)

    def batches(
        self, n: int, beta: float, drawn: Callable[[Batch, list[Batch]], None]
    ) -> Iterator[tuple[Batch, ReplayBatch]]:
        """`n` minibatches, each with the replay sample that it is a part of; valid until the next one.

        `drawn` is called with those that are sampled together, as one minibatch and as several.
        """
        if not self._config.prioritized and (self._in_ram or self.draws is not None):
            n_at_once = minibatches_at_once(self._config.batch_size)
            for start in range(0, n, n_at_once):
                sample, whole, parts = self._sampled(min(n_at_once, n - start))
                drawn(whole, parts)
                for part in parts:
                    yield part, sample
            return
        self._prefetch.ask(beta)
        n_left = n
        try:
            while n_left:
                sample, n_left = self._prefetch.take(), n_left - 1
                if n_left:  # before this one is used, so that the next is prefetched meanwhile
                    self._prefetch.ask(beta)
                yield self._minibatch(sample), sample
        finally:
            if n_left:  # stopped early
                self._prefetch.take()
            self._prefetch.finish()

    def peek(self) -> Batch:
        """A minibatch for comparing steps; does not advance the sampler."""
        n_draws = self._sampler.n_draws
        sample = self._sampler.sample(self._config.batch_size).to(self._device)
        self._sampler.n_draws = n_draws
        return self._minibatch(sample)

    def _sampled(self, n: int) -> tuple[ReplayBatch, Batch, list[Batch]]:
        """A sample of `n` minibatches, and the same as one minibatch and as `n`."""
        n_rows = n * self._config.batch_size
        if not self._in_ram:
            return self._split(self.retries.attempt(lambda: self._sampler.sample(n_rows)), n)
        made = self._buffer(n)
        self._sampler.sample(n_rows, out=made[0])
        return made

    def _split(self, sample: ReplayBatch, n: int) -> tuple[ReplayBatch, Batch, list[Batch]]:
        whole, size = self._minibatch(sample), self._config.batch_size
        return sample, whole, [whole.take(slice(i * size, (i + 1) * size)) for i in range(n)]

    def _alloc(self, n: int) -> tuple[ReplayBatch, Batch, list[Batch]]:
        """Memory for `n` minibatches."""
        replay = self.replay
        sample = alloc_batch(replay.obs_layout, replay.action_layout, n * self._config.batch_size)
        return self._split(sample, n)

    def update_priorities(self, sample: ReplayBatch, error: Tensor) -> None:
        """Set the priorities of a sample's transitions to their absolute TD errors."""
        self._prefetch.update(sample, error)

    def arrays(self) -> dict[str, Array]:
        """Its content by name; views if it is in RAM."""
        return self.replay.arrays() | {f"sampler.{k}": v for k, v in self._sampler.arrays().items()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore what `arrays` gave."""
        self.replay.restore(arrays)
        names = [name for name in arrays if name.startswith("sampler.")]
        self._sampler.restore({name[8:]: arrays[name] for name in names})

    def close(self) -> None:
        """End the prefetching thread."""
        self._prefetch.close()
