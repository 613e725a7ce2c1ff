"""Schedules by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from merak.core.errors import ScheduleError
from merak.schedule.auto import auto
from merak.schedule.catalog import FORMULAS
from merak.schedule.ir import Schedule

BUILDERS: Mapping[str, Callable[..., Schedule]] = MappingProxyType({**FORMULAS, "auto": auto})
"""Every builder: (num_ranks, num_microbatches, **options) to a schedule."""


def names() -> tuple[str, ...]:
    """The names that `build` knows, simple schedules first."""
    return tuple(BUILDERS)


def options(name: str) -> tuple[str, ...]:
    """The names of the options that a schedule's builder takes.

    Raises:
        ScheduleError: there is no schedule of this name.
    """
    parameters = inspect.signature(_builder(name)).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def build(name: str, num_ranks: int, num_microbatches: int, **chosen: Any) -> Schedule:
    """Build a schedule by name.

    Args:
        name: one of `names()`.
        num_ranks: pipeline degree. Schedules with several stages per rank cut the model into a
            multiple of it.
        num_microbatches: microbatches per iteration.
        **chosen: options of the schedule's own builder.

    Raises:
        ScheduleError: the name or an option is unknown, or the schedule is not defined for these
            counts.
    """
    builder = _builder(name)
    unknown = sorted(set(chosen) - set(options(name)))
    if unknown:
        known = ", ".join(options(name)) or "none"
        raise ScheduleError(f"{name} has no option {unknown[0]!r}; its options are: {known}.")
    return builder(num_ranks, num_microbatches, **chosen)


def _builder(name: str) -> Callable[..., Schedule]:
    if name not in BUILDERS:
        raise ScheduleError(f"There is no schedule {name!r}; choose one of: {', '.join(names())}.")
    return BUILDERS[name]
