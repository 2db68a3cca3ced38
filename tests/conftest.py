"""Tests do not depend on earlier runs, nor on how pytest was started: a cache folder of their own, no signal ignored."""

from __future__ import annotations

import os
import signal
import tempfile

os.environ["FLATOUT_CACHE"] = tempfile.mkdtemp(prefix="flatout-tests-")
# A shell's background job has SIGINT ignored, one under nohup SIGHUP, and the children of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
