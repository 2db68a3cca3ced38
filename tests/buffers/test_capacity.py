"""Buffer sizes as users write them, and the error if memory is too small."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flatout.buffers.capacity import fitting_capacity, parse_capacity, transition_bytes
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.errors import FlatoutError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "capacity"),
    [
        (100_000, 100_000),
        ("100_000", 100_000),
        ("100,000", 100_000),
        ("1e6", 1_000_000),
        ("50k", 50_000),
        ("1.5M", 1_500_000),
        ("200MB", 2_000_000),
        ("50 GB", 500_000_000),
        ("1gib", 2**30 // 100),
        ("2Kb", 20),
    ],
)
def test_buffer_sizes_are_parsed(text: str | int, capacity: int) -> None:
    assert parse_capacity(text, 100) == capacity


@pytest.mark.parametrize("text", ["", "many", "-5", "5XB", "GB", "1.2.3", "5Gi", "nan"])
def test_an_invalid_buffer_size_is_refused(text: str) -> None:
    with pytest.raises(FlatoutError, match=r"is neither a number of transitions .* nor of bytes"):
        parse_capacity(text, 100)


@pytest.mark.parametrize("text", ["0", "99B"])
def test_a_size_that_holds_nothing_is_refused(text: str) -> None:
    with pytest.raises(FlatoutError, match="holds no transition"):
        parse_capacity(text, 100)


def test_a_buffer_that_does_not_fit_is_refused_with_one_that_does() -> None:
    assert fitting_capacity("900", 1000, CPU, free_bytes=1_000_000) == 900
    with pytest.raises(FlatoutError, match="use at most 900 transitions") as error:
        fitting_capacity("50GB", 1000, CPU, free_bytes=1_000_000)
    assert "50,000,000 transitions of 1,000 bytes, 50.0 GB; 1.0 MB are free in memory" in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(FlatoutError, match="use at most"):
        fitting_capacity("900TB", 1000, CPU)


def test_a_transition_stores_one_observation() -> None:
    image = ObsLayout(spaces.Box(0, 255, (84, 84, 4), np.uint8))
    discrete = ActionLayout(spaces.Discrete(6))
    assert transition_bytes(image, discrete) == 84 * 84 * 4 + 1 + 5
    assert transition_bytes(image, discrete, prioritized=True) == 84 * 84 * 4 + 1 + 10
    assert transition_bytes(image, ActionLayout(spaces.Discrete(300))) == 84 * 84 * 4 + 8 + 5
    assert transition_bytes(ObsLayout(spaces.Box(-1, 1, (3,))), ActionLayout(spaces.Box(-1, 1, (2,)))) == 25
