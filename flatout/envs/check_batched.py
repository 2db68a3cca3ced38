"""Checks any env before training: single ones with `check`, batched ones by shapes, dtypes and values of a few steps."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from flatout.envs.check import (
    EnvInfo,
    call,
    check,
    has_mask,
    nan_message,
    plain_warnings,
    require_dict,
    sample_action,
    simple_parts,
    validate_spaces,
)
from flatout.envs.make import BatchedEnvs, BatchedKind, EnvFactory, batched_kind
from flatout.envs.spaces import MASK_KEY
from flatout.envs.wrappers import blocking
from flatout.errors import EnvError

N_STEPS = 4
"""Enough to see shapes; NaN and wrong episode ends are checked all through the run."""


def check_env(factory: EnvFactory, *, seed: int = 0, n_envs: int = 1) -> EnvInfo:
    """Check an env of either kind; a batched one is made with `n_envs` envs if it takes `num_envs`."""
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        made: Any = blocking(partial(factory.make, n_envs))  # type: ignore[arg-type]  # a batched env is returned as it is
        kind = batched_kind(made)
        info = _check_batched(factory, made, kind, seed) if kind else check(factory, env=made, seed=seed)
    return replace(info, warnings=tuple(dict.fromkeys((*info.warnings, *plain_warnings(raised)))))


def _check_batched(factory: EnvFactory, envs: BatchedEnvs, kind: BatchedKind, seed: int) -> EnvInfo:
    try:
        n_envs = envs.num_envs
        if not isinstance(n_envs, int | np.integer) or n_envs < 1:
            raise EnvError(f"num_envs is {n_envs!r}; it must be at least 1")
        validate_spaces(envs, "single_")
        notes = _Trial(envs, kind, seed).run()
        if factory.is_instance:  # the run continues with this one: leave it in new episodes
            call(lambda: envs.reset(seed=seed), "reset", N_STEPS)
    except EnvError as error:
        raise EnvError(f"{factory.name}: {error}") from error.__cause__
    finally:
        if not factory.is_instance:
            with suppress(Exception):
                envs.close()  # type: ignore[union-attr]  # optional
    return EnvInfo(
        factory=factory,
        observation_space=envs.single_observation_space,
        action_space=envs.single_action_space,
        warnings=tuple(notes),
        batched=kind,
        n_envs=int(n_envs),
        device=str(envs.device) if kind == "tensor" else "cpu",  # type: ignore[union-attr]
    )


class _Trial:
    """A few checked random steps of a batched env."""

    def __init__(self, envs: BatchedEnvs, kind: BatchedKind, seed: int) -> None:
        self._envs, self._seed, self._n_envs = envs, seed, int(envs.num_envs)
        self._device = torch.device(envs.device) if kind == "tensor" else None  # type: ignore[union-attr]
        self._space, self._action_space = envs.single_observation_space, envs.single_action_space
        self._step = 0

    def run(self) -> list[str]:
        """Take the steps; returns warnings, or raises EnvError."""
        self._action_space.seed(self._seed)
        obs, info = call(lambda: self._envs.reset(seed=self._seed), "reset", 0)
        require_dict(info, "reset")
        self._validate_obs(obs, "observation")
        notes = self._notes(info)
        for self._step in range(1, N_STEPS + 1):
            result = call(partial(self._envs.step, self._actions(obs)), "step", self._step)
            self._validate_step(*result)
            obs = result[0]
        return notes

    def _validate_step(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        require_dict(info, "step")
        self._validate_obs(obs, "observation")
        self._validate(reward, "reward", ())
        for name, flags in (("terminated", terminated), ("truncated", truncated)):
            self._validate(flags, name, ())
            if _to_numpy(flags).dtype != np.bool_:
                raise EnvError(f"{name} at step {self._step} is not an array of bools")
        if self._device is not None:
            if "final_obs" not in info:
                raise EnvError(
                    "step() gave no info['final_obs']; a batched env of tensors must give it at every step"
                )
            self._validate_obs(info["final_obs"], "final_obs", finite=False)

    def _notes(self, info: dict[str, Any]) -> list[str]:
        notes = []
        if self._device is None and "autoreset_mode" not in self._envs.metadata:  # type: ignore[union-attr]
            notes.append("metadata['autoreset_mode'] is missing; Gymnasium's default NEXT_STEP is assumed")
        if MASK_KEY in info and not has_mask(self._space):
            notes.append("info['action_mask'] of a batched env is ignored; put it into a Dict observation")
        return notes

    def _actions(self, obs: Any) -> Any:
        masks = _to_numpy(obs[MASK_KEY]) if has_mask(self._space) else [None] * self._n_envs
        actions = np.stack([sample_action(self._action_space, mask, self._step) for mask in masks])
        return actions if self._device is None else torch.from_numpy(actions).to(self._device)

    def _validate_obs(self, obs: Any, path: str, finite: bool = True) -> None:
        for part, values, name in simple_parts(self._space, obs, path, self._step):
            self._validate(values, name, part.shape or (), finite)

    def _validate(self, values: Any, name: str, shape: tuple[int, ...], finite: bool = True) -> None:
        if self._device is not None:
            self._refuse_other_device(values, name)
        array = _to_numpy(values)
        if array.dtype.kind not in "buif":
            raise EnvError(f"{name} at step {self._step} is not an array of numbers")
        if array.shape != (self._n_envs, *shape):
            raise EnvError(
                f"{name} at step {self._step} has shape {array.shape}; "
                f"for {self._n_envs} envs it must be {(self._n_envs, *shape)}"
            )
        bad = ~np.isfinite(array.reshape(self._n_envs, -1)).all(axis=1)
        if finite and bad.any():
            kind = "a NaN" if np.isnan(array).any() else "an infinite"
            raise EnvError(nan_message(name, int(bad.argmax()), self._step, kind))

    def _refuse_other_device(self, values: Any, name: str) -> None:
        if not isinstance(values, torch.Tensor):
            raise EnvError(f"{name} at step {self._step} is a {type(values).__name__}, not a torch tensor")
        if not same_device(values.device, self._device):
            raise EnvError(f"{name} at step {self._step} is on {values.device}; the env says {self._device}")


def same_device(a: torch.device | str, b: torch.device | str | None) -> bool:
    """Whether two names mean the same device; `cuda` without an index matches every CUDA device."""
    one, other = torch.device(a), torch.device(b or "cpu")
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


def _to_numpy(values: Any) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
