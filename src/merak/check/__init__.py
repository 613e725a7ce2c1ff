"""Checks of models: training on many ranks against training in one process."""

from merak.check.case import Case
from merak.check.check import CheckReport, Workspace, check_against, check_model
from merak.check.reference import EagerError
from merak.check.runs import CheckOptions, Job, Layout

__all__ = [
    "Case",
    "CheckOptions",
    "CheckReport",
    "EagerError",
    "Job",
    "Layout",
    "Workspace",
    "check_against",
    "check_model",
]
