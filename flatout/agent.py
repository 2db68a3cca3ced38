"""Agents as users hold them: learn, predict, evaluate, save, load, with the conventions of Stable-Baselines3."""

from __future__ import annotations

import math
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from time import sleep, time
from typing import Any, Self

import gymnasium as gym
import numpy as np
import torch

from flatout.algorithms.base import LARGE, UNKNOWN_TRAITS, Algorithm, EnvTraits, register_algorithm
from flatout.collect.noise import ActionNoise
from flatout.config.fields import replace as replace_fields
from flatout.config.run_config import RunConfig, preset_note, read_file, resolve
from flatout.config.trust import code_in, require_trust
from flatout.device import private
from flatout.device.accelerator import is_accelerator, local_rank, resolve_device, use_device
from flatout.device.cards import is_listed
from flatout.device.machine import gc_frozen, machine, usable_cores
from flatout.envs.check import EnvInfo, check
from flatout.envs.loader import Code
from flatout.envs.make import EnvFactory, EnvSource, env_factory
from flatout.envs.spaces import ActionLayout, Array, ObsLayout, space_from_json
from flatout.errors import FlatoutError, one_line
from flatout.executors.base import RestartBudget
from flatout.executors.episodes import LastEpisodes
from flatout.integrations.loggers import LOGGERS, LoggerProcess, require_loggers
from flatout.models.actor import env_actions
from flatout.models.policy import Policy
from flatout.perf.costs import Costs
from flatout.perf.planner import measured_batch_size, needs_step_times
from flatout.perf.trial import try_out
from flatout.runlog.files import plural, write_json
from flatout.runlog.folder import RunFolder, default_run_name
from flatout.runlog.recorder import Recorder, Sink
from flatout.timing import CompileWatch
from flatout.training.callbacks import CallbackList, Callbacks
from flatout.training.checkpoint import Checkpoint, CheckpointFolder
from flatout.training.checkpoint import read as read_checkpoint
from flatout.training.checkpoint import write as write_checkpoint
from flatout.training.distributed import LostRankError, Unwritten, join
from flatout.training.evaluation import Evaluation, eval_executor, evaluate
from flatout.training.loop import train
from flatout.training.stop import StopRequest
from flatout.training.summary import summarize
from flatout.training.trainer import EVAL_SEED, MAX_EVAL_ENVS, Trainer
from flatout.views.display import PlainDisplay, make_display
from flatout.views.notebook import Curve, HtmlText, Plot, table_html
from flatout.views.report import write_report
from flatout.views.stream import SafeStream
from flatout.views.text import report_text, summary_lines, summary_text

ROUNDED = 1.1
"""A run that takes more than this times the env steps that were asked for says so."""
COMPILING = "compiling code for this machine; once, up to half a minute"
SAVE_TRIES = 4
"""How often a run's last checkpoint is tried."""


class Agent:
    """An agent, and the settings it learns with.

    `env` is a Gymnasium id, `module:Id`, `file.py:factory`, `envpool:Task`, a gym.Env class, a function that makes an
    env, a gym.Env itself (for n_envs=1), or a batched env: a gymnasium.vector.VectorEnv, an object like it that works
    with tensors, or a function that makes one of those.
    Settings are the flags of `flatout train --help`, with underscores. With `runs_dir`, `run_name` or `log`, learn() writes
    a run folder.
    """

    algo: str | None = None
    """The algorithm of a subclass."""
    _wants_folder = False
    _run_name: str | None = None
    _runs_dir: str | Path | None = None
    _overwrite = False
    _require_trust: Callable[[str], None] = staticmethod(lambda _: None)
    """Raises if the code of this name came from a checkpoint and is not trusted."""
    _costs: Costs | None = None
    """Of the env's steps, if they were timed when it was checked."""

    def __init__(
        self,
        env: EnvSource | None = None,
        preset: str | None = None,
        *,
        config_file: Path | None = None,
        run_name: str | None = None,
        runs_dir: str | Path | None = None,
        overwrite: bool = False,
        trust: bool = False,
        **settings: Any,
    ) -> None:
        """`trust`: whether `config_file` may name code (an env, algorithm, network, …) that no run of yours wrote."""
        began_at = time()
        _refuse_sb3_signature(env, settings)
        if isinstance(algo := settings.get("algo"), Algorithm):
            settings["algo"] = register_algorithm(algo).name
        if self.algo is not None and settings.setdefault("algo", self.algo) != self.algo:
            kind = AGENTS.get(settings["algo"], Agent)
            raise FlatoutError(f"this is {self.algo.upper()}; use flatout.{kind.__name__}")
        if preset is not None:
            settings["preset"] = preset
        factory = env_factory(env, settings.get("env_kwargs")) if env is not None else None
        name, n_envs = (factory.name, factory.n_envs) if factory else (None, None)
        if isinstance(env, gym.Env) and n_envs == 1:
            settings = _for_one_env(env_factory(env), settings)
        config = _resolve(name, settings, config_file, n_envs, trust)
        source: EnvSource = env if env is not None else config.env
        if factory is None or config.env_kwargs:
            factory = env_factory(source, config.env_kwargs)
        device = resolve_device(config.device)
        info, costs = _try_env(_prepared(factory, config, device), config)
        traits = EnvTraits(
            continuous=isinstance(info.action_space, gym.spaces.Box),
            large_obs=info.obs_size > LARGE,
            large_rewards=info.reward_size > LARGE,
        )
        if traits != UNKNOWN_TRAITS or info.n_envs not in (None, config.n_envs):
            n_envs = n_envs if info.n_envs is None else info.n_envs
            config = _resolve(name, settings, config_file, n_envs, trust, traits)
        if info.batched == "tensor" and config.device == "auto":
            device = info.device
        self._run_name, self._runs_dir, self._overwrite = run_name, runs_dir, overwrite
        self._wants_folder = bool(run_name or runs_dir or config.log)
        spaces = info.observation_space, info.action_space
        self._set_up(config, source, spaces, device, info.factory.mask_in_info, env=info)
        self._costs = costs
        self.began_at = began_at
        if settings.get("batch_size") == "auto" and config.algorithm.USES_REPLAY:
            self._measure_batch_size()

    def _set_up(
        self,
        config: RunConfig,
        source: EnvSource,
        spaces: tuple[Any, Any],
        device: str,
        mask_in_info: bool,
        *,
        env: EnvInfo | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Set the attributes of a new agent; without `env` the env is made when it is needed."""
        self.config, self.device = config, device
        self.began_at = time()
        """When start-up began; the first learn() counts `startup_seconds` from here."""
        self.summary: dict[str, Any] = {}
        """The summary.json of the last learn()."""
        self.is_saved = True
        """Whether the end of the last learn() could write its checkpoint and summary."""
        self.stop_signal: signal.Signals | None = None
        """The signal that ended the last learn(), if any."""
        obs, action = ObsLayout(spaces[0]), ActionLayout(spaces[1])
        model = config.learner_spec(obs, action).make_model().to(device)
        self.policy = Policy(model=model, obs=obs, action=action, device=torch.device(device))
        self.machine = machine()
        self._source, self._env, self._checkpoint = source, env, checkpoint
        self._mask_in_info = mask_in_info
        self._trainer: Trainer | None = None
        self._folder: RunFolder | None = None
        self._resume_notes: list[str] = []
        self._curve = Curve()
        self._trained_in: Path | None = None
        """The folder of the run that a loaded agent comes from."""
        self._n_predictions = 0

    def _measure_batch_size(self) -> None:
        """On a card for which no batch of off-policy learning is known: up to what its memory allows, what is fast."""
        device = self.policy.device
        if is_accelerator(device) and not is_listed(self.machine.gpus[device.index or 0].name):
            size = measured_batch_size(self.config, self.policy)
            self.config = replace_fields(self.config, {"batch_size": size})

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        env: EnvSource | None = None,
        *,
        trust: bool = False,
        typed: Collection[str] = (),
        code: Mapping[str, Any] | None = None,
    ) -> Agent:
        """The agent in a checkpoint; its env is made when it is needed.

        Code that it names must be `typed` by the user, written by a run of this user, or trusted with `trust`. `code`: the
        network, optimizer or schedules that it was trained with, by setting, for what cannot be loaded by its name.
        """
        began_at, state = time(), checkpoint.state
        own = {name: Code.of(value) for name, value in (code or {}).items()}
        try:
            saved = _with_code(state["config"], own)
            doubt = partial(require_trust, saved, "checkpoint", trust=trust, typed=[*typed, *own.values()])
            named = code_in(saved) if isinstance(saved, dict) else ()
            doubt(names=[name for name in named if name not in ("env", "executor")])
            config = RunConfig.from_json(saved, "checkpoint")
            spaces = space_from_json(state["observation_space"]), space_from_json(state["action_space"])
            mask_in_info = bool(state["mask_in_info"])
        except KeyError as error:
            raise FlatoutError(f"this checkpoint has no {error}; it was not written by flatout") from error
        kind = AGENTS.get(config.algo, Agent)
        agent = kind.__new__(kind)
        source = env if env is not None else config.env
        device = resolve_device(config.device)
        try:
            agent._set_up(config, source, spaces, device, mask_in_info, checkpoint=checkpoint)
        except FlatoutError as error:
            if config.network.network is None:
                raise
            again = "give the network again: --network FILE.py:NAME, in Python flatout.load(…, network=…)"
            raise FlatoutError(f"{error}; {again}") from error
        agent.began_at = began_at
        agent._require_trust = lambda name: (
            None if name == "env" and env is not None else doubt(names=(name,))
        )
        tensors = {n[6:]: t for n, t in checkpoint.tensors.items() if n.startswith("model.")}
        try:
            agent.policy.model.load_state_dict(tensors)
        except RuntimeError as error:
            raise FlatoutError(
                "this checkpoint is damaged: its parameters do not fit its settings"
            ) from error
        return agent

    def changed(self, settings: Mapping[str, Any]) -> Agent:
        """A new, untrained agent with some settings changed, in the same env, which is not checked again."""
        agent = type(self).__new__(type(self))
        config = replace_fields(self.config, settings)
        spaces = self.policy.obs.space, self.policy.action.space
        agent._set_up(config, self._source, spaces, self.device, self._mask_in_info, env=self._env)
        agent._costs = self._costs
        return agent

    def learn(
        self,
        total_timesteps: int | None = None,
        callback: Callbacks | None = None,
        progress_bar: bool = False,
    ) -> Self:
        """Learn for `total_timesteps` more env steps, or up to the configured total; returns the agent.

        `callback` is a function, a flatout.Callback, or a list of them. A function is called with the progress after each
        iteration; returning False stops. A signal stops after the current
        iteration, saves everything, and is then raised.
        """
        self.run(total_timesteps, callback, progress_bar)
        if self.stop_signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.stop_signal is not None:
            raise SystemExit(128 + self.stop_signal)
        return self

    @gc_frozen()
    def run(self, total_timesteps: int | None, callback: Callbacks | None, progress_bar: bool) -> None:
        """The same as `learn`, but a signal that stops it is kept in `stop_signal` and not raised."""
        hooks = CallbackList(callback)
        require_loggers(self.config.log)
        use_device(self.policy.device)  # another agent may have used another one
        progress_bar = progress_bar and self.is_first
        early: list[tuple[str, str]] = []

        def on_restart(note: str, traceback_text: str) -> None:
            early.append((note, traceback_text))
            if progress_bar:
                SafeStream(sys.stderr).write(f"note: {note}\n")

        def on_compile() -> None:
            if progress_bar and recorder is None:
                SafeStream(sys.stderr).write(f"note: {COMPILING}\n")
            elif recorder is not None:
                recorder.note(COMPILING)

        recorder: Recorder | None = None
        with CompileWatch(on_compile) as watch:
            trainer = self.trainer(total_timesteps, on_restart)
        trainer.budget.listener = on_restart
        trainer.recover()
        until = (
            self.config.timesteps if total_timesteps is None else trainer.state.env_steps + total_timesteps
        )
        self._open_folder()
        display = make_display(phase=lambda: trainer.clock.current) if progress_bar else None
        self._learned_curve().cut(trainer.state.env_steps)
        sinks: list[Sink] = [self._curve, *([display] if display is not None else [])]
        if (ranks := trainer.ranks) is not None and not ranks.is_first:
            sinks = [self._curve, ranks.notes]
        resume_at, folder = trainer.state.env_steps or None, self._folder
        kinds = [kind for kind in LOGGERS if kind in self.config.log]
        recorder = Recorder(
            folder,
            sinks,
            about=trainer.describe(),
            resume_at=resume_at,
            columns=self.config.descriptor.metrics,
            loggers=[LoggerProcess(kind, folder, resume_at) for kind in kinds] if folder is not None else (),
        )
        for fault in early:
            recorder.fault(*fault, is_known=True)
        trainer.budget.listener = recorder.fault
        if display is not None:
            rounded = self._rounding_note(until - trainer.state.env_steps)
            display.start([*self.header(), *([f"note: {rounded}"] if rounded else [])])
        stop = StopRequest() if trainer.ranks is None else StopRequest(grace_seconds=None)
        startup = time() - self.began_at
        watch.clock = trainer.clock
        with stop.listening(), watch:
            try:
                hooks.on_begin(self)
                status = train(
                    trainer,
                    until=until,
                    recorder=recorder,
                    checkpoints=self._checkpoints(),
                    callback=hooks.on_iteration if hooks else None,
                    stop=stop,
                )
            except BaseException as error:
                status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                is_lost = isinstance(error, LostRankError)
                self._finish(
                    trainer, recorder, status, startup, " ".join(str(error).split()), save=not is_lost
                )
                hooks.on_end(self)
                raise
            self._finish(trainer, recorder, status, startup, None)
            hooks.on_end(self)
        self.began_at = time()
        self.stop_signal = stop.signal

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[Any, Any]:
        """The action for one observation or a batch, and the new state of the policy's memory, if it has one.

        With a memory, pass the state that the last call returned, None at first, and whether an episode has just
        started, for each env; without one, `state` is returned unchanged.
        """
        policy = self.policy
        if self._mask_in_info and not (isinstance(observation, dict) and "action_mask" in observation):
            observation = self._with_mask(observation, action_masks)
        elif action_masks is not None:
            raise FlatoutError("this agent's env gives no action masks; leave action_masks out")
        arrays, single = policy.obs.batch(observation)
        with torch.inference_mode():
            noise = None if deterministic else self._prediction_noise(len(arrays[0]))
            if policy.model.state_size:
                state = self._state(state, episode_start, len(arrays[0]))
            actions = env_actions(policy, arrays, noise, state)
        return (actions[0] if single else actions), state

    def evaluate(
        self,
        n_episodes: int = 100,
        *,
        deterministic: bool = True,
        seed: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        max_steps: int | None = None,
    ) -> Evaluation:
        """Play whole episodes in separate envs, made with other `env_kwargs` if given; longer ones are cut at `max_steps`.

        An env that fails is replaced, with a warning, ten times at most.
        If the env was given as a batched env itself, there is only that one: training then starts new episodes in it.
        """
        seed = self.config.seed + EVAL_SEED if seed is None else seed
        n_envs = min(n_episodes, MAX_EVAL_ENVS)
        if env_kwargs:
            env, _ = self._checked_env(self.config.env_kwargs | dict(env_kwargs))
        else:
            env = self.env_info()
        plan = self._trainer.plan if self._trainer is not None else None
        timeout = self.config.step_timeout
        budget = RestartBudget(window_seconds=math.inf)
        budget.listener = lambda note, _: warnings.warn(note, stacklevel=2)
        executor = eval_executor(env, self.policy, n_envs, seed, plan, budget, timeout)
        try:
            return evaluate(
                executor,
                self.policy,
                n_episodes=n_episodes,
                seed=seed,
                max_steps=self.config.eval_max_steps if max_steps is None else max_steps,
                deterministic=deterministic,
            )
        finally:
            executor.close()
            if self._trainer is not None:
                self._trainer.after_evaluation()

    def playable(self, env_kwargs: Mapping[str, Any] | None = None) -> EnvFactory:
        """What makes envs to play in and render, with other `env_kwargs` if given."""
        kwargs = self.config.env_kwargs | dict(env_kwargs or {})
        return self._checked_env(kwargs)[0].factory

    def reward_scale(self) -> float | None:
        """What a loaded agent's rewards were divided by while it learned; None if they were clipped to their sign."""
        if self.config.algorithm.clip_reward:
            return None
        tensors = {} if self._checkpoint is None else self._checkpoint.tensors
        variance = tensors.get("reward_scaler.var")
        return 1.0 if variance is None else float(variance) ** 0.5

    def save(self, path: str | Path) -> None:
        """Write the agent to a file, with everything that further learning needs."""
        if self._trainer is None and self._checkpoint is not None:
            checkpoint = self._checkpoint
        else:
            checkpoint = self.trainer().checkpoint()
        if self.is_first:
            write_checkpoint(Path(path), checkpoint)

    def close(self) -> None:
        """Close its envs and end its processes; happens automatically when the agent is garbage-collected."""
        if self._trainer is not None:
            self._trainer.close()

    def report(self) -> str:
        """Where the time of the last learn() went, in a few lines; a table in a notebook."""
        if not self.summary:
            return "nothing learned yet: call learn() first"
        folder = self._folder if self.is_saved else None
        return HtmlText(summary_text(self.summary) if folder is None else report_text(folder.path))

    def plot(self) -> Plot:
        """The learning curve: a notebook shows it, `plot().save("curve.svg")` writes it."""
        return Plot(self._learned_curve(), f"{self.config.env}, {self.config.descriptor.title}")

    def _learned_curve(self) -> Curve:
        """The curve of what was learned so far, by an earlier process too if there is a run folder."""
        if not self._curve.returns and self._trained_in is not None:
            self._curve = Curve.read(self._trained_in / "metrics.csv")
        return self._curve

    def _repr_html_(self) -> str:
        config, curve = self.config, self._learned_curve()
        rows = [("settings", config.arithmetic()), ("device", f"{self.device}, seed {config.seed}")]
        if self.summary:
            rows += [(label, text) for label, text in summary_lines(self.summary) if label != "run"]
        title = f"{config.descriptor.title} on {config.env}"
        return table_html(title, rows, self.plot().svg if curve.returns else "")

    def header(self) -> list[str]:
        """Lines that describe the run before it begins."""
        config = self.config
        lines = [
            f"{config.env} · {config.descriptor.title} · settings: {self._settings_source()} · {self.device} "
            f"({plural(self.machine.cores, 'core')}) · seed {config.seed}",
            config.arithmetic(),
        ]
        if normalized := [
            it for it in ("obs", "reward") if getattr(config.algorithm, f"normalize_{it}", False)
        ]:
            words = {"obs": "observations", "reward": "rewards"}
            lines.append(f"normalized: {' and '.join(words[it] for it in normalized)}")
        if config.atari or config.frame_stack > 1:
            lines.append(config.frames())
        else:
            lines += _stacked_by_the_env(self.policy.obs)
        if self._trainer is not None:
            plan = self._trainer.plan
            lines.append(f"executor {plan.executor_name}: {self._trainer.plan_reason}")
            overlap = "on" if self._trainer.overlap else "off"
            lines.append(f"overlap {overlap}: {self._trainer.overlap_reason}")
            lines.append(f"updates: {self._trainer.learner.backend} backend")
            if (ranks := self._trainer.ranks) is not None:
                lines.append(ranks.describe(config))
            lines += self._trainer.learner.memory()
        if self._folder is not None:
            lines.append(f"run folder: {self._folder.path}")
        return lines + [f"note: {note}" for note in self._notes()]

    def _settings_source(self) -> str:
        """Where the settings come from that the user did not give."""
        config, algorithm = self.config, self.config.descriptor
        if config.preset is None and config.env in algorithm.recipes:
            return "tuned for this env"
        if config.preset in (None, "auto") and self.policy.action.continuous and algorithm.auto_continuous:
            return "auto, for continuous actions"
        return config.preset or "auto"

    def _notes(self) -> list[str]:
        notes = [*(self._env.warnings if self._env else ()), *self._resume_notes]
        notes.append((self._folder and self._folder.lock.note) or "")
        notes += [*private.notes, *(self._trainer.notes if self._trainer else ())]
        n_fresh = len(self._trainer.fresh_envs) if self._trainer else 0
        if n_fresh and self._env is not None and self._env.batched:
            notes.append("a batched env cannot be restored: all its envs started new episodes")
        elif n_fresh:
            notes.append(
                f"{n_fresh} of {self.config.n_envs} envs could not be restored and started a new episode"
            )
        preset, presets = self.config.preset, self.config.descriptor.presets
        if preset is not None and preset in presets:
            obs_bytes = sum(x.nbytes for x in self.policy.obs.alloc(1))
            free = self.machine.memory_available_bytes
            notes.append(preset_note(presets, preset, self.machine.cores, free, obs_bytes) or "")
        return [note for note in notes if note]

    def _rounding_note(self, n_steps: int) -> str | None:
        """Says so where whole rollouts take notably more env steps than were asked for."""
        config, total = self.config, self.config.total_batch
        takes = -(-n_steps // total) * total
        if n_steps < 1 or takes <= ROUNDED * n_steps:
            return None
        fits = max(n_steps // config.n_envs, 1)
        shorter = f"; --n-steps {fits} would fit" if n_steps < total else ""
        return (
            f"rollouts have {config.n_envs} envs × {config.algorithm.n_steps:,} steps, so this run takes {takes:,} env "
            f"steps, not {n_steps:,}{shorter}"
        )

    @property
    def training_returns(self) -> LastEpisodes:
        """Returns of the last 100 episodes of training, in which actions were sampled."""
        if self._trainer is not None:
            return self._trainer.state.returns
        saved = self._checkpoint.state["progress"] if self._checkpoint is not None else {}
        return LastEpisodes(saved.get("returns", ()))

    def env_info(self, timed: bool = False) -> EnvInfo:
        """The checked env; `timed`: its steps will be needed to plan a run."""
        if self._env is None:
            self._env, self._costs = self._checked_env(self.config.env_kwargs, timed)
        return self._env

    def _checked_env(self, kwargs: Mapping[str, Any], timed: bool = False) -> tuple[EnvInfo, Costs | None]:
        """The env with these keyword arguments, checked; refused if its spaces or number of envs differ."""
        config = self.config
        self._require_trust("env")
        factory = _prepared(env_factory(self._source, kwargs), config, self.device)
        factory.refuse_copies(config.n_envs)
        info, costs = _try_env(factory, config, timed)
        for kind, known in (("observation", self.policy.obs), ("action", self.policy.action)):
            if getattr(info, f"{kind}_space") != known.space:
                raise FlatoutError(f"the env's {kind} space is not the one this agent was trained with")
        if info.n_envs is not None:
            _refuse_other_n_envs(factory.name, info.n_envs, config.n_envs)
        return info, costs

    def trainer(
        self, n_steps: int | None = None, on_restart: Callable[[str, str], None] | None = None
    ) -> Trainer:
        """The trainer, made on first use; `n_steps` is about how many env steps it will train for."""
        if self._trainer is None:
            self._require_trust("executor")
            self._trainer = Trainer(
                self.config,
                self.env_info(timed=True),
                self.policy,
                n_cores=max(self.machine.cores // local_rank()[1], 1),
                n_steps=n_steps or self.config.timesteps,
                checkpoint=self._checkpoint,
                costs=self._costs,
                on_restart=on_restart,
                ranks=join(),
            )
        return self._trainer

    def resume_into(self, folder: RunFolder | None, notes: list[str]) -> None:
        """Continue in a run's existing folder at the next learn(), which shows the notes at its start.

        None: another rank has the folder.
        """
        self._folder, self._resume_notes, self._wants_folder = folder, notes, True
        self._trained_in = folder.path if folder is not None else None

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints: it is alone, or rank 0 of a run of several."""
        ranks = join()
        return ranks is None or ranks.is_first

    def _open_folder(self) -> None:
        if self._folder is None and self._wants_folder and self.is_first:
            config = self.config
            name = self._run_name or default_run_name(
                config.env, config.descriptor.name, config.seed, datetime.now()
            )
            self._folder = RunFolder.create(
                Path(self._runs_dir or "runs"), name, self._overwrite, numbered=not self._run_name
            )
        if self._folder is not None:
            self._folder.claim()
            try:
                write_json(self._folder.config, self.config.to_json())
                write_json(self._folder.system, self.machine.to_json())
            except FlatoutError:
                self._folder.discard()
                self._folder = self._folder if self._folder.path.exists() else None
                raise

    def _checkpoints(self) -> CheckpointFolder | None:
        """Where checkpoints go; all ranks of a run make them, and rank 0 writes."""
        if self._folder is not None:
            return CheckpointFolder(self._folder.checkpoints)
        return None if self.is_first or not self._wants_folder else Unwritten(Path())

    def _finish(
        self,
        trainer: Trainer,
        recorder: Recorder,
        status: str,
        startup: float,
        error: str | None,
        save: bool = True,
    ) -> None:
        """`save`: whether the parameters are worth a checkpoint."""
        self.summary = summarize(trainer, status=status, startup_seconds=startup, error=error)
        trainer.budget.listener = None
        recorder.close()
        self.summary |= recorder.figures()
        folder, checkpoints, n_steps = self._folder, self._checkpoints(), trainer.state.env_steps
        self.is_saved = True
        if checkpoints is None or not trainer.state.iteration:  # nothing learned
            if folder is not None:
                folder.discard()
                self._folder = None
            return
        checkpoint, lost = cache(trainer.checkpoint), None  # ranks make it together, once
        if save:
            lost = _try_to_save(lambda: checkpoints.save(checkpoint(), n_steps), SAVE_TRIES)
        if folder is None:
            return
        self.summary["error"] = self.summary["error"] or lost
        self.is_saved = not _try_to_save(lambda: folder.end(self.summary)) and not lost
        for note in recorder.end_loggers(self.summary):
            PlainDisplay(SafeStream(sys.stderr)).note(f"note: {note}")
        if recorder.figures()["records_lost"] != self.summary["records_lost"]:
            self.summary |= recorder.figures()
            _try_to_save(lambda: folder.end(self.summary))
        _try_to_save(lambda: write_report(folder.path))
        folder.settle()
        folder.lock.release()

    def _with_mask(self, observation: Any, masks: Any) -> dict[str, Any]:
        """The observation in the form of MaskFromInfo; without a mask everything is allowed."""
        space = self.policy.obs.space["obs"]  # type: ignore[index]
        shape = np.shape(observation) if space.shape is not None else ()
        lead = shape[: len(shape) - len(space.shape or ())]
        n_logits = self.policy.action.n_logits
        mask = np.ones((*lead, n_logits), np.int8) if masks is None else np.asarray(masks, np.int8)
        return {"obs": observation, "action_mask": mask}

    def _state(self, state: Any, episode_start: Any, n: int) -> Array:
        """A copy of the memory's state for `n` envs; zeros where an episode starts."""
        shape = n, self.policy.model.state_size
        if state is None:
            return np.zeros(shape, np.float32)
        if np.shape(state) != shape:
            raise FlatoutError(f"state has shape {np.shape(state)}; for {n} observations it must be {shape}")
        own: Array = np.array(state, np.float32)
        if episode_start is not None:
            own[np.broadcast_to(np.asarray(episode_start, bool), n)] = 0
        return own

    def _prediction_noise(self, n: int) -> torch.Tensor:
        self._n_predictions += 1
        noise = ActionNoise(self.policy.action, np.arange(n), self.config.seed)
        return noise.draw(self._n_predictions, 1)[0].to(self.policy.device)


class PPO(Agent):
    """Proximal policy optimization, for any action space."""

    algo = "ppo"


class DQN(Agent):
    """Deep Q-learning with a replay buffer, for Discrete actions."""

    algo = "dqn"


class PQN(Agent):
    """Q-learning from rollouts of many envs, without a replay buffer, for Discrete actions."""

    algo = "pqn"


class RecurrentPPO(Agent):
    """PPO with a memory, for envs whose observations do not show everything."""

    algo = "recurrent-ppo"


class SAC(Agent):
    """Soft actor-critic with a replay buffer, for continuous actions."""

    algo = "sac"


AGENTS: dict[str | None, type[Agent]] = {kind.algo: kind for kind in (PPO, DQN, PQN, SAC, RecurrentPPO)}
"""The subclass of an algorithm that has one; all others use `Agent` itself."""


def load(path: str | Path, env: EnvSource | None = None, *, trust: bool = False, **code: Any) -> Agent:
    """The agent in a file written by `save`, in a checkpoint, or in a run folder (its newest checkpoint that is whole).

    `trust`: whether the file may name code (an env, algorithm, executor, network, …) that no run of yours wrote. `code`:
    `network=`, `optimizer=` or a schedule of your own that cannot be loaded by its name, or is elsewhere now.
    """
    path = Path(path)
    if path.is_dir():
        used, checkpoint, skipped = CheckpointFolder(RunFolder.open(path).checkpoints).newest()
        for line in skipped:
            warnings.warn(f"{line}; using {used.name}", stacklevel=2)
    else:
        checkpoint = read_checkpoint(path)
    agent = Agent.from_checkpoint(checkpoint, env, trust=trust, code=code)
    agent._trained_in = path if path.is_dir() else None
    return agent


def _with_code(config: Any, code: Mapping[str, Code]) -> Any:
    """A checkpoint's settings with this code for what it was trained with."""
    if not code or not isinstance(config, dict):
        return config
    parts = [part for part in config.values() if isinstance(part, dict)]
    for name in code:
        if not any(part.get(name) for part in parts):
            raise FlatoutError(f"this agent has no {name} of your own; leave it out")
    return {
        key: {k: code.get(k, v) for k, v in part.items()} if isinstance(part, dict) else part
        for key, part in config.items()
    }


def _resolve(
    env: str | None,
    settings: dict[str, Any],
    file: Path | None,
    n_envs: int | None,
    trust: bool,
    traits: EnvTraits = UNKNOWN_TRAITS,
) -> RunConfig:
    """The complete settings; `n_envs` is the number of envs of a batched env, if it is fixed."""
    if n_envs is not None:
        known = read_file(file, settings | {"env": env}, trust) if file else {}
        given = known | settings
        _refuse_other_n_envs(env or "env", n_envs, given.get("n_envs", n_envs))
        settings = settings | {"n_envs": n_envs}
    device = resolve_device(str(settings.get("device", "auto")))
    n_cores = usable_cores()
    return resolve(env, settings, device=device, n_cores=n_cores, file=file, trust=trust, traits=traits)


def _prepared(factory: EnvFactory, config: RunConfig, device: str) -> EnvFactory:
    """The factory with what the run's settings say about its envs."""
    return replace(factory, device=device, atari=bool(config.atari), frame_stack=config.frame_stack or 1)


def _stacked_by_the_env(obs: ObsLayout) -> list[str]:
    """What an agent sees of an env that stacks frames itself, in at most one line."""
    stacked = [spec for spec in obs.specs if spec.frames > 1]
    if not stacked:
        return []
    channels, height, width = stacked[0].shape
    frame = (
        f"{height}x{width}"
        if channels == stacked[0].frames
        else f"{height}x{width}x{channels // stacked[0].frames}"
    )
    return [f"observations: {frame}, {stacked[0].frames} frames stacked by the env"]


def _refuse_sb3_signature(env: Any, settings: Mapping[str, Any]) -> None:
    """Name the import that takes Stable-Baselines3's arguments, where a script still gives them."""
    policies = ("MlpPolicy", "CnnPolicy", "MultiInputPolicy")
    given = [env] if isinstance(env, str) and env in policies else []
    given += [name for name in ("policy", "policy_kwargs", "verbose", "tensorboard_log") if name in settings]
    if given:
        raise FlatoutError(
            f"{given[0]!r} is of Stable-Baselines3's signature, which flatout.sb3 has: from flatout.sb3 import PPO; "
            "flatout's own begins with the env: flatout.PPO('CartPole-v1')"
        )


def _for_one_env(factory: EnvFactory, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run in one env that is made already; others than one env in this process are refused."""
    factory.refuse_copies(settings.get("n_envs", 1))
    kind, n_collectors = settings.get("executor", "auto"), settings.get("n_collectors", 0)
    if kind not in ("auto", "serial") or str(n_collectors) != "0":
        raise FlatoutError(
            "an env that is made already steps in this process, with executor='serial'; give what makes it for others"
        )
    return settings | {"n_envs": 1, "executor": "serial"}


def _try_env(factory: EnvFactory, config: RunConfig, timed: bool = True) -> tuple[EnvInfo, Costs | None]:
    """The checked env; the steps of a user's env, which is tried in another process, are timed there at once."""
    if factory.is_instance:  # its check leaves it in new episodes
        return check(factory, n_envs=config.n_envs, seed=config.seed), None
    seed = 0  # defaults go by what the check sees, and all seeds of an env are to have the same
    if factory.is_built_in:
        return check(factory, n_envs=config.n_envs, seed=seed), None
    timed = timed and needs_step_times(config)
    return try_out(factory, seed=seed, n_envs=config.n_envs, timeout=config.step_timeout, timed=timed)


def _try_to_save(save: Callable[[], object], n_tries: int = 1) -> str | None:
    """Save a part of a run's end; a failure is printed and returned, and does not keep the other parts from being saved.

    A disk may fail for a moment: with `n_tries` it is tried again every second.
    """
    try:
        save()
    except Exception as error:
        if n_tries > 1:
            sleep(1.0)
            return _try_to_save(save, n_tries - 1)
        problem = str(error) if isinstance(error, FlatoutError) else one_line(error)
        PlainDisplay(SafeStream(sys.stderr)).note(f"flatout: {problem}")
        return problem
    return None


def _refuse_other_n_envs(name: str, n_envs: int, given: Any) -> None:
    if str(given) != str(n_envs):  # a flag's value is still text
        raise FlatoutError(f"env '{name}' steps {n_envs} envs at once, which --n-envs {given} cannot change")
