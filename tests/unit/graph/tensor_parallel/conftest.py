"""Splits of segments are found once; tests that are about how name the fixture, and undo it."""

import pytest

from tests import shared_cache


@pytest.fixture(autouse=True)
def shared_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_cache.share_found(monkeypatch.setattr)
