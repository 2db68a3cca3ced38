"""The README's pictures, from real runs: `make pictures`, three minutes.

`docs/images/train.svg`: a training in a terminal, two thirds through. `snake.gif`: what `make train` has learned.
`dashboard.png`: the dashboard with the curves of three seeds, in Chromium.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from time import sleep

from rich.console import Console
from rich.text import Text
from selenium import webdriver
from selenium.webdriver.common.by import By

IMAGES = Path(__file__).parents[1] / "docs" / "images"
FLATOUT = [sys.executable, "-m", "flatout"]
COLUMNS, ROWS = 100, 30
REDRAWN = re.compile(r"\r(?:\x1b\[2K(?:\x1b\[1A)?)+")
"""What a live display writes before it draws itself again."""
FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-background-networking --window-size=1400,900 --hide-scrollbars"


def in_a_terminal(words: list[str], folder: Path) -> str:
    """Everything that a command writes to a terminal."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(words[0], words, os.environ | {"TERM": "xterm-256color"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    written = b""
    try:
        while some := os.read(terminal, 65536):
            written += some
    except OSError:  # it has ended
        pass
    if os.waitpid(process, 0)[1]:
        raise SystemExit(written.decode(errors="replace"))
    return written.decode()


def screen_of_a_run(folder: Path) -> None:
    """train.svg: the header, and the display when two thirds are done."""
    words = ["train", "CartPole-v1", "--seed", "1"]
    written = REDRAWN.split(in_a_terminal([*FLATOUT, *words], folder))
    header, *screens = (part.replace("\r", "") for part in written)
    shown = next(it for it in screens if re.search(r"\((6[5-9]|7\d) %\)", Text.from_ansi(it).plain))
    lines = header.split("\n")
    plain = [Text.from_ansi(line).plain for line in lines]
    first = next(i for i, line in enumerate(plain) if line.startswith("CartPole-v1 ·"))
    end = next(i for i, line in enumerate(plain) if line.startswith(("run folder", "╭")))
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text("$ flatout " + " ".join(words), style="bold"))
        for line in [*lines[first:end], *shown.rstrip("\n").split("\n")]:
            console.print(Text.from_ansi(line))
        console.save_svg(str(IMAGES / "train.svg"), title="flatout")


CLICK_A_WRONG_BOX = """
const boxes = [...document.querySelectorAll("#runs tbody input")];
const wrong = boxes.find((box) => box.closest("tr").textContent.includes("CartPole") !== box.checked);
if (wrong) wrong.click();
return Boolean(wrong);
"""
"""CartPole's runs are to be chosen, the others not."""


def dashboard(folder: Path) -> None:
    """dashboard.png: three seeds of a run and Snake, chosen for their curves."""
    server = subprocess.Popen(
        [*FLATOUT, "dashboard", "runs", "--no-browser", "--port", "0"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None, "it is a pipe"
    address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in FLAGS.split():
        options.add_argument(flag)
    driver = shutil.which("chromedriver")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        browser.get(address)
        sleep(2)
        while browser.execute_script(CLICK_A_WRONG_BOX):
            sleep(0.5)  # the table is drawn anew
        browser.find_element(By.ID, "grouped").click()
        sleep(2)
        browser.save_screenshot(str(IMAGES / "dashboard.png"))
    finally:
        browser.quit()
        server.terminate()


def main() -> None:
    """Make all of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        screen_of_a_run(folder)
        for words in (
            ["train", "CartPole-v1", "--seed", "2", "--quiet"],
            ["train", "CartPole-v1", "--seed", "3", "--quiet"],
            ["train", "snake", "--run-name", "snake", "--quiet"],
            ["play", "snake", "--episodes", "1", "--out", str(IMAGES / "snake.gif")],
        ):
            subprocess.run([*FLATOUT, *words], cwd=folder, check=True)
        dashboard(folder)


if __name__ == "__main__":
    main()
