"""A model with the interface of Stable-Baselines3's, whatever its algorithm.

A model holds a VecEnv and a flatout agent that steps it in this process. Callbacks are called at every step, as in
Stable-Baselines3; the policy is the same during a rollout in both.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
import warnings
import zipfile
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Self

import numpy as np
import torch

from flatout.agent import AGENTS, Agent
from flatout.collect.ragged import Interrupted
from flatout.config.run_config import RunConfig, resolve
from flatout.device.accelerator import resolve_device
from flatout.device.machine import usable_cores
from flatout.envs.spaces import Array, ObsLayout, space_from_json
from flatout.errors import one_line
from flatout.runlog.recorder import Progress
from flatout.sb3.arguments import Arguments, check_policy, refuse
from flatout.sb3.envs import VecEnvAdapter, wrapped
from flatout.sb3.files import ABOUT, AGENT, from_json, place_of, read_model, to_json
from flatout.sb3.library import library
from flatout.timing import PhaseClock
from flatout.training.checkpoint import Checkpoint
from flatout.training.checkpoint import write as write_checkpoint

NOT_SAVED = ("envs.", "ready.")
"""Tensors of a checkpoint that belong to its envs."""
MAY_CHANGE = ("verbose", "tensorboard_log", "stats_window_size", "policy_kwargs", "device")
"""Arguments that may be set after a model is made; others are compiled into it."""
NOT_CALLED = (
    "train",
    "collect_rollouts",
    "_setup_model",
    "_setup_learn",
    "_store_transition",
    "_sample_action",
)
"""Methods of Stable-Baselines3's models that flatout does without."""


class Model:
    """What the three algorithms have in common."""

    ARGUMENTS: ClassVar[type[Arguments]]
    LOG_INTERVAL: ClassVar[int]

    verbose: int
    tensorboard_log: str | None
    seed: int | None

    def __init__(self, policy: Any, env: Any, *args: Any, **keywords: Any) -> None:
        """The arguments of Stable-Baselines3's class of the same name."""
        given = self.ARGUMENTS.of(args, keywords)
        if env is None:
            raise refuse("env is None", "give an env, or use load() for a model without one")
        venv = wrapped(env, getattr(given, "verbose", 0))
        self._begin(policy, given, venv)
        self.set_random_seed(self.seed)
        adapter = VecEnvAdapter(venv)
        config = self._config(adapter.name, adapter.single_observation_space, adapter.num_envs)
        agent = Agent.__new__(AGENTS[config.algo])
        spaces = adapter.single_observation_space, adapter.single_action_space
        info = adapter.info()
        device = resolve_device(config.device)
        agent._set_up(config, adapter, spaces, device, False, env=info)
        self._hold(agent, adapter)

    def _begin(self, policy: Any, given: Arguments, venv: Any | None) -> None:
        """Set the attributes that do not need the agent."""
        for name in NOT_CALLED:
            if hasattr(type(self), name):
                raise refuse(
                    f"{type(self).__name__}.{name}() would never be called",
                    "write an algorithm of your own (docs/algorithms.md) or use a callback",
                )
        vars(self).update(vars(given))
        self._given, self._policy_name = given, check_policy(policy)
        self.env: Any = venv
        self.num_timesteps = self._n_stored = self._episode_num = self._n_updates = 0
        self.ep_info_buffer: deque[Any] | None = None
        self.ep_success_buffer: deque[Any] | None = None
        self._logger: Any = None
        self._custom_logger = False
        self._callback: Any = None
        self._error: BaseException | None = None
        self._has_new_env = False
        self._replay: Mapping[str, Array] | None = None
        """A replay buffer that was loaded, until the learner takes it."""
        if venv is not None:
            self._check(venv)

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            name in vars(self).get("_given", self).__dict__
            and name not in MAY_CHANGE
            and "_agent" in vars(self)
        ):
            raise refuse(
                f"model.{name} cannot be changed after the model is made",
                f"save it and give {name} to load(path, env, {name}=…)",
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"flatout.sb3: {type(self).__name__} has no {name}; see docs/migrating.md")

    def _hold(self, agent: Agent, adapter: VecEnvAdapter | None) -> None:
        self._agent, self._adapter = agent, adapter
        self.observation_space, self.action_space = agent.policy.obs.space, agent.policy.action.space
        self.n_envs = agent.config.n_envs
        if adapter is not None:
            adapter.before, adapter.after, adapter.failed = self._before_step, self._after_step, self._fail

    def _check(self, venv: Any) -> None:
        is_dict = hasattr(venv.observation_space, "spaces")
        if is_dict != (self._policy_name == "MultiInputPolicy"):
            fits = "MultiInputPolicy" if is_dict else "MlpPolicy or CnnPolicy"
            raise refuse(f"{self._policy_name} does not take {venv.observation_space}", f"use {fits}")
        if self.ARGUMENTS.ALGO != "ppo" and library("common.vec_env").unwrap_vec_normalize(venv) is not None:
            warnings.warn(
                "flatout.sb3: the replay buffer keeps observations and rewards as VecNormalize gave them, and does "
                "not normalize them again when they are sampled",
                stacklevel=4,
            )

    def _config(self, name: str, space: Any, n_envs: int) -> RunConfig:
        seed = int(np.random.default_rng().integers(2**31)) if self.seed is None else self.seed
        settings = self._given.settings(self._policy_name, ObsLayout(space), n_envs)
        settings |= {"algo": self.ARGUMENTS.ALGO, "n_envs": n_envs, "seed": seed, "overlap": "off"}
        settings |= {"atari": False, "checkpoint_every": 0, "timesteps": 1}
        return resolve(name, settings, device="cpu", n_cores=usable_cores())

    # --- as in Stable-Baselines3 -------------------------------------------------------------------------------

    def learn(
        self,
        total_timesteps: int,
        callback: Any = None,
        log_interval: int | None = -1,
        tb_log_name: str | None = None,
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Learn for about this many env steps; whole rollouts are collected."""
        if self.env is None:
            raise refuse("this model has no env", "use set_env() before learn()")
        agent, total = self._agent, int(total_timesteps)
        self._log_interval = self.LOG_INTERVAL if log_interval == -1 else log_interval
        self._prepare(total, callback, tb_log_name or type(self).__name__, reset_num_timesteps, progress_bar)
        self._callback.on_training_start(self._locals, globals())
        if total > 0:
            agent.learn(total, callback=self._after_iteration)
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._callback.on_training_end()
        self._callback = None
        return self

    def _prepare(self, total: int, callback: Any, tb_log_name: str, reset: bool, progress_bar: bool) -> None:
        self.start_time = time.time_ns()
        if self.ep_info_buffer is None or reset:
            self._keep_episodes()
        if reset:
            self.num_timesteps = self._episode_num = 0
        self._num_timesteps_at_start = self.num_timesteps
        self._total_timesteps = total + self.num_timesteps
        self._iteration = self._step_of_rollout = 0
        agent, is_new = self._agent, self._agent._trainer is None
        if is_new and self._replay is not None:
            assert agent._checkpoint is not None, "a replay is loaded into a model that was loaded"
            steps = {"env_steps": np.array([agent._checkpoint.state["progress"]["env_steps"]])}
            agent._checkpoint = Checkpoint(
                agent._checkpoint.tensors, agent._checkpoint.state, {**self._replay, **steps}
            )
        trainer = agent.trainer(total)
        self._replay = None
        if reset:
            trainer.state.schedule_start = trainer.state.env_steps
        if (reset or self._has_new_env) and not is_new:
            trainer.after_evaluation()
        self._has_new_env = False
        if not self._custom_logger:
            configure = library("common.utils").configure_logger
            self._logger = configure(self.verbose, self.tensorboard_log, tb_log_name, reset)
        self._callback = _as_callback(callback, progress_bar)
        self._callback.init_callback(self)
        self._locals = Locals(
            self=self,
            env=self.env,
            callback=self._callback,
            total_timesteps=self._total_timesteps,
            log_interval=self._log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset,
            progress_bar=progress_bar,
        )

    def _before_step(self) -> None:
        if self._callback is not None and self._step_of_rollout == 0:
            self._guarded(self._callback.on_rollout_start)

    def _after_step(
        self, actions: Array, obs: Any, rewards: Array, dones: Array, infos: list[dict[str, Any]]
    ) -> None:
        if self._callback is None:  # the env is used for something else
            return
        self.num_timesteps += self.n_envs
        self._n_stored += self.n_envs
        self._step_of_rollout += 1
        self._guarded(lambda: self._tell(actions, obs, rewards, dones, infos))

    def _tell(
        self, actions: Array, obs: Any, rewards: Array, dones: Array, infos: list[dict[str, Any]]
    ) -> None:
        new = {
            "actions": actions,
            "clipped_actions": actions,
            "new_obs": obs,
            "rewards": rewards,
            "dones": dones,
        }
        self._callback.update_locals(new | {"infos": infos, "n_steps": self._step_of_rollout})
        if not self._callback.on_step():
            raise Interrupted
        self._add_episodes(infos, dones)
        if self._step_of_rollout == self._agent.config.algorithm.n_steps:
            self._step_of_rollout = 0
            self._callback.on_rollout_end()

    def _guarded(self, call: Any) -> None:
        """Call a callback; what it raises ends the training and is raised by learn()."""
        try:
            call()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = error
        raise Interrupted from error

    def _add_episodes(self, infos: list[dict[str, Any]], dones: Array) -> None:
        assert self.ep_info_buffer is not None, "learn() makes it"
        assert self.ep_success_buffer is not None, "learn() makes it"
        for info, done in zip(infos, dones, strict=True):
            if "episode" in info:
                self.ep_info_buffer.append(info["episode"])
            if done:
                self._episode_num += 1
                if "is_success" in info:
                    self.ep_success_buffer.append(info["is_success"])
                if self._logs_episodes and self._log_interval and self._episode_num % self._log_interval == 0:
                    self.dump_logs()

    @property
    def _logs_episodes(self) -> bool:
        """Whether `log_interval` counts episodes, not iterations."""
        return self.ARGUMENTS.ALGO != "ppo"

    def _after_iteration(self, progress: Progress) -> None:
        self._iteration += 1
        for name, value in progress.metrics.items():
            self.logger.record(name, value)
        self._n_updates = self._counted(progress.updates)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        if not self._logs_episodes and self._log_interval and self._iteration % self._log_interval == 0:
            self.dump_logs(self._iteration)

    def _counted(self, n_updates: int) -> int:
        """Updates as Stable-Baselines3 counts them: PPO's epochs, gradient steps of others."""
        if self._logs_episodes:
            return n_updates
        given: Any = self._given
        return math.ceil(n_updates * int(given.batch_size) / (int(given.n_steps) * self.n_envs))

    @property
    def _current_progress_remaining(self) -> float:
        return 1.0 - self.num_timesteps / self._total_timesteps

    def dump_logs(self, iteration: int = 0) -> None:
        """Write the log."""
        logger, mean = self.logger, library("common.utils").safe_mean
        seconds = max((time.time_ns() - self.start_time) / 1e9, sys.float_info.epsilon)
        if iteration:
            logger.record("time/iterations", iteration, exclude="tensorboard")
        if self._logs_episodes:
            logger.record("time/episodes", self._episode_num, exclude="tensorboard")
        if self.ep_info_buffer:
            logger.record("rollout/ep_rew_mean", mean([episode["r"] for episode in self.ep_info_buffer]))
            logger.record("rollout/ep_len_mean", mean([episode["l"] for episode in self.ep_info_buffer]))
        if self.ep_success_buffer:
            logger.record("rollout/success_rate", mean(self.ep_success_buffer))
        logger.record("time/fps", int((self.num_timesteps - self._num_timesteps_at_start) / seconds))
        logger.record("time/time_elapsed", int(seconds), exclude="tensorboard")
        logger.record("time/total_timesteps", self.num_timesteps, exclude="tensorboard")
        logger.dump(step=self.num_timesteps)

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[Any, Any]:
        """The action for an observation or a batch of them."""
        if isinstance(observation, tuple):
            raise refuse(
                "predict() was given a tuple",
                "obs, info = env.reset() for a gym.Env; obs = env.reset() for a VecEnv",
            )
        transposed = library("common.preprocessing").maybe_transpose
        parts = getattr(self.observation_space, "spaces", {})
        if not isinstance(observation, dict):
            observation = transposed(np.asarray(observation), self.observation_space)
        else:
            observation = {
                key: transposed(np.asarray(array), parts[key]) if key in parts else array
                for key, array in observation.items()
            }
        return self._agent.predict(observation, state, episode_start, deterministic)

    def get_env(self) -> Any:
        """The VecEnv, or None."""
        return self.env

    def get_vec_normalize_env(self) -> Any:
        """The VecNormalize around the training envs, or None."""
        return None if self.env is None else library("common.vec_env").unwrap_vec_normalize(self.env)

    def set_env(self, env: Any, force_reset: bool = True) -> None:
        """Train in another env from now on."""
        venv, agent = wrapped(env, self.verbose), self._agent
        library("common.utils").check_for_correct_spaces(venv, self.observation_space, self.action_space)
        if venv.num_envs != self.n_envs:
            raise refuse(
                f"set_env() was given {venv.num_envs} envs and the model has {self.n_envs}",
                f"use {type(self).__name__}.load(path, env)",
            )
        self.env = venv
        self._check(venv)
        self._has_new_env = force_reset
        if self._adapter is not None:
            self._adapter.venv = venv
            return
        adapter = VecEnvAdapter(venv)
        agent._source, agent._env = adapter, adapter.info()
        self._hold(agent, adapter)

    def set_random_seed(self, seed: int | None = None) -> None:
        """Seed Python, NumPy, torch, the action space and the envs."""
        if seed is not None:
            library("common.utils").set_random_seed(seed)
            if self.env is not None:
                self.env.action_space.seed(seed)
                self.env.seed(seed)

    @property
    def logger(self) -> Any:
        """The logger of the last or current learn()."""
        return self._logger

    def set_logger(self, logger: Any) -> None:
        """Log with this logger instead of the one that `verbose` and `tensorboard_log` ask for."""
        self._logger, self._custom_logger = logger, True

    @property
    def device(self) -> Any:
        """The learner's device."""
        return self._agent.policy.device

    @device.setter
    def device(self, _: Any) -> None:
        """Given to the constructor."""

    @property
    def policy(self) -> Policy:
        """What acts."""
        return Policy(self)

    @policy.setter
    def policy(self, _: Any) -> None:
        raise refuse(
            "model.policy cannot be replaced",
            "updates are compiled or fused already: leave torch.compile out; use set_parameters() for other weights",
        )

    def get_parameters(self) -> dict[str, dict[str, torch.Tensor]]:
        """A copy of the parameters, under flatout's names."""
        return {"policy": {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}}

    def set_parameters(self, load_path_or_dict: Any, exact_match: bool = True, device: Any = "auto") -> None:  # noqa: ARG002
        """Set the parameters, from `get_parameters` or from a file that `save` wrote."""
        if not isinstance(load_path_or_dict, dict):
            checkpoint, _ = read_model(load_path_or_dict)
            tensors = _model_tensors(checkpoint)
        elif load_path_or_dict.keys() == {"policy"}:
            tensors = load_path_or_dict["policy"]
        else:
            raise refuse(
                f"set_parameters() was given {', '.join(load_path_or_dict) or 'nothing'}",
                "give {'policy': …} as get_parameters() returns it",
            )
        self.policy.load_state_dict(tensors, strict=exact_match)

    def _begin_from_parameters(self) -> None:
        """Let target networks have the parameters that were set, and the next learn() and save() begin with them."""
        agent = self._agent
        if agent._trainer is not None:
            networks = getattr(agent._trainer.learner, "networks", None)
            if networks is not None:
                networks.soft_update(1.0)
        elif agent._checkpoint is not None:
            saved, config = agent._checkpoint, agent.config
            model = copy.deepcopy(agent.policy.model)
            how = {"n_envs": self.n_envs, "seed": config.seed, "clock": PhaseClock(), "precision": "fp32"}
            state = config.descriptor.make_learner(model, config.algorithm, **how).state()
            kept = {name: t for name, t in saved.tensors.items() if name.startswith("optimizer.")}
            new = {name: t.detach().cpu() for name, t in state.items()} | kept
            agent._checkpoint = Checkpoint(saved.tensors | new, saved.state, saved.replay)

    def save(self, path: Any, exclude: Any = None, include: Any = None) -> None:
        """Write the model to a zip that `load` reads; it holds no pickle."""
        if exclude or include:
            raise refuse("save() always writes the same things", "leave out exclude and include")
        about = {
            "algorithm": self.ARGUMENTS.ALGO,
            "policy": self._policy_name,
            "arguments": {name: to_json(value) for name, value in vars(self._given).items()},
            "n_envs": self.n_envs,
            "num_timesteps": self.num_timesteps,
            "episodes": [[float(it[key]) for key in "rlt"] for it in self.ep_info_buffer or ()],
        }
        place = place_of(path, ".zip", reading=False)
        with TemporaryDirectory() as folder, zipfile.ZipFile(place, "w") as archive:
            write_checkpoint(Path(folder, AGENT), self._checkpoint())
            archive.write(Path(folder, AGENT), AGENT)
            archive.writestr(ABOUT, json.dumps(about))

    def _checkpoint(self) -> Checkpoint:
        agent = self._agent
        if agent._trainer is None and agent._checkpoint is not None:
            saved = agent._checkpoint
        else:
            saved = agent.trainer().checkpoint()
        tensors = {name: t for name, t in saved.tensors.items() if not name.startswith(NOT_SAVED)}
        return Checkpoint(tensors, saved.state, None)

    @classmethod
    def load(
        cls,
        path: Any,
        env: Any = None,
        device: Any = "auto",
        custom_objects: Mapping[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,  # noqa: ARG003
        **keywords: Any,
    ) -> Self:
        """A model from a file that `save` wrote; `custom_objects` and keywords replace its arguments."""
        if print_system_info:
            library("common.utils").get_system_info()
        checkpoint, about = read_model(path)
        if about["algorithm"] != cls.ARGUMENTS.ALGO:
            raise refuse(
                f"this is a model of {about['algorithm'].upper()}", f"use {about['algorithm'].upper()}.load"
            )
        arguments = {name: from_json(name, value) for name, value in about["arguments"].items()}
        arguments |= {"device": device} | dict(custom_objects or {}) | keywords
        self = cls.__new__(cls)
        venv = None if env is None else wrapped(env, int(arguments["verbose"]))
        self._begin(about["policy"], cls.ARGUMENTS.of((), arguments), venv)
        space = space_from_json(checkpoint.state["observation_space"])
        adapter = None if venv is None else VecEnvAdapter(venv)
        n_envs = about["n_envs"] if adapter is None else adapter.num_envs
        config = self._config(checkpoint.state["config"]["env"], space, n_envs)
        checkpoint.state["config"] = config.to_json()
        agent = Agent.from_checkpoint(checkpoint, adapter, trust=True)
        self._hold(agent, None)
        if venv is not None:
            self.set_env(venv)
        self.num_timesteps = about["num_timesteps"]
        self._keep_episodes(dict(zip("rlt", episode, strict=True)) for episode in about.get("episodes", ()))
        return self

    def _keep_episodes(self, known: Iterable[dict[str, float]] = ()) -> None:
        size = getattr(self, "stats_window_size", 100)
        self.ep_info_buffer, self.ep_success_buffer = deque(known, maxlen=size), deque(maxlen=size)


class Policy:
    """`model.policy`: acts, and holds the parameters under flatout's names."""

    def __init__(self, model: Model) -> None:
        self._model, self._module = model, model._agent.policy.model
        self.observation_space, self.action_space = model.observation_space, model.action_space

    def predict(self, *args: Any, **keywords: Any) -> tuple[Any, Any]:
        """As the model's."""
        return self._model.predict(*args, **keywords)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The parameters."""
        return dict(self._module.state_dict())

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Set parameters."""
        known = self._module.state_dict()
        if known.keys().isdisjoint(tensors):
            raise refuse(
                "none of these names is a parameter",
                f"flatout's are {', '.join([name for name in known if name.startswith('pi_')][:3])}, …",
            )
        try:
            self._module.load_state_dict(tensors, strict=strict)
        except RuntimeError as error:
            raise refuse(
                f"the parameters do not fit the model ({one_line(error)})", "make it with the same network"
            ) from error
        self._model._begin_from_parameters()

    def parameters(self) -> Any:
        """The parameters' tensors."""
        return self._module.parameters()

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refused: its forward pass takes other inputs than Stable-Baselines3's."""
        raise refuse("model.policy(…) has no counterpart", "use predict()")

    def set_training_mode(self, mode: bool) -> None:
        """Nothing: acting and learning compute the same."""

    def __getattr__(self, name: str) -> Any:
        advice = (
            "save the model, or export the policy with flatout.integrations.export"
            if name == "save"
            else "see docs/migrating.md"
        )
        raise AttributeError(f"flatout.sb3: model.policy has no {name}; {advice}")


class Locals(dict[str, Any]):
    """What callbacks see as `self.locals`."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"{key}: flatout's callbacks have no such local variable; there are {', '.join(self)}")


def _as_callback(callback: Any, progress_bar: bool) -> Any:
    callbacks = library("common.callbacks")
    if isinstance(callback, list):
        callback = callbacks.CallbackList(callback)
    if not isinstance(callback, callbacks.BaseCallback):
        callback = callbacks.ConvertCallback(callback)
    return callbacks.CallbackList([callback, callbacks.ProgressBarCallback()]) if progress_bar else callback


def _model_tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name[6:]: tensor for name, tensor in checkpoint.tensors.items() if name.startswith("model.")}
