"""Axes of charts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from merak.schedule.render.svg import ticks

PAGE_WIDTH = 1180
"""Pixels of a picture that a desktop's page shows without scrolling."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Axis of a chart.

    Args:
        least: value at its start.
        most: value at its end.
        start: coordinate of its start.
        end: coordinate of its end.
    """

    least: float
    most: float
    start: int
    end: int

    @classmethod
    def over(cls, values: Sequence[float], start: int, end: int, room: float) -> Axis:
        """The axis of some values, with room beside them, but not below 0 for values above it.

        Args:
            values: of the chart.
            start: coordinate of the least one.
            end: coordinate of the greatest one.
            room: as a fraction of their range, or of the value where all are the same.
        """
        low, high = min(values), max(values)
        beside = (high - low) * room or abs(high) * room or 1.0
        return cls(max(0.0, low - beside) if low >= 0 else low - beside, high + beside, start, end)

    def place(self, value: float) -> float:
        """The coordinate of a value."""
        range_ = self.most - self.least
        part = (value - self.least) / range_ if range_ else 0.5
        return self.start + part * (self.end - self.start)

    def ticks(self) -> Iterator[tuple[float, float]]:
        """Up to six round values, and their coordinates."""
        span = ticks(self.most - self.least)
        step = (span[1] - span[0] if len(span) > 1 else self.most - self.least) * 2
        begin = math.ceil(self.least / step - 1e-9)
        for number in range(begin, math.floor(self.most / step + 1e-9) + 1):
            yield number * step, self.place(number * step)
