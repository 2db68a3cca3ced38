"""The card shows mistakes: without one of the product's waits, or with a stream or a device mixed up, a run goes wrong.

Streams of the card run as late as they may. Where a mistake shows only if one of them is fast, the test lets it be fast.
"""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Event
from time import monotonic, sleep
from typing import Any

import pytest
import torch

import simcard
from flatout.algorithms.ppo.learner import PPOLearner
from flatout.buffers import rollout
from flatout.buffers.rollout import Rollout, Staging
from flatout.collect.collector import Collector
from flatout.collect.tensors import _CapturedSteps
from flatout.device import accelerator
from flatout.models import params
from flatout.models.actor import DeviceActor
from flatout.models.params import ParamCopy
from tests.card.runs import DQN, PPO, act_on, difference, on_cpu, trained
from tests.card.walk import Walk

pytestmark = pytest.mark.card

CLOSE = 1e-5
OVERLAPPED = PPO | {"overlap": "on"}
Patch = pytest.MonkeyPatch


def change(patch: Patch, owner: type, name: str, pieces: dict[str, str]) -> None:
    """Replace pieces of a method's source."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    for old, new in pieces.items():
        assert source.count(old) == 1, f"{owner.__name__}.{name} has no {old!r}"
        source = source.replace(old, new)
    found: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile(source, name, "exec", flags), vars(sys.modules[owner.__module__]), found)
    patch.setattr(owner, name, found[name])


def goes_wrong(
    settings: dict[str, Any], acting: str, patch: Patch, break_it: Callable[[Patch], None]
) -> bool:
    """Whether a run that equals the CPU's differs from it, or fails, once it is broken."""
    act_on(patch, acting)
    expected = on_cpu(settings, Walk, n_iterations=4)
    assert difference(trained("sim:1", settings, Walk, n_iterations=4), expected) <= CLOSE
    break_it(patch)
    try:
        return difference(trained("sim:1", settings, Walk, n_iterations=4), expected) > CLOSE
    except (RuntimeError, ValueError):
        return True
    finally:
        finish_kernels()


def finish_kernels() -> None:
    """Kernels that were given nonsense may fail; those must not trouble the next test."""
    while simcard.queued(1):
        with suppress(RuntimeError):
            torch.accelerator.synchronize(1)


def stage_early(patch: Patch) -> None:
    """The next rollout is collected and staged while nothing of the one before has run yet."""
    release = Staging.release

    def released(self: Staging) -> None:
        release(self)
        until = monotonic() + 1.0  # in the last iteration there is none
        while self._staged is None and monotonic() < until:
            sleep(0.001)

    patch.setattr(Staging, "release", released)


def copy_fast(patch: Patch) -> None:
    """Rollouts are copied as soon as they may."""
    send = Staging._send

    def sent(self: Staging, rollout: Rollout) -> Any:
        data = send(self, rollout)
        self._copies.synchronize()
        return data

    patch.setattr(Staging, "_send", sent)


@pytest.mark.parametrize("settings", [PPO, OVERLAPPED], ids=["lockstep", "overlapped"])
def test_learning_from_a_rollout_before_it_is_copied(settings: dict[str, Any], monkeypatch: Patch) -> None:
    def break_it(patch: Patch) -> None:
        change(patch, Staging, "take", {"now.wait_event(self._sent)": "pass"})

    assert goes_wrong(settings, "cpu", monkeypatch, break_it)


def test_copying_over_a_rollout_that_is_still_read(monkeypatch: Patch) -> None:
    send = Staging._send
    stage_early(monkeypatch)
    copy_fast(monkeypatch)

    def break_it(patch: Patch) -> None:
        patch.setattr(Staging, "_send", send)
        change(patch, Staging, "_send", {"self._copies.wait_event(self._read)": "pass"})
        copy_fast(patch)

    assert goes_wrong(OVERLAPPED, "cpu", monkeypatch, break_it)


def test_refilling_pinned_memory_that_is_still_copied(monkeypatch: Patch) -> None:
    stage_early(monkeypatch)

    def break_it(patch: Patch) -> None:
        change(patch, Staging, "_send", {"self._was_sent and not self._sent.query()": "False"})

    assert goes_wrong(OVERLAPPED, "cpu", monkeypatch, break_it)


def test_copies_in_another_stream_than_the_one_that_is_waited_for(monkeypatch: Patch) -> None:
    def break_it(patch: Patch) -> None:
        change(patch, Staging, "_send", {"self._sent.record(self._copies)": "self._sent.record()"})

    assert goes_wrong(PPO, "cpu", monkeypatch, break_it)


def act_early(patch: Patch) -> None:
    """The learner begins after the first action of the next rollout."""
    acted, publish, finish, learn = Event(), Collector.publish, DeviceActor.finish, PPOLearner.learn

    def published(self: Collector) -> None:
        acted.clear()
        publish(self)

    def finished(self: DeviceActor) -> None:
        finish(self)
        acted.set()

    def learned(self: PPOLearner, *args: Any, **keywords: Any) -> Any:
        if self.device.type == "sim":
            acted.wait(1.0)  # with the last rollout nobody acts
        return learn(self, *args, **keywords)

    patch.setattr(Collector, "publish", published)
    patch.setattr(DeviceActor, "finish", finished)
    patch.setattr(PPOLearner, "learn", learned)


PARAMETERS = {
    "not waited for by the host": ("finish", "self._copied.synchronize()", PPO, "cpu"),
    "never recorded": ("begin", "self._copied.record(current_stream(self._device))", PPO, "cpu"),
    "not waited for by the stream": (
        "finish",
        "current_stream(self._device).wait_event(self._copied)",
        OVERLAPPED,
        "sim:1",
    ),
}


@pytest.mark.parametrize("how", PARAMETERS)
def test_acting_with_parameters_that_have_not_arrived(how: str, monkeypatch: Patch) -> None:
    name, line, settings, acting = PARAMETERS[how]
    if acting != "cpu":
        act_early(monkeypatch)

    def break_it(patch: Patch) -> None:
        change(patch, ParamCopy, name, {line: "pass"})

    assert goes_wrong(settings, acting, monkeypatch, break_it)


@pytest.mark.parametrize("settings", [PPO, DQN], ids=["ppo", "dqn"])
def test_reading_actions_before_they_are_there(settings: dict[str, Any], monkeypatch: Patch) -> None:
    def break_it(patch: Patch) -> None:
        change(patch, DeviceActor, "finish", {"self._done.synchronize()": "pass"})

    assert goes_wrong(settings, "sim:1", monkeypatch, break_it)


def test_waiting_for_the_stream_of_another_device(monkeypatch: Patch) -> None:
    def break_it(patch: Patch) -> None:
        def of_thread(_: torch.device) -> torch.Stream:
            return torch.accelerator.current_stream(0)

        patch.setattr(rollout, "current_stream", of_thread)
        patch.setattr(params, "current_stream", of_thread)

    assert goes_wrong(PPO, "sim:1", monkeypatch, break_it)


def warmed_up() -> bool:
    """Whether what a graph's warm-up reads was written before, and what it writes is there afterwards."""
    device = torch.device("sim:1")
    x, y = torch.zeros(2, 3, device=device)
    accelerator.synchronize(device)

    def warm_up(reads_at_once: bool) -> None:
        y.copy_(x)
        if reads_at_once:
            accelerator.current_stream(device).synchronize()

    right = []
    for reads_at_once in (False, True):
        x.fill_(7.0)
        accelerator.Graph(lambda: y + 1, device, partial(warm_up, reads_at_once))
        right.append(bool((y == 7).all()))
        torch._foreach_zero_([x, y])
        accelerator.synchronize(device)
    return all(right)


@pytest.mark.parametrize("line", ["stream.wait_stream(now)", "now.wait_stream(stream)"])
def test_warming_up_a_graph_without_regard_to_the_current_stream(line: str, monkeypatch: Patch) -> None:
    assert warmed_up()
    change(monkeypatch, accelerator.Graph, "__init__", {line: "pass"})
    assert not warmed_up()


def test_without_the_wait_for_what_the_host_reads_episodes_are_lost(monkeypatch: Patch) -> None:
    settings = PPO | {"executor": "auto"}
    expected = trained("sim:1", settings, "snake").summary["episodes"]
    change(monkeypatch, _CapturedSteps, "read_episodes", {"self._is_read.synchronize()": "pass"})
    assert trained("sim:1", settings, "snake").summary["episodes"] != expected
