"""Find the small version of a transformers model that a check trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from merak.check.reference import EagerError, FinalError, reference
from merak.check.training import Job, Outcome
from merak.core.errors import MerakError

MOST_PARAMETERS = 200_000_000
"""More than this is not trained on somebody's laptop."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A job, and what one process made of it."""

    job: Job
    outcome: Outcome


def first_that_trains(versions: Iterable[Callable[[], Job]]) -> Trained:
    """The first of some jobs that plain PyTorch can train in one process.

    Args:
        versions: make the jobs, the most wanted one first; the last is the model as it is.

    Raises:
        EagerError: none trains; it says why the last one does not.
    """
    error: MerakError | None = None
    for number, make in enumerate(versions):
        try:
            job = make()
            _refuse_large(job, is_smallest=number == 0)
            return Trained(job, reference(job))
        except FinalError:
            raise
        except _TooLarge as large:
            error = error or large
        except MerakError as failed:
            error = failed
        except Exception as failed:  # a config that its own model, or the batch, cannot be made of
            error = EagerError(f"its config cannot be used: {type(failed).__name__}: {failed}")
    assert error is not None, "no versions"
    raise error


class _TooLarge(EagerError):
    """A version that nobody wants to train for a check."""


def _refuse_large(job: Job, *, is_smallest: bool) -> None:
    try:
        with torch.device("meta"):
            model: nn.Module = job.case.build()
    except Exception:
        if is_smallest:
            return  # some models look at numbers while they are built; this one cannot be large
        raise
    size = sum(p.numel() for p in model.parameters())
    if size > MOST_PARAMETERS:
        raise _TooLarge(
            f"{job.case.name} has {size:,} parameters in its smallest version that can be made; "
            "make it smaller with --config."
        )
