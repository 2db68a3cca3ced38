"""Jobs outlive the process that started them: a test that fails must not leave any behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest


@pytest.fixture(autouse=True)
def _no_job_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if Path(process.cwd()).is_relative_to(tmp_path):
                process.kill()
