from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.runlog.samples import Samples, read_samples

GPU: dict[str, Any] = {
    **{"utilization": 0.5, "memory": 100, "memory_total": 200, "power": 60.0, "energy": 12.0},
    **{"sm_clock": 1200, "temperature": 70, "n_processes": 2},
    "throttled": ["power cap"],
}


def header(offset: float = 0.0) -> dict[str, Any]:
    return {"began": 1_700_000_000.0, "offset": offset, "version": 1}


def sample(t: float, **fields: Any) -> dict[str, Any]:
    known = {"cores": [10.0, 90.0], "memory": 1000, "run_memory": 500, "run_cpu": 120.0, "n_processes": 3}
    return {"t": t, **known, "gpu": None, **fields}


def read(tmp_path: Path, *lines: dict[str, Any] | str, end: str = "\n") -> Samples:
    path = tmp_path / "samples.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + end)
    return read_samples(path)


def test_a_sound_file_comes_back_as_columns(tmp_path: Path) -> None:
    samples = read(tmp_path, header(), sample(0.2), sample(0.4, run_cpu=None))
    assert samples.problems == []
    assert samples.t.tolist() == [0.2, 0.4]
    assert samples.cores.tolist() == [[10, 90], [10, 90]]
    assert samples.run_cpu[0] == 120
    assert np.isnan(samples.run_cpu[1])
    assert samples.gpu == {}


def test_the_gpu_has_columns_of_its_own(tmp_path: Path) -> None:
    samples = read(
        tmp_path, header(), sample(0.2), sample(0.4, gpu=GPU), sample(0.6, gpu=GPU | {"power": None})
    )
    assert samples.gpu["utilization"].tolist()[1:] == [0.5, 0.5]
    assert np.isnan(samples.gpu["utilization"][0])
    assert np.isnan(samples.gpu["power"][2])


def test_a_resumed_run_has_one_time_and_one_energy(tmp_path: Path) -> None:
    first = [sample(1.0, gpu=GPU | {"energy": 10.0}), sample(2.0, gpu=GPU | {"energy": 20.0})]
    second = [sample(0.5, gpu=GPU | {"energy": 5.0}), sample(1.5, gpu=GPU | {"energy": 15.0})]
    samples = read(tmp_path, header(), *first, header(2.5), *second)
    assert samples.t.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert samples.gpu["energy"].tolist() == [10, 20, 25, 35]


def test_samples_between_checkpoint_and_kill_are_left_out(tmp_path: Path) -> None:
    lost = [sample(t, gpu=GPU | {"energy": 10 * t}) for t in (1.0, 2.0, 3.0)]
    samples = read(tmp_path, header(), *lost, header(1.5), sample(0.5, gpu=GPU | {"energy": 1.0}))
    assert samples.t.tolist() == [1.0, 2.0]
    assert samples.gpu["energy"].tolist() == [10, 11]


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_cut_last_line_is_left_out_and_reported(kept: int, tmp_path: Path) -> None:
    samples = read(tmp_path, header(), sample(0.2), json.dumps(sample(0.4))[:kept], end="")
    assert samples.t.tolist() == [0.2]
    assert samples.problems == ["samples.jsonl ends in an incomplete line, which is ignored"]


@pytest.mark.parametrize(
    "garbage",
    ["\x00\x00\x00", "[1, 2]", "{}", '{"t": "soon"}', '{"t": NaN}', "[" * 100_000, "9" * 10_000],
)
def test_garbage_between_lines_is_skipped(garbage: str, tmp_path: Path) -> None:
    samples = read(tmp_path, header(), sample(0.2), garbage, sample(0.4))
    assert samples.t.tolist() == [0.2, 0.4]
    words = ("unreadable line", "record without a valid sample")
    assert samples.problems in [[f"samples.jsonl has 1 {word}"] for word in words]


def test_fields_of_the_wrong_kind_are_unknown(tmp_path: Path) -> None:
    wrong = sample(0.2, cores="many", memory=True, run_memory="x", n_processes=10**400, gpu=7)
    samples = read(tmp_path, header(), wrong, sample(0.4, cores=[None, 5.0]))
    assert np.isnan(samples.cores).tolist() == [[True, True], [True, False]]
    for column in (samples.memory, samples.run_memory):
        assert np.isnan(column).tolist() == [True, False]
    assert samples.gpu == {}


def test_bytes_that_are_not_text_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(
        json.dumps(header()).encode() + b"\n\xff\xfe\x80\n" + json.dumps(sample(0.2)).encode() + b"\n"
    )
    samples = read_samples(path)
    assert samples.t.tolist() == [0.2]
    assert len(samples.problems) == 1


def test_without_a_header_times_are_as_written(tmp_path: Path) -> None:
    samples = read(tmp_path, sample(0.2))
    assert samples.t.tolist() == [0.2]
    assert samples.problems == ["samples.jsonl has no header; times are as written"]


def test_a_missing_file_gives_no_samples_and_a_problem(tmp_path: Path) -> None:
    samples = read_samples(tmp_path / "samples.jsonl")
    assert samples.t.size == 0
    assert samples.cores.shape == (0, 0)
    assert samples.problems == ["samples.jsonl is missing"]


def test_an_empty_file_gives_no_samples(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").touch()
    samples = read_samples(tmp_path / "samples.jsonl")
    assert samples.t.size == 0
    assert samples.problems == ["samples.jsonl is empty"]


def test_a_run_that_ended_before_its_first_sample_has_no_problem(tmp_path: Path) -> None:
    samples = read(tmp_path, header())
    assert samples.t.size == 0
    assert samples.problems == []


def test_samples_are_read_in_little_memory(tmp_path: Path) -> None:
    path, n_samples, n_cores = tmp_path / "samples.jsonl", 2000, 64
    line = json.dumps(sample(1.0, cores=[12.5 + core for core in range(n_cores)]))
    path.write_text("\n".join([json.dumps(header()), *[line] * n_samples]) + "\n")
    tracemalloc.start()
    try:
        samples = read_samples(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert samples.cores.shape == (n_samples, n_cores)
    assert peak < n_samples * 2 * (8 * n_cores + 500)  # 8 bytes a core, in rows and then in columns
