"""Saving of checkpoints, by all ranks together, in the background while training goes on."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from merak.checkpoint.description import describe_model
from merak.checkpoint.files import (
    commit,
    inner_files,
    partial_folder,
    record_file,
    set_aside,
    start_partial,
)
from merak.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    TIED,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
)
from merak.checkpoint.model_files import ModelFiles, plan_model_files, plan_other_files
from merak.checkpoint.remote.committing import commit_remote, start_remote
from merak.checkpoint.remote.folder import RemoteFolder, is_url, name_of
from merak.checkpoint.save_pretrained import on_rank0, ranks_that_see
from merak.checkpoint.shards import Box, Shards, assign_boxes, box_sizes, only_boxes, shard_of
from merak.checkpoint.staging import ShardStager
from merak.checkpoint.state import (
    RankState,
    buffers_to_save,
    held_shards,
    held_values,
    merged_values,
)
from merak.checkpoint.storage import BOXES, WEIGHTS, CheckpointWriter, ShardSavePlanner
from merak.checkpoint.values import dtype_name, pack_value
from merak.checkpoint.writing import failure_of, together
from merak.core.errors import SavingError, WeightsError
from merak.core.health.failure import is_lost_connection
from merak.core.health.status import during, phase, waiting, waiting_for_all
from merak.core.health.timeouts import until
from merak.core.mesh import Mesh
from merak.core.packages import installed_version
from merak.graph.weights.gather_weights import state_names
from merak.graph.weights.holders import find_holders
from merak.graph.weights.rank_agreement import gather_objects, is_distributed

logger = logging.getLogger(__name__)

PACKAGES = {"merak": "merak-train", "torch": "torch", "transformers": "transformers"}
"""Packages whose versions a manifest has, and their names as distributions."""


SENTINEL = "checkpoint-is-incomplete.txt"
"""File that transformers' `enable_jit_checkpoint` puts into the folder before it has it saved."""

ABANDON_S = 5.0
"""Seconds that a save gets when its rank has failed."""


@dataclass(frozen=True, slots=True)
class Contents:
    """State that a checkpoint holds beside parameters and optimizer.

    Args:
        values: small values by name, such as the state of the learning rate schedule.
        layout: of the job, for people.
        model_files: of the folder that `from_pretrained` reads; the tensors that these files hold
            as they are, whole, are not stored a second time.
        write_files: writes further files into the folder that it is given, on rank 0.
        committed: called on rank 0, in the thread that saves, when the checkpoint is there.
        owns_target: whether the target's name is the job's own, so that what is there and is no
            checkpoint is set aside; else it is refused.
        url: of the checkpoint on remote storage, in the place of the target's folder, in whose
            place it is then written aside.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    model_files: ModelFiles | None = None
    write_files: Callable[[Path], None] | None = None
    committed: Callable[[], None] | None = None
    owns_target: bool = False
    url: str | None = None

    @property
    def remote(self) -> RemoteFolder | None:
        """The checkpoint's folder on remote storage, if it is to be there."""
        return None if self.url is None else RemoteFolder(self.url)


class CheckpointSaver:
    """Saves one checkpoint after the other; made once for a job, by all ranks.

    Args:
        mesh: the grid of ranks.
        in_background: whether `save` returns as soon as the state has been copied.
    """

    def __init__(self, mesh: Mesh, in_background: bool = True) -> None:
        self._mesh = mesh
        self._in_background = in_background
        self._stager = ShardStager()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="merak save")
        self._group: dist.ProcessGroup | None = None
        self._pending: Future[Any] | None = None
        self._target: Path | None = None
        self._url: str | None = None
        self._writer: CheckpointWriter | None = None
        # Which boxes this rank writes, and the boxes of all ranks that it was decided for.
        self._assigned: frozenset[Box] = frozenset()
        self._assigned_for: list[int] | None = None

    def save(self, target: Path, state: RankState, contents: Contents | None = None) -> None:
        """Save a checkpoint; collective. Waits for the save before.

        Args:
            target: the checkpoint's folder, seen by all ranks; a checkpoint that is there is
                replaced when all has been written.
            state: of this rank.
            contents: what it holds besides.

        Raises:
            SavingError: the folder cannot be written, or the save before has failed.
            WeightsError: the folder holds other files, or the optimizer has parameters that the
                model does not have.
        """
        self.wait()
        found = contents or Contents()
        with phase(f"saving {target.name}"):
            kinds, manifest = self._start(target, state, found)
            if self._in_background and self._group is None and is_distributed():
                self._group = dist.new_group(backend="gloo")
            self._target, self._url = target, found.url
            self._writer = CheckpointWriter(
                partial_folder(target),
                self._mesh.rank,
                partial(self._complete, target, manifest, found),
                found.model_files,
                self._group,
                found.remote,
            )
            self._pending = self._begin(self._writer, kinds)
            if self._in_background:
                self._pending.add_done_callback(self._tell_failure)
        if not self._in_background:
            self.wait()

    def wait(self) -> None:
        """Wait until the last save has ended; collective.

        Raises:
            SavingError: it has failed. The checkpoint before it is as it was.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        assert self._target is not None and self._writer is not None
        name, writer = self._target.name, self._writer
        while not pending.done():
            with phase(f"writing parameters and optimizer of {name}"):
                until(lambda: pending.done() or writer.waits or writer.commits)
            with phase(f"committing {name}"):
                until(lambda: pending.done() or not writer.commits)
            with waiting_for_all(f"parameters and optimizer of {name} to be written by"):
                until(lambda: pending.done() or not writer.waits)
        problem = pending.exception()
        if self._url is not None or problem is not None:
            self._remove_partial()
        if problem is None:
            return
        # A rank that has died is told of where lost connections are.
        raise problem if is_lost_connection(problem) else failure_of(problem, self._target)

    def is_saving(self, place: str) -> bool:
        """Whether a checkpoint is being written.

        Args:
            place: its folder or URL.
        """
        return self._pending is not None and place == (self._url or str(self._target))

    def abandon(self) -> None:
        """Wait a moment for a save that is under way, since this rank has failed.

        What is left of one that does not is removed.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with suppress(TimeoutError):
            if pending.exception(ABANDON_S) is None:
                return
        self._remove_partial()

    def close(self) -> None:
        """Free the copies and the thread, after the last save."""
        self._stager.close()
        self._executor.shutdown()

    def _tell_failure(self, pending: Future[Any]) -> None:
        """Say at once, in the thread that saves, what is raised when the job waits for the save."""
        problem = pending.exception()
        if problem is None or pending is not self._pending or self._mesh.rank != 0:
            return
        assert self._target is not None
        failure = failure_of(problem, self._target)
        if isinstance(failure, SavingError):
            message = "%s The job goes on until the next save; the checkpoint before is as it was."
            logger.error(message, failure)

    def _remove_partial(self) -> None:
        is_here = self._mesh.rank == 0 or self._url is not None  # perhaps a folder of each host
        if is_here and self._target is not None:
            shutil.rmtree(partial_folder(self._target), ignore_errors=True)  # of no use, and large

    def _start(
        self, target: Path, state: RankState, contents: Contents
    ) -> tuple[dict[str, Shards], Manifest]:
        """Collect what all ranks save, and make the folder; collective.

        Returns:
            The shards that this rank writes, by kind; what the manifest has beside tensors and
            files.
        """
        files = contents.model_files
        shards: Shards = {}
        weights: Shards = {}
        values: dict[str, Any] = {}
        buffers = buffers_to_save(state)

        def start() -> None:
            stored = {f"{MODEL}{name}" for name in files.stored} if files is not None else set()
            held = held_shards(state, buffers)
            shards.update({key: shard for key, shard in held.items() if key not in stored})
            if files is not None:
                tensors = state.view().tensors
                weights.update({n: shard_of(tensors[n], None, 0) for n in files.needed()})
            values.update(held_values(state))
            if self._mesh.rank == 0:
                if contents.remote is None:
                    _clear(target, contents.owns_target)
                else:
                    start_remote(contents.remote, contents.owns_target)
                folder = start_partial(target)
                if files is not None:
                    files.write_companions(folder)
                if contents.write_files is not None:
                    contents.write_files(folder)

        together(start, target)
        if contents.url is not None:  # each host has a folder of its own for what it uploads
            partial_folder(target).mkdir(parents=True, exist_ok=True)
        sizes = box_sizes(shards)
        found = gather_objects((hash(tuple(sizes.items())), values))
        hashes = [one for one, _ in found]
        if hashes != self._assigned_for:
            self._assigned = assign_boxes(gather_objects(sizes))[self._mesh.rank]
            self._assigned_for = hashes
        described = state.description or describe_model(state.model)
        manifest = _manifest(contents, {}, {}, described, state.model)
        of_ranks = merged_values([of_rank for _, of_rank in found])
        manifest = replace(manifest, values={**of_ranks, **manifest.values})
        return {BOXES: only_boxes(shards, self._assigned), WEIGHTS: weights}, manifest

    def _begin(self, writer: CheckpointWriter, kinds: dict[str, Shards]) -> Future[Any]:
        planner = ShardSavePlanner()
        if not is_distributed():
            staged = self._stager.stage(kinds) if self._in_background else kinds
            return self._executor.submit(_save_alone, writer, planner, staged)
        if not self._in_background:
            return self._executor.submit(save, kinds, storage_writer=writer, planner=planner)
        return cast(
            "Future[Any]",
            async_save(
                kinds,
                storage_writer=writer,
                planner=planner,
                process_group=self._group,
                async_stager=self._stager,
            ),
        )

    def _complete(
        self,
        target: Path,
        manifest: Manifest,
        contents: Contents,
        tensors: Mapping[str, StoredTensor],
        files: Mapping[str, StoredFile],
    ) -> None:
        """Commit the checkpoint, on rank 0, when all ranks have written."""
        folder = partial_folder(target)
        own = set(inner_files(folder)) - files.keys()
        every = {name: record_file(folder / name) for name in sorted(own)} | dict(files)
        if contents.model_files is not None:
            tensors = {**tensors, **_whole_tensors(contents.model_files)}
        manifest = replace(manifest, tensors=tensors, files=every)
        if contents.remote is None:
            commit(target, manifest)
        else:
            commit_remote(contents.remote, folder, manifest)
        if contents.committed is not None:
            contents.committed()


def save_state(
    target: str | os.PathLike[str], state: RankState, contents: Contents | None = None
) -> None:
    """Save one checkpoint in a folder, or at a URL, and wait for it; collective.

    See `CheckpointSaver.save`.
    """
    saver, found = CheckpointSaver(state.mesh, in_background=False), contents or Contents()
    with ExitStack() as stack:
        stack.callback(saver.close)
        folder = Path(target)
        if is_url(target):
            aside = stack.enter_context(tempfile.TemporaryDirectory(prefix="merak-"))
            folder, found = Path(aside, name_of(str(target))), replace(found, url=str(target))
        saver.save(folder, state, found)


@during("saving the last weights")
def save_weights(target: Path, state: RankState, contents: Contents) -> None:
    """Save a checkpoint of the model alone, also where not all ranks see its folder; collective.

    Every file is written by a rank that sees the folder which rank 0 makes.

    Args:
        target: the checkpoint's folder, seen by rank 0.
        state: of this rank, without an optimizer.
        contents: what it holds besides, but for `model_files`.

    Raises:
        WeightsError: it could not be written, or the folder holds other files.
    """
    model, mesh, folder = state.model, state.mesh, partial_folder(target)
    on_rank0(partial(_clear, target, True), target, mesh, "model")
    holdings = find_holders(model, state.owned, state.shards, mesh)
    recorded: dict[str, StoredFile] = {}
    try:
        writers = ranks_that_see(target, folder, mesh, "model")
        files = plan_model_files(model, holdings, mesh, writers=writers)
        others = plan_other_files(files, holdings, writers)
        tensors = state.view().tensors
        for planned in (files, others):
            written = planned.write(tensors, folder, wait=waiting, target=target)
            record = partial(_record, folder, written, recorded)
            together(record, target)
        everyone = gather_objects(recorded)

        def finish() -> None:
            files.write_companions(folder)
            if contents.write_files is not None:
                contents.write_files(folder)
            every = {name: one for found in everyone for name, one in found.items()}
            _record(folder, sorted(set(inner_files(folder)) - every.keys()), every)
            described = state.description or describe_model(model)
            stored = _whole_tensors(files) | _whole_tensors(others)
            manifest = _manifest(contents, stored, every, described, model)
            commit(target, manifest)

        on_rank0(finish, target, mesh, "model")
    finally:
        if mesh.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _record(folder: Path, names: Iterable[str], recorded: dict[str, StoredFile]) -> None:
    recorded.update({name: record_file(folder / name) for name in names})


def _manifest(
    contents: Contents,
    tensors: Mapping[str, StoredTensor],
    files: Mapping[str, StoredFile],
    described: Mapping[str, Any],
    model: nn.Module,
) -> Manifest:
    tied = {name: first for name, first in state_names(model).items() if name != first}
    values = {**contents.values, **({TIED: tied} if tied else {})}
    return Manifest(
        tensors=tensors,
        values={name: pack_value(one, name) for name, one in values.items()},
        files=files,
        model=described,
        layout=contents.layout,
        versions={name: installed_version(package) for name, package in PACKAGES.items()},
    )


def _whole_tensors(files: ModelFiles) -> dict[str, StoredTensor]:
    """The tensors that the files of the model hold as they are."""
    found = {}
    for name, (file, key) in files.stored.items():
        holders = files.held[name].holders
        box = StoredBox(file, key, (0,) * len(holders.shape), holders.shape)
        found[f"{MODEL}{name}"] = StoredTensor(holders.shape, dtype_name(holders.dtype), (box,))
    return found


def _save_alone(
    writer: CheckpointWriter, planner: ShardSavePlanner, kinds: dict[str, Shards]
) -> None:
    """What torch's `save` does, without its warning that there is one process."""
    planner.set_up_planner(kinds, is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    writer.finish(metadata, [writer.write_data(plan, planner).value()])


def _clear(target: Path, is_own: bool) -> None:
    """Set what is in a target's place and is no checkpoint aside, or refuse it."""
    names = {path.name for path in target.iterdir()} if target.is_dir() else set()
    if target.is_dir() and (MANIFEST in names or names <= {SENTINEL}):
        return
    if os.path.lexists(target) and is_own:
        logger.warning("%s is no checkpoint; it is %s now.", target, set_aside(target))
    elif os.path.lexists(target):
        raise WeightsError(
            f"{target} is there already and is no checkpoint; save to a folder of its own."
        )
