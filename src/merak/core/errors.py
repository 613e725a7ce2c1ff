"""Errors that a user can meet: each is one sentence that says what, the values, and the fix."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any


class MerakError(ValueError):
    """Error about bad input, found by Merak; the base of every error below."""

    errors: tuple[MerakError, ...] = ()
    """Those that it joins, a line each; empty for an error of its own."""


class PackageError(MerakError):
    """Error about a model that needs a package which is not installed."""


class MeshError(MerakError):
    """Error about degrees that do not fit the ranks, or `merak.init` missing or called twice."""


class TraceError(MerakError):
    """Error about a model that cannot be traced, or that gives no loss."""


class RefusedBatchError(TraceError):
    """Error about a batch that a model cannot be traced for, which all ranks raise together."""


class ShardError(MerakError):
    """Error about a tensor parallel degree or feature dict that does not fit the model."""


class PlanError(MerakError):
    """Error about segments that cannot be laid out over the stages."""


class DoesNotFitError(PlanError):
    """Error about a job that needs more memory than its devices have."""


class ScheduleError(MerakError):
    """Error about a schedule that is unknown, undefined for the requested sizes, or wrong."""


class DataError(MerakError):
    """Error about a dataset or batch that does not give the model what it needs."""


class ArgumentsError(MerakError):
    """Error about a training argument that cannot be honoured."""


class WeightsError(MerakError):
    """Error about weights that cannot be created or loaded."""


class TrainingError(MerakError):
    """Error in training: a loss that is not finite, a transfer that never completes."""


class SavingError(WeightsError, TrainingError):
    """Error about files that cannot be written: a full disk, a read-only folder."""


class RecordError(MerakError):
    """Error about the record of a run that is not there or cannot be read."""


class CommandError(MerakError):
    """Error about an option or a recipe that names something unknown or unfit."""


class RunError(Exception):
    """Failure of a run that is not bad input; the message says how."""


class StartError(RunError):
    """Failure of ranks before the first of them has run a step."""


class TerminatedError(RunError):
    """End of a run by SIGTERM, which has its own exit code."""


@contextmanager
def collected(problems: list[MerakError]) -> Iterator[None]:
    """Context that collects an error about input, so that a file's other errors come, too.

    Args:
        problems: found so far; what is found inside is added.
    """
    try:
        yield
    except TrainingError:
        raise
    except MerakError as error:
        problems.extend(error.errors or (error,))


def raise_all(problems: Sequence[MerakError]) -> None:
    """Raise errors as one, whose message has a line for each.

    Raises:
        MerakError: there are some; of the first one's class.
    """
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = dict.fromkeys(map(str, problems))
        joined = type(problems[0])("\n".join(lines))
        joined.errors = tuple(problems)
        raise joined


def caused_by(cause: Exception, message: str) -> ArgumentsError:
    """Make an `ArgumentsError` that `except` of its cause's type catches, too.

    Args:
        cause: what another library has raised; scripts may expect its type.
        message: one sentence.
    """
    if isinstance(cause, ValueError):
        return ArgumentsError(message)
    kind = type(cause)
    both: type[ArgumentsError] = type(ArgumentsError.__name__, (ArgumentsError, kind), {})
    return both(message)


def refuse_unknown(
    function: str,
    given: Iterable[str],
    known: Iterable[str],
    *,
    suggested: Iterable[str] | None = None,
    former: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuse keyword arguments that a function does not have.

    Args:
        function: its name, as the user calls it.
        given: names of the arguments.
        known: names that it has.
        suggested: those that a sentence may suggest; all by default.
        former: what former arguments are today, by their names.

    Raises:
        ArgumentsError: there is one; `except TypeError` catches it, too.
    """
    names = list(known)
    suggested = names if suggested is None else list(suggested)
    for name in given:
        if name not in names:
            fix = todays_name(name, former) or did_you_mean(name, suggested)
            raise caused_by(TypeError(), f"{function} has no argument {name!r}{fix}")


def todays_name(name: str, former: Mapping[str, str]) -> str | None:
    """Return "; today it is …" for a former name; None for any other.

    Args:
        name: as it is given.
        former: what former names are today, by name.
    """
    return f"; today it is {former[name]}." if name in former else None


def keyword_names(function: Callable[..., Any]) -> list[str]:
    """Names that a function's arguments can be given by."""
    named = inspect.signature(function).parameters.values()
    return [one.name for one in named if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]


def takes_any_name(function: Callable[..., Any]) -> bool:
    """Whether a function takes arguments by names that it does not declare."""
    named = inspect.signature(function).parameters.values()
    return any(one.kind is one.VAR_KEYWORD for one in named)


def _words(name: str) -> set[str]:
    return set(re.findall("[a-z0-9]+", name.lower()))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" where a similar name, or one of its words, is known, else "."."""
    lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), lower, n=3, cutoff=0.6)
    if not matches:  # budget, of memory-budget
        words = _words(word)
        matches = [name for name in lower if words and words <= _words(name)][:3]
    return f"; did you mean {' or '.join(lower[match] for match in matches)}?" if matches else "."
