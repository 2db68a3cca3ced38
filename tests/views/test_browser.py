"""The page in a real browser, opened from disk: it draws, zooms and logs no errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.common.print_page_options import PrintOptions
from selenium.webdriver.remote.webelement import WebElement

from flatout.views.report import write_report
from tests.runlog.lane_examples import CONFIG, write_killed_run, write_run
from tests.views.test_text import FINDING

FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-background-networking --window-size=1200,1600"


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.fail("chromium and chromedriver are needed: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def open_page(browser: webdriver.Chrome, path: Path) -> None:
    browser.get(path.resolve().as_uri())


def console(browser: webdriver.Chrome) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]  # type: ignore[no-untyped-call]


def show(browser: webdriver.Chrome, element: WebElement) -> None:
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)


def view(gantt: WebElement) -> tuple[float, float]:
    return float(gantt.get_attribute("data-from") or "nan"), float(gantt.get_attribute("data-to") or "nan")


def colors(browser: webdriver.Chrome) -> int:
    """How many colours the timeline shows."""
    script = """
        const canvas = document.querySelector('#gantt canvas');
        const pixels = canvas.getContext('2d').getImageData(100, 0, canvas.width - 100, canvas.height - 24).data;
        const seen = new Map();
        for (let i = 0; i < pixels.length; i += 4) {
          const key = pixels.slice(i, i + 4).join();
          seen.set(key, (seen.get(key) || 0) + 1);
        }
        return [...seen.values()].filter((n) => n > 500).length;
    """
    return int(browser.execute_script(script))


def test_a_finished_run_is_drawn_and_zoomed_without_errors(browser: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(browser, write_report(write_run(tmp_path / "a"), [FINDING]))
    assert browser.find_element(By.ID, "verdict").text.startswith("Finished: 50,000 env steps")
    assert browser.find_element(By.CSS_SELECTOR, "#findings code").text == "--overlap on"
    for chart in ("curve", "rate", "busy"):
        drawn = browser.find_element(By.CSS_SELECTOR, f"#{chart} svg path").get_attribute("d") or ""
        assert drawn.count("L") > 80
        assert "NaN" not in drawn
    assert colors(browser) >= 6
    assert not browser.find_element(By.ID, "power-part").is_displayed()
    open_page(browser, write_report(write_run(tmp_path / "b", gpu=True)))
    power = browser.find_element(By.CSS_SELECTOR, "#power svg path").get_attribute("d") or ""
    assert power.count("L") > 80
    assert len(browser.find_elements(By.CSS_SELECTOR, "#busy svg path")) == 3
    open_page(browser, tmp_path / "a" / "report.html")

    gantt = browser.find_element(By.ID, "gantt")
    assert view(gantt) == pytest.approx((0, 10))
    gantt.send_keys("+", Keys.ARROW_RIGHT)
    begin, end = view(gantt)
    assert end - begin == pytest.approx(6)
    assert begin == pytest.approx(3.2)
    gantt.send_keys("0")
    assert view(gantt) == pytest.approx((0, 10))
    show(browser, gantt)
    drag = ActionChains(browser).move_to_element(gantt).click_and_hold().move_by_offset(200, 0).release()
    drag.perform()
    begin, end = view(gantt)
    assert 1 < end - begin < 3
    browser.find_element(By.ID, "gantt-reset").click()
    assert view(gantt) == pytest.approx((0, 10))
    browser.execute_script(
        "const b = arguments[0].getBoundingClientRect(); arguments[0].dispatchEvent(new WheelEvent('wheel',"
        "{deltaY: -120, clientX: b.left + 300, clientY: b.top + 10, bubbles: true, cancelable: true}))",
        gantt,
    )
    assert view(gantt)[1] - view(gantt)[0] < 9
    assert console(browser) == []


def test_hovering_shows_phase_and_length(browser: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(browser, write_report(write_run(tmp_path / "a", gpu=True)))
    gantt = browser.find_element(By.ID, "gantt")
    tip = browser.find_element(By.ID, "tip")
    assert not tip.is_displayed()
    # 3 s: in the seventh iteration, a quarter into its 0.4 s.
    width, left = gantt.size["width"], 96
    x = round(left + (width - left) * 3.0 / 10.1)
    show(browser, gantt)
    to_the_learner = 15 - gantt.size["height"] // 2
    ActionChains(browser).move_to_element_with_offset(gantt, x - width // 2, to_the_learner).perform()
    assert "learner at 3" in tip.text
    assert "wait 200 ms" in tip.text
    curve = browser.find_element(By.ID, "curve")
    show(browser, curve)
    ActionChains(browser).move_to_element(curve).perform()
    assert "return, mean of the last 100 episodes: 2" in tip.text
    assert console(browser) == []


def test_the_curve_switches_to_wall_time(browser: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(browser, write_report(write_run(tmp_path / "a")))
    curve = browser.find_element(By.ID, "curve")
    assert "50 k" in curve.text
    browser.find_element(By.ID, "by-time").click()
    assert "10 s" in curve.text
    assert browser.find_element(By.ID, "by-time").get_attribute("aria-pressed") == "true"
    assert console(browser) == []


@pytest.mark.parametrize("width", [360, 800])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_pages_fit_and_dark_mode_changes_the_background(
    browser: webdriver.Chrome, tmp_path: Path, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        open_page(browser, write_report(write_run(tmp_path / "a", gpu=True), [FINDING]))
        script = (
            "return [document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor]"
        )
        needed, ground = browser.execute_script(script)
        assert needed <= width
        assert (max(int(part) for part in ground[4:-1].split(",")) > 128) == (scheme == "light")
        assert colors(browser) >= 4
        assert console(browser) == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_killed_and_empty_runs_open_too(browser: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(browser, write_report(write_killed_run(tmp_path / "a")))
    assert "ends in an incomplete line" in browser.find_element(By.ID, "missing").text
    assert browser.find_elements(By.CSS_SELECTOR, "#curve svg path")
    empty = tmp_path / "b"
    empty.mkdir()
    (empty / "config.json").write_text(json.dumps(CONFIG))
    open_page(browser, write_report(empty))
    assert "no return to show" in browser.find_element(By.ID, "curve").text
    assert "no timeline to show" in browser.find_element(By.ID, "gantt").text
    assert len(browser.print_page(PrintOptions())) > 1000
    assert console(browser) == []
