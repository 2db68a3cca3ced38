"""Scenario files: an error is one line that names the file and the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import FlatoutError
from flatout.workloads.mission import Mission
from flatout.workloads.mission.scenario import KEYS, load_scenario, parse, solvable

MAP = ["#######", "#S...O#", "#B.#..#", "#C.#..#", "#######"]
GOOD: dict[str, Any] = {
    "name": "yard",
    "map": MAP,
    "patrols": [{"route": [[1, 4], [3, 4]]}, {"route": [[3, 5]], "facing": "N"}],
    "time_limit": 50,
    "hold": 2,
    "charges": 0,
    "patrol_sight": 2,
    "known_map": False,
}


def write(folder: Path, data: Any) -> Path:
    file = folder / "yard.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return file


def edited(row: int, text: str) -> dict[str, Any]:
    return {"map": [*MAP[:row], text, *MAP[row + 1 :]]}


def test_a_scenario_is_read_as_written(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, GOOD))
    assert scenario.units == ((1, 1), (2, 1), (3, 1))
    assert scenario.objective == (1, 5)
    assert [route.cells for route in scenario.routes] == [((1, 4), (2, 4), (3, 4)), ((3, 5),)]
    assert scenario.routes[1].facing == 0
    assert (scenario.time_limit, scenario.hold, scenario.charges, scenario.patrol_sight) == (50, 2, 0, 2)
    assert not scenario.known_map
    assert ["".join("#" if wall else "." for wall in row) for row in scenario.walls] == [
        "".join("#" if mark == "#" else "." for mark in row) for row in MAP
    ]


def test_the_example_in_the_docs_can_be_played() -> None:
    page = (Path(__file__).parents[2] / "docs" / "mission.md").read_text()
    example = json.loads(page.split("```json")[1].split("```")[0])
    assert set(example) == set(KEYS)
    assert solvable(parse(example))


def test_the_env_plays_the_file_whatever_the_seed(tmp_path: Path) -> None:
    env = Mission(scenario=write(tmp_path, GOOD))
    for seed in (1, 2):
        env.reset(seed=seed)
        assert env.game.units == [(1, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ('{"map": [', "not JSON, line 1 column 10"),
        ([1], "it must be an object with name, map, patrols, …, not [1]"),
        ({"patrols": []}, "key 'map' is missing"),
        ({**GOOD, "patrol": []}, "a scenario takes no 'patrol'; did you mean 'patrols'"),
        ({"map": "###"}, 'map is "###"; it must be a list of strings'),
        ({"map": MAP[:3]}, "map has 3 rows of 7 columns; it must have 5 to 64 of each"),
        (edited(2, "#B.#..."), "map row 2 column 6 is '.'; the outer ring must be walls"),
        (edited(2, "#B.#.#"), "map row 2 has 6 columns; row 0 has 7"),
        (edited(2, "#B.x..#"), "map row 2 column 3 is 'x'; use #"),
        (edited(2, "#..#..#"), "map has no 'B', the breacher"),
        (edited(2, "#BS#..#"), "map row 2 column 2 is a second 'S'; the first is in row 1 column 1"),
        (
            {**edited(1, "#S.#.O#"), "charges": 0},
            "map: between C in row 3 column 1 and O in row 1 column 5 at least 1 walls must be broken; charges is 0",
        ),
        ({**GOOD, "hold": 0}, "hold is 0; it must be a whole number from 1 to 1,000"),
        ({**GOOD, "time_limit": "long"}, "time_limit is 'long'; it must be a whole number from 1 to 10,000"),
        ({**GOOD, "charges": True}, "charges is True; it must be a whole number"),
        ({**GOOD, "known_map": 1}, "known_map is 1; it must be true or false"),
        ({**GOOD, "name": 1}, "name is 1; it must be a string"),
        ({**GOOD, "patrols": {}}, "patrols is {}; it must be a list"),
        ({**GOOD, "patrols": [{"route": [[1, 4]]}, 3]}, "patrols[1] is 3;"),
        ({**GOOD, "patrols": [{"route": []}]}, "patrols[0].route is []"),
        ({**GOOD, "patrols": [{"route": [[1, 4], [2, 3]]}]}, "patrols[0].route[1] is [2, 3], a wall"),
        (
            {**GOOD, "patrols": [{"route": [[1, 9]]}]},
            "patrols[0].route[0] is [1, 9]; the map has rows 0 to 4, columns 0 to 6",
        ),
        (
            {**GOOD, "patrols": [{"route": [[1, 2.5]]}]},
            "patrols[0].route[0] is [1, 2.5]; it must be [row, column]",
        ),
        (
            {**edited(1, "#S.#.O#"), "patrols": [{"route": [[1, 2], [1, 4]]}]},
            "patrols[0].route[1]: no path from row 1 column 2 to row 1 column 4",
        ),
        (
            {**GOOD, "patrols": [{"route": [[1, 4]], "facing": "up"}]},
            'patrols[0].facing is "up"; it must be N, E, S or W',
        ),
    ],
)
def test_a_bad_scenario_is_refused_in_one_line(tmp_path: Path, data: Any, says: str) -> None:
    file = write(tmp_path, data)
    with pytest.raises(FlatoutError) as caught:
        Mission(scenario=file)
    line = str(caught.value)
    assert line.startswith(f"scenario {file}: ")
    assert says in line
    assert "\n" not in line


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FlatoutError, match=r"no\.json: No such file"):
        Mission(scenario=tmp_path / "no.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(FlatoutError, match=r"bytes\.json: not text, byte 0"):
        Mission(scenario=tmp_path / "bytes.json")


def test_level_and_render_mode_are_checked() -> None:
    with pytest.raises(FlatoutError, match="level is 4; it must be one of 1, 2, 3"):
        Mission(level=4)
    with pytest.raises(FlatoutError, match="render_mode is 'human'"):
        Mission(render_mode="human")
