"""Growing files are read line by line, each once; damaged ones as far as they go."""

from __future__ import annotations

from pathlib import Path

from flatout.runlog.files import Tail


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.read() == (False, [])
    path.write_bytes(b"one\ntw")
    assert tail.read() == (False, [b"one"])
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.read() == (False, [b"two", b"three"])
    assert tail.read() == (False, [])
    path.write_bytes(b"new\n")
    assert tail.read() == (True, [b"new"])
    (tmp_path / "other").write_bytes(b"new\nand longer\n")
    (tmp_path / "other").replace(path)
    assert tail.read() == (True, [b"new", b"and longer"])
    path.write_bytes(b"another beginning\nof greater length\n")
    assert tail.read()[0]
    path.unlink()
    assert tail.read() == (True, [])
    assert tail.read() == (False, [])
