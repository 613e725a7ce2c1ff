"""Splits and memory of segments are found once: none of these tests is about how."""

import pytest

from tests import shared_cache


@pytest.fixture(autouse=True)
def shared_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_cache.share_found(monkeypatch.setattr)
