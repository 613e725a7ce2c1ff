"""What several test files share: schedules over a grid, with unit costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from merak.core.errors import ScheduleError
from merak.schedule.catalog import FORMULAS
from merak.schedule.costs import uniform
from merak.schedule.ir import Schedule
from merak.schedule.registry import build
from merak.schedule.simulator.simulate import Simulation, simulate


def simulated(
    name: str, num_ranks: int, num_microbatches: int, *, backward_s: float = 2.0, **options: Any
) -> Simulation:
    """F = R = 1, B = 2 unless said otherwise, I = W = B / 2."""
    schedule = build(name, num_ranks, num_microbatches, **options)
    return simulate(schedule, uniform(schedule.num_stages, backward_s=backward_s))


def every_schedule(
    all_ranks: tuple[int, ...], all_microbatches: tuple[int, ...]
) -> Iterator[Schedule]:
    """Every formula schedule over a grid, where it is defined."""
    for name in FORMULAS:
        for num_ranks in all_ranks:
            for num_microbatches in all_microbatches:
                try:
                    yield build(name, num_ranks, num_microbatches)
                except ScheduleError:
                    continue
