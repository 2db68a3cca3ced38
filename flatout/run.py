"""The composition root: the only file that knows every concrete class.

Comes in: a config and an env. Goes out: a trainer, everything that learning needs put together.
"""

from __future__ import annotations

import statistics
import weakref
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from time import perf_counter
from typing import Any

import numpy as np
import torch

from flatout.buffers.rollout import Rollout
from flatout.collect.batched import batched_collector, batched_eval_executor
from flatout.collect.child import ChildCollectors, Job
from flatout.collect.collector import Collector, Collects
from flatout.collect.evaluate import Evaluation, evaluate
from flatout.config import RunConfig
from flatout.envs.check import EnvInfo
from flatout.envs.make import one_line
from flatout.envs.spaces import ActionLayout, ObsLayout, space_to_json
from flatout.errors import FlatoutError
from flatout.executors.base import Executor
from flatout.executors.choose import Plan, only_plan, plans, probe
from flatout.executors.coroutine import CoroutineExecutor
from flatout.executors.process import ProcessExecutor
from flatout.executors.serial import SerialExecutor
from flatout.executors.supervise import RestartBudget
from flatout.executors.thread import ThreadExecutor
from flatout.hardware.threads import torch_threads
from flatout.learn.checkpoint import Checkpoint
from flatout.learn.learner import Learner
from flatout.models.actor import make_actor
from flatout.models.policy import ActorCritic
from flatout.pipeline.lockstep import Counted, Lockstep
from flatout.pipeline.state import TrainState
from flatout.pipeline.stop import StopRequest
from flatout.trace.phases import PhaseClock

EVAL_SEED = 1_000_003
"""Added to the run's seed, so that evaluation never sees the training episodes."""
MAX_EVAL_ENVS = 10
EVAL_IN_PLACE = "evaluation plays in the one batched env there is; training then begins new episodes in it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What acting needs: the model and how spaces map to it."""

    model: ActorCritic
    obs: ObsLayout
    action: ActionLayout
    device: torch.device


class Trainer:
    """Everything that learning needs, alive between two calls of learn()."""

    def __init__(
        self, config: RunConfig, env: EnvInfo, policy: Policy, *, n_cores: int, n_steps: int
    ) -> None:
        self.config, self._env, self.policy = config, env, policy
        self._n_cores, self._n_steps = n_cores, n_steps
        self.clock = PhaseClock()
        self.state = TrainState()
        self.notes: list[str] = []
        self.budget = RestartBudget()
        self.learner = Learner(
            policy.model, config.ppo, n_envs=config.n_envs, seed=config.seed, clock=self.clock
        )
        if config.eval_every and env.factory.is_instance:
            self.notes.append(EVAL_IN_PLACE)
        self.plan, self._collector, rollout = self._first_that_starts(self._plans())
        n_params = self.learner.params.flat.numel()
        self._pipeline = Lockstep(
            self._collector,
            self.learner,
            rollout,
            self.state,
            collect_threads=torch_threads(n_params, config.n_envs, n_cores),
            learn_threads=torch_threads(n_params, config.ppo.batch_size, n_cores),
        )
        self._finalizer = weakref.finalize(self, self._collector.close)
        self._eval_executor: Executor | None = None

    def _plans(self) -> list[Plan]:
        config = self.config
        only = only_plan(self._env, config.executor, config.n_envs)
        if only is not None:
            return [only]
        measured = probe(
            self._env.factory, self.policy.action, partial(acting_seconds, self.policy), seed=config.seed
        )
        return plans(
            measured,
            n_envs=config.n_envs,
            n_cores=self._n_cores,
            timesteps=self._n_steps,
            only=config.executor,
            children_ok=self.policy.device.type == "cpu",
        )

    def _first_that_starts(self, ranked: list[Plan]) -> tuple[Plan, Collects[Any], Counted]:
        """Build the best plan; where one cannot start, say so and take the next."""
        for plan, following in zip_longest(ranked, ranked[1:]):
            try:
                return plan, *self._assemble(plan)
            except Exception as error:
                if following is None:
                    raise
                self.notes.append(
                    f"executor {plan.kind} could not start ({one_line(error)}); using {following.kind}"
                )
        raise FlatoutError(f"--executor {self.config.executor} cannot run this env; use --executor auto")

    def _assemble(self, plan: Plan) -> tuple[Collects[Any], Counted]:
        config, policy, env_ids = self.config, self.policy, np.arange(self.config.n_envs)
        n_steps = config.ppo.n_steps
        if plan.children:
            job = Job(
                factory=self._env.factory,
                obs=policy.obs,
                action=policy.action,
                network=config.network,
                normalize_obs=config.ppo.normalize_obs,
                seed=config.seed,
                first=0,
                end=config.n_envs,
            )
            children = ChildCollectors(
                job, policy.model, plan.n_collectors, n_steps=n_steps, clock=self.clock, budget=self.budget
            )
            return children, children.rollout
        if plan.kind == "batched":
            return batched_collector(
                self._env,
                policy.model,
                policy.obs,
                policy.action,
                n_envs=config.n_envs,
                n_steps=n_steps,
                device=policy.device,
                seed=config.seed,
                clock=self.clock,
            )
        executor: Executor
        if plan.kind == "process":
            executor = ProcessExecutor(
                self._env.factory,
                policy.obs,
                env_ids,
                config.seed,
                action=policy.action,
                n_workers=plan.n_workers,
                n_cores=self._n_cores,
                budget=self.budget,
            )
        elif plan.kind in ("thread", "async"):
            waiting = ThreadExecutor if plan.kind == "thread" else CoroutineExecutor
            executor = waiting(self._env.factory, policy.obs, env_ids, config.seed, budget=self.budget)
        else:
            executor = SerialExecutor(self._env.factory, policy.obs, env_ids, config.seed, budget=self.budget)
        collector = Collector(
            executor, policy.model, policy.action, device=policy.device, seed=config.seed, clock=self.clock
        )
        return collector, Rollout.alloc(policy.obs, policy.action, n_steps, config.n_envs)

    def start(self, checkpoint: Checkpoint | None = None) -> list[int]:
        """Reset the envs, or bring everything back to a checkpoint; returns the envs that began anew."""
        if checkpoint is None:
            self._collector.reset()
            return []
        tensors = checkpoint.tensors
        self.learner.load_state(tensors)
        saved = TrainState.from_json(checkpoint.state["progress"])
        for name in TrainState.__slots__:
            setattr(self.state, name, getattr(saved, name))
        self.learner.n_updates = saved.n_updates
        self._collector.n_steps = saved.env_steps // self.config.n_envs
        envs = {name[5:]: t.numpy() for name, t in tensors.items() if name.startswith("envs.")}
        if not envs or (not self._env.batched and "ages" not in envs):  # saved without a way back
            self._collector.reset()
            return list(range(self.config.n_envs))
        return self._collector.restore(envs)

    def iterate(self, total_steps: int, stop: StopRequest) -> dict[str, float]:
        """Collect a rollout and learn from it."""
        return self._pipeline.iterate(total_steps, stop)

    def checkpoint(self) -> Checkpoint:
        """The state after the last whole iteration."""
        tensors = {name: tensor.detach().cpu() for name, tensor in self.learner.state().items()}
        snapshot = self._collector.snapshot()
        self.state.phases = self.clock.read()
        tensors |= {f"envs.{name}": torch.from_numpy(array) for name, array in snapshot.items()}
        return Checkpoint(tensors, describe(self.config, self._env, self.policy, self.state))

    def evaluate(self) -> Evaluation:
        """Play the deterministic policy in envs of its own, or in the only batched env there is."""
        if self._eval_executor is None:
            n_envs = min(self.config.eval_episodes, MAX_EVAL_ENVS)
            seed = self.config.seed + EVAL_SEED
            self._eval_executor = eval_executor(self._env, self.policy.obs, n_envs, seed)
        result = evaluate(
            self._eval_executor,
            self.policy.model,
            self.policy.action,
            n_episodes=self.config.eval_episodes,
            device=self.policy.device,
            seed=self.config.seed + EVAL_SEED,
        )
        self.after_evaluation()
        return result

    def after_evaluation(self) -> None:
        """Begin new episodes where evaluation has played in the training envs themselves."""
        if self._env.factory.is_instance:
            self._collector.reset()

    def close(self) -> None:
        """Close every env; happens by itself when the trainer is no longer used."""
        self._finalizer()
        if self._eval_executor is not None:
            self._eval_executor.close()


def eval_executor(env: EnvInfo, layout: ObsLayout, n_envs: int, seed: int) -> Executor:
    """Envs to evaluate in."""
    if env.batched:
        return batched_eval_executor(env, layout, n_envs, seed)
    kind = CoroutineExecutor if env.is_async else SerialExecutor
    return kind(env.factory, layout, np.arange(n_envs), seed, replayable=False)


def acting_seconds(policy: Policy, n_rows: int) -> float:
    """Seconds the policy takes to act on `n_rows` observations, measured."""
    actor = make_actor(policy.model, n_rows, policy.device)
    kind = np.float32 if policy.action.continuous else np.int64
    noise = np.zeros((n_rows, policy.action.noise_size), np.float32)
    rows, log_prob = np.zeros((n_rows, policy.action.size), kind), np.zeros(n_rows, np.float32)
    obs = policy.obs.alloc(n_rows)
    times = []
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(7):
        began = perf_counter()
        actor.act(obs, noise, rows, log_prob)
        times.append(perf_counter() - began)
    torch.set_num_threads(n_threads)
    return statistics.median(times)


def describe(config: RunConfig, env: EnvInfo, policy: Policy, state: TrainState) -> dict[str, Any]:
    """A checkpoint's JSON part: enough to act without the env, and to go on with it."""
    return {
        "config": config.to_json(),
        "observation_space": space_to_json(policy.obs.space),
        "action_space": space_to_json(policy.action.space),
        "mask_in_info": env.factory.mask_in_info,
        "progress": state.to_json(),
    }
