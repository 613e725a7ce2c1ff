"""The checkpoint that a training resumes from, checked before anything is built for it."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from merak.checkpoint.files import set_aside
from merak.checkpoint.formats.of_trainer import is_of_trainer
from merak.checkpoint.formats.pickled import is_pickled
from merak.checkpoint.manifest import MANIFEST
from merak.checkpoint.saved import check_valid, open_checkpoint
from merak.core.errors import WeightsError
from merak.core.rank0 import is_rank0, warn_on_rank0

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
        reads_all: whether the training itself begins: the checksums of all files are compared, and
            folders without a manifest that were passed over are renamed.

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
            f"Can't find a valid checkpoint at {request}: resume_from_checkpoint={request!r} is "
            "not a folder; name a checkpoint-… folder that a trainer wrote, or leave it out to "
            "start anew."
        )
    _check(Path(request), allow_pickled, reads_all)
    return os.fspath(request)


def outdated(newest: Path, best: str | None, limit: int | None) -> list[Path]:
    """Checkpoints that a run may remove after a save; those of later steps are not its own.

    Args:
        newest: the checkpoint that was just saved, which stays.
        best: the one of the best model, which stays.
        limit: how many may stay; None, or none above 0, for all.
    """
    if limit is None or limit <= 0:
        return []
    found = [one for one in _checkpoints(newest.parent) if _number(one) <= _number(newest)]
    kept = {newest, newest if best is None else Path(best)} & set(found)
    excess = len(found) - max(limit, len(kept))
    return [one for one in reversed(found) if one not in kept][: max(excess, 0)]


def _checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    named = output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    found = [folder for folder in named if _step(folder) is not None and folder.is_dir()]
    return sorted(found, key=_number, reverse=True)


def _number(checkpoint: Path) -> int:
    return _step(checkpoint) or 0


def _step(checkpoint: Path) -> int | None:
    digits = checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(digits) if digits.isascii() and digits.isdecimal() else None  # not ², nor ٣


def _newest_valid(found: list[Path], output_dir: Path, allow_pickled: bool, reads_all: bool) -> str:
    """The newest valid checkpoint; damaged ones are named and passed over."""
    problems: list[WeightsError] = []
    for checkpoint in found:
        try:
            _check(checkpoint, allow_pickled, reads_all)
        except WeightsError as problem:
            problems.append(problem)
            continue
        aside = _set_aside(found[: len(problems)]) if reads_all and is_rank0() else {}
        for folder, passed_over in zip(found, problems):
            moved = f" It is {aside[folder]} now." if folder in aside else ""
            warn_on_rank0(logger, "%s Passed over for %s.%s", passed_over, checkpoint, moved)
        return str(checkpoint)
    if problems:
        raise problems[0]
    raise WeightsError(
        f"No valid checkpoint found in output directory ({output_dir}): resume_from_checkpoint="
        "True, but it has no checkpoint-… folder; name one, or leave it out to start anew."
    )


def _set_aside(passed_over: list[Path]) -> dict[Path, Path]:
    """Rename folders without a manifest, in whose place no checkpoint could be saved; new names.

    One that is damaged, or that another tool wrote, stays: a checkpoint of its step replaces it.
    """
    found = {}
    for folder in passed_over:
        if not (os.path.lexists(folder / MANIFEST) or is_pickled(folder) or is_of_trainer(folder)):
            with suppress(OSError):  # in a folder that cannot be written, nothing will be saved
                found[folder] = set_aside(folder)
    return found


def _check(checkpoint: Path, allow_pickled: bool, reads_all: bool) -> None:
    if reads_all:
        check_valid(checkpoint, allow_pickled)
    else:
        open_checkpoint(checkpoint, allow_pickled)
