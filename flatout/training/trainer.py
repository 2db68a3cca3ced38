"""The composition root: makes the parts of a run from its config and connects them."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from flatout.buffers.rollout import Rollout, TensorRollout
from flatout.collect.collector import Collector, Collects
from flatout.collect.groups import MIN_ENVS, GroupedCollector
from flatout.collect.noise import NO_EXPLORATION
from flatout.collect.ray_actors import RayCollectors
from flatout.collect.subprocess import CollectorJob, SubprocessCollectors
from flatout.collect.tensors import batched_collector
from flatout.config.run_config import RunConfig
from flatout.device.accelerator import (
    can_capture,
    choose_precision,
    has_streams,
    is_accelerator,
    new_event,
    no_compiler,
    use_device,
    use_matmul_precision,
)
from flatout.device.machine import free_memory, torch_threads
from flatout.envs.check import EnvInfo
from flatout.envs.spaces import Array, space_to_json
from flatout.errors import FlatoutError, one_line
from flatout.executors.base import EXECUTORS, EnvSet, Executor, RestartBudget, make_executor
from flatout.learning.compile import Compilation, Recipe, compiled_here, is_available
from flatout.models.policy import Policy
from flatout.perf.costs import Costs, Settings
from flatout.perf.decide import Decision
from flatout.perf.planner import UpdateProbe, faster_device, plan_run
from flatout.timing import DeviceClock, PhaseClock
from flatout.training.checkpoint import Checkpoint
from flatout.training.distributed import RankCollector, Ranks, share_of
from flatout.training.durable import SavedArrays
from flatout.training.evaluation import Evaluation, eval_executor, evaluate
from flatout.training.pipeline import Pipeline, SizedRollout
from flatout.training.state import TrainState

EVAL_SEED = 1_000_003
"""Added to the run's seed, so that evaluation does not repeat training episodes."""
MAX_EVAL_ENVS = 10
EVAL_IN_PLACE = (
    "evaluation uses the training env, as there is only one; training then begins new episodes in it"
)


class Trainer:
    """The parts of a run; they live on between two calls of learn()."""

    def __init__(
        self,
        config: RunConfig,
        env: EnvInfo,
        policy: Policy,
        *,
        n_cores: int,
        n_steps: int,
        checkpoint: Checkpoint | None = None,
        costs: Costs | None = None,
        on_restart: Callable[[str, str], None] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`checkpoint`: where to go on. `costs`: of the env's steps, if they were timed. `ranks`: other processes of this run.

        `on_restart` gets a note and a traceback when an env or worker is replaced.
        """
        self.config, self._env, self.policy, self._n_cores = config, env, policy, n_cores
        self.ranks = ranks
        self.clock = PhaseClock()
        self.state = TrainState()
        self.notes: list[str] = []
        self.budget = RestartBudget()
        self.budget.listener = on_restart
        self.precision = choose_precision(config.precision, policy.device, policy.n_params)
        use_device(policy.device)
        if is_accelerator(policy.device):
            use_matmul_precision(self.precision)
        before = checkpoint.state["progress"] if checkpoint is not None else {}
        plan = partial(
            plan_run,
            env=env,
            n_cores=n_cores,
            timesteps=n_steps,
            overlapped=before.get("overlapped"),
            costs=costs,
        )
        decision = self._planned_by_first(
            plan
        )  # before the learner, which a copy would take the parameters from
        self.learner = config.descriptor.make_learner(
            policy.model,
            config.algorithm,
            n_envs=config.n_envs,
            seed=config.seed,
            clock=self.clock,
            precision=self.precision,
        )
        self.learner.update.parts.n_rows = config.part_size
        if ranks is not None:
            ranks.attach(self.learner.update)
        if config.compile == "auto" and config.accumulate == 1:  # the other backends take whole minibatches
            self.learner.use_fused()
        self.learner.fit_into(free_memory(policy.device))
        self.learner.reserve()
        if config.eval_every and env.factory.is_instance:
            self.notes.append(EVAL_IN_PLACE)
        if decision is None:
            decision = plan(UpdateProbe(config, policy, self.learner, self.precision))
        self.overlap, self.overlap_reason = decision.overlap, decision.overlap_reason
        self.measured = decision.measured
        """Measurements before the run, in seconds: an env's step, launching an update; None if it was not measured."""
        self.state.overlapped = self.overlap
        self._eval_executor: Executor | None = None
        self.fresh_envs: list[int] = []
        """Envs that began a new episode because they could not be restored."""
        self._cut_off: Mapping[str, Array] | None = None
        """After a run that was cut off: what brings its envs back; the collector is not used any more."""
        self._open(decision.ways, None if checkpoint is None else _arrays("envs.", checkpoint.tensors))
        if ranks is not None:
            self.fresh_envs = sorted(set().union(*ranks.gather(self.fresh_envs)))
        reason = decision.reasons.get(self.plan, "")
        self.plan_reason = "the env is made already" if env.factory.is_instance else reason
        self._speed_up_updates(self.pipeline.learn_threads)
        self._close_learner = weakref.finalize(self, self.learner.close)
        if checkpoint is not None:
            self._load(checkpoint)

    def _planned_by_first(self, plan: Callable[[UpdateProbe], Decision]) -> Decision | None:
        """With other ranks: how all of them run, as rank 0 has measured its share of the work."""
        ranks = self.ranks
        if ranks is None:
            return None
        ranks.check(self.config)
        share = share_of(self.config, self._env, ranks.n)
        return ranks.from_first(lambda: plan(UpdateProbe.of_copy(share, self.policy)))

    def _open(self, ranked: list[Settings], envs: Mapping[str, Array] | None) -> None:
        """Start the envs, at a snapshot if there is one, and connect them with the learner."""
        config, n_cores = self.config, self._n_cores
        self.plan, self.collector, rollouts = self._first_that_starts(ranked, envs)
        n_beside = self.plan.n_collectors if self.overlap and self.plan.in_subprocesses else 0
        learn_threads = self.learner.threads(n_cores, n_beside)
        collect_threads = learn_threads
        if not self.overlap:
            collect_threads = torch_threads(self.policy.model.n_multiplies, config.n_envs, n_cores)
        self.pipeline: Pipeline[Any] = Pipeline(
            self.collector,
            self.learner,
            rollouts,
            self.state,
            clock=self.clock,
            lag=int(self.overlap),
            collect_threads=collect_threads,
            learn_threads=learn_threads,
        )
        self._close_pipeline = weakref.finalize(self, self.pipeline.close)

    def _speed_up_updates(self, n_threads: int) -> None:
        """A graph on an accelerator, a compiled update on the CPU, or neither, as the settings say."""
        config, device = self.config, self.policy.device
        if config.compile == "off" or self.learner.update.optimizer is not None:
            return
        if self.ranks is not None and config.compile == "on":
            self.notes.append("nothing is compiled: the ranks meet between a gradient and its step")
        if is_accelerator(device):
            self.learner.capture = can_capture(device)
            if config.compile == "on" and self.ranks is None:
                self.notes.append(self._compile_for_graph())
            return
        if config.accumulate > 1 and config.compile == "on":
            self.notes.append(
                "nothing is compiled: --accumulate splits minibatches, a compiled update takes whole ones"
            )
        if config.accumulate > 1 or self.learner.update.backend == "fused" or not is_available():
            return
        if self.ranks is not None:
            return
        if not config.algorithm.COMPILES:
            return
        # A compiled step meets its threads in every operation, and its convolutions are slower than the library's.
        images = any(spec.kind == "image" for spec in self.policy.obs.specs)
        if config.compile == "auto" and (images or self.learner.update.is_shared(n_threads)):
            return
        spec = config.learner_spec(self.policy.obs, self.policy.action)
        recipe = Recipe(spec=spec, device="cpu", precision=self.precision, n_threads=n_threads)
        self.learner.compilation = Compilation(recipe, wait=config.compile == "on")

    def _compile_for_graph(self) -> str:
        """Compile the step that a graph captures; a note on what came of it."""
        update, missing = self.learner.update, no_compiler(self.policy.device)
        if not missing and self.config.accumulate > 1:
            missing = "--accumulate splits minibatches"
        if not missing:
            try:
                update.begin(1e-4, 0.2)  # at a clip range of 0 rounding would decide about gradients
                update.compiled_step = compiled_here(update, self.learner.example_batch(update.batch_size))
                return "the update is compiled, and captured as a graph"
            except Exception as error:
                missing = one_line(error)
        return f"the update is captured as a graph, but not compiled: {missing}"

    def _first_that_starts(
        self, ranked: list[Settings], envs: Mapping[str, Array] | None
    ) -> tuple[Settings, Collects[Any], Sequence[SizedRollout]]:
        """Build the best plan and start its envs; if it cannot start, note that and try the next."""
        for plan, following in zip_longest(ranked, ranked[1:]):
            self.budget.renew()
            try:
                return plan, *self._start(plan, envs)
            except Exception as error:
                if following is None:
                    raise
                name, why = plan.executor_name, one_line(error)
                self.notes.append(f"executor {name} could not start ({why}); using {following.executor_name}")
        raise FlatoutError(f"--executor {self.config.executor} cannot run this env; use --executor auto")

    def _start(
        self, plan: Settings, envs: Mapping[str, Array] | None
    ) -> tuple[Collects[Any], Sequence[SizedRollout]]:
        """The collector of a plan, with its envs reset or restored to a snapshot, and the rollouts it fills."""
        collector, rollouts = self._make_collector(plan)
        if self.ranks is not None:
            every = RankCollector(collector, rollouts, self.ranks, self.policy, self.config.n_envs)
            collector, rollouts = every, every.rollouts
        try:
            # Snapshots of batched envs do not say how to replay an env; only batched envs can restore them.
            if envs and ("ages" in envs or plan.executor not in EXECUTORS or self._env.batched):
                self.fresh_envs = collector.restore(envs)
            else:
                collector.reset()
                self.fresh_envs = [] if envs is None else list(range(self.config.n_envs))
        except BaseException:
            collector.close()
            raise
        return collector, rollouts

    @property
    def envs_on_accelerator(self) -> bool:
        """Whether envs are stepped on the learner's accelerator."""
        return is_accelerator(self.policy.device) and isinstance(self.pipeline.rollouts[0], TensorRollout)

    def _make_collector(self, plan: Settings) -> tuple[Collects[Any], Sequence[SizedRollout]]:
        """The collector of a plan, and the rollouts it fills."""
        config, policy = self.config, self.policy
        n_steps, n_slots = config.algorithm.n_steps, 2 if self.overlap else 1
        explore = config.descriptor.exploration
        exploration = NO_EXPLORATION if explore is None else explore(config.algorithm, config.n_envs)
        env_ids = np.arange(config.n_envs) if self.ranks is None else self.ranks.env_ids(config.n_envs)
        n_envs = len(env_ids)
        envs = EnvSet(
            self._env.factory,
            policy.obs,
            env_ids,
            config.seed,
            action=policy.action,
            budget=self.budget,
        )
        if plan.in_subprocesses:
            make_model = config.learner_spec(policy.obs, policy.action).make_model
            job = CollectorJob(envs=envs, make_model=make_model, exploration=exploration)
            how: dict[str, Any] = {"n_steps": n_steps, "n_slots": n_slots, "timeout": config.step_timeout}
            processes: SubprocessCollectors | RayCollectors
            if plan.executor == "ray":
                processes = RayCollectors(
                    job, policy.model, plan.n_collectors, address=config.ray_address, **how
                )
            else:
                processes = SubprocessCollectors(job, policy.model, plan.n_collectors, **how)
            return processes, processes.rollouts
        is_batched = plan.executor == "batched"
        device = policy.device if is_batched else faster_device(policy, n_envs)
        model, source = policy.model, None
        if self.overlap or device != policy.device:  # acting needs its own copy of the parameters
            model, source = copy.deepcopy(policy.model).to(device), policy.model
        clock = PhaseClock("collector 0")
        if is_batched:
            return batched_collector(
                envs,
                model,
                n_steps=n_steps,
                device=device,
                clock=clock,
                n_slots=n_slots,
                source=source,
                exploration=exploration,
            )
        in_groups = plan.executor == "serial" and has_streams(device) and n_envs >= MIN_ENVS
        halves = np.array_split(envs.env_ids, 2 if in_groups else 1)
        groups = [
            Collector(
                make_executor(
                    plan.executor,
                    replace(envs, env_ids=env_ids),
                    n_workers=plan.n_workers,
                    step_timeout=config.step_timeout,
                ),
                model,
                device=device,
                seed=config.seed,
                clock=clock,
                source=None if nth else source,
                exploration=exploration,
            )
            for nth, env_ids in enumerate(halves)
        ]
        collector = GroupedCollector(groups) if in_groups else groups[0]
        slots = range(n_slots)
        return collector, [Rollout.alloc(model.obs, policy.action, n_steps, n_envs) for _ in slots]

    def _load(self, checkpoint: Checkpoint) -> None:
        """Go on with the learner and the counts of a checkpoint."""
        self.learner.load_state(checkpoint.tensors)
        saved = self.state
        saved.load(checkpoint.state["progress"])
        saved.overlapped = self.overlap
        self.learner.n_updates = saved.n_updates
        ahead = checkpoint.state.get("ready")
        self._go_on(None if ahead is None else (_named("ready.", checkpoint.tensors), ahead))
        replay = checkpoint.replay
        if isinstance(replay, SavedArrays) and (problem := replay.problem()) is not None:
            self.notes.append(f"{problem}; the run goes on without it")
            replay = None
        if replay is not None and int(replay["env_steps"][0]) != saved.env_steps:
            replay = None  # it belongs to another checkpoint that had this name
        self.learner.restore_replay(replay, saved.env_steps)

    def _go_on(self, ahead: tuple[Mapping[str, torch.Tensor], Mapping[str, Any]] | None) -> None:
        """Continue the exploration noise after the steps so far, and with the rollout that was collected ahead."""
        self.collector.n_steps = self.state.env_steps // self.config.n_envs
        if ahead is not None and self.pipeline.restore_rollout(*ahead):
            self.collector.n_steps += self.config.algorithm.n_steps

    def cut_off(self) -> None:
        """Leave the envs as they are, because a run was cut off: in the middle of a step, or hanging."""
        self._cut_off = {}
        if not self.pipeline.is_collecting and self.ranks is None:  # other ranks may be elsewhere
            with suppress(Exception):  # workers that were interrupted may be gone or give another answer
                self._cut_off = self.collector.snapshot()

    def recover(self) -> None:
        """After a run that was cut off: make new envs, at the end of the last whole rollout if they can be replayed."""
        if self._cut_off is not None:
            ahead = self.pipeline.saved_rollout()
            self._close_pipeline()
            self._open([self.plan], self._cut_off)
            self._go_on(ahead)
            self._cut_off = None

    def checkpoint(self) -> Checkpoint:
        """The state after the last whole iteration."""
        tensors = {name: tensor.detach().cpu() for name, tensor in self.learner.state().items()}
        snapshot = self.collector.snapshot() if self._cut_off is None else self._cut_off
        self.state.lanes = self.pipeline.read_lanes()
        tensors |= {f"envs.{name}": torch.from_numpy(array) for name, array in snapshot.items()}
        self.state.oom_backoffs = self.learner.n_backoffs
        about = {  # enough to act without the env, and to resume with it
            "config": self.config.to_json(),
            "observation_space": space_to_json(self.policy.obs.space),
            "action_space": space_to_json(self.policy.action.space),
            "mask_in_info": self._env.factory.mask_in_info,
            "progress": self.state.to_json(),
        }
        ahead = self.pipeline.saved_rollout()
        if ahead is not None:
            arrays, about["ready"] = ahead
            tensors |= {f"ready.{name}": tensor for name, tensor in arrays.items()}
        replay = self.learner.replay()
        if replay is not None:
            replay = {**replay, "env_steps": np.array([self.state.env_steps])}
        return Checkpoint(tensors, about, replay)

    def agreed(self, stops: bool) -> bool:
        """Whether to stop, if this process wants to, or any rank; called at the end of each iteration."""
        if self.ranks is None:
            return stops
        stops, notes = self.ranks.agree(stops, self.learner.params.flat)
        self.pipeline.notes += notes if self.ranks.is_first else []
        return stops

    def begin_lanes(self, *, spans: bool) -> None:
        """Restart the clocks, with or without spans."""
        self.pipeline.begin_lanes(spans=spans)
        device = self.policy.device
        if has_streams(device):
            self.learner.device_clock = DeviceClock(lambda: new_event(device, timed=True))

    def describe(self) -> dict[str, Any]:
        """What the run is, apart from how it goes; for progress.json and summary.json."""
        config, plan = self.config, self.plan
        return {
            "env": config.env,
            "algo": config.descriptor.name,
            "preset": config.preset or "auto",
            "seed": config.seed,
            "device": str(self.policy.device),
            "devices": 1 if self.ranks is None else self.ranks.n,
            "executor": {
                "kind": plan.executor,
                "collectors": plan.n_collectors,
                "children": plan.in_subprocesses,
                "workers": plan.n_workers,
                "reason": self.plan_reason,
            },
            "overlap": {
                "on": self.overlap,
                "reason": self.overlap_reason,
                "fell_back": self.state.fell_back,
            },
        }

    @property
    def compiled(self) -> bool:
        """Whether updates run as anything faster than plain autograd by now."""
        return self.learner.update.backend != "eager"

    def evaluate(self, stop: Callable[[], bool] = lambda: False) -> Evaluation:
        """Evaluate the deterministic policy in separate envs, or in the user's own batched env.

        After a failure the envs are closed, and the next evaluation makes new ones.
        """
        config = self.config
        n_episodes, seed = config.eval_episodes, config.seed + EVAL_SEED
        try:
            if self._eval_executor is None:
                n_envs = min(n_episodes, MAX_EVAL_ENVS)
                budget = RestartBudget(window_seconds=math.inf)
                budget.listener = partial(_in_evaluation, self.budget)
                self._eval_executor = eval_executor(
                    self._env, self.policy, n_envs, seed, self.plan, budget, config.step_timeout
                )
            result = evaluate(
                self._eval_executor,
                self.policy,
                n_episodes=n_episodes,
                seed=seed,
                max_steps=config.eval_max_steps,
                stop=stop,
            )
        except BaseException as error:
            self._close_evaluation()
            if isinstance(error, Exception):
                self.after_evaluation()
            elif self._env.factory.is_instance:
                self.cut_off()
            raise
        self.after_evaluation()
        return result

    def after_evaluation(self) -> None:
        """Begin new episodes if evaluation has used the training envs."""
        if self._env.factory.is_instance and self._cut_off is None:
            self.collector.reset()

    def close(self) -> None:
        """Close every env; this also happens when the trainer is garbage-collected."""
        self._close_pipeline()
        self._close_learner()
        self._close_evaluation()

    def _close_evaluation(self) -> None:
        if self._eval_executor is not None:
            self._eval_executor.close()
            self._eval_executor = None


def _in_evaluation(budget: RestartBudget, note: str, traceback_text: str) -> None:
    """Tell the listener of the run's budget about an env of the evaluation."""
    if budget.listener is not None:
        budget.listener(f"in evaluation: {note}", traceback_text)


def _arrays(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    return {name: tensor.numpy() for name, tensor in _named(prefix, tensors).items()}


def _named(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
