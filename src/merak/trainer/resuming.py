"""The checkpoint that a training resumes from, checked before anything is built for it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from transformers import TrainerState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from merak.checkpoint.dcp import is_complete
from merak.core.errors import WeightsError
from merak.core.rank0 import warn_on_rank0

logger = logging.getLogger(__name__)

AUTO = "auto"
"""The request to resume from the newest valid checkpoint, or to start anew if there is none."""

RANKS_FOLDER = "merak"
"""The part of a checkpoint that holds the ranks' parameters and optimizer states."""


def checkpoint_to_resume(request: object, output_dir: str) -> str | None:
    """Find and check the checkpoint that a training resumes from.

    Args:
        request: a folder; True for the last one in `output_dir`; `AUTO` for the same, or none if
            there is none; None or False for none.
        output_dir: where the run saves.

    Raises:
        WeightsError: there is none, or it is not whole.
    """
    if request is None or request is False:
        return None
    if request == AUTO:
        try:
            return _last_whole(Path(output_dir))
        except WeightsError as problem:
            if any(Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
                warn_on_rank0(
                    logger, "%s No checkpoint is whole, so training starts anew.", problem
                )
            return None
    if request is True:
        return _last_whole(Path(output_dir))
    if not isinstance(request, str | os.PathLike) or not os.path.isdir(request):
        raise WeightsError(
            f"resume_from_checkpoint={request!r} is not a folder; name a checkpoint-… folder that "
            "Merak wrote, or leave it out to start anew."
        )
    check_whole(Path(request))
    return os.fspath(request)


def _number(checkpoint: Path) -> int | None:
    """The step of a checkpoint's folder; None for another folder."""
    digits = checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(digits) if digits.isdigit() and checkpoint.is_dir() else None


def _last_whole(output_dir: Path) -> str:
    """The last checkpoint of a run; one that was cut off while it was written is passed over."""
    found = [f for f in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if _number(f) is not None]
    problems: list[WeightsError] = []
    for checkpoint in sorted(found, key=lambda folder: _number(folder) or 0, reverse=True):
        try:
            check_whole(checkpoint)
        except WeightsError as problem:
            problems.append(problem)
            continue
        if problems:
            warn_on_rank0(logger, "%s Resuming from %s.", problems[0], checkpoint)
        return str(checkpoint)
    if problems:
        raise problems[0]
    raise WeightsError(
        f"resume_from_checkpoint=True, but {output_dir} has no checkpoint-… folder; name one, or "
        "leave it out to start anew."
    )


def check_whole(checkpoint: Path) -> None:
    """Refuse a checkpoint of which a file is missing or was not written to its end.

    Raises:
        WeightsError: with the first such file.
    """
    ranks = checkpoint / RANKS_FOLDER
    if not ranks.is_dir():
        raise WeightsError(
            f"{checkpoint} has no folder {RANKS_FOLDER!r}, so it is no checkpoint to resume a "
            "Merak job from; name a checkpoint-… folder that Merak wrote."
        )
    if not is_complete(ranks):
        raise _not_whole(checkpoint, f"{RANKS_FOLDER}/.metadata, which is written last, is missing")
    for name in (SCHEDULER_NAME, TRAINER_STATE_NAME):
        file = checkpoint / name
        if not file.is_file():
            raise _not_whole(checkpoint, f"{name} is missing")
        if not file.stat().st_size:
            raise _not_whole(checkpoint, f"{name} is empty")
    try:
        TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    except (OSError, ValueError, TypeError) as cause:
        message = " ".join(str(cause).split())
        raise _not_whole(checkpoint, f"{TRAINER_STATE_NAME} cannot be read: {message}") from cause


def unreadable(checkpoint: str, name: str, cause: Exception) -> WeightsError:
    """The error of a checkpoint whose file turns out to be damaged."""
    message = " ".join(str(cause).split()) or type(cause).__name__
    return _not_whole(Path(checkpoint), f"{name} cannot be read: {message[:120]}")


def _not_whole(checkpoint: Path, what: str) -> WeightsError:
    return WeightsError(
        f"{checkpoint} is not a whole checkpoint ({what.rstrip('.')}); resume from another one, or "
        "leave resume_from_checkpoint out to start anew."
    )
