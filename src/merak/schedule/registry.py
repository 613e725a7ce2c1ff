"""Registry of schedules by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin, get_type_hints

from merak.core.errors import ScheduleError, did_you_mean
from merak.schedule.catalog import FORMULAS
from merak.schedule.ir import Schedule
from merak.schedule.search.auto import auto
from merak.schedule.serialize import load
from merak.schedule.validate.schedule import check

BUILDERS: Mapping[str, Callable[..., Schedule]] = MappingProxyType({**FORMULAS, "auto": auto})
"""Every builder: (num_ranks, num_microbatches, **options) to a schedule."""


MOST_RANKS = 4096
"""Most ranks of a schedule; the time of its checks grows with their square."""

MOST_FORWARDS = 2**20
"""Most ranks × microbatches of a schedule, which takes a minute or more to build."""


def names() -> tuple[str, ...]:
    """The names that `build` knows, simple schedules first."""
    return tuple(BUILDERS)


def summary(name: str) -> str:
    """What a schedule does, in a line: the first of its builder's file.

    Raises:
        ScheduleError: there is no schedule of this name.
    """
    described = inspect.getdoc(inspect.getmodule(_builder(name))) or ""
    return described.partition("\n")[0].rstrip(".")


def options(name: str) -> tuple[str, ...]:
    """The names of the options that a schedule's builder takes.

    Raises:
        ScheduleError: there is no schedule of this name.
    """
    parameters = inspect.signature(_builder(name)).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def takes_costs(name_or_file: str) -> bool:
    """Whether a schedule is made for given times of stages, as such as each layout can have.

    Raises:
        ScheduleError: there is no schedule of this name.
    """
    return not is_file(name_or_file) and "costs" in options(name_or_file)


def is_synchronous(
    name_or_file: str, num_ranks: int, num_microbatches: int, chosen: Mapping[str, Any]
) -> bool:
    """Whether a schedule updates weights at the end of a step alone.

    Args:
        name_or_file: as of `resolve`, as the others.
        num_ranks: pipeline degree.
        num_microbatches: microbatches per iteration.
        chosen: options of a named schedule's builder.

    Raises:
        ScheduleError: as of `resolve`.
    """
    if takes_costs(name_or_file):
        return True
    return resolve(name_or_file, num_ranks, num_microbatches, **chosen).is_synchronous


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
        meant = did_you_mean(unknown[0], options(name))
        fix = f"; its options are: {known}." if meant == "." else meant
        raise ScheduleError(f"{name} has no option {unknown[0]!r}{fix}")
    _check_types(name, builder, chosen)
    return builder(num_ranks, num_microbatches, **chosen)


def _check_types(name: str, builder: Callable[..., Schedule], chosen: dict[str, Any]) -> None:
    hints = get_type_hints(builder)
    for option, value in chosen.items():
        if get_args(hints[option]):
            kinds = tuple(get_origin(part) or part for part in get_args(hints[option]))
        else:
            kinds = (hints[option],)
        # Integers are numbers, but booleans are not integers.
        allowed = (*kinds, int) if float in kinds else kinds
        if not isinstance(value, allowed) or (type(value) is bool and bool not in allowed):
            wanted = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
            raise ScheduleError(f"{name}'s option {option} is {value!r}; give a value of {wanted}.")


def _builder(name: str) -> Callable[..., Schedule]:
    if name not in BUILDERS:
        meant = did_you_mean(name, names())
        known = f"; choose one of: {', '.join(names())}." if meant == "." else meant
        raise ScheduleError(f"There is no schedule {name!r}{known}")
    return BUILDERS[name]


def resolve(name_or_file: str, num_ranks: int, num_microbatches: int, **chosen: Any) -> Schedule:
    """Build a schedule by name, or read one from a file and check that it fits.

    Args:
        name_or_file: one of `names()`, or the path of a schedule file; a path has a suffix or a
            separator, which no name has.
        num_ranks: pipeline degree.
        num_microbatches: microbatches per iteration.
        **chosen: options of a named schedule's builder.

    Returns:
        A valid schedule.

    Raises:
        ScheduleError: as `build`; or the file cannot be read, has an error, is invalid, or is for
            other counts.
    """
    if not is_file(name_or_file):
        check_size(num_ranks, num_microbatches, MOST_RANKS, MOST_FORWARDS)
        return build(name_or_file, num_ranks, num_microbatches, **chosen)
    schedule = load(Path(name_or_file))
    if chosen:
        raise ScheduleError(
            f"A schedule from a file takes no options; got {', '.join(sorted(chosen))}."
        )
    if (schedule.num_ranks, schedule.num_microbatches) != (num_ranks, num_microbatches):
        raise ScheduleError(
            f"The schedule in {name_or_file} is for {schedule.num_ranks} ranks and "
            f"{schedule.num_microbatches} microbatches; asked for {num_ranks} and "
            f"{num_microbatches}."
        )
    check(schedule)
    return schedule


def check_size(num_ranks: int, num_microbatches: int, most_ranks: int, most_forwards: int) -> None:
    """Refuse a schedule that is too large to build.

    Args:
        num_ranks: pipeline degree.
        num_microbatches: microbatches per iteration.
        most_ranks: of the first.
        most_forwards: of their product.

    Raises:
        ScheduleError: it is larger.
    """
    if num_ranks > most_ranks:
        raise ScheduleError(
            f"a pipeline of {num_ranks:,} ranks is longer than the {most_ranks:,} that are laid "
            "out; use fewer stages."
        )
    forwards = num_ranks * num_microbatches
    if num_ranks > 0 and forwards > most_forwards:
        raise ScheduleError(
            f"{num_ranks:,} ranks × {num_microbatches:,} microbatches are {forwards:,} forwards, "
            f"more than the {most_forwards:,} that are laid out; use fewer stages or microbatches."
        )


def is_file(name_or_file: str) -> bool:
    """Whether a text means a schedule file rather than a name."""
    path = Path(name_or_file)
    if name_or_file in BUILDERS:
        return False
    return bool(path.suffix) or len(path.parts) > 1 or path.is_file()
