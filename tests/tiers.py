"""Two tiers of tests: essential ones, which `make test` runs, and slow ones beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])


def slow(*values: object, id: str | None = None) -> Any:
    """One row of a parametrized test, as a test of the slow tier.

    Args:
        values: of the row.
        id: what pytest calls it; None for the name that it makes of the values.
    """
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def one_in(number: int) -> Callable[[Test], Test]:
    """A decorator above `parametrize`: of so many rows one, the first, is essential.

    For rows that take the same way through Merak; the others are slow.
    """

    def thinned(test: Test) -> Test:
        marks: list[pytest.Mark] = vars(test)["pytestmark"]
        names, values, *_ = marks[-1].args
        is_one = isinstance(names, str) and "," not in names
        rows = [
            value if hasattr(value, "marks") else pytest.param(*((value,) if is_one else value))
            for value in values
        ]
        rows = [
            row if place % number == 0 else row._replace(marks=[*row.marks, pytest.mark.slow])
            for place, row in enumerate(rows)
        ]
        marks[-1] = pytest.mark.parametrize(names, rows, **marks[-1].kwargs).mark
        return test

    return thinned
