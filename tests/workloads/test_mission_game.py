"""The rules of Mission, one by one, on maps small enough to know the outcome."""

from __future__ import annotations

import numpy as np
import pytest

from flatout.workloads.mission.game import BREACHER, CARRIER, N_ACTIONS, SCOUT, Game
from flatout.workloads.mission.grid import (
    DIRECTIONS,
    FAR,
    Cell,
    Walls,
    breaches,
    distances,
    prices,
    shortest_path,
    visible,
)
from tests.workloads.missions import game, play

YARD = ("#########", "#S......#", "#B......#", "#C.....O#", "#########")


def random_walls(seed: int, size: int = 9, share: float = 0.3) -> Walls:
    walls = np.random.default_rng(seed).random((size, size)) < share
    walls[[0, -1], :] = walls[:, [0, -1]] = True
    return walls


def cells(view: Walls) -> set[Cell]:
    return {(row, column) for row, column in np.argwhere(view).tolist()}


def sees(walls: Walls, a: Cell, b: Cell, radius: int = 4) -> bool:
    """By the book: walk along the line; where it passes between two cells, one of the two sides has to be free."""
    down, right = b[0] - a[0], b[1] - a[1]
    if down**2 + right**2 > (radius + 0.5) ** 2:
        return False
    n = max(abs(down), abs(right))
    sides = [True, True]
    for i in range(1, n):
        for side, nudge in enumerate((-1e-6, 1e-6)):
            cell = tuple(round(x + d * i / n + nudge) for x, d in ((a[0], down), (a[1], right)))
            sides[side] = sides[side] and not walls[cell]
    return any(sides)


@pytest.mark.parametrize("seed", range(6))
def test_sight_follows_straight_lines_and_is_symmetric(seed: int) -> None:
    walls = random_walls(seed)
    floor = [(int(r), int(c)) for r, c in np.argwhere(~walls)]
    seen = {cell: cells(visible(walls, cell, 4)) for cell in floor}
    assert all((b in seen[a]) == sees(walls, a, b) for a in floor for b in floor)
    assert all((b in seen[a]) == (a in seen[b]) for a in floor for b in floor)
    assert any(b not in seen[a] for a in floor for b in floor)


def test_a_wall_is_seen_and_hides_what_lies_behind() -> None:
    walls = np.zeros((5, 9), bool)
    walls[2, 4] = True
    seen = cells(visible(walls, (2, 1), 6))
    assert (2, 4) in seen
    assert not {(2, 5), (2, 6), (2, 7)} & seen
    assert {(1, 5), (3, 5), (2, 3)} <= seen


def test_a_patrol_sees_the_quadrant_ahead() -> None:
    walls = np.zeros((9, 9), bool)
    east = cells(visible(walls, (4, 4), 2, facing=1))
    assert east == {(4, 4), (3, 5), (4, 5), (5, 5), (3, 6), (4, 6), (5, 6)}


def test_distances_equal_those_of_a_plain_search() -> None:
    for seed in range(3):
        walls = random_walls(seed)
        goal = (4, 4)
        price = prices(walls, 6)
        found = np.full(walls.shape, FAR)
        found[goal] = 0
        for _ in range(30):  # Bellman-Ford
            for r, c in np.ndindex(*walls.shape):
                for down, right in DIRECTIONS:
                    to = (r + down, c + right)
                    if 0 < r < 8 and 0 < c < 8 and price[to] < FAR:
                        found[r, c] = min(found[r, c], found[to] + price[to])
        assert np.array_equal(distances(price, goal)[1:-1, 1:-1], found[1:-1, 1:-1])


def test_a_shortest_path_stays_on_the_floor() -> None:
    mission = game("#######", "#S#O..#", "#B#.#.#", "#C..#.#", "#######")
    way = shortest_path(mission.walls, (1, 1), (1, 5))
    assert way == [(1, 1), (2, 1), (3, 1), (3, 2), (3, 3), (2, 3), (1, 3), (1, 4), (1, 5)]
    assert shortest_path(mission.walls | (np.arange(7) == 2), (1, 1), (1, 5)) == []
    assert breaches(mission.walls | (np.arange(7) == 2), (1, 5), (1, 1)) == 1


def test_the_scout_moves_two_cells_the_others_one_and_the_carrier_rests() -> None:
    mission = game(*YARD)
    play(mission, scout="e", breacher="E", carrier="E")
    assert mission.units == [(1, 3), (2, 2), (3, 2)]
    play(mission, scout="E", breacher="E", carrier="E")
    assert mission.units == [(1, 4), (2, 3), (3, 2)]
    play(mission, carrier="E")
    assert mission.units[CARRIER] == (3, 3)


def test_walls_stop_everyone_and_the_mask_says_so() -> None:
    mission = game("#####", "#S#.#", "#B.O#", "#C..#", "#####")
    parts = np.split(mission.allowed, np.cumsum(N_ACTIONS)[:-1])
    assert parts[SCOUT].tolist() == [1, 0, 0, 1, 0, 0, 0, 1, 0]
    assert parts[BREACHER].tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert parts[CARRIER].tolist() == [1, 1, 1, 0, 0]
    play(mission, scout="Ee", breacher="Ww", carrier="SW")
    assert mission.units == [(1, 1), (2, 1), (3, 1)]


def test_the_breacher_breaks_inner_walls_while_it_has_charges() -> None:
    mission = game("#######", "#S#.#.#", "#B#.#.#", "#C...O#", "#######", charges=1)
    (event,) = play(mission, breacher="e")
    assert event.breached == (2, 2)
    assert not mission.walls[2, 2]
    assert mission.charges == 0
    play(mission, breacher="EEe")
    assert mission.units[BREACHER] == (2, 3)
    assert mission.walls[2, 4]


def test_the_outer_ring_cannot_be_broken() -> None:
    mission = game(*YARD, charges=5)
    play(mission, breacher="w")
    assert mission.walls[2, 0]
    assert mission.charges == 5


def walk_to(mission: Game, column: int) -> None:
    while mission.units[CARRIER][1] < column:
        play(mission, carrier="E.")


def test_only_the_carrier_can_hold_the_objective_in_consecutive_steps() -> None:
    mission = game(*YARD, hold=3, charges=0)
    play(mission, scout="eeeSS", breacher="EEEEEES")
    assert mission.units[:2] == [(3, 7), (3, 7)]
    assert mission.held == 0
    walk_to(mission, 7)
    assert (mission.held, mission.outcome) == (2, None)
    play(mission, carrier="W.")
    assert (mission.held, mission.outcome) == (0, None)
    play(mission, carrier="E")
    assert mission.held == 1
    play(mission, carrier="..")
    assert (mission.held, mission.outcome) == (3, "success")


def test_a_patrol_walks_back_and_forth_at_half_speed() -> None:
    mission = game(*YARD, patrols=[{"route": [[1, 5], [1, 7]]}], patrol_sight=1)
    at = [mission.patrols[0].at[1]]
    for _ in range(9):
        play(mission, scout=".")
        at.append(mission.patrols[0].at[1])
    assert at == [5, 5, 6, 6, 7, 7, 6, 6, 5, 5]
    assert mission.patrols[0].facing == 3


def test_a_patrol_chases_a_unit_that_it_sees_and_captures_it_when_next_to_it() -> None:
    mission = game(*YARD, patrols=[{"route": [[1, 6]], "facing": "W"}], patrol_sight=4)
    events = play(mission, scout="E")
    assert events[0].noticed == (0,)
    assert mission.patrols[0].mode == "chase"
    assert mission.patrols[0].at == (1, 6)
    events = play(mission, scout="...")
    assert [event.captured for event in events] == [(), (), (SCOUT,)]
    assert mission.patrols[0].at == (1, 3)
    assert mission.free == [False, True, True]
    assert mission.outcome is None


def test_a_patient_patrol_chases_only_after_consecutive_sightings() -> None:
    post = [{"route": [[1, 6]], "facing": "W"}]
    mission = game(*YARD, patrols=post, patrol_sight=4, patience=3)
    patrol = mission.patrols[0]
    play(mission, scout="EE")
    assert patrol.alarm == pytest.approx(2 / 3)
    play(mission, scout="w")
    assert (patrol.alarm, patrol.mode) == (0.0, "route")
    events = play(mission, scout="E..")
    assert [event.noticed for event in events] == [(), (), (0,)]
    assert (patrol.alarm, patrol.mode) == (1.0, "chase")


def test_an_unaware_patrol_captures_only_units_in_its_cell() -> None:
    mission = game(*YARD, patrols=[{"route": [[1, 5], [1, 2]]}], patrol_sight=1, patience=9)
    mission.units[:2] = (1, 3), (2, 4)
    captured = [event.captured for event in play(mission, scout="......")]
    assert captured == [(), (), (), (SCOUT,), (), ()]


def test_units_behind_a_patrol_or_a_wall_are_not_seen() -> None:
    behind = game(*YARD, patrols=[{"route": [[1, 4]], "facing": "E"}])
    assert play(behind, scout="E..")[-1].noticed == ()
    rows = ("#########", "#S.#....#", "#B.#....#", "#C.....O#", "#########")
    hidden = game(*rows, patrols=[{"route": [[1, 5]], "facing": "W"}])
    assert all(event.noticed == () for event in play(hidden, scout="..."))


def test_a_patrol_that_lost_a_unit_goes_where_it_saw_it_and_returns() -> None:
    rows = ("##########", "#..S.....#", "#.########", "#B.C....O#", "##########")
    mission = game(*rows, patrols=[{"route": [[1, 8]], "facing": "W"}], patrol_sight=3)
    patrol, columns, modes = mission.patrols[0], [], []
    for move in "eww.....":
        play(mission, scout=move)
        columns.append(patrol.at[1])
        modes.append(patrol.mode)
    assert columns == [8, 7, 6, 5, 6, 7, 7, 8]
    assert modes == ["chase"] * 4 + ["return"] * 3 + ["route"]
    assert patrol.facing == 3
    assert mission.free == [True, True, True]


def test_the_mission_fails_without_the_carrier_or_without_a_path() -> None:
    caught = game(*YARD, patrols=[{"route": [[3, 3]], "facing": "W"}])
    events = play(caught, carrier="..")
    assert [event.captured for event in events] == [(), (CARRIER,)]
    assert caught.outcome == "captured"

    sealed = ("#######", "#S..#.#", "#B..#O#", "#C..#.#", "#######")
    wasted = game(*sealed[:1], "#S.##.#", *sealed[2:], charges=1)
    play(wasted, breacher="NEe")
    assert wasted.walls[1, 4]
    assert wasted.outcome == "unreachable"
    lost = game(*sealed, charges=1, patrols=[{"route": [[2, 3]], "facing": "W"}], patrol_sight=2)
    play(lost, breacher="E.")
    assert not lost.free[BREACHER]
    assert lost.outcome == "unreachable"


def test_the_squad_knows_the_cells_it_has_seen_and_remembers_patrols() -> None:
    rows = ("#############", "#S..........#", "#B####.######", "#C.........O#", "#############")
    mission = game(*rows, known_map=False, patrols=[{"route": [[1, 8]], "facing": "E"}])
    assert not mission.known[1, 10]
    assert mission.known[1, 7]
    assert mission.sightings == {}
    play(mission, scout="E")
    assert mission.sightings[0].at == (1, 8)
    play(mission, scout="W..")
    assert mission.sightings[0].age == 3
    assert mission.known[1, 8]
