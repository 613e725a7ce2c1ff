"""The names that scripts import from `merak.engine`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from merak import engine


def test_every_name_of_the_facade_is_there() -> None:
    assert len(engine.__all__) <= 10
    assert all(getattr(engine, name).__name__ == name for name in engine.__all__)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'layout'"):
        _ = engine.layout


def test_it_is_imported_without_torch() -> None:
    code = "import merak.engine, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
