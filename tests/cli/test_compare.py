"""`flatout compare`: groups of seeds, their statistics, and files that open anywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from flatout.cli.main import run
from flatout.views.compare import bootstrap_interval, interquartile_mean
from tests.runlog.lane_examples import CONFIG, SUMMARY

EVIL = "<script>alert(1)</script>"


def write_run(path: Path, final: float, seconds: float = 10.0, overlap: str = "off", **settings: Any) -> None:
    """A run whose return rises from 0 to `final` in a straight line."""
    path.mkdir(parents=True)
    config = CONFIG | {"overlap": overlap} | settings
    (path / "config.json").write_text(json.dumps(config))
    (path / "summary.json").write_text(json.dumps({**SUMMARY, "env": config["env"], "return_mean": final}))
    rows = (f"{500 * i},{seconds * i / 100},{final * i / 100}\n" for i in range(1, 101))
    head = "time/total_timesteps,time/time_elapsed,rollout/ep_rew_mean\n"
    (path / "metrics.csv").write_text(head + "".join(rows))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five seeds of PPO in one folder, two of it with a smaller batch in another, and a run of another env."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    for seed, final in enumerate((100.0, 110.0, 120.0, 130.0, 500.0)):
        # `train --seeds` tells all runs but the first whether to overlap.
        write_run(folder / f"wide/seed-{seed}", final, overlap="off" if seed else "auto", seed=seed)
    for seed in range(2):
        write_run(folder / f"narrow/seed-{seed}", 40.0 + seed, 20.0, seed=seed, ppo={"batch_size": 64})
    write_run(folder / "other", 7.0, env=EVIL)
    return folder


def test_the_interquartile_mean_leaves_the_outer_quarters_out() -> None:
    assert interquartile_mean(np.array([500.0, 100.0, 110.0, 120.0, 130.0])) == 120.0
    assert interquartile_mean(np.array([1.0, 2.0, 6.0])) == 3.0
    values = np.random.default_rng(1).normal(10, 1, 40)
    low, high = bootstrap_interval(values)
    # The standard error of a mean of 40 is 0.16, and the interval spans about four of it.
    assert 9.3 < low < float(interquartile_mean(values)) < high < 10.7
    assert 0.4 < high - low < 1.0
    assert bootstrap_interval(values[::-1].copy()) == (low, high)


def test_seeds_are_grouped_and_compared_in_a_table(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", "wide", "narrow/seed-0", "narrow/seed-1", "--target-return", "100"]
    assert run(argv) == 0
    env, head, _, wide, narrow, *rest = capsys.readouterr().out.splitlines()
    assert env == "CartPole-v1"
    assert re.split(r"  +", head.strip())[:5] == ["runs", "seeds", "IQM return", "95 % interval", "mean"]
    assert wide.split()[:3] == ["wide", "5", "120.0"]
    assert "192.0 ± 172.5" in wide
    assert "batch_size 256" in wide
    assert " 8.4 s " in wide  # of the median run, which ends at 120
    assert narrow.split()[:3] == ["narrow", "2", "40.5"]
    assert "not reached" in narrow
    assert rest[0].startswith("wide is ahead: return 120.0 against 40.5 of narrow")
    assert "fewer than 5 seeds" in rest[1]
    assert run(["compare", "wide", "narrow", "--steps", "25000", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [it["iqm"] for it in figures] == pytest.approx([60.0, 20.25])
    assert len(figures[0]["runs"]) == 5


def test_files_are_complete_and_escape_what_they_show(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "runs", "--out", "curves.svg"]) == 0
    assert "2 envs, shown apart" in capsys.readouterr().out.splitlines()[0]
    assert run(["compare", "runs", "--out", "page.html"]) == 0
    svg, page = Path("curves.svg").read_text(), Path("page.html").read_text()
    texts = [
        "".join(it.itertext()) for it in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"CartPole-v1", EVIL, "env steps", "wall time"} <= set(texts)
    assert any(text.startswith("wide, 5 seeds") for text in texts)
    # Two charts of each group: means of three groups, spread of the two that have seeds.
    assert svg.count('class="mean') == 6
    assert svg.count('class="band') == 4
    assert page.count("<svg") == 4, "a chart is a picture of its own, to stand below the other on a phone"
    for text in (svg, page):
        assert EVIL not in text
        assert "prefers-color-scheme: dark" in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "wide is ahead: return 120.0 against 40.5 of narrow" in page


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["wide", "--out", "curves.pdf"], "--out curves.pdf: name a .svg or .html file"),
        (["wid"], "no run 'wid' in runs/"),
        (["empty"], "there are no runs in empty/"),
        ([], "the following arguments are required: RUN"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], words: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    assert run(["compare", *argv]) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert shown.count("\n") == 1
