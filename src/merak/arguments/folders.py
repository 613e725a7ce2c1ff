"""Output folder of a run: checks that every rank sees and can write it, and of its free space."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from transformers.trainer_utils import HubStrategy

from merak.arguments.fields import TrainingFields
from merak.checkpoint.remote.folder import RemoteFolder, check_writable, is_url
from merak.core.errors import ArgumentsError, MerakError
from merak.core.health.status import waiting_for_all
from merak.core.health.timeouts import until
from merak.core.mesh import Mesh
from merak.core.rank0 import decide_on_rank0, warn_on_rank0
from merak.core.units import ranges, size
from merak.graph.weights.rank_agreement import gather_objects

logger = logging.getLogger(__name__)

PROBE = ".merak-probe-"
"""How the names of the files begin by which ranks find out whether they share a folder."""

_OF_FOLDERS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)

VISIBLE_S = 10.0
"""Seconds in which a file of another host must be seen: network file systems cache folders."""


def folder_problems(arguments: TrainingFields) -> Iterator[str]:
    """Yield why folder or URL cannot be written, as far as can be told without writing there."""
    url = arguments.checkpoint_url
    if is_url(arguments.output_dir):
        yield (
            f"output_dir={arguments.output_dir!r} is no folder of this host, which logs and last "
            f"weights need; name one, and use checkpoint_url={arguments.output_dir!r}."
        )
        return
    if url is not None and not is_url(url):
        yield f"checkpoint_url={url!r} is no URL; use such as s3://bucket/run."
    elif url is not None:
        try:
            RemoteFolder(url).open()
        except ArgumentsError as error:
            yield f"checkpoint_url={url!r}: {error}"
    if url is not None and arguments.push_to_hub and arguments.hub_strategy in _OF_FOLDERS:
        yield (
            f"hub_strategy={HubStrategy(arguments.hub_strategy).value!r} pushes whole checkpoints, "
            "which checkpoint_url keeps elsewhere; use hub_strategy='every_save'."
        )
    wanted = Path(str(arguments.output_dir)).expanduser().absolute()
    found = next(p for p in (wanted, *wanted.parents) if os.path.lexists(p))
    if not found.is_dir():
        yield (
            f"output_dir={str(arguments.output_dir)!r} cannot be a folder, since {found} is a "
            "file; name another."
        )
    elif not os.access(found, os.W_OK | os.X_OK):
        yield (
            f"output_dir={str(arguments.output_dir)!r} cannot be written, since {found} is not "
            "yours to write into; name another."
        )


def make_output_folder(folder: str) -> None:
    """Make the folder of a run's results, and check that a file can be written there.

    Raises:
        ArgumentsError: it cannot.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"merak")
    except OSError as cause:
        raise ArgumentsError(
            f"output_dir={folder!r} cannot be written ({cause.strerror}); name another."
        ) from cause


@dataclass(frozen=True, slots=True)
class _View:
    """The output folder as one rank sees it.

    Args:
        host: of the rank.
        folder: as the rank has it.
        is_shared: whether it sees rank 0's file there.
        reason: why it cannot write there; empty where it can.
    """

    host: str
    folder: str
    is_shared: bool
    reason: str


def check_shared_folder(folder: str, mesh: Mesh, *, saves: bool) -> None:
    """Check that all ranks have the same output folder, and can write it; a collective.

    Args:
        folder: this rank's.
        mesh: of the job.
        saves: whether checkpoints are saved there. If not, hosts without a shared folder get a
            warning.

    Raises:
        ArgumentsError: checkpoints could not be saved there.
    """
    if mesh.device_mesh is None or mesh.world_size == 1:
        make_output_folder(folder)
        return
    if not saves and not mesh.hosts:
        return
    probe = decide_on_rank0(mesh, "the output folder", lambda: _write_probe(folder))
    try:
        own = _look_for(folder, probe)
        views = [own] * mesh.world_size
        with waiting_for_all("the output folder to be seen by"):
            dist.all_gather_object(views, own)
    finally:
        if mesh.rank == 0:
            Path(folder, probe).unlink(missing_ok=True)
    problem = _not_shared(views) or _not_writable(views)
    if problem is None:
        return
    if saves:
        raise ArgumentsError(f"{problem} for the checkpoints, or use save_strategy='no'.")
    warn_on_rank0(logger, "%s if they are to read what is saved there.", problem)


def _write_probe(folder: str) -> str:
    make_output_folder(folder)
    for left_over in Path(folder).glob(f"{PROBE}*"):  # of a job that was killed
        with suppress(OSError):
            left_over.unlink()
    name = f"{PROBE}{secrets.token_hex(8)}"
    Path(folder, name).write_text("merak", encoding="ascii")
    return name


def _look_for(folder: str, probe: str) -> _View:
    path = os.path.abspath(folder)

    def is_there() -> bool:
        with suppress(OSError):
            return probe in os.listdir(path)  # which a network file system asks its server for
        return False

    is_shared, reason = until(is_there, VISIBLE_S), ""
    if is_shared:
        try:
            make_output_folder(path)
        except ArgumentsError as error:
            reason = str(error.__cause__ or error)
    return _View(socket.gethostname(), path, is_shared, reason)


def _not_shared(views: Sequence[_View]) -> str | None:
    """Say which ranks do not see rank 0's file, as a sentence that lacks its end."""
    ranks = [rank for rank, view in enumerate(views) if not view.is_shared]
    if not ranks:
        return None
    own = views[0]
    others = dict.fromkeys((views[r].host, views[r].folder) for r in ranks)
    listed = [host if folder == own.folder else f"{host}: {folder}" for host, folder in others]
    return (
        f"output_dir={own.folder!r} is not one folder for all ranks: rank{'s' * (len(ranks) > 1)} "
        f"{ranges(ranks)} ({'; '.join(listed)}) cannot see what rank 0 writes on {own.host}; name "
        "a folder on a file system that all hosts share"
    )


def _not_writable(views: Sequence[_View]) -> str | None:
    """Say which ranks cannot write into the folder, as a sentence that lacks its end."""
    ranks = [rank for rank, view in enumerate(views) if view.reason]
    if not ranks:
        return None
    first = views[ranks[0]]
    return (
        f"output_dir={first.folder!r} cannot be written by rank{'s' * (len(ranks) > 1)} "
        f"{ranges(ranks)} (on {first.host}: {first.reason}); name another"
    )


def check_url(url: str, mesh: Mesh) -> None:
    """Check that every rank can write into a folder on remote storage; a collective.

    Args:
        url: of the folder.
        mesh: of the job.

    Raises:
        ArgumentsError: a rank cannot, the same on all ranks.
    """
    reason = ""
    try:
        check_writable(url, mesh.rank)
    except MerakError as error:
        reason = str(error)
    reasons = gather_objects(reason, "whether checkpoint_url can be written on")
    if ranks := [rank for rank, one in enumerate(reasons) if one]:
        raise ArgumentsError(
            f"checkpoint_url={url!r} cannot be written by rank{'s' * (len(ranks) > 1)} "
            f"{ranges(ranks)}: {reasons[ranks[0]]}"
        )


def check_space(folder: str, mesh: Mesh, least_bytes: int, num_kept: int) -> None:
    """Check that checkpoints find room; a collective.

    Args:
        folder: this rank's, which exists on rank 0.
        mesh: of the job.
        least_bytes: that one checkpoint takes at least.
        num_kept: checkpoints that are there while another one is written.

    Raises:
        ArgumentsError: there is no room for one.
    """

    def check() -> None:
        free = shutil.disk_usage(folder).free
        if free < least_bytes:
            raise ArgumentsError(
                f"output_dir={folder!r} has {size(free)} free, but a checkpoint of this model "
                f"takes at least {size(least_bytes)}; make room, name another folder, or use "
                "save_strategy='no'."
            )
        if free < least_bytes * (num_kept + 1):
            logger.warning(
                "output_dir=%r has %s free, but a checkpoint of this model takes at least %s, and "
                "another one is written before the oldest of %d is deleted: make room, or lower "
                "save_total_limit.",
                folder, size(free), size(least_bytes), num_kept,
            )  # fmt: skip

    decide_on_rank0(mesh, "the space in the output folder", check)


def warn_of_space(folder: str, mesh: Mesh, num_bytes: int) -> None:
    """Warn where the last weights of a training find no room; a collective.

    Args:
        folder: this rank's, which exists on rank 0.
        mesh: of the job.
        num_bytes: of the weights.
    """

    def check() -> None:
        free = shutil.disk_usage(folder).free
        if free < num_bytes:
            logger.warning(
                "output_dir=%r has %s free, but the last weights, which train() leaves there, take "
                "%s; make room before it ends, name another folder, or set save_last_weights=False "
                "(state_dict() and save_pretrained() of the model are refused then).",
                folder, size(free), size(num_bytes),
            )  # fmt: skip

    decide_on_rank0(mesh, "the space in the output folder", check)
