"""Evaluation: the returns of a policy over whole episodes, in separate envs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from flatout.collect.noise import ActionNoise
from flatout.collect.ragged import Interrupted
from flatout.envs.check import EnvInfo
from flatout.envs.spaces import Array
from flatout.errors import EnvError, FlatoutError
from flatout.executors.base import EnvSet, Episode, Executor, RestartBudget, Step, make_executor, step
from flatout.executors.episodes import EpisodeStatistics
from flatout.models.actor import env_actions
from flatout.models.policy import Policy
from flatout.perf.costs import Settings
from flatout.runlog.files import plural
from flatout.views.figures import mean_and_std, number
from flatout.views.notebook import table_html

ISOLATED = ("process", "thread")
"""Executors whose envs may die or hang without harm; evaluation uses them where training does."""
N_WORKERS = 2


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Returns and lengths of the evaluated episodes."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    n_cut: int = 0
    """Episodes that were cut at the step limit; they count with their return so far."""

    @property
    def return_mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def return_std(self) -> float:
        """Standard deviation of the returns."""
        return float(np.std(self.returns))

    @property
    def length_mean(self) -> float:
        """Mean episode length in env steps."""
        return float(np.mean(self.lengths))

    def _repr_html_(self) -> str:
        low, high = min(self.returns), max(self.returns)
        rows = [
            (
                "return",
                f"{mean_and_std(self.return_mean, self.return_std)}, from {number(low)} to {number(high)}",
            ),
            ("episodes", f"{plural(len(self.returns), 'episode')}, {number(self.length_mean)} steps each"),
            ("cut", f"{self.n_cut} at the step limit" if self.n_cut else ""),
        ]
        return table_html("evaluation", rows)


def eval_executor(
    env: EnvInfo,
    policy: Policy,
    n_envs: int,
    seed: int,
    plan: Settings | None = None,
    budget: RestartBudget | None = None,
    step_timeout: float = 0.0,
) -> Executor:
    """New envs to evaluate in, or the user's own batched env.

    They are as far from this process as those of the plan. Without a plan, envs of the user are in other processes, if
    they can be made there.
    """
    kind = "batched" if env.batched else "async" if env.is_async else "serial"
    if env.factory.is_instance and not env.batched:
        n_envs = 1
    if plan is not None and kind == "serial":
        kind = "process" if plan.in_subprocesses else plan.executor if plan.executor in ISOLATED else "serial"
    envs = EnvSet(
        env.factory,
        policy.obs,
        np.arange(n_envs),
        seed,
        action=policy.action,
        replayable=False,
        budget=budget,
    )
    make = partial(make_executor, envs=envs, n_workers=N_WORKERS, step_timeout=step_timeout)
    apart = not env.factory.is_built_in and not env.factory.is_instance
    if plan is None and kind == "serial" and apart:
        with suppress(Exception):
            return _started(make("process"))
    return make(kind)


def _started(executor: Executor) -> Executor:
    """The executor, once its processes have made their envs; it is closed if they cannot."""
    try:
        executor.apply(id)
        return executor
    except BaseException:
        executor.close()
        raise


# No inference mode: a batched env could not change tensors elsewhere that it made there.
@torch.no_grad()
def evaluate(
    executor: Executor,
    policy: Policy,
    *,
    n_episodes: int,
    seed: int,
    max_steps: int,
    deterministic: bool = True,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Play `n_episodes` from new resets; each env plays a fixed share, so that short episodes are not favoured.

    An episode is cut after `max_steps`. Raises Interrupted when `stop` becomes true.
    """
    n_envs = executor.n_envs
    left = np.array([n_episodes // n_envs + (i < n_episodes % n_envs) for i in range(n_envs)])
    noise = ActionNoise(policy.action, executor.env_ids, seed)
    now, state = executor.reset(), np.zeros((n_envs, policy.model.state_size), np.float32)
    played = EpisodeStatistics(executor.env_ids)
    episodes: list[Episode] = []
    t = n_cut = 0
    while left.any():
        if stop():
            raise Interrupted
        drawn = None if deterministic else noise.draw(t, 1)[0].to(policy.device)
        now = step(executor, env_actions(policy, now.obs, drawn, state))
        t += 1
        played.add(now.reward)
        for ended in (now.terminated | now.truncated, now.restarted):
            played.clear(ended)
            state[ended] = 0
        cut = played.end(np.flatnonzero((played.lengths >= max_steps) & (left > 0)))
        for episode in [*now.ended, *cut]:
            if left[episode.env_id] > 0:
                left[episode.env_id] -= 1
                episodes.append(episode)
        if cut:
            n_cut += len(cut)
            state[[e.env_id for e in cut]] = 0
            now = _begin_again(executor, [e.env_id for e in cut if left[e.env_id]], left)
    returns, lengths = tuple(e.total_reward for e in episodes), tuple(e.length for e in episodes)
    return Evaluation(returns, lengths, n_cut)


def _begin_again(executor: Executor, env_ids: list[int], left: Array) -> Step:
    """Begin new episodes in these envs; an executor that cannot reset some of its envs plays no more in them."""
    if not env_ids:
        return executor.current
    try:
        return executor.reset_envs([None] * executor.n_envs, None, env_ids)
    except EnvError:
        raise
    except FlatoutError:
        left[env_ids] = 0
        return executor.current
