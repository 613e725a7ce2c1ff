"""How sure prices are: fractions of a step's parts that explain the errors of published runs.

`benchmarks/published_runs.py` prints this behind its table. The error of a row is taken as normal,
with a standard deviation that is the sum of its parts (computation, bubble, communication, update),
each times a fraction of its own. The fractions are the means of their logarithms under the
likelihood of all rows, on a grid; what few rows tell apart stays near the middle of its range. Then
each set of rows is left out, and one counts how many of its errors are within 1.64 deviations (nine
of ten, if errors are normal) that follow from the other sets.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NINE_OF_TEN = 1.64
"""Standard deviations of a normal distribution that hold 90 % of it, on both sides."""

_RANGES = ((0.02, 0.3, 14), (0.02, 1.0, 14), (0.02, 1.0, 14), (0.1, 1.0, 4))
"""Smallest and largest fraction of every part, and the points of the grid between them."""


@dataclass(frozen=True)
class Error:
    """Error of one row.

    Args:
        set: of the row.
        shares: of computation, bubble, exposed communication and update in the price.
        error: price ÷ published − 1.
        stated: uncertainty of the price.
    """

    set: str
    shares: tuple[float, float, float, float]
    error: float
    stated: float


def print_uncertainty(rows: Sequence[Error]) -> None:
    """Print how many errors are as small as stated, and the fractions that explain them."""
    within = sum(abs(own.error) <= own.stated for own in rows)
    print(f"uncertainty: {within} of {len(rows)} errors are within what their prices state")
    names = ("computation", "bubble", "communication", "update")
    for name, deviation in zip(names, _deviations(rows), strict=True):
        print(f"  {name}: {deviation:.1%}, in nine of ten {NINE_OF_TEN * deviation:.1%}")
    sets = sorted({own.set for own in rows})
    held = 0
    for left_out in sets if len(sets) > 1 else ():
        fitted = _deviations([own for own in rows if own.set != left_out])
        for own in (row for row in rows if row.set == left_out):
            held += abs(own.error) <= NINE_OF_TEN * float(np.dot(fitted, own.shares))
    if len(sets) > 1:
        print(f"  fitted to the other sets, they hold {held} of {len(rows)} errors")


def _deviations(rows: Sequence[Error]) -> np.ndarray:
    """Fraction of every part that is one standard deviation."""
    points = [np.geomspace(low, high, count) for low, high, count in _RANGES]
    grid = np.array(list(itertools.product(*points)))
    shares = np.array([own.shares for own in rows])
    errors = np.array([own.error for own in rows])
    deviation = grid @ shares.T
    unlikely = (np.log(deviation) + errors**2 / 2 / deviation**2).sum(axis=1)
    weight = np.exp(unlikely.min() - unlikely)
    return np.exp((np.log(grid) * weight[:, None]).sum(axis=0) / weight.sum())
