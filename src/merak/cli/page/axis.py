"""Axes of charts."""

from __future__ import annotations

import math

from merak.schedule.render.svg import ticks

PAGE_WIDTH = 1180
"""Pixels of a picture that a desktop's page shows without scrolling."""


def round_values(low: float, high: float) -> list[float]:
    """Up to six round values between two, for the labels of an axis.

    Args:
        low: the least value.
        high: the greatest one.
    """
    span = ticks(high - low)
    step = (span[1] - span[0] if len(span) > 1 else high - low) * 2
    begin = math.ceil(low / step - 1e-9)
    return [number * step for number in range(begin, math.floor(high / step + 1e-9) + 1)]
