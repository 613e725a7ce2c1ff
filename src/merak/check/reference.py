"""Reference run of a case in one process, or the reason why there is none."""

from __future__ import annotations

import math
import traceback
from dataclasses import replace

import torch

from merak.check.case import Case
from merak.check.runs import CheckOptions, Job, Outcome, loss_of, train_in_one_process
from merak.core.errors import MerakError
from merak.core.packages import missing_package


class EagerError(MerakError):
    """Failure of plain PyTorch to train the model in one process."""


class FinalError(EagerError):
    """Failure of plain PyTorch that holds for every size of the model."""


def reference(job: Job) -> Outcome:
    """Train in this process, in plain PyTorch.

    Args:
        job: what to train.

    Raises:
        EagerError: it fails, makes losses that are not numbers, or draws at random.
    """
    case = job.case
    try:
        outcome = train_in_one_process(job)
        is_random = _is_random(case, job.options)
    except MerakError:
        raise
    except Exception as error:
        holds = isinstance(error, ImportError) or is_without_loss(error)
        kind = FinalError if holds else EagerError
        raise kind(why_not(case, error)) from error
    if not all(math.isfinite(loss) for loss in outcome.losses):
        raise EagerError(
            f"{case.name} does not train in one process: its losses are "
            f"{', '.join(f'{loss:.4g}' for loss in outcome.losses)}; give it other sizes."
        )
    if not outcome.gradients:
        raise EagerError(
            f"{case.name} does not train in one process: no parameter gets a gradient."
        )
    if is_random:
        raise FinalError(
            f"{case.name} draws random numbers while it runs even with every dropout at 0, so two "
            "runs of one process differ already; give its noise in the batch, or switch what draws "
            "off in its config."
        )
    return outcome


def with_reference(job: Job) -> tuple[Job, Outcome]:
    """Return a job that one process can train, and its outcome there.

    Some models take batches of certain numbers of samples alone, such as a multiple of their
    codebooks: for these, the last batch of an evaluation is a whole one.

    Args:
        job: what to train, and perhaps to evaluate.

    Raises:
        EagerError: as of `reference`.
    """
    try:
        return job, reference(job)
    except FinalError:
        raise
    except EagerError as error:
        whole = replace(job, ragged=False)
        if not job.options.evaluate or whole == job:
            raise
        try:
            return whole, reference(whole)
        except EagerError:
            raise error from None


def why_not(case: Case, error: Exception) -> str:
    """Describe why plain PyTorch cannot build or train a model, in a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = " ".join(lines[:2]).rstrip(".") or type(error).__name__
    if isinstance(error, ImportError):
        return missing_package(case.name, error)
    if is_without_loss(error):
        return (
            f"{case.name} returns no loss for these columns; name a class with a head that "
            "computes one, or give the case a loss function."
        )
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return (
        f"{case.name} does not train in one process without Merak either: "
        f"{type(error).__name__}{where}: {message}."
    )


def is_without_loss(error: BaseException | None) -> bool:
    """Whether an error means that the model returned no loss."""
    return isinstance(error, KeyError) and error.args == ("loss",)


def _is_random(case: Case, options: CheckOptions) -> bool:
    """Whether the loss depends on the state of the random number generator."""
    batch = case.batch(0, options.microbatch)
    losses = []
    for seed in (1, 2):
        model = case.model(options.seed)  # anew: a forward may have moved the buffers that it reads
        torch.manual_seed(seed)
        losses.append(float(loss_of(case, model, batch).detach()))
    return losses[0] != losses[1]
