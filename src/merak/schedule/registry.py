"""Schedules by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from merak.core.errors import ScheduleError
from merak.schedule.chimera import chimera
from merak.schedule.dualpipe_v import dualpipe_v
from merak.schedule.early_recompute import early_recompute
from merak.schedule.gems import gems
from merak.schedule.gpipe import gpipe
from merak.schedule.interleaved_1f1b import interleaved_1f1b
from merak.schedule.interleaved_zero_bubble import interleaved_zero_bubble
from merak.schedule.ir import Schedule
from merak.schedule.last_no_recompute import last_no_recompute
from merak.schedule.one_f_one_b import one_f_one_b
from merak.schedule.pipedream import pipedream
from merak.schedule.pipedream_2bw import pipedream_2bw
from merak.schedule.shifted_critical_path import shifted_critical_path
from merak.schedule.zero_bubble_h1 import zero_bubble_h1
from merak.schedule.zero_bubble_v import zero_bubble_v

BUILDERS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "early_recompute": early_recompute,
        "last_no_recompute": last_no_recompute,
        "shifted_critical_path": shifted_critical_path,
        "interleaved_1f1b": interleaved_1f1b,
        "chimera": chimera,
        "gems": gems,
        "zero_bubble_h1": zero_bubble_h1,
        "interleaved_zero_bubble": interleaved_zero_bubble,
        "zero_bubble_v": zero_bubble_v,
        "dualpipe_v": dualpipe_v,
        "pipedream": pipedream,
        "pipedream_2bw": pipedream_2bw,
    }
)
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
