"""Whether a model trains on many ranks as it does in one process."""

from merak.check.case import Case
from merak.check.check import CheckReport, Workshop, check_against, check_model
from merak.check.reference import EagerError
from merak.check.runs import CheckOptions, Job, Layout

__all__ = [
    "Case",
    "CheckOptions",
    "CheckReport",
    "EagerError",
    "Job",
    "Layout",
    "Workshop",
    "check_against",
    "check_model",
]
