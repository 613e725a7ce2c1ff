"""What can go wrong in commands."""

from merak.core.errors import MerakError


class CommandError(MerakError):
    """A command's option or a recipe that names something that is not there or does not fit."""


class RunError(Exception):
    """A run that failed in a way that is not bad input; the message says how."""
