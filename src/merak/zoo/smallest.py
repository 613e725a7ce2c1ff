"""Search for the small version of a transformers model that a check trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from merak.check.reference import EagerError, FinalError, is_without_loss, with_reference
from merak.check.runs import Job, Outcome
from merak.core.errors import MerakError, PackageError
from merak.zoo.configs.fields import Fields

MOST_PARAMETERS = 200_000_000
"""More than this is not trained on somebody's laptop."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Job, and its outcome in one process.

    Args:
        job: what was trained.
        outcome: what came of it.
        filled: fields of the model's config that it leaves open and that were filled by a guess.
    """

    job: Job
    outcome: Outcome
    filled: Fields = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Version:
    """Version of a model (smaller, or as the user has it) that a check may train.

    Args:
        jobs: makes jobs that train it on different batches, the most wanted one first; it is given
            the reasons why those before did not train, which grow meanwhile.
        is_small: whether it cannot be large, so that it need not be built without weights first.
        is_whole: whether it is the model as the user has it.
        filled: as of `Trained`.
        most_parameters: a version with more is not trained.
    """

    jobs: Callable[[Sequence[MerakError]], Iterable[Job]]
    is_small: bool = False
    is_whole: bool = False
    filled: Fields = field(default_factory=dict)
    most_parameters: int = MOST_PARAMETERS


def first_that_trains(versions: Iterable[Version]) -> Trained:
    """Return the first version of a model that plain PyTorch can train in one process.

    Args:
        versions: the most wanted one first.

    Raises:
        EagerError: none trains; it says why the model as it is does not, or, where that is too
            large to be tried, why the first version does not.
        PackageError: a package is missing.
    """
    failures: list[MerakError] = []
    for version in versions:
        found = _train(version)
        if isinstance(found, Trained):
            return found
        if isinstance(found, FinalError | PackageError):
            raise found
        failures.append(found)
        if version.is_whole and not isinstance(found, _TooLarge):
            raise found
    assert failures, "no versions"
    raise next((f for f in failures if not isinstance(f, _TooLarge)), failures[0])


def _train(version: Version) -> Trained | MerakError:
    """Train a version on the first batch with which it trains; else return the first reason."""
    failures: list[MerakError] = []
    try:
        for job in version.jobs(failures):
            if not failures:
                _refuse_large(job, version)
            try:
                return Trained(*with_reference(job), version.filled)
            except EagerError as failed:  # perhaps for want of another batch
                failures.append(failed)
    except MerakError as failed:
        failures.append(failed)
    except Exception as failed:  # a config that its own model, or the batch, cannot be made of
        message = f"its config cannot be used: {type(failed).__name__}: {failed}"
        failures.append(EagerError(message))
    assert failures, "no jobs"
    # That one batch gave no loss says nothing where another one failed for its own reason.
    return next((f for f in failures if not is_without_loss(f.__cause__)), failures[0])


class _TooLarge(EagerError):
    """Refusal of a version that is too large to train for a check."""


def _refuse_large(job: Job, version: Version) -> None:
    try:
        with torch.device("meta"):
            model: nn.Module = job.case.build()
    except Exception:
        if version.is_small:
            return  # some models look at numbers while they are built
        raise
    size = sum(p.numel() for p in model.parameters())
    if size > version.most_parameters:
        raise _TooLarge(
            f"{job.case.name} has {size:,} parameters in its smallest version that can be made; "
            "make it smaller with --config."
        )
