"""Checkpoints survive kills, full disks and flipped bits; what is read is what was written.

Children are forked by a helper process of one thread that has torch imported, because forking the test's own
process with its threads can deadlock and importing torch a hundred times takes minutes.
"""

from __future__ import annotations

import fcntl
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from flatout.errors import FlatoutError
from flatout.training import checkpoint as checkpoint_module
from flatout.training.checkpoint import Checkpoint, CheckpointFolder, read, write
from flatout.training.durable import STAGING_SUFFIX, SavedArrays, write_arrays

N_KILLS = 100
REPOSITORY = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def content(env_steps: int) -> Checkpoint:
    """The expected checkpoint of `env_steps`: 0.2 to 3 MB, so that kills happen during writing."""
    n = 25_000 + env_steps * 7919 % 350_000
    weights = torch.arange(n) * (env_steps + 1)
    return Checkpoint({"weights": weights, "step": torch.tensor(env_steps)}, {"env_steps": env_steps, "n": n})


def assert_same(found: Checkpoint, expected: Checkpoint) -> None:
    assert found.state == expected.state
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].shape == tensor.shape
        assert raw_bytes(found.tensors[name]) == raw_bytes(tensor)  # torch.equal calls two NaN different.


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def refusal(action: Callable[[], object]) -> str:
    """The message of the one-line error that `action` must end with."""
    with pytest.raises(FlatoutError) as caught:
        action()
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def staging_folders(folder: Path) -> set[Path]:
    return {path for path in folder.iterdir() if path.name.endswith(STAGING_SUFFIX)}


def helper(call: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs `call`, a function of this module."""
    code = f"import sys; from {__name__} import {call}; {call}(*sys.argv[1:])"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def save_until_killed(folder: Path, report: int) -> None:
    """Save ever newer checkpoints; write `.` at the start and the env steps after each save."""
    checkpoints = CheckpointFolder(folder)
    env_steps = checkpoints.newest()[1].state["env_steps"]
    os.write(report, b".\n")
    while True:
        env_steps += 1
        checkpoints.save(content(env_steps), env_steps)
        os.write(report, b"%d\n" % env_steps)


def kill_on_demand(folder: str) -> None:
    """For each delay read from stdin: fork a saver, SIGKILL it that long after its start, print its last report."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        reports, report = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reports)  # Else a saver whose parent is gone would write into its own pipe for ever.
            try:
                save_until_killed(Path(folder), report)
            finally:
                os._exit(1)
        os.close(report)
        with os.fdopen(reports) as lines:
            lines.readline()
            time.sleep(float(line))
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            saved = lines.read().split()
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print(saved[-1] if saved else "0", "killed" if killed else "ended by itself", sep=",", flush=True)


def test_a_hundred_kills_while_saving_lose_nothing_that_was_reported(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(content(0), 0)
    delays = random.Random(7)
    last_reported, n_inside = 0, 0
    with helper("kill_on_demand", str(tmp_path)) as killer:
        assert killer.stdin is not None
        assert killer.stdout is not None
        for _ in range(N_KILLS):
            before = staging_folders(tmp_path)
            print(delays.uniform(0, 0.1), file=killer.stdin, flush=True)
            _, during, _ = checkpoints.newest()  # Reading while another process saves and deletes.
            assert_same(during, content(during.state["env_steps"]))
            reported, ending = killer.stdout.readline().strip().split(",")
            assert ending == "killed"
            last_reported = max(last_reported, int(reported))
            n_inside += bool(staging_folders(tmp_path) - before)

            path, newest, skipped = checkpoints.newest()
            assert newest.state["env_steps"] >= last_reported
            assert path.name == f"step-{newest.state['env_steps']:012d}.flatout"
            assert_same(newest, content(newest.state["env_steps"]))
            assert skipped == []
        killer.stdin.close()
    assert last_reported >= N_KILLS // 4, "the children hardly saved, so the kills prove little"
    assert n_inside >= N_KILLS // 10, "hardly any kill landed inside writing"

    final = last_reported + 10
    checkpoints.save(content(final), final)
    assert staging_folders(tmp_path) == set()
    assert len(list(tmp_path.iterdir())) == 2


def save_on_full_disk(folder: str) -> None:
    """Save step 2 where no file may grow past 100 kB, and print the error."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        CheckpointFolder(Path(folder)).save(content(2), 2)
    except FlatoutError as error:
        print(error)


def test_a_full_disk_is_an_error_of_one_line_and_loses_no_old_file(tmp_path: Path) -> None:
    old = CheckpointFolder(tmp_path).save(content(1), 1)
    with helper("save_on_full_disk", str(tmp_path)) as child:
        output, _ = child.communicate()
    assert output == f"cannot write checkpoint '{tmp_path}/step-000000000002.flatout': File too large\n"
    assert child.returncode == 0
    assert list(tmp_path.iterdir()) == [old]
    assert_same(read(old), content(1))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        data = bytes(byte % 2 for byte in data)
    tensor = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return tensor.reshape(shape)


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
floats = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(names, tensors(), max_size=4),
    st.dictionaries(st.text(max_size=8), json_values, max_size=4),
)
def test_what_is_read_is_what_was_written(tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
    checkpoint = Checkpoint(tensors, state)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "a.flatout"), checkpoint)
        assert_same(read(Path(folder, "a.flatout")), checkpoint)


def test_strided_and_shared_tensors_are_saved_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(torch.ones(2))
    views = {"base": base, "again": base, "t": base.T, "row": base[1], "column": base[:, 1], "p": parameter}
    write(tmp_path / "a.flatout", Checkpoint(views, {}))
    expected = {name: tensor.detach().clone().contiguous() for name, tensor in views.items()}
    assert_same(read(tmp_path / "a.flatout"), Checkpoint(expected, {}))


def test_loaded_tensors_do_not_share_memory_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.flatout"
    write(path, content(3))
    loaded = read(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert_same(loaded, content(3))
    loaded.tensors["weights"].add_(1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: 2}, [{(): 0}], torch.zeros(1), {1, 2}])
def test_state_that_json_would_change_is_an_assertion_error(tmp_path: Path, value: object) -> None:
    with pytest.raises(AssertionError, match="checkpoint state"):
        write(tmp_path / "a.flatout", Checkpoint({}, {"value": value}))
    assert list(tmp_path.iterdir()) == []


def test_any_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.flatout"
    weights = torch.arange(600, dtype=torch.float32)
    written = Checkpoint(
        {"weights": weights, "done": torch.tensor([True, False])}, {"lr": 1e-3, "names": ["a", "b"]}
    )
    write(path, written)
    intact = path.read_bytes()
    header = 8 + int.from_bytes(intact[:8], "little")
    draw = random.Random(3)
    positions = [*range(9), *draw.sample(range(9, header), 31), *draw.sample(range(header, len(intact)), 30)]
    n_noticed = 0
    for position in positions:
        damaged = bytearray(intact)
        damaged[position] ^= draw.randrange(1, 256)
        path.write_bytes(damaged)
        try:
            assert_same(read(path), written)  # Only the header's padding may change without harm.
        except FlatoutError:
            n_noticed += 1
    assert n_noticed >= len(positions) - 1
    path.write_bytes(intact)
    assert_same(read(path), written)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.flatout"
    write(path, Checkpoint({"weights": torch.arange(30)}, {"a": 1}))
    intact = path.read_bytes()
    for length in range(1, len(intact)):
        path.write_bytes(intact[:length])
        assert "is truncated or corrupt" in refusal(lambda: read(path))


def test_wrong_files_are_described_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "a.flatout"
    assert refusal(lambda: read(path)) == f"checkpoint '{path}' does not exist"
    assert "is a folder" in refusal(lambda: read(tmp_path))
    assert "not a regular file" in refusal(lambda: read(Path("/dev/zero")))
    assert "Not a directory" in refusal(lambda: read(Path(__file__) / "a.flatout"))
    path.touch()
    assert "is empty" in refusal(lambda: read(path))
    path.write_text("a text that is no checkpoint")
    assert "is not a flatout checkpoint" in refusal(lambda: read(path))
    torch.save({"a": torch.zeros(2)}, path)
    assert "torch.save" in refusal(lambda: read(path))
    torch.save({"a": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)
    assert "is a pickle" in refusal(lambda: read(path))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", "{}")
        archive.writestr("policy.pth", b"")
    assert "Stable-Baselines3" in refusal(lambda: read(path))


def test_foreign_and_newer_safetensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.flatout"
    for metadata in ({}, {"format": "pt"}):
        save_file({"a": torch.zeros(2)}, path, metadata)
        assert "not a checkpoint that flatout wrote" in refusal(lambda: read(path))
    save_file({"a": torch.zeros(2)}, path, {"format": "flatout-2"})
    assert "has format flatout-2" in refusal(lambda: read(path))
    assert "upgrade flatout" in refusal(lambda: read(path))
    save_file({"a": torch.zeros(2)}, path, {"format": "flatout-1", "state": "{}", "checksum": "0" * 64})
    expected = f"checkpoint '{path}' is corrupt: its checksum does not match; use an older checkpoint from '{tmp_path}'"
    assert refusal(lambda: read(path)) == expected


def test_unwritable_destinations_are_errors_of_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "folder").mkdir()
    assert refusal(lambda: write(file / "a.flatout", content(0))).startswith(
        f"cannot write checkpoint '{file}/a.fl"
    )
    assert "/proc/" in refusal(lambda: write(Path("/proc/flatout/a.flatout"), content(0)))
    assert "Is a directory" in refusal(lambda: write(tmp_path / "folder", content(0)))
    assert "File name too long" in refusal(lambda: write(tmp_path / ("a" * 300), content(0)))
    assert refusal(lambda: write(file / "two\nlines", content(0)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_interrupted_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.flatout"
    write(path, content(1))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(path, content(2))
    assert list(tmp_path.iterdir()) == [path]
    assert_same(read(path), content(1))


def test_folder_keeps_the_last_two_and_the_best(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "runs" / "checkpoints")
    for env_steps in (900, 1_000, 20_000, 1_000_000_000_000):
        checkpoints.save(content(env_steps), env_steps)
        checkpoints.save_best(content(env_steps // 2))
    names = sorted(path.name for path in checkpoints.path.iterdir())
    assert names == ["best.flatout", "step-000000020000.flatout", "step-1000000000000.flatout"]
    assert_same(read(checkpoints.path / "best.flatout"), content(500_000_000_000))
    path, newest, skipped = checkpoints.newest()
    assert (path.name, skipped) == ("step-1000000000000.flatout", [])
    assert_same(newest, content(1_000_000_000_000))


def test_saving_below_an_abandoned_step_makes_the_new_one_the_newest(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    for env_steps in (100, 200, 150):
        checkpoints.save(content(env_steps), env_steps)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000000000100.flatout",
        "step-000000000150.flatout",
    ]


def test_newest_skips_corrupt_files_and_says_so(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    assert "there is no checkpoint" in refusal(checkpoints.newest)
    old, new = (checkpoints.save(content(env_steps), env_steps) for env_steps in (1, 2))
    new.write_bytes(new.read_bytes()[:-1])
    path, checkpoint, skipped = checkpoints.newest()
    assert path == old
    assert_same(checkpoint, content(1))
    assert len(skipped) == 1
    assert f"'{new}' is truncated or corrupt" in skipped[0]
    old.write_bytes(b"")
    assert "can be loaded (2 tried)" in refusal(checkpoints.newest)
    file = CheckpointFolder(new)
    assert "Not a directory" in refusal(file.newest)


def test_newest_follows_a_run_that_deletes_what_is_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(content(1), 1)

    def read_late(path: Path) -> Checkpoint:
        monkeypatch.undo()
        for env_steps in (2, 3):
            checkpoints.save(content(env_steps), env_steps)
        return read(path)

    monkeypatch.setattr(checkpoint_module, "read", read_late)
    path, newest, skipped = checkpoints.newest()
    assert (path.name, skipped) == ("step-000000000003.flatout", [])
    assert_same(newest, content(3))


def test_files_get_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "a.flatout", content(0))
    finally:
        os.umask(before)
    assert (tmp_path / "a.flatout").stat().st_mode & 0o777 == 0o640


def test_writers_in_one_folder_do_not_sweep_each_other(tmp_path: Path) -> None:
    def write_often(writer: int) -> None:
        for i in range(40):
            write(tmp_path / f"{writer}.flatout", Checkpoint({"i": torch.tensor(i)}, {}))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write_often, range(4)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{writer}.flatout" for writer in range(4)]
    assert all(read(path).tensors["i"] == 39 for path in tmp_path.iterdir())


def test_a_writer_swept_before_it_has_its_lock_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock_late(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        write(tmp_path / "other.flatout", content(1))
        assert staging_folders(tmp_path) == set()
        fcntl.flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    write(tmp_path / "a.flatout", content(2))
    assert_same(read(tmp_path / "a.flatout"), content(2))
    assert_same(read(tmp_path / "other.flatout"), content(1))
    assert staging_folders(tmp_path) == set()


def test_saved_arrays_are_memory_maps(tmp_path: Path) -> None:
    ring = np.arange(60, dtype=np.float32).reshape(3, 10, 2)
    write_arrays(tmp_path / "x.replay", {"a.0": ring[:, :4], "b": np.array([7]), "c": np.zeros((0, 3))})
    saved = SavedArrays(tmp_path / "x.replay")
    assert isinstance(saved["a.0"], np.memmap)
    assert np.array_equal(saved["a.0"], ring[:, :4])
    assert saved["b"][0] == 7
    assert saved["c"].shape == (0, 3)
    (tmp_path / "x.replay").write_bytes(b"nothing")
    with pytest.raises(FlatoutError, match="is damaged, or is not a replay"):
        len(SavedArrays(tmp_path / "x.replay"))


def replay(n: int = 4) -> dict[str, np.ndarray[Any, Any]]:
    return {"obs.0": np.arange(1000 * n, dtype=np.float32), "env_steps": np.array([n])}


def checkpoint_with_replay(n: int = 4) -> Checkpoint:
    return Checkpoint({"w": torch.ones(3)}, {"n": n}, replay(n))


def test_checkpoints_whose_names_have_dots_keep_their_own_replays(tmp_path: Path) -> None:
    names = {"lr0.001": 1, "lr0.01": 2, "lr0.1.flatout": 3}
    for name, n in names.items():
        write(tmp_path / name, checkpoint_with_replay(n))
    for name, n in names.items():
        saved = read(tmp_path / name).replay
        assert isinstance(saved, SavedArrays)
        assert saved.problem() is None
        assert saved["env_steps"][0] == n


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "objects", "compressed", "of another"])
def test_a_replay_that_is_damaged_or_foreign_is_not_used(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "x.replay"
    write(tmp_path / "x.flatout", checkpoint_with_replay())
    content = bytearray(path.read_bytes())
    if damage == "objects":
        with path.open("wb") as file:
            np.savez(file, allow_pickle=True, **{"obs.0": np.array([{}, []], object)})
    elif damage == "compressed":
        with path.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **replay())
    elif damage == "of another":
        write_arrays(path, replay(7))
    else:
        content[5000] ^= 1
        n_bytes = {"cut": 9000, "empty": 0, "changed": len(content)}[damage]
        path.write_bytes(content[:n_bytes])
    checkpoint = read(tmp_path / "x.flatout")  # the rest can be used
    assert torch.equal(checkpoint.tensors["w"], torch.ones(3))
    assert isinstance(checkpoint.replay, SavedArrays)
    assert "belongs to another checkpoint" in str(checkpoint.replay.problem()) or "damaged" in str(
        checkpoint.replay.problem()
    )
    with pytest.raises(FlatoutError, match="delete it to save without it"):
        write(tmp_path / "y.flatout", checkpoint)
    assert not (tmp_path / "y.flatout").exists()
    if damage in ("objects", "compressed"):
        with pytest.raises(FlatoutError, match="is damaged"):
            SavedArrays(path)["obs.0"]


def test_a_checkpoint_that_cannot_be_written_leaves_no_replay_behind(tmp_path: Path) -> None:
    write(tmp_path / "x.flatout", checkpoint_with_replay(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))  # room for the replay only
    try:
        with pytest.raises(FlatoutError, match="File too large"):
            write(tmp_path / "x.flatout", Checkpoint({"w": torch.ones(10_000)}, {"n": 2}, replay(2)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x.flatout", "x.replay"]
    saved = read(tmp_path / "x.flatout").replay
    assert isinstance(saved, SavedArrays)
    assert saved.problem() is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_on_a_full_disk_the_older_checkpoint_makes_room_and_the_last_good_one_stays(small_disk: Path) -> None:
    folder = CheckpointFolder(small_disk / "checkpoints")

    def sized(kilobytes: int) -> Checkpoint:
        return Checkpoint({"w": torch.ones(256 * kilobytes)}, {})

    for steps in (1, 2, 3):  # 3 × 400 kB do not fit into 1 MB
        folder.save(sized(400), steps)
    assert [path.name[5:17].lstrip("0") for path in sorted(folder.path.iterdir())] == ["2", "3"]
    with pytest.raises(FlatoutError, match="No space left on device"):
        folder.save(sized(900), 4)
    path, _, _ = folder.newest()
    assert path.name == "step-000000000003.flatout"
    assert [path.name for path in folder.path.iterdir()] == ["step-000000000003.flatout"]
