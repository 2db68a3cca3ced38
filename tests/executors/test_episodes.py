"""Episode statistics, the action log and the check for NaN, apart from any executor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from flatout.envs.spaces import ObsLayout
from flatout.errors import EnvError
from flatout.executors.base import Episode, alloc_step
from flatout.executors.episodes import (
    MAX_LOG,
    RESEED_STEPS,
    ActionLog,
    EpisodeStatistics,
    StepCheck,
    env_seed,
    merge_snapshots,
    part_of_snapshot,
)

IDS = np.array([4, 5, 6])
OBS = (np.zeros((3, 1), np.float32),)


def started_log(**options: Any) -> ActionLog:
    log = ActionLog(IDS, 7, **({"replayable": True} | options))
    assert [log.next_seed(i) for i in range(3)] == [env_seed(7, env_id, 0) for env_id in (4, 5, 6)]
    return log


def marked(log: ActionLog) -> dict[str, Any]:
    log.mark(OBS, EpisodeStatistics(IDS))
    return log.snapshot()


def test_an_episode_is_the_sum_of_its_rewards_and_the_next_starts_from_zero() -> None:
    statistics = EpisodeStatistics(IDS)
    for _ in range(3):
        statistics.add(np.array([1.0, 2.0, 3.0]))
    statistics.add_some(1, 0.5)
    assert statistics.end([1, 2]) == [Episode(5, 6.5, 4), Episode(6, 9.0, 3)]
    statistics.add(np.ones(3))
    assert statistics.end(np.arange(3)) == [Episode(4, 4.0, 4), Episode(5, 1.0, 1), Episode(6, 1.0, 1)]
    assert statistics.end([]) == []


def test_the_actions_since_an_envs_last_seed_are_in_the_snapshot() -> None:
    log = started_log()
    for t in range(5):
        log.add(np.arange(3) + 10 * t)
        if t == 2:
            assert log.next_seed(1) == env_seed(7, 5, 1)
    snapshot = marked(log)
    assert snapshot["ages"].tolist() == [5, 2, 5]
    assert snapshot["actions"][:, [0, 2]].tolist() == [[10 * t, 10 * t + 2] for t in range(5)]
    assert snapshot["actions"][3:, 1].tolist() == [31, 41]


def test_a_restored_log_replays_what_the_first_one_logged() -> None:
    first, second = started_log(), ActionLog(IDS, 7, replayable=True)
    for t in range(4):
        first.add(np.arange(3) + 10 * t)
    replays = second.restore(marked(first))
    for i, replay in enumerate(replays):
        assert replay is not None
        assert replay[0] == env_seed(7, 4 + i, 0)
        assert replay[1].tolist() == [i, 10 + i, 20 + i, 30 + i]
    second.add(np.array([0, 99, 0]))
    assert marked(second)["actions"][:, 1].tolist() == [1, 11, 21, 31, 99]


def test_an_env_is_seeded_again_at_the_first_end_after_enough_steps() -> None:
    log = started_log()
    for _ in range(RESEED_STEPS - 1):
        log.add(np.ones(3))
    assert not log.is_due(0)
    log.add(np.ones(3))
    assert log.is_due(0)
    assert log.next_seed(0) == env_seed(7, 4, 1)
    assert not log.is_due(0)
    assert log.is_due(1)
    assert marked(log)["ages"].tolist() == [0, RESEED_STEPS, RESEED_STEPS]
    assert marked(log)["seed_counts"].tolist() == [1, 0, 0]


def test_an_episode_that_is_too_long_is_not_replayed() -> None:
    log = started_log()
    for _ in range(MAX_LOG + 1):
        log.add(np.zeros(3, np.int64))
    log.next_seed(2)
    snapshot = marked(log)
    assert len(snapshot["actions"]) == 0
    replays = ActionLog(IDS, 7, replayable=True).restore(snapshot)
    assert [replay is None for replay in replays] == [True, True, False]


def test_snapshots_of_parts_are_one_snapshot_also_when_a_part_has_no_actions() -> None:
    fresh, old = ActionLog(IDS, 7, replayable=True), ActionLog(IDS + 3, 7, replayable=True)
    for i in range(3):
        fresh.next_seed(i)
        old.next_seed(i)
    old.add(np.full((3, 2), 0.5, np.float32))
    merged = merge_snapshots([marked(fresh), marked(old)])
    assert merged["actions"].shape == (1, 6, 2)
    assert merged["ages"].tolist() == [0, 0, 0, 1, 1, 1]
    part = part_of_snapshot(merged, 3, 6)
    assert (part["actions"] == 0.5).all()
    assert part["seed_counts"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["reward", "obs", "final_obs"])
def test_the_first_env_with_a_nan_is_named(where: str, bad: float) -> None:
    step = alloc_step(ObsLayout(spaces.Box(-1, 1, (2,))), 3)
    check = StepCheck(step, IDS)
    check.check_all(3, any_ended=True)
    check.check_some(np.arange(3), [3, 3, 3], np.arange(3))
    array = step.reward if where == "reward" else getattr(step, where)[0]
    array[1] = bad
    with pytest.raises(EnvError, match=r"env 5 gave a NaN .* at step 3"):
        check.check_all(3, any_ended=True)
    if where != "reward":
        with pytest.raises(EnvError, match="env 5 gave a NaN observation at step 9"):
            check.check_some(np.array([0, 1]), [8, 9, 7], np.array([1]))
        check.check_some(np.array([0, 2]), [8, 9, 7], np.array([2]))
