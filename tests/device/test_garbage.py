"""The garbage collector is kept off what exists while a run lasts, and gets it back."""

from __future__ import annotations

import gc

from flatout.device.garbage import undisturbed


def test_what_exists_is_spared_for_a_while() -> None:
    assert gc.get_freeze_count() == 0
    with undisturbed():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with undisturbed():
            pass
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
