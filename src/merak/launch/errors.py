"""Errors of commands."""

from merak.core.errors import MerakError


class CommandError(MerakError):
    """Error about an option or a recipe that names something unknown or unfit."""


class RunError(Exception):
    """Failure of a run that is not bad input; the message says how."""


class StartError(RunError):
    """Failure of ranks before the first of them has run a step."""


class TerminatedError(RunError):
    """End of a run by SIGTERM, which has its own exit code."""
