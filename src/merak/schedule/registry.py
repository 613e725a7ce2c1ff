"""Registry of schedules by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from merak.core.errors import ScheduleError, did_you_mean
from merak.core.kinds import fits, kind_names
from merak.schedule.builders.common import check_counts
from merak.schedule.catalog import FORMULAS, even_traits
from merak.schedule.ir import Schedule
from merak.schedule.search.auto import auto
from merak.schedule.serialize import load
from merak.schedule.traits import Builder, Traits, traits_of
from merak.schedule.validate.schedule import check

_BUILDERS = {**FORMULAS, "auto": Builder(auto, tried=({},), formula=even_traits())}
"""Builders by name, and those that `register` adds. `auto`, made for times of stages, is judged as
1F1B before there are any."""

MOST_RANKS = 4096
"""Most ranks of a schedule; the time of its checks grows with their square."""

MOST_FORWARDS = 2**20
"""Most ranks × microbatches of a schedule, which takes a minute or more to build."""


def names() -> tuple[str, ...]:
    """The names that `build` knows, simple schedules first."""
    return tuple(_BUILDERS)


def summary(name: str) -> str:
    """Summary of a schedule in a line: the first of its builder's file.

    Raises:
        ScheduleError: there is no schedule of this name.
    """
    described = inspect.getdoc(inspect.getmodule(_builder(name).build)) or ""
    return described.partition("\n")[0].rstrip(".")


def options(name: str) -> tuple[str, ...]:
    """The names of the options that a schedule's builder takes.

    Raises:
        ScheduleError: there is no schedule of this name.
    """
    return tuple(_options(_builder(name).build))


@lru_cache(maxsize=256)
def _options(build: Callable[..., Schedule]) -> Mapping[str, Any]:
    """Options of a builder by name, with the types of their values."""
    parameters, hints = inspect.signature(build).parameters.values(), get_type_hints(build)
    named = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return {name: hints.get(name, object) for name in named}


def takes_costs(name_or_file: str) -> bool:
    """Whether a schedule is built from the stages' times, which any layout has.

    Raises:
        ScheduleError: there is no schedule of this name.
    """
    return not is_file(name_or_file) and "costs" in options(name_or_file)


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
    return _checked(name, chosen).build(num_ranks, num_microbatches, **chosen)


def _checked(name: str, chosen: Mapping[str, Any]) -> Builder:
    """The builder of a name, which takes the chosen options."""
    builder = _builder(name)
    hints = _options(builder.build)
    unknown = sorted(set(chosen) - set(hints))
    if unknown:
        known = ", ".join(hints) or "none"
        meant = did_you_mean(unknown[0], hints)
        fix = f"; its options are: {known}." if meant == "." else meant
        raise ScheduleError(f"{name} has no option {unknown[0]!r}{fix}")
    for option, value in chosen.items():
        if not fits(value, hints[option]):
            wanted = " or ".join(kind_names(hints[option]))
            raise ScheduleError(f"{name}'s option {option} is {value!r}; give {wanted}.")
    return builder


def _builder(name: str) -> Builder:
    if name not in _BUILDERS:
        meant = did_you_mean(name, names())
        known = f"; choose one of: {', '.join(names())}." if meant == "." else meant
        raise ScheduleError(f"There is no schedule {name!r}{known}")
    return _BUILDERS[name]


def register(
    name: str, build: Callable[..., Schedule], *, searched: Sequence[Mapping[str, Any]] = ({},)
) -> None:
    """Add a schedule of one's own, which jobs name and searches for plans try.

    Every process of a job has to; traits are those of what is built, simulated with equal stages.

    Args:
        name: a new one, without dots and separators.
        build: (num_ranks, num_microbatches) and options by keyword to a schedule; a ValueError says
            for which it is not defined.
        searched: options that searches try; none where a job has to name it.

    Raises:
        ScheduleError: the name is taken, or that of a file.
    """
    if name in _BUILDERS or is_file(name):
        raise ScheduleError(f"{name!r} is a schedule already, or a file; register another name.")

    @wraps(build)
    def checked(num_ranks: int, num_microbatches: int, **chosen: Any) -> Schedule:
        try:
            schedule = build(num_ranks, num_microbatches, **chosen)
        except ScheduleError:
            raise
        except ValueError as error:
            raise ScheduleError(f"{name}: {error}") from error
        _check_counts(name, schedule, num_ranks, num_microbatches)
        return schedule

    _BUILDERS[name] = Builder(checked, tuple(searched))


def searched(everywhere: bool = True) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names and options of the schedules that a search for plans tries.

    Args:
        everywhere: those that it tries in every layout; else those that it tries in the layout of
            the fastest plan alone.
    """
    for name, builder in _BUILDERS.items():
        for chosen in builder.searched if everywhere else builder.tried:
            yield name, MappingProxyType(dict(chosen))


def traits(
    name_or_file: str, num_ranks: int, num_microbatches: int, chosen: Mapping[str, Any]
) -> Traits:
    """Traits of a schedule of `resolve`, which is built where no formula says them.

    Raises:
        ScheduleError: as of `resolve`.
    """
    of: object = _BUILDERS.get(name_or_file)
    if of is None:
        with suppress(OSError):
            of = Path(name_or_file).stat().st_mtime_ns
    own = tuple(chosen.items())
    try:
        hash(own)
    except TypeError:  # of a list
        return _traits.__wrapped__(name_or_file, of, num_ranks, num_microbatches, own)
    return _traits(name_or_file, of, num_ranks, num_microbatches, own)


@lru_cache(maxsize=4096)
def _traits(
    name: str, of: object, ranks: int, microbatches: int, own: tuple[tuple[str, Any], ...]
) -> Traits:
    """Traits of a schedule; `of` changes with what its name means."""
    chosen = dict(own)
    if is_file(name) or (builder := _checked(name, chosen)).formula is None:
        return traits_of(resolve(name, ranks, microbatches, **chosen))
    check_size(ranks, microbatches, MOST_RANKS, MOST_FORWARDS)
    check_counts(name, ranks, microbatches)
    return builder.formula(ranks, microbatches, **chosen)


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
    _check_counts(f"The schedule in {name_or_file}", schedule, num_ranks, num_microbatches)
    return schedule


def _check_counts(what: str, schedule: Schedule, num_ranks: int, num_microbatches: int) -> None:
    """Refuse a schedule of others that is invalid, or for other counts."""
    if (schedule.num_ranks, schedule.num_microbatches) != (num_ranks, num_microbatches):
        raise ScheduleError(
            f"{what} is for {schedule.num_ranks} ranks and {schedule.num_microbatches} "
            f"microbatches; asked for {num_ranks} and {num_microbatches}."
        )
    check(schedule)


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
    if name_or_file in _BUILDERS:
        return False
    return bool(path.suffix) or len(path.parts) > 1 or path.is_file()
