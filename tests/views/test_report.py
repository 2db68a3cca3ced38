from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import FlatoutError
from flatout.runlog.records import read_run
from flatout.views.report import report_page, write_report
from tests.runlog.lane_examples import CONFIG, chain, metrics, write_killed_run, write_lines, write_run
from tests.views.test_text import FINDING


class Page(HTMLParser):
    """What a browser would find: the texts by id, the data, and what would be loaded from elsewhere."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.text = ""
        self._in_script = False
        self._in_data = False
        self._data = ""
        self.feed(html)
        self.data: dict[str, Any] = json.loads(self._data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_script = tag in ("script", "style")
        self._in_data = dict(attrs).get("id") == "data"
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self._data += data
        elif not self._in_script:
            self.text += data


def test_the_page_holds_verdict_findings_figures_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path / "a", gpu=True), [FINDING])
    assert path == tmp_path / "a" / "report.html"
    html = path.read_text()
    page = Page(html)
    assert page.loaded == ["data:,"]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    for text in (
        "Finished: 50,000 env steps in 10.0 s, 5,000 steps/s, return 486.2 ± 12.0. The learner was busy 40 %",
        FINDING.what,
        FINDING.evidence,
        "--overlap on",
        "predicted: 1.6 × the speed, 8,200 steps/s, learner busy 80 %",
        "waiting for envs",
        "staging data",
        "ppo.learning_rate",
        "AMD EPYC",
        "any kernel ran; not how full",
    ):
        assert text in page.text, text
    assert "What is missing" not in page.text
    assert [lane["name"] for lane in page.data["gantt"]["lanes"]][:3] == ["learner", "device", "collector 0"]
    assert page.data["curve"]["return"][-1] == pytest.approx(485, abs=2)
    assert page.data["time"]["rate"][70] == pytest.approx(5000, rel=0.02)
    assert page.data["time"]["gpu"][20] == pytest.approx(0.58, abs=0.04)
    watts = [value for value in page.data["time"]["power"] if value is not None]
    assert len(watts) > 100
    assert 30 < min(watts) <= max(watts) < 300
    assert Page(report_page(read_run(write_run(tmp_path / "b")))).data["time"]["power"] == []


def test_names_given_by_users_cannot_break_the_page(tmp_path: Path) -> None:
    nasty = "</script><script>alert(1)</script>"
    folder = write_run(tmp_path / "a", config=CONFIG | {"env": nasty, "env_kwargs": {nasty: nasty}})
    write_lines(folder / "spans.jsonl", chain("learner", [(nasty, 1.0), ("update", 1.0)]))
    html = report_page(read_run(folder))
    assert "<script>alert" not in html
    assert Page(html).data["gantt"]["phases"] == ["update", nasty]


def test_a_long_run_still_makes_a_small_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "metrics.csv").write_text(metrics(30_000, seconds=3000.0))
    spans = []
    for lane in ("learner", *(f"collector {i}" for i in range(24))):
        work = [("wait", 0.01), ("update", 0.02)] if lane == "learner" else [("act", 0.01), ("env", 0.02)]
        spans += chain(lane, work * 500)
    write_lines(folder / "spans.jsonl", spans)
    html = report_page(read_run(folder))
    page = Page(html)
    assert len(html) < 300_000
    assert len(page.data["curve"]["steps"]) <= 1000
    assert page.data["curve"]["steps"][-1] == 50_000
    gantt = page.data["gantt"]
    assert (len(gantt["lanes"]), gantt["left_out"]) == (12, 13)
    n_spans = sum(len(detail["start"]) for lane in gantt["lanes"] for detail in lane["detail"])
    assert 3000 < n_spans <= 5000
    update = gantt["lanes"][0]["phases"].index(gantt["phases"].index("update"))
    bins = gantt["lanes"][0]["bins"][update]
    assert sum(bins) / len(bins) == pytest.approx(100 * 2 / 3, abs=1)


def test_a_killed_and_an_empty_run_say_what_is_missing(tmp_path: Path) -> None:
    killed = Page(report_page(read_run(write_killed_run(tmp_path / "a"))))
    assert "Killed: 31,000 env steps" in killed.text
    assert "spans.jsonl ends in an incomplete line" in killed.text
    empty = tmp_path / "b"
    empty.mkdir()
    (empty / "config.json").write_text(json.dumps(CONFIG))
    page = Page(report_page(read_run(empty)))
    for name in ("summary.json", "metrics.csv", "spans.jsonl", "samples.jsonl", "system.json"):
        assert f"{name} is missing" in page.text
    assert page.data["gantt"]["lanes"] == []
    assert "n_envs" in page.text


def test_lost_envs_are_shown_with_their_traceback(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "faults.log").write_text("2026-11-16 env 3 died\nTraceback <here>\n")
    text = Page(report_page(read_run(folder))).text
    assert "Envs were lost and rebuilt" in text
    assert "Traceback <here>" in text


def test_a_folder_without_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FlatoutError, match="is not a run"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
