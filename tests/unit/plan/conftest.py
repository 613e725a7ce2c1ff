"""Traces that these tests need are shared: none of the tests is about how a trace is made."""

import pytest

from tests import shared_cache


@pytest.fixture(autouse=True)
def shared_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_cache.share(monkeypatch.setattr)
    shared_cache.share_found(monkeypatch.setattr)
