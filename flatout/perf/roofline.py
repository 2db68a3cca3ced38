"""What updates and acting would take on a card that this machine does not have, by its data sheet.

Each kernel takes what its operations or its memory traffic need at the card's peak, whichever is longer, and a fixed time
(Williams et al. 2009). The operations are the model's own, run on torch's `meta` device, which computes nothing. Real
kernels reach 30 to 90 % of these peaks, so this is the least time that a card needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from flatout.config.run_config import RunConfig
from flatout.device.cards import Card
from flatout.models.policy import Policy
from flatout.perf.costs import Costs, Settings, UpdateCost

KERNEL_SECONDS = 1.2e-6
"""The shortest kernel inside a graph."""
LINK_SECONDS = 8e-6
"""The shortest copy between host and card."""
REPLAY_SECONDS = 20e-6
"""The host's part of launching a graph."""
ACT_SECONDS = 35e-6
"""The host's part of acting on a card: writing observations, launching, reading actions."""
DRAW_KERNELS = 90
"""Kernels that draw a minibatch from a replay on the card and set its priorities."""


class Roofline(TorchDispatchMode):
    """Adds up the time of all kernels that run inside it."""

    def __init__(self, card: Card, *, tf32: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flops = 1e12 * (card.tf32 if tf32 else card.fp32)
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
            n_bytes = sum(x.numel() * x.element_size() for x in tensors)
            count = flop_registry.get(func._overloadpacket)
            flops = 0 if count is None else count(*args, **(kwargs or {}), out_val=out)
            self.seconds += KERNEL_SECONDS + max(flops / self._flops, n_bytes / self._bandwidth)
        return out


def seconds_on(card: Card, work: Callable[[], Any], *, tf32: bool = False) -> float:
    """Seconds of the kernels that `work` launches."""
    roof = Roofline(card, tf32=tf32)
    with roof:
        work()
    return roof.seconds


def on_card(
    config: RunConfig, policy: Policy, costs: Costs, settings: Settings, card: Card
) -> tuple[Costs, Settings]:
    """The costs of the same run with a card to learn on, and its settings there."""
    tf32 = config.precision == "tf32" or (config.precision == "auto" and card.tf32 > card.fp32)
    spec = config.learner_spec(policy.obs, policy.action)
    learner = spec.make_learner("meta", "fp32")
    batch = learner.example_batch(settings.batch_size)
    update = seconds_on(card, lambda: learner.update.captured_step(batch), tf32=tf32)
    if settings.train_ratio is not None:
        update += DRAW_KERNELS * KERNEL_SECONDS
    cost = UpdateCost(python=REPLAY_SECONDS, points=((settings.batch_size, update),))
    obs, _ = learner.example_inputs(settings.n_envs)
    noise = torch.zeros(settings.n_envs, policy.action.noise_size, device="meta")
    latency = 2 * LINK_SECONDS + seconds_on(card, lambda: learner.model.sample(obs, noise), tf32=tf32)
    # Two groups act in turn: while one waits for the card, the other steps.
    hidden = sum(costs.compute) / len(costs.compute) * settings.n_envs / 2
    act = 2 * (ACT_SECONDS + max(latency - hidden, 0.0))
    here = costs.act_apart or costs.act
    costs = replace(
        costs,
        act=tuple((n, min(seconds, act)) for n, seconds in here),
        act_apart=here,
        update=cost,
        compiled=None,
        beside=None,
        learn_overhead=1.05,
    )
    return costs, replace(settings, on_device=True, compiled=False)
