"""Tests use a cache folder of their own, so that their results do not depend on earlier runs."""

from __future__ import annotations

import os
import tempfile

os.environ["FLATOUT_CACHE"] = tempfile.mkdtemp(prefix="flatout-tests-")
