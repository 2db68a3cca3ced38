"""Agents as users hold them, PPO, DQN and PQN: learn, predict, save, load, with Stable-Baselines3's conventions."""

from __future__ import annotations

import copy
import signal
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from time import time
from typing import Any, Self

import numpy as np
import torch

from flatout.algorithms.base import Algorithm, register_algorithm
from flatout.collect.noise import ActionNoise
from flatout.config.fields import replace as replace_fields
from flatout.config.run_config import RunConfig, preset_note, read_file, resolve
from flatout.device.accelerator import resolve_device
from flatout.device.machine import gc_frozen, machine
from flatout.envs.check import EnvInfo
from flatout.envs.check_batched import check_env
from flatout.envs.make import EnvSource, env_factory
from flatout.envs.spaces import ActionLayout, ObsLayout, space_from_json
from flatout.errors import FlatoutError
from flatout.integrations.tensorboard import TensorBoardWriter
from flatout.models.policy import Policy
from flatout.runlog.folder import RunFolder, default_run_name, write_json
from flatout.runlog.recorder import Recorder, Sink
from flatout.training.checkpoint import Checkpoint, CheckpointFolder
from flatout.training.checkpoint import read as read_checkpoint
from flatout.training.checkpoint import write as write_checkpoint
from flatout.training.evaluation import Evaluation, eval_executor, evaluate
from flatout.training.loop import Callback, identity, summarize, train
from flatout.training.stop import StopRequest
from flatout.training.trainer import EVAL_SEED, MAX_EVAL_ENVS, Trainer
from flatout.views.display import make_display
from flatout.views.report import write_report
from flatout.views.text import report_text, summary_text


class Agent:
    """An agent and the settings it learns with, of whichever algorithm they name.

    `env` is a Gymnasium id, `module:Id`, `file.py:factory`, a gym.Env class, a function that makes one, or a
    batched env: a gymnasium.vector.VectorEnv, or an object like one that gives tensors, or what makes those.
    Settings are those of `flatout train --help`, with underscores. With `runs_dir` or `run_name` every
    learn() keeps a run's folder.
    """

    algo: str | None = None
    """The algorithm of a class that stands for one."""

    def __init__(
        self,
        env: EnvSource | None = None,
        preset: str | None = None,
        *,
        config_file: Path | None = None,
        run_name: str | None = None,
        runs_dir: str | Path | None = None,
        overwrite: bool = False,
        **settings: Any,
    ) -> None:
        self.began_at = time()
        """When start-up began; learn() counts `startup_seconds` from here, the first time."""
        self._machine = machine()
        if isinstance(algo := settings.get("algo"), Algorithm):
            settings["algo"] = register_algorithm(algo).name
        if self.algo is not None and settings.setdefault("algo", self.algo) != self.algo:
            raise FlatoutError(f"this is {self.algo.upper()}; use flatout.{str(settings['algo']).upper()}")
        self.device = resolve_device(str(settings.get("device", "auto")))
        factory = env_factory(env, settings.get("env_kwargs")) if env is not None else None
        name = factory.name if factory else None
        if preset is not None:
            settings["preset"] = preset
        n_envs = factory.n_envs if factory else None
        self.config = self._resolve(name, settings, config_file, n_envs)
        self._source: EnvSource = env if env is not None else self.config.env
        if factory is None or self.config.env_kwargs != factory.kwargs:
            factory = env_factory(self._source, self.config.env_kwargs)
        factory = replace(factory, device=resolve_device(self.config.device))
        self._env: EnvInfo | None = check_env(factory, seed=self.config.seed, n_envs=self.config.n_envs)
        if self._env.n_envs not in (None, self.config.n_envs):
            self.config = self._resolve(name, settings, config_file, self._env.n_envs)
        self.device = resolve_device(self.config.device)
        if self._env.batched == "tensor" and self.config.device == "auto":
            self.device = self._env.device
        self.policy = _policy(self.config, self._env.observation_space, self._env.action_space, self.device)
        self._mask_in_info = self._env.factory.mask_in_info
        self._setup(None, run_name, runs_dir, overwrite)

    def _resolve(
        self, env: str | None, settings: dict[str, Any], file: Path | None, n_envs: int | None
    ) -> RunConfig:
        """The settings; `n_envs` is how many a batched env steps at once, where that is not ours to choose."""
        if n_envs is not None:
            given = (read_file(file) if file else {}) | settings
            _refuse_other_n_envs(env or "env", n_envs, given.get("n_envs", n_envs))
            settings = settings | {"n_envs": n_envs}
        return resolve(env, settings, device=self.device, n_cores=self._machine.cores, file=file)

    def _setup(
        self,
        checkpoint: Checkpoint | None,
        run_name: str | None = None,
        runs_dir: str | Path | None = None,
        overwrite: bool = False,
    ) -> None:
        self._run_name, self._runs_dir, self._overwrite = run_name, runs_dir, overwrite
        self._checkpoint = checkpoint
        self._trainer: Trainer | None = None
        self._fresh_envs: list[int] = []
        self._resume_notes: list[str] = []
        self._folder: RunFolder | None = None
        self._n_predictions = 0
        self.summary: dict[str, Any] = {}
        self.stop_signal: signal.Signals | None = None
        """The signal that ended the last learn(), if one did."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, env: EnvSource | None = None) -> Agent:
        """The agent that a checkpoint describes; its env is made only when learning goes on."""
        began_at = time()
        try:
            config = RunConfig.from_json(checkpoint.state["config"], "checkpoint")
            kind = AGENTS.get(config.algo, Agent)
            agent = kind.__new__(kind)
            agent.config, agent.began_at, agent._machine = config, began_at, machine()
            spaces = [
                space_from_json(checkpoint.state[f"{kind}_space"]) for kind in ("observation", "action")
            ]
            agent._mask_in_info = bool(checkpoint.state["mask_in_info"])
        except KeyError as error:
            raise FlatoutError(f"this checkpoint lacks {error}; it was not written by flatout") from error
        agent.device = resolve_device(agent.config.device)
        agent._source, agent._env = env if env is not None else agent.config.env, None
        agent.policy = _policy(agent.config, spaces[0], spaces[1], agent.device)
        _load_model(agent.policy, checkpoint)
        agent._setup(checkpoint)
        return agent

    def changed(self, settings: Mapping[str, Any]) -> Agent:
        """A new agent that has learned nothing, with some settings changed, in the same env: which is not tried out
        again."""
        agent = copy.copy(self)
        agent.began_at = time()
        agent.config = replace_fields(self.config, settings)
        spaces = self.policy.obs.space, self.policy.action.space
        agent.policy = _policy(agent.config, *spaces, self.device)
        agent._setup(None)
        return agent

    def learn(
        self,
        total_timesteps: int | None = None,
        callback: Callback | None = None,
        progress_bar: bool = False,
    ) -> Self:
        """Learn for `total_timesteps` more env steps, or to the configured total; returns the agent.

        `callback(progress)` is called after each iteration; returning False stops. A signal is passed on
        to the caller once the iteration is finished and everything is saved.
        """
        self.run(total_timesteps, callback, progress_bar)
        if self.stop_signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.stop_signal is not None:
            raise SystemExit(128 + self.stop_signal)
        return self

    @gc_frozen()
    def run(self, total_timesteps: int | None, callback: Callback | None, progress_bar: bool) -> None:
        """`learn`, with the signal that ended it left in `stop_signal`."""
        trainer = self._started(total_timesteps)
        until = (
            self.config.timesteps if total_timesteps is None else trainer.state.env_steps + total_timesteps
        )
        self._claim_folder()
        display = make_display(phase=lambda: trainer.clock.current) if progress_bar else None
        resume_at = trainer.state.env_steps or None
        folder = self._folder
        sinks: list[Sink] = [display] if display is not None else []
        if folder is not None:
            sinks.append(TensorBoardWriter(folder.tensorboard, resume_at))
        about = identity(trainer, self.device)
        recorder = Recorder(folder, sinks, resume_at=resume_at, about=about)
        if display is not None:
            display.start(self.header())
        stop = StopRequest()
        startup = time() - self.began_at
        try:
            status = train(
                trainer,
                until=until,
                recorder=recorder,
                checkpoints=CheckpointFolder(folder.checkpoints) if folder is not None else None,
                callback=callback,
                stop=stop,
            )
        except BaseException as error:
            status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            self._finish(trainer, recorder, status, startup, " ".join(str(error).split()))
            raise
        self._finish(trainer, recorder, status, startup, None)
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
        """The action for one observation or a batch of them, and the state as it came in."""
        del episode_start  # of recurrent policies, kept for Stable-Baselines3's callers
        policy = self.policy
        if self._mask_in_info and not (isinstance(observation, dict) and "action_mask" in observation):
            observation = self._with_mask(observation, action_masks)
        elif action_masks is not None:
            raise FlatoutError("this agent's env gives no action masks; leave action_masks out")
        leaves, single = policy.obs.batch(observation)
        obs = tuple(torch.from_numpy(leaf).to(policy.device) for leaf in leaves)
        with torch.inference_mode():
            if deterministic:
                rows = policy.model.mode(obs)
            else:
                rows, _ = policy.model.sample(obs, self._prediction_noise(len(leaves[0])))
            actions = policy.action.to_env(policy.model.head.squash(rows).cpu().numpy())
        return (actions[0] if single else actions), state

    def evaluate(
        self,
        n_episodes: int = 100,
        *,
        deterministic: bool = True,
        seed: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
    ) -> Evaluation:
        """Play whole episodes in envs of its own, made with other `env_kwargs` where some are given; of a batched
        env given as such there is only that one, in which learning then goes on with new episodes."""
        seed = self.config.seed + EVAL_SEED if seed is None else seed
        n_envs = min(n_episodes, MAX_EVAL_ENVS)
        env = self._checked_env(self.config.env_kwargs | dict(env_kwargs)) if env_kwargs else self._env_info()
        executor = eval_executor(env, self.policy.obs, n_envs, seed)
        try:
            return evaluate(
                executor,
                self.policy.model,
                self.policy.action,
                n_episodes=n_episodes,
                device=self.policy.device,
                seed=seed,
                deterministic=deterministic,
            )
        finally:
            executor.close()
            if self._trainer is not None:
                self._trainer.after_evaluation()

    def save(self, path: str | Path) -> None:
        """Write the agent, with everything that learning on needs, to one file."""
        if self._trainer is None and self._checkpoint is not None:
            checkpoint = self._checkpoint
        else:
            checkpoint = self._started().checkpoint()
        write_checkpoint(Path(path), checkpoint)

    def close(self) -> None:
        """End its envs and processes; also happens by itself when the agent is no longer used."""
        if self._trainer is not None:
            self._trainer.close()

    def report(self) -> str:
        """Where the time of the last learn() went, in a few lines."""
        if not self.summary:
            return "nothing learned yet: call learn() first"
        return summary_text(self.summary) if self._folder is None else report_text(self._folder.path)

    def header(self) -> list[str]:
        """What a person should know before the run begins."""
        config = self.config
        source = config.preset or ("tuned for this env" if _is_tuned(config) else "auto")
        lines = [
            f"{config.env} · {config.descriptor.title} · settings: {source} · {self.device} "
            f"({self._machine.cores} cores) · seed {config.seed}",
            config.arithmetic(),
        ]
        if self._trainer is not None:
            plan = self._trainer.plan
            where = " in child processes" if plan.in_subprocesses else ""
            lines.append(f"executor {plan.kind}{where}: {plan.reason}")
            overlap = "on" if self._trainer.overlap else "off"
            lines.append(f"overlap {overlap}: {self._trainer.overlap_reason}")
        if self._folder is not None:
            lines.append(f"run folder: {self._folder.path}")
        return lines + [f"note: {note}" for note in self._notes()]

    def _notes(self) -> list[str]:
        notes = [*(self._env.warnings if self._env else ()), *self._resume_notes]
        notes += self._trainer.notes if self._trainer else []
        if self._fresh_envs and self._env is not None and self._env.batched:
            notes.append(
                "a batched env cannot be brought back to where it stood: all envs began new episodes"
            )
        elif self._fresh_envs:
            notes.append(
                f"{len(self._fresh_envs)} of {self.config.n_envs} envs could not be replayed to where they "
                "stood and began a new episode"
            )
        preset, presets = self.config.preset, self.config.descriptor.presets
        if preset is not None and preset in presets:
            obs_bytes = sum(leaf.nbytes for leaf in self.policy.obs.alloc(1))
            free = self._machine.memory_available_bytes
            notes.append(preset_note(presets, preset, self._machine.cores, free, obs_bytes) or "")
        return [note for note in notes if note]

    def _env_info(self) -> EnvInfo:
        if self._env is None:
            self._env = self._checked_env(self.config.env_kwargs)
        return self._env

    def _checked_env(self, kwargs: Mapping[str, Any]) -> EnvInfo:
        """The env with these keywords; refused unless this agent can act in it."""
        config = self.config
        factory = replace(env_factory(self._source, kwargs), device=self.device)
        info = check_env(factory, seed=config.seed, n_envs=config.n_envs)
        for kind, known in (("observation", self.policy.obs), ("action", self.policy.action)):
            if getattr(info, f"{kind}_space") != known.space:
                raise FlatoutError(f"the env's {kind} space is not the one this agent was trained with")
        if info.n_envs is not None:
            _refuse_other_n_envs(factory.name, info.n_envs, config.n_envs)
        return info

    def _started(self, n_steps: int | None = None) -> Trainer:
        """The trainer; made on first use, for about `n_steps` env steps."""
        if self._trainer is None:
            began = self._checkpoint.state["progress"] if self._checkpoint is not None else {}
            trainer = Trainer(
                self.config,
                self._env_info(),
                self.policy,
                n_cores=self._machine.cores,
                n_steps=n_steps or self.config.timesteps,
                overlapped=began.get("overlapped"),
            )
            self._fresh_envs = trainer.start(self._checkpoint)
            self._trainer = trainer
        return self._trainer

    def resume_into(self, folder: RunFolder, notes: list[str]) -> None:
        """Let the next learn() go on in a run's existing folder, and say the notes at its start."""
        self._folder, self._resume_notes = folder, notes

    def _claim_folder(self) -> None:
        if self._folder is None and (self._run_name or self._runs_dir):
            config = self.config
            name = self._run_name or default_run_name(
                config.env, config.descriptor.name, config.seed, datetime.now()
            )
            self._folder = RunFolder.create(Path(self._runs_dir or "runs"), name, self._overwrite)
        if self._folder is not None:
            write_json(self._folder.config, self.config.to_json())
            write_json(self._folder.system, self._machine.to_json())

    def _finish(
        self, trainer: Trainer, recorder: Recorder, status: str, startup: float, error: str | None
    ) -> None:
        self.summary = summarize(
            trainer, status=status, device=self.device, startup_seconds=startup, error=error
        )
        self.summary |= recorder.figures()
        folder, has_learned = self._folder, trainer.state.iteration > 0
        if folder is not None and has_learned:
            CheckpointFolder(folder.checkpoints).save(trainer.checkpoint(), trainer.state.env_steps)
        recorder.close()
        if folder is not None and not has_learned:
            folder.discard()
            self._folder = None
        elif folder is not None:
            write_json(folder.summary, self.summary)
            folder.progress.unlink(missing_ok=True)
            write_report(folder.path)
            folder.settle()

    def _with_mask(self, observation: Any, masks: Any) -> dict[str, Any]:
        """The observation as the mask wrapper gives it; without a mask everything is allowed."""
        space = self.policy.obs.space["obs"]  # type: ignore[index]
        shape = np.shape(observation) if space.shape is not None else ()
        lead = shape[: len(shape) - len(space.shape or ())]
        n_logits = self.policy.action.n_logits
        mask = np.ones((*lead, n_logits), np.int8) if masks is None else np.asarray(masks, np.int8)
        return {"obs": observation, "action_mask": mask}

    def _prediction_noise(self, n_rows: int) -> torch.Tensor:
        self._n_predictions += 1
        noise = ActionNoise(self.policy.action, np.arange(n_rows), self.config.seed)
        return noise.draw(self._n_predictions, 1)[0].to(self.policy.device)


class PPO(Agent):
    """Learns a policy from what it just did: for any action space."""

    algo = "ppo"


class DQN(Agent):
    """Learns the values of actions from what it has stored: for Discrete actions."""

    algo = "dqn"


class PQN(Agent):
    """Learns the values of actions from what it just did in many envs at once: for Discrete actions."""

    algo = "pqn"


AGENTS: dict[str, type[Agent]] = {"ppo": PPO, "dqn": DQN, "pqn": PQN}


def load(path: str | Path, env: EnvSource | None = None) -> Agent:
    """The agent in a file that `save` wrote, in a checkpoint, or in a run's folder (its newest)."""
    path = Path(path)
    if path.is_dir():
        _, checkpoint, _ = CheckpointFolder(RunFolder.open(path).checkpoints).newest()
    else:
        checkpoint = read_checkpoint(path)
    return Agent.from_checkpoint(checkpoint, env)


def _policy(config: RunConfig, observation_space: Any, action_space: Any, device: str) -> Policy:
    obs, action = ObsLayout(observation_space), ActionLayout(action_space)
    model = config.learner_spec(obs, action).make_model().to(device)
    return Policy(model=model, obs=obs, action=action, device=torch.device(device))


def _refuse_other_n_envs(name: str, n_envs: int, wanted: Any) -> None:
    if str(wanted) != str(n_envs):  # a flag's value is still text
        raise FlatoutError(f"env '{name}' steps {n_envs} envs at once, which --n-envs {wanted} cannot change")


def _load_model(policy: Policy, checkpoint: Checkpoint) -> None:
    tensors = {n[6:]: t for n, t in checkpoint.tensors.items() if n.startswith("model.")}
    try:
        policy.model.load_state_dict(tensors)
    except RuntimeError as error:
        raise FlatoutError(
            "this checkpoint's parameters do not fit its own settings; it is damaged"
        ) from error


def _is_tuned(config: RunConfig) -> bool:
    return config.preset is None and config.env in config.descriptor.recipes
