"""The checkpoint that a training resumes from, checked before anything is built for it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from merak.checkpoint.saved import check_valid, open_checkpoint
from merak.core.errors import WeightsError
from merak.core.rank0 import warn_on_rank0

logger = logging.getLogger(__name__)

AUTO = "auto"
"""Request for the newest valid checkpoint, or for a new training where there is none at all."""


def checkpoint_to_resume(
    request: object, output_dir: str, *, allow_pickled: bool = False, reads_all: bool = True
) -> str | None:
    """Find and check the checkpoint that a training resumes from; collective.

    Args:
        request: a folder; True for the newest valid one in `output_dir`; "auto" likewise, or None
            where there is no checkpoint; None or False for none.
        output_dir: where the run saves.
        allow_pickled: whether checkpoints of the format before this one may be read.
        reads_all: whether to compare the checksums of all files.

    Raises:
        WeightsError: there is none, or none is valid.
    """
    if request is None or request is False:
        return None
    if request is True or request == AUTO:
        found = _checkpoints(Path(output_dir))
        if not found and request == AUTO:
            return None
        return _newest_valid(found, Path(output_dir), allow_pickled, reads_all)
    if not isinstance(request, str | os.PathLike) or not os.path.isdir(request):
        raise WeightsError(
            f"resume_from_checkpoint={request!r} is not a folder; name a checkpoint-… folder that "
            "Merak wrote, or leave it out to start anew."
        )
    _check(Path(request), allow_pickled, reads_all)
    return os.fspath(request)


def _checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    steps = {folder: _step(folder) for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    found = [folder for folder, step in steps.items() if step is not None and folder.is_dir()]
    return sorted(found, key=lambda folder: steps[folder] or 0, reverse=True)


def _step(checkpoint: Path) -> int | None:
    digits = checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(digits) if digits.isdigit() else None


def _newest_valid(found: list[Path], output_dir: Path, allow_pickled: bool, reads_all: bool) -> str:
    """The newest valid checkpoint; damaged ones are named and passed over."""
    problems: list[WeightsError] = []
    for checkpoint in found:
        try:
            _check(checkpoint, allow_pickled, reads_all)
        except WeightsError as problem:
            problems.append(problem)
            continue
        for passed_over in problems:
            warn_on_rank0(logger, "%s Passed over for %s.", passed_over, checkpoint)
        return str(checkpoint)
    if problems:
        raise problems[0]
    raise WeightsError(
        f"resume_from_checkpoint=True, but {output_dir} has no checkpoint-… folder; name one, or "
        "leave it out to start anew."
    )


def _check(checkpoint: Path, allow_pickled: bool, reads_all: bool) -> None:
    if reads_all:
        check_valid(checkpoint, allow_pickled)
    else:
        open_checkpoint(checkpoint, allow_pickled)
