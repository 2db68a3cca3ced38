"""Prioritized sampling against naive lists, in RAM and on a device: distribution, weights, odd priorities, stale slots."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.buffers import priority as tree
from flatout.buffers.device_replay import TensorPrioritized, TensorSumTree
from flatout.buffers.priority import Prioritized
from flatout.envs.spaces import Array
from tests.buffers.plain_replay import CPU, Filled
from tests.buffers.test_replay import chi_square_is_plausible

Sampler: TypeAlias = Prioritized | TensorPrioritized


def both(filled: Filled, *, n_step: int = 1, alpha: float = 0.6, eps: float = 1e-6) -> list[Sampler]:
    """A sampler in RAM and one on a device, of the same steps."""
    return [
        Prioritized(filled.replay, gamma=0.9, n_step=n_step, alpha=alpha, eps=eps, seed=3),
        TensorPrioritized(filled.tensors, gamma=0.9, n_step=n_step, alpha=alpha, eps=eps, seed=3),
    ]


def steady(n_envs: int = 2, per_env: int = 10, n_steps: int = 8) -> Filled:
    """Envs whose episodes never end, after `n_steps`."""
    filled = Filled(n_envs, per_env, 0, p_terminated=0, p_truncated=0)
    for _ in range(n_steps):
        filled.step()
    return filled


def parts(sampler: Sampler) -> Array:
    """The priority of each slot."""
    return torch.as_tensor(sampler.priorities).double().numpy().copy()


def set_all(sampler: Sampler, index: Array, values: Array) -> None:
    """Update slots as if they had just been sampled."""
    at = torch.from_numpy(index)
    serial = sampler.replay.serials(at if isinstance(sampler, TensorPrioritized) else index)  # type: ignore[arg-type]
    sampler.update(at, torch.as_tensor(serial), torch.from_numpy(values))


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([1, 7, 15, 16, 17, 127, 128, 129, 1025, 5000]),
    n_writes=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_both_sum_trees_equal_a_list(size: int, n_writes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    naive = np.zeros(size, np.float32)
    sums = leaves, nodes, offsets = tree.alloc_tree(size)
    device = TensorSumTree(size, CPU)
    for _ in range(n_writes):
        index = rng.integers(size, size=rng.integers(1, 60))  # with repeats: the last one counts
        value = rng.choice([0.0, 1e-30, 1.0, 1e30], size=len(index)) * rng.random(len(index))
        for i, v in zip(index, value, strict=True):
            naive[i] = v
        for i, v in zip(index, value, strict=True):
            leaves[i] = v
        tree.sum_up(sums, index.copy(), len(index))
        device.write(torch.from_numpy(index), torch.from_numpy(value))
        np.testing.assert_array_equal(leaves[:size], naive)
        np.testing.assert_array_equal(device.leaves.numpy(), naive)
        total = math.fsum(naive.tolist())
        assert nodes[offsets[-2]] == pytest.approx(total, rel=1e-12)
        assert device.total.item() == pytest.approx(total, rel=1e-12)
    if total == 0:
        return
    mass = np.concatenate([rng.random(20), [0.0, 1.0]]) * total  # the ends, too: there rounding tells
    found = np.empty(len(mass), np.int64)
    tree.find(sums, mass.copy(), found)
    there = device.find(torch.from_numpy(mass)).numpy()
    assert (naive[found] > 0).all()
    assert (naive[there] > 0).all()
    ends = np.cumsum(naive.astype(np.float64))
    near = 1e-9 * total
    for got in (found, there):
        assert (mass >= ends[got] - naive[got] - near).all()
        assert (mass <= ends[got] + near).all()


def test_sums_do_not_drift() -> None:
    """After a million writes of very different sizes the sums equal newly computed ones."""
    rng = np.random.default_rng(0)
    size = 300
    sums = leaves, nodes, offsets = tree.alloc_tree(size)
    for _ in range(1000):
        index = rng.integers(size, size=1000)
        leaves[index] = 10.0 ** rng.uniform(-20, 20, size=1000)
        tree.sum_up(sums, index, len(index))
    leaves[:size] = 1
    for i in range(size):
        tree.sum_up(sums, np.array([i]), 1)
    assert nodes[offsets[-2]] == size


@pytest.mark.parametrize("which", [0, 1], ids=["ram", "device"])
def test_samples_are_in_proportion_to_priorities_and_weights_are_exact(which: int) -> None:
    filled = Filled(3, 9, 11, p_truncated=0.3)
    for _ in range(30):
        filled.anything()
    sampler = both(filled, n_step=2, alpha=0.7, eps=0.01)[which]
    eligible = np.array(sorted(filled.plain.eligible(2)))
    raw = np.random.default_rng(0).exponential(size=len(eligible)).astype(np.float32)
    set_all(sampler, eligible, raw)
    share = (raw.astype(np.float64) + 0.01) ** 0.7
    share /= share.sum()
    drawn = np.concatenate([sampler.sample(50).index.numpy() for _ in range(80)])
    counts = np.bincount(drawn, minlength=filled.replay.size)[eligible]
    assert counts.sum() == 4000
    assert chi_square_is_plausible(counts, share * 4000)
    batch = sampler.sample(64, beta=0.5)
    chance = share[np.searchsorted(eligible, batch.index.numpy())]
    right = (len(eligible) * chance) ** -0.5
    np.testing.assert_allclose(batch.weight.numpy(), right / right.max(), rtol=1e-5)


@pytest.mark.parametrize("which", [0, 1], ids=["ram", "device"])
def test_a_batch_is_stratified(which: int) -> None:
    """A slot with a share of k / B is sampled at least k - 1 and at most k + 2 times."""
    sampler = both(steady(), alpha=1.0, eps=0.0)[which]
    eligible = np.flatnonzero(parts(sampler))
    values = np.random.default_rng(1).random(len(eligible))
    set_all(sampler, eligible, values)
    for _ in range(20):
        counts = np.bincount(sampler.sample(128).index.numpy(), minlength=sampler.replay.size)[eligible]
        share = values / values.sum() * 128
        assert (counts >= np.floor(share) - 1).all()
        assert (counts <= np.ceil(share) + 1).all()


def test_ram_and_device_give_the_same_samples() -> None:
    filled = Filled(3, 9, 2)
    one, other = both(filled, n_step=3)
    for k in range(40):
        filled.anything()
        if filled.plain.eligible(3):
            here, there = one.sample(16), other.sample(16)
            assert here.index.tolist() == there.index.tolist(), k
            for x, y in zip(here.tensors(), there.tensors(), strict=True):
                torch.testing.assert_close(x, y)
            errors = here.reward.abs() * 3
            one.update(here.index, here.serial, errors)
            other.update(there.index, there.serial, errors)
            np.testing.assert_allclose(parts(one), parts(other), rtol=1e-6)
    assert one.n_draws > 20


@pytest.mark.parametrize("which", [0, 1], ids=["ram", "device"])
def test_zero_negative_and_non_finite_priorities_are_handled(which: int) -> None:
    sampler = both(steady(1, 10, 8), alpha=1.0, eps=0.0)[which]
    odd = np.array([0.0, 1e-300, -2.0, np.nan, np.inf, -np.inf, 5.0, 1.0])
    set_all(sampler, np.arange(8), odd)
    # No number and infinity count as the largest priority before; 0 and less than can be told are as small as can be.
    assert parts(sampler)[:8] == pytest.approx([1e-30, 1e-30, 2, 1, 1, 1, 5, 1])
    set_all(sampler, np.arange(8), np.full(8, np.nan))
    assert parts(sampler)[:8].tolist() == [5.0] * 8
    for value in (1e300, 0.0, 1e-300):
        set_all(sampler, np.arange(8), np.full(8, value))
        batch = sampler.sample(800)
        assert np.bincount(batch.index.numpy()).tolist() == [100] * 8
        assert batch.weight.tolist() == [1.0] * 800
    set_all(sampler, np.arange(8), np.array([1e300] + [0.0] * 7))
    batch = sampler.sample(64, beta=1.0)
    assert set(batch.index.tolist()) == {0}
    assert torch.isfinite(batch.weight).all()


@pytest.mark.parametrize("which", [0, 1], ids=["ram", "device"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_priorities_may_come_as_any_float(which: int, dtype: torch.dtype) -> None:
    sampler = both(steady(1, 10, 8), alpha=1.0, eps=0.0)[which]
    errors = torch.tensor([[2.0, 9.0], [0.5, 9.0]], dtype=dtype, requires_grad=True)[
        :, 0
    ]  # not even contiguous
    sampler.update(torch.tensor([2, 5]), torch.tensor([2, 5]), errors)
    assert parts(sampler)[[2, 5, 7]].tolist() == [2.0, 0.5, 1.0]


@pytest.mark.parametrize("which", [0, 1], ids=["ram", "device"])
def test_new_steps_get_the_largest_priority_once_they_are_eligible(which: int) -> None:
    filled = steady(1, 10, 4)
    sampler = both(filled, n_step=3, alpha=1.0, eps=0.0)[which]
    assert parts(sampler).tolist() == [1, 1] + [0] * 9  # the last two wait for their windows
    set_all(sampler, np.array([0, 1]), np.array([7.0, 0.5]))
    filled.step()
    assert parts(sampler).tolist() == [7, 0.5, 7] + [0] * 8
    filled.plain.p_terminated = 1.0
    filled.step()
    assert parts(sampler).tolist() == [7, 0.5, 7, 7, 7, 7] + [0] * 5
    assert filled.plain.head == [6]


@pytest.mark.parametrize("which", [0, 1], ids=["ram", "device"])
def test_slots_overwritten_meanwhile_are_not_updated(which: int) -> None:
    filled = steady(2, 4, 4)
    sampler = both(filled, alpha=1.0, eps=0.0)[which]
    old = sampler.sample(64)
    for _ in range(2):
        filled.step()  # a new step in an env's first slot, and the newest observation in the second
    before = parts(sampler)
    sampler.update(old.index, old.serial, torch.full((64,), 9.0))
    kept = sorted(set(old.index.tolist()) - {0, 1, 5, 6})
    assert parts(sampler)[[0, 1]].tolist() == before[[0, 1]].tolist() == [1.0, 0.0]
    assert parts(sampler)[kept].tolist() == [9.0] * len(kept)
    filled.step()
    assert parts(sampler)[1] == 9.0  # the new step there, as the largest so far
    sampler.update(torch.tensor([1, 1, 1]), torch.tensor([1, 6, 1]), torch.tensor([100.0, 3.0, 100.0]))
    assert parts(sampler)[1] == 3.0


@pytest.mark.parametrize("which", [0, 1], ids=["ram", "device"])
def test_the_last_of_several_updates_of_a_slot_counts(which: int) -> None:
    sampler = both(steady(), alpha=1.0, eps=0.0)[which]
    set_all(sampler, np.array([3, 1, 3, 1, 3]), np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert parts(sampler)[[1, 3]].tolist() == [4.0, 5.0]


@pytest.mark.parametrize("which", [0, 1], ids=["ram", "device"])
def test_a_restored_sampler_continues_identically(which: int) -> None:
    filled = Filled(2, 9, 4)
    sampler = both(filled, n_step=2)[which]
    filled.rollout(3)
    for _ in range(30):
        filled.anything()
        batch = sampler.sample(8)
        sampler.update(batch.index, batch.serial, batch.reward)
    saved = {name: array.copy() for name, array in sampler.arrays().items()}
    for again in both(filled, n_step=2):  # also from one kind into the other
        again.restore(saved)
        np.testing.assert_array_equal(parts(again), parts(sampler))
        assert again.n_draws == 30
        assert again.sample(32).index.tolist() == both_next(sampler, saved)


def both_next(sampler: Sampler, saved: dict[str, Array]) -> list[int]:
    """The sampler's next batch, from the same state each time."""
    sampler.restore(saved)
    return [int(i) for i in sampler.sample(32).index]


def test_the_same_seed_gives_the_same_samples_and_another_does_not() -> None:
    def drawn(seed: int) -> list[list[int]]:
        filled = steady()
        sampler = Prioritized(filled.replay, gamma=0.9, seed=seed)
        return [sampler.sample(5).index.tolist() for _ in range(3)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1)[0] != drawn(1)[1]
