"""What updates and acting would take on a card that this machine does not have, by its data sheet.

Each kernel takes what its operations or its memory traffic need at the card's peak, whichever is longer, and a fixed time
(Williams et al. 2009). The operations are the model's own, run on torch's `meta` device, which computes nothing. Real
kernels reach 30 to 90 % of these peaks, so this is the least time that a card needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from flatout.collect.groups import MIN_ENVS
from flatout.collect.tensors import TensorActions
from flatout.config.run_config import RunConfig
from flatout.device.accelerator import LARGE_NETWORK
from flatout.device.cards import Card
from flatout.envs.check import EnvInfo
from flatout.executors.tensors import TensorExecutor
from flatout.learning.learner import Learner
from flatout.models.policy import Policy
from flatout.perf.costs import Costs, Settings, UpdateCost, at

KERNEL_SECONDS = 1.2e-6
"""The shortest kernel inside a graph."""
LINK_SECONDS = 8e-6
"""The shortest copy between host and card."""
REPLAY_SECONDS = 20e-6
"""The host's part of launching a graph."""
ACT_SECONDS = 35e-6
"""The host's part of acting on a card: writing observations, launching, reading actions."""
REDUCE_SECONDS = 30e-6
"""The shortest all-reduce between the cards of a machine; larger ones are taken at the speed of the link to the host,
though NVLink, where there is one, is ten times as fast."""
DRAW_KERNELS = {False: 9, True: 90}
"""Kernels of an update that take its minibatch, by whether they draw it by priority and set new priorities."""


class Roofline(TorchDispatchMode):
    """Adds up the time of all kernels that run inside it.

    `half`: networks compute in 16 bits. What is computed here has 32, so tensors of layers, which have two dimensions or
    more, count half.
    """

    def __init__(self, card: Card, *, tf32: bool = False, half: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flops = 1e12 * (card.bf16 if half else card.tf32 if tf32 else card.fp32)
        self._half = half
        self._bandwidth = 1e9 * card.bandwidth
        self.seconds: float = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            out = func(*args, **(kwargs or {}))
        except NotImplementedError:  # in-place optimizer steps have no meta form, and return nothing
            out = None
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view:
            tensors = [x for x in tree_iter((args, kwargs, out)) if isinstance(x, Tensor)]
            n_bytes = sum(x.nbytes / (2 if self._half and x.ndim > 1 else 1) for x in tensors)
            count = flop_registry.get(func._overloadpacket)
            flops = 0 if count is None else count(*args, **(kwargs or {}), out_val=out)
            self.seconds += KERNEL_SECONDS + max(flops / self._flops, n_bytes / self._bandwidth)
        return out


def seconds_on(card: Card, work: Callable[[], Any], *, tf32: bool = False, half: bool = False) -> float:
    """Seconds of the kernels that `work` launches."""
    roof = Roofline(card, tf32=tf32, half=half)
    with roof:
        work()
    return roof.seconds


def on_card(
    config: RunConfig,
    policy: Policy,
    costs: Costs,
    settings: Settings,
    card: Card,
    env: EnvInfo | None = None,
    n_cards: int = 1,
) -> tuple[Costs, Settings]:
    """The costs of the same run with a card to learn on, or several, and its settings there."""
    tf32 = config.precision == "tf32" or (config.precision == "auto" and card.tf32 > card.fp32)
    half = config.precision in ("bf16", "fp16") or (
        config.precision == "auto" and policy.n_params >= LARGE_NETWORK
    )
    timed = partial(seconds_on, card, tf32=tf32)
    learner = config.learner_spec(policy.obs, policy.action).make_learner("meta", "fp32")
    batch = learner.example_batch(max(settings.batch_size // n_cards, 1))
    update = timed(lambda: learner.update.captured_step(batch), half=half)
    if n_cards > 1:  # one all-reduce of the gradient per update, as a ring
        update += REDUCE_SECONDS + 2 * 4 * policy.n_params / (1e9 * card.link)
        costs = replace(costs, ray_call=costs.ray_call / n_cards)  # each rank asks its own actors
    if half:  # the parameters are converted for each update
        update += KERNEL_SECONDS + 6 * policy.n_params / (1e9 * card.bandwidth)
    if settings.train_ratio is not None:
        update += DRAW_KERNELS[getattr(config.algorithm, "prioritized", False)] * KERNEL_SECONDS
    cost = UpdateCost(python=REPLAY_SECONDS, points=((settings.batch_size, update),))
    costs = replace(costs, update=cost, compiled=None, beside=None, learn_overhead=1.05)
    on = replace(settings, on_device=True, compiled=False)
    if settings.executor == "batched":
        step = None if env is None or env.batched != "tensor" else _step_of(env, learner, settings.n_envs)
        return (costs if step is None else _stepping_there(costs, settings.n_envs, timed(step))), on
    return _acting_there(costs, settings, learner, timed), on


def _acting_there(
    costs: Costs, settings: Settings, learner: Learner[Any], timed: Callable[[Callable[[], Any]], float]
) -> Costs:
    """The costs with acting on the card, if that is faster than on the CPU."""
    n_envs = settings.n_envs
    # Two groups act in turn: while one waits for the card, the other steps.
    n_groups = 1 if costs.waits or n_envs < MIN_ENVS else 2
    kernels = timed(_acting(learner, -(-n_envs // n_groups)))
    hidden = costs.step_seconds * n_envs / 2 if n_groups == 2 else 0.0
    act = n_groups * (ACT_SECONDS + max(kernels + 2 * LINK_SECONDS - hidden, 0.0))
    here = costs.act_apart or costs.act
    if at(here, n_envs) <= act:
        return replace(costs, act=here, act_apart=here)
    # It always acts for all envs, of which some may count.
    return replace(
        costs, act=((1, act), (2, act)), act_apart=here, act_on_device=n_groups * (kernels + 2 * LINK_SECONDS)
    )


def _acting(learner: Learner[Any], n_envs: int) -> Callable[[], Any]:
    obs, _ = learner.example_inputs(n_envs)
    noise = torch.zeros(n_envs, learner.model.action.noise_size, device="meta")
    return lambda: learner.model.sample(obs, noise)


def _step_of(env: EnvInfo, learner: Learner[Any], n_envs: int) -> Callable[[], Any] | None:
    """A time step of batched envs of tensors: acting, stepping, storing; None if they cannot be made elsewhere."""
    model, act = learner.model, _acting(learner, n_envs)
    try:
        made: Any = replace(env.factory, device="meta").make(n_envs)
        executor = TensorExecutor(made, model.obs, np.arange(n_envs), 0)
        executor.reset()
        actions = TensorActions(model.action, executor.device)
    except Exception:
        return None
    if executor.device.type != "meta" or not executor.capturable:
        return None

    def step() -> None:
        action, log_prob = act()
        now = executor.step(actions.to_env(model.head.squash(action)))
        kept = action, log_prob, now.reward, now.terminated, now.truncated, *now.final_obs, *now.obs
        for value in (*kept, *now.obs):  # the observations are read from the rollout, too
            value.clone()

    return step


def _stepping_there(costs: Costs, n_envs: int, seconds: float) -> Costs:
    """The costs with envs that step on the card, all in so many seconds: the host only launches."""
    waiting = max(seconds - REPLAY_SECONDS, 0.0) / n_envs
    return replace(costs, wait=(waiting,), compute=(0.0,), act=((n_envs, REPLAY_SECONDS),), store=0.0)
