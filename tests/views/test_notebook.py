"""What a notebook shows: curves, HTML of results, and a run's progress in one output."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import flatout
from flatout.training.evaluation import Evaluation
from flatout.views.notebook import Curve, Plot, curve_svg, text_html
from tests.runlog.progress_examples import progress

SMALL: dict[str, Any] = {"n_envs": 4, "n_steps": 32, "batch_size": 64, "n_epochs": 2}
SVG = "{http://www.w3.org/2000/svg}"


def drawn(svg: str) -> list[tuple[float, float]]:
    """The points of the line."""
    (line,) = ET.fromstring(svg).iter(f"{SVG}path")
    pairs = [pair.split() for pair in line.attrib["d"].removeprefix("M").split("L")]
    return [(float(x), float(y)) for x, y in pairs]


def test_an_agent_draws_what_it_has_learned_in_this_process_and_after_loading(tmp_path: Path) -> None:
    agent = flatout.PPO("CartPole-v1", seed=1, runs_dir=tmp_path, run_name="<a>", eval_every=1000, **SMALL)
    assert "No episode has ended yet" in agent.plot().svg
    assert "<svg" not in agent._repr_html_()
    agent.learn(2000)
    svg = agent.plot().svg
    points = drawn(svg)
    assert points == sorted(points)
    assert len(list(ET.fromstring(svg).iter(f"{SVG}circle"))) == 2
    assert flatout.load(tmp_path / "<a>").plot().svg == svg
    agent.plot().save(tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text() == svg
    html = agent._repr_html_()
    assert "PPO on CartPole-v1" in html
    assert "2,048 env steps" in html
    assert svg in html
    report = agent.report()
    assert report.startswith("Finished: 2,048 env steps")
    assert "<th" in report._repr_html_()  # type: ignore[attr-defined]


def test_a_long_run_has_a_short_curve_up_to_its_end() -> None:
    curve = Curve()
    for steps in range(0, 5_000_000, 128):
        curve.write(progress(env_steps=steps, return_mean=steps / 1e6, metrics={}))
    assert 400 < len(curve.returns) <= 1001
    assert curve.returns[-1][0] > 4_980_000
    curve.cut(2_000_000)
    assert curve.returns[-1][0] <= 2_000_000
    assert drawn(curve_svg(curve, "a"))
    assert repr(Plot(curve, "a")).startswith("learning curve of a, return 0")


def test_texts_become_tables_and_paragraphs_without_markup_of_their_own() -> None:
    html = text_html(
        "Finished: <b>\n\nrun  CartPole & co\n     and more\nspeed  3\n\n1. slow\n   because\n   → faster"
    )
    assert html == (
        "<div><p>Finished: &lt;b&gt;</p><table>"
        '<tr><th style="text-align:left;white-space:nowrap">run</th><td style="text-align:left">CartPole &amp; co and more</td></tr>'
        '<tr><th style="text-align:left;white-space:nowrap">speed</th><td style="text-align:left">3</td></tr></table>'
        "<p>1. slow<br>because<br>→ faster</p></div>"
    )


def test_an_evaluation_is_a_table() -> None:
    html = Evaluation((1.0, 3.0), (10, 30), n_cut=1)._repr_html_()
    assert "2.00 ± 1.00, from 1.00 to 3.00" in html
    assert "2 episodes, 20.0 steps each" in html
    assert "1 at the step limit" in html
