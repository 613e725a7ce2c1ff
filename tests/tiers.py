"""Two tiers of tests: essential ones, which `make test` runs, and slow ones beside them."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: object, id: str | None = None) -> Any:
    """One row of a parametrized test, as a test of the slow tier.

    Args:
        values: of the row.
        id: what pytest calls it; None for the name that it makes of the values.
    """
    return pytest.param(*values, marks=pytest.mark.slow, id=id)
