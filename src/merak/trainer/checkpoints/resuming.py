"""The checkpoint that a training resumes from, checked before anything is built for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from merak.checkpoint.files import remove_checkpoint as remove_folder
from merak.checkpoint.files import set_aside
from merak.checkpoint.formats.of_trainer import is_of_trainer
from merak.checkpoint.formats.pickled import is_pickled
from merak.checkpoint.manifest import MANIFEST, parse_manifest
from merak.checkpoint.remote.committing import manifest_text, remove_remote
from merak.checkpoint.remote.fetching import fetch_together
from merak.checkpoint.remote.folder import RemoteFolder, is_url, name_of
from merak.checkpoint.saved import check_valid, open_checkpoint
from merak.core.errors import MerakError, WeightsError
from merak.core.rank0 import is_rank0, warn_on_rank0
from merak.graph.weights.rank_agreement import gather_objects

logger = logging.getLogger(__name__)

AUTO = "auto"
"""Request for the newest valid checkpoint, or for a new training where there is none at all."""


def checkpoint_to_resume(
    request: object,
    output_dir: str,
    *,
    url: str | None = None,
    allow_pickled: bool = False,
    reads_all: bool = True,
) -> str | None:
    """Find and check the checkpoint that a training resumes from; collective.

    Args:
        request: a folder or URL; True for the newest valid one of the run; "auto" likewise, or None
            where there is no checkpoint; None or False for none.
        output_dir: folder of the run, into which a checkpoint of remote storage is fetched.
        url: where the run saves; in `output_dir` if it is None.
        allow_pickled: whether checkpoints of the format before this one may be read.
        reads_all: whether the training itself begins: the checksums of all files are compared, and
            folders without a manifest that were passed over are renamed.

    Returns:
        The folder, perhaps one that was fetched; a URL as it is, if the training does not begin.

    Raises:
        WeightsError: there is none, or none is valid.
    """
    if request is None or request is False:
        return None
    check = partial(_check, Path(output_dir), allow_pickled, reads_all)
    if request is True or request == AUTO:
        run = url or output_dir
        found = checkpoints_in(run)
        if not found and request == AUTO:
            return None
        return _newest_valid(found, run, check, sets_aside=reads_all)
    if not (isinstance(request, str | os.PathLike) and is_there(os.fspath(request))):
        raise WeightsError(
            f"Can't find a valid checkpoint at {request}: resume_from_checkpoint={request!r} is "
            "not a folder; name a checkpoint-… folder that a trainer wrote, or leave it out to "
            "start anew."
        )
    return check(os.fspath(request))


def outdated(newest: str, best: str | None, limit: int | None) -> list[str]:
    """Checkpoints that a run may remove after a save; those of later steps are not its own.

    Args:
        newest: the checkpoint that was just saved, which stays; a folder or URL, as all others.
        best: the one of the best model, which stays.
        limit: how many may stay; None, or none above 0, for all.
    """
    if limit is None or limit <= 0:
        return []
    run = newest.rpartition("/")[0]
    found = [one for one in _listed(run) if _number(one) <= _number(newest)]
    kept = {newest, newest if best is None else best} & set(found)
    excess = len(found) - max(limit, len(kept))
    return [one for one in reversed(found) if one not in kept][: max(excess, 0)]


def remove_checkpoint(place: str) -> None:
    """Remove a checkpoint; cut off half-way, it is no checkpoint any more.

    Args:
        place: its folder or URL.
    """
    if is_url(place):
        remove_remote(RemoteFolder(place))
    else:
        remove_folder(Path(place))


def checkpoint_place(run: str, step: int) -> str:
    """The folder or URL of a step's checkpoint, as transformers names it.

    Args:
        run: folder or URL of the run's checkpoints.
        step: number of the step.
    """
    name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
    return RemoteFolder(run).child(name).url if is_url(run) else str(Path(run) / name)


def is_there(place: str) -> bool:
    """Whether a checkpoint's folder is there; collective for a URL, which rank 0 looks at.

    Args:
        place: folder or URL.
    """
    if not is_url(place):
        return os.path.isdir(place)
    return _of_rank0(lambda: RemoteFolder(place).has(MANIFEST))


def checkpoints_in(run: str) -> list[str]:
    """The checkpoints of a run, the newest first; collective for a URL, which rank 0 looks at.

    Args:
        run: folder or URL of the run's checkpoints.
    """
    return _of_rank0(lambda: _listed(run)) if is_url(run) else _listed(run)


def _listed(run: str) -> list[str]:
    if is_url(run):
        remote = RemoteFolder(run)
        # Without a manifest, a save was cut off, or is another job's that is under way.
        named = [remote.child(n) for n in remote.folders() if _step(n) is not None]
        found = [folder.url for folder in named if folder.has(MANIFEST)]
    else:
        folders = Path(run).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        found = [str(one) for one in folders if _step(one.name) is not None and one.is_dir()]
    return sorted(found, key=_number, reverse=True)


Found = TypeVar("Found")


def _of_rank0(look: Callable[[], Found]) -> Found:
    """What rank 0 finds on remote storage, which all ranks go by; collective."""
    found: Found | None = None
    failure: MerakError | None = None
    if is_rank0():
        try:
            found = look()
        except MerakError as error:
            failure = error
    found, failure = gather_objects((found, failure))[0]
    if failure is not None:
        raise failure
    return cast("Found", found)


def _number(place: str) -> int:
    return _step(name_of(place)) or 0


def _step(name: str) -> int | None:
    digits = name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(digits) if digits.isascii() and digits.isdecimal() else None  # not ², nor ٣


def _newest_valid(
    found: list[str], run: str, check: Callable[[str], str], *, sets_aside: bool
) -> str:
    """The newest valid checkpoint; damaged ones are named and passed over."""
    problems: list[WeightsError] = []
    for checkpoint in found:
        try:
            valid = check(checkpoint)
        except WeightsError as problem:
            problems.append(problem)
            continue
        passed_over = found[: len(problems)]
        aside = _set_aside(passed_over) if sets_aside and is_rank0() else {}
        for place, reason in zip(passed_over, problems):
            moved = f" It is {aside[place]} now." if place in aside else ""
            warn_on_rank0(logger, "%s Passed over for %s.%s", reason, checkpoint, moved)
        return valid
    if problems:
        raise problems[0]
    raise WeightsError(
        f"No valid checkpoint found in output directory ({run}): resume_from_checkpoint="
        "True, but it has no checkpoint-… folder; name one, or leave it out to start anew."
    )


def _set_aside(passed_over: list[str]) -> dict[str, Path]:
    """Rename folders without a manifest, in whose place no checkpoint could be saved; new names.

    One that is damaged, or that another tool wrote, stays: a checkpoint of its step replaces it.
    """
    found = {}
    for place in passed_over:
        folder = Path(place)
        if is_url(place) or os.path.lexists(folder / MANIFEST):
            continue
        if not (is_pickled(folder) or is_of_trainer(folder)):
            with suppress(OSError):  # in a folder that cannot be written, nothing will be saved
                found[place] = set_aside(folder)
    return found


def _check(output_dir: Path, allow_pickled: bool, reads_all: bool, checkpoint: str) -> str:
    """Check a checkpoint; returns its folder, which is fetched from remote storage."""
    if is_url(checkpoint) and not reads_all:
        parse_manifest(checkpoint, manifest_text(RemoteFolder(checkpoint)))
        return checkpoint
    is_remote = is_url(checkpoint)
    folder = fetch_together(checkpoint, output_dir) if is_remote else Path(checkpoint)
    if reads_all:
        check_valid(folder, allow_pickled)
    else:
        open_checkpoint(folder, allow_pickled)
    return str(folder)
