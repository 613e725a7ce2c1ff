"""Freed memory is kept where the C library is glibc, and where nobody has said otherwise."""

from __future__ import annotations

import ctypes

import pytest

from merak.core.start import allocator


def test_glibc_keeps_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in allocator._OF_GLIBC:
        monkeypatch.delenv(name, raising=False)
    assert allocator.keep_freed_memory() is hasattr(ctypes.CDLL(None), "mallopt")


@pytest.mark.parametrize("name", allocator._OF_GLIBC)
def test_variables_of_glibc_count_instead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "131072")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("it has asked the C library"))
    assert not allocator.keep_freed_memory()
