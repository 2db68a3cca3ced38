"""Nothing that earlier runs of this machine have kept decides what the tests see."""

from __future__ import annotations

import os
import tempfile

os.environ["FLATOUT_CACHE"] = tempfile.mkdtemp(prefix="flatout-tests-")
