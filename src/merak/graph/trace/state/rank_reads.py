"""The rank of this process as Python state: where a model's code reads it, and with what effect.

Inside a model's forward and loss the default group is that of the replicas: those ranks whose
batches one process would have as one larger batch.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any
from unittest import mock

import torch.distributed as dist
from accelerate import DistributedType, PartialState  # type: ignore[import-untyped]

from merak.core.errors import TraceError
from merak.core.mesh import Mesh, current_mesh, has_mesh
from merak.core.rank0 import warn_on_rank0
from merak.core.source_lines import MERAK, is_library, with_text
from merak.graph.weights.rank_agreement import is_distributed

logger = logging.getLogger(__name__)

_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID"})
"""Variables of the environment that launchers give each process another value of."""
_LISTING = frozenset({"__iter__", "copy"})
_OF_ACCELERATE = ("process_index", "local_process_index")
_PASSING_ON = (
    __file__,
    os.__file__,
    str(sys.modules[Mesh.__module__].__file__),
    os.path.join(MERAK, "graph", "trace", "calls", "loss_recorder.py"),
)
"""Files of code that reads the rank for its caller, beside those of libraries."""


_NUM_PROCESSES, _KIND = "num_processes", "distributed_type"
_ACCELERATOR = f"{os.sep}accelerate{os.sep}accelerator.py"
_TRAINER = f"{os.sep}transformers{os.sep}trainer"
"""Of files of transformers' trainer, whose own sums over ranks Merak's stands for."""


@dataclass(frozen=True, slots=True)
class ReplicaWorld:
    """The default group as a model finds it in its forward and its loss.

    Args:
        size: number of replicas, each with samples of its own.
        rank: which of them this is.
        ranks: the global ranks that they are where this one is.
    """

    size: int
    rank: int
    ranks: tuple[int, ...]


def replica_world(training: bool, rank: int | None = None) -> ReplicaWorld | None:
    """The replicas of this job; None where no mesh has been laid out, or there is one rank.

    Args:
        training: whether the model trains; the batch of an evaluation is one replica's alone.
        rank: the global rank that asks; None for this one.
    """
    if not (has_mesh() and is_distributed()):
        return None
    mesh = current_mesh()
    mesh = mesh if rank is None else replace(mesh, rank=rank)
    if not training:
        return ReplicaWorld(1, 0, (mesh.rank,))
    return ReplicaWorld(mesh.dp, mesh.dp_rank, tuple(sorted((mesh.rank, *mesh.peers("dp")))))


class RankReads:
    """Reads of the rank, and of the number of ranks, by a model's own code.

    Args:
        instead: the global rank that this code finds; None for the true one.
        training: as of `replica_world`.
        keeps_rank: whether this code finds the rank among all ranks, as what only logs by it has to
            in a step, and the number of replicas all the same.

    Attributes:
        training: as given.
        world: the default group as the model finds it; None for that of all ranks.
        are_met: whether a collective has been called that is followed.
        lines: that read the rank, as "file:number".
        asks_size: whether the number of ranks is read.
    """

    def __init__(
        self, instead: int | None = None, *, training: bool = True, keeps_rank: bool = False
    ) -> None:
        self._instead = instead
        self._thread = threading.get_ident()
        self.world = replica_world(training, instead)
        self._keeps_rank = keeps_rank
        self.training = training
        self.lines: dict[str, None] = {}
        self.asks_size = self.are_met = False

    def _found(self, rank: Any, in_world: int | None = None) -> Any:
        """What a read finds: Merak's own, and other threads', the true rank.

        Args:
            rank: the true one.
            in_world: the one that a model finds; None for its global rank.
        """
        if threading.get_ident() != self._thread or not (line := reading_line()):
            return rank
        self.lines[line] = None
        if in_world is not None:
            return in_world
        return rank if self._instead is None else type(rank)(self._instead)

    def _found_size(self, size: int) -> int:
        """What a read of the number of ranks finds."""
        if self.world is None or threading.get_ident() != self._thread:
            return size
        line = reading_line()
        if not line or _TRAINER in line:
            return size
        self.asks_size = True
        return self.world.size

    def _found_kind(self, state: Any) -> Any:
        """What accelerate's functions find: that replicas meet, where a model calls them itself.

        An `Accelerator`, such as a trainer's own, is that of one process.
        """
        found = vars(state)[_KIND]
        if self._found_size(1) == 1 or _is_in_file(sys._getframe(1), _ACCELERATOR):
            return found
        is_on_cpu = state.device.type == "cpu"
        return DistributedType.MULTI_CPU if is_on_cpu else DistributedType.MULTI_GPU

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context in which reads of this thread are recorded."""
        rank_of, size_of = dist.ProcessGroup.rank, dist.ProcessGroup.size
        value_of = os._Environ.__getitem__
        own: Any = vars(Mesh)["rank"]
        in_world = None if self.world is None or self._keeps_rank else self.world.rank

        def rank_in(group: dist.ProcessGroup) -> Any:
            return self._found(rank_of(group), in_world if is_default(group) else None)

        def size(group: dist.ProcessGroup) -> int:
            found = size_of(group)
            return self._found_size(found) if is_default(group) else found

        def variable(environment: Any, name: Any) -> Any:
            value = value_of(environment, name)
            is_listed = sys._getframe(1).f_code.co_name in _LISTING  # of all variables
            return value if name not in _VARIABLES or is_listed else self._found(value)

        with ExitStack() as stack:
            for owner, name, value in (
                (dist.ProcessGroup, "rank", rank_in),
                (dist.ProcessGroup, "size", size),
                (os._Environ, "__getitem__", variable),
                (Mesh, "rank", property(lambda mesh: self._found(own.__get__(mesh)))),
                *((PartialState, n, self._attribute(n)) for n in _OF_ACCELERATE),
                (PartialState, _NUM_PROCESSES, self._number()),
                (PartialState, _KIND, property(self._found_kind)),
            ):
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
            yield

    def _attribute(self, name: str) -> property:
        return property(lambda state: self._found(vars(state)[name]))

    def _number(self) -> property:
        return property(lambda state: self._found_size(vars(state)[_NUM_PROCESSES]))


def _is_in_file(frame: FrameType | None, file: str) -> bool:
    """Whether code of a file has called, directly or not."""
    while frame is not None and not frame.f_code.co_filename.endswith(file):
        frame = frame.f_back
    return frame is not None


def is_default(group: Any) -> bool:
    """Whether a process group is the default one, of all ranks."""
    return dist.is_initialized() and group is dist.distributed_c10d._get_default_group()


def reading_line(frame: FrameType | None = None) -> str:
    """The line of a model or a script that asks for something; "" where Merak's own code does.

    Args:
        frame: where to begin; by default the caller's.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        is_merak = file.startswith(MERAK) and file not in _PASSING_ON
        if is_merak or not (file in _PASSING_ON or "/accelerate/" in file or is_library(file)):
            return "" if is_merak else f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def refuse_by_rank(reads: RankReads, described: Callable[[RankReads], object]) -> bool:
    """Refuse a model that computes something else on other ranks; what only prints may do so.

    Args:
        reads: of a trace on this rank.
        described: traces the model where others read the rank, and describes what it computes.

    Other replicas may compute something else where they meet: they know which rows are their own.

    Returns:
        Whether anything is warned of.

    Raises:
        TraceError: it does.
    """
    if not reads.lines or not is_distributed():
        return False
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    others = {0, 1, num_ranks - 1}
    if reads.are_met:
        mesh = current_mesh()
        places = (replace(mesh, rank=other) for other in range(num_ranks))
        others = {place.rank for place in places if place.dp_rank == mesh.dp_rank}
        others = {min(others), max(others)}
    lines = ", ".join(map(with_text, reads.lines))
    try:
        mine = described(reads)
        for other in sorted(others - {rank}):
            if described(RankReads(other, training=reads.training)) != mine:
                raise _Refusal(
                    f"{lines} reads the rank of the process, and rank {other} would compute "
                    f"something else than rank {rank}: pipeline ranks run pieces of one graph, "
                    "tensor parallel ranks have the same samples, and replicas share one model. "
                    "Leave it out; what only prints may stay, under `if dist.get_rank() == 0`."
                )
    except _Refusal as error:
        raise TraceError(str(error)) from None
    except TraceError as error:
        warn_on_rank0(
            logger,
            "%s reads the rank of the process, and whether other ranks compute something else "
            "cannot be told (%s).",
            lines,
            error,
        )
        return True
    return False


class _Refusal(TraceError):
    """Other ranks compute something else."""
