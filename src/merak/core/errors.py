"""Errors that a user can meet: each is one sentence that says what, the values, and the fix."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any


class MerakError(ValueError):
    """Error about bad input, found by Merak; the base of every error below."""


class PackageError(MerakError):
    """Error about a model that needs a package which is not installed."""


class MeshError(MerakError):
    """Error about degrees that do not fit the ranks, or `merak.init` missing or called twice."""


class TraceError(MerakError):
    """Error about a model that cannot be traced, or that gives no loss."""


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


def refuse_unknown(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse keyword arguments that a function does not have.

    Args:
        function: its name, as the user calls it.
        given: names of the arguments.
        known: names that it has.

    Raises:
        ArgumentsError: there is one; `except TypeError` catches it, too.
    """
    names = list(known)
    for name in given:
        if name not in names:
            message = f"{function} has no argument {name!r}{did_you_mean(name, names)}"
            raise caused_by(TypeError(), message)


def keyword_names(function: Callable[..., Any]) -> list[str]:
    """Names that a function's arguments can be given by."""
    named = inspect.signature(function).parameters.values()
    return [one.name for one in named if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]


def takes_any_name(function: Callable[..., Any]) -> bool:
    """Whether a function takes arguments by names that it does not declare."""
    named = inspect.signature(function).parameters.values()
    return any(one.kind is one.VAR_KEYWORD for one in named)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" where a similar name is known, else "."."""
    lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), lower, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(lower[match] for match in matches)}?" if matches else "."
