"""Predictions for cards by data sheet."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flatout
import simcard
from flatout.device.cards import CARDS, Card, card
from flatout.perf.costs import Costs
from flatout.perf.planner import settings_of
from flatout.perf.roofline import KERNEL_SECONDS, on_card, seconds_on
from flatout.perf.simulate import simulate

CARD = Card(10.0, 20.0, 40.0, 100, 8, 16)
"""10 and 20 Tflops, 100 GB/s."""


def test_a_big_matrix_product_takes_its_operations_at_the_peak() -> None:
    a = torch.empty(4096, 4096, device="meta")
    assert seconds_on(CARD, lambda: a @ a) == pytest.approx(2 * 4096**3 / 10e12 + KERNEL_SECONDS)
    assert seconds_on(CARD, lambda: a @ a, tf32=True) == pytest.approx(2 * 4096**3 / 20e12 + KERNEL_SECONDS)


def test_an_addition_takes_its_memory_traffic() -> None:
    a = torch.empty(25_000_000, device="meta")
    assert seconds_on(CARD, lambda: a + a) == pytest.approx(3e8 / 100e9 + KERNEL_SECONDS)


def test_a_view_costs_nothing() -> None:
    a = torch.empty(64, 64, device="meta")
    assert seconds_on(CARD, lambda: (a.t(), a[3:], a.view(-1))) == 0


def test_a_card_speeds_up_a_big_network_more_than_a_small_one() -> None:
    gains = []
    for widths in ((64, 64), (1024, 1024)):
        agent = flatout.PPO(
            "CartPole-v1", n_envs=8, n_steps=64, batch_size=256, network_arch=widths, device="cpu"
        )
        settings = settings_of(agent.config, agent.policy, 2)
        flops = 6.0 * settings.n_params * settings.batch_size
        here = Costs(wait=(0.0,), compute=(1e-5,), act=((8, 1e-4),))
        here = replace(here, update=replace(here.update, points=((256, 3e-4 + flops / 50e9),)))
        there, on = on_card(agent.config, agent.policy, here, settings, card("rtx4070"))
        gains.append(simulate(there, on).learn_rate / simulate(here, settings).learn_rate)
        assert on.on_device
    assert gains[1] > 10 * gains[0]


def test_the_simulated_card_has_the_same_data_sheets() -> None:
    for name, sheet in simcard.CARDS.items():
        ours = CARDS[name]
        theirs = (sheet.fp32_flops, sheet.tf32_flops, sheet.half_flops)
        assert theirs == pytest.approx([x * 1e12 for x in (ours.fp32, ours.tf32, ours.bf16)])
        assert (sheet.memory_bandwidth, sheet.link_bandwidth) == (ours.bandwidth * 1e9, ours.link * 1e9)
        assert sheet.memory_bytes == ours.memory * 1e9
        assert sheet.graph_kernel_seconds == KERNEL_SECONDS
