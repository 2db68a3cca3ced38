"""Each test starts with an idle card, and this thread uses the first of its devices."""

from __future__ import annotations

from tests.simcard.conftest import card as card  # an autouse fixture
