"""Replica buffers: buffers that the forward writes, synchronised over the replicas of a stage.

Replicas run at the same time, each on its own samples. What they write is brought together at the
end of every step, so that the next one, an evaluation and a checkpoint find the same everywhere:

- what no sample has a part in is the same already, and is looked after only where replicas had
  different numbers or shapes of microbatches;
- the running statistics of norms of a batch are averaged;
- of everything else the first replica's is taken, as torch's DistributedDataParallel does, and a
  warning names it.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from merak.core.mesh import Mesh, largest
from merak.core.rank0 import warn_on_rank0
from merak.engine.comm.gradient_buckets import others_of
from merak.engine.health.status import Progress
from merak.graph.program.program import Program
from merak.graph.segment.buffer_kinds import (
    DIFFERS,
    WrittenBuffer,
    classify_written_buffers,
    written_buffers,
)
from merak.plan.layout import Layout

logger = logging.getLogger(__name__)

MOST_NAMED = 8
"""Buffers that a warning names; of more it gives the number."""


@dataclass(frozen=True, slots=True)
class StageBuffers:
    """The buffers that one stage writes.

    Args:
        group: all ranks that hold the same part of the stage.
        first: the global rank of the replica whose buffers count.
        kinds: the buffers by name, and what each is.
    """

    group: dist.ProcessGroup
    first: int
    kinds: Mapping[str, WrittenBuffer]

    def of(self, *kinds: WrittenBuffer) -> list[str]:
        """Names of the buffers of some kinds."""
        return [name for name, kind in self.kinds.items() if kind in kinds]


def stage_buffers(
    layout: Layout, mesh: Mesh, groups: Mapping[int, dist.ProcessGroup | None]
) -> list[StageBuffers]:
    """The buffers that this rank's stages and their replicas write; warns of writes that are lost.

    Args:
        layout: the model, laid out.
        mesh: the grid of ranks.
        groups: by stage, of this rank's at least, all ranks that hold the same part of it.
    """
    if mesh.replicas == 1 and len(layout.schedule.pipes) == 1:
        return []
    kinds = classify_written_buffers(layout.graph, len(layout.schedule.pipes))
    _warn([name for name, kind in kinds.items() if kind in DIFFERS])
    found = []
    for stage in sorted(layout.schedule.stages_of(mesh.pp_rank)):
        group = groups[stage]
        own = layout.partition.stages[stage]
        written = {
            name: kinds[name]
            for segment in layout.graph.segments[own.start : own.stop]
            for name in written_buffers(segment.graph)
            if name in kinds
        }
        if group is not None and written:
            first = layout.stage_rank[stage] * mesh.replicas * mesh.tp + mesh.tp_rank
            found.append(StageBuffers(group, first, written))
    return found


def _warn(names: Sequence[str]) -> None:
    if not names:
        return
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    warn_on_rank0(
        logger,
        "Replicas differ in the buffers %s%s: the forward writes them, with what depends on the "
        "replica's own microbatches. Each reads its own until the step ends, and then all take the "
        "first replica's, as in torch's DistributedDataParallel (of running statistics, the mean). "
        "So what reads them is not as in one process; with dp=1, in one pipe, it is.",
        ", ".join(names[:MOST_NAMED]),
        more,
    )


class ReplicaBuffers:
    """Synchronises the buffers of a rank's stages with those of their replicas.

    Args:
        stages: the buffers that each writes.
        buffers: the model's buffers by name.
        progress: reports every wait.
    """

    def __init__(
        self,
        stages: Sequence[StageBuffers],
        buffers: Mapping[str, torch.Tensor],
        progress: Progress,
    ) -> None:
        self._stages = stages
        self._buffers = buffers
        self._progress = progress

    @torch.no_grad()
    def start(self) -> None:
        """Broadcast the first replica's buffers, before the first step."""
        for stage in self._stages:
            with self._waiting(stage):
                self._take_first(stage, list(stage.kinds))

    @torch.no_grad()
    def synchronize(self, shapes: object) -> None:
        """Synchronise the buffers after a step; all replicas call it together.

        Args:
            shapes: of this replica's microbatches; equal ones have equal representations.
        """
        for stage in self._stages:
            with self._waiting(stage):
                taken = [WrittenBuffer.SAMPLES]
                if stage.of(WrittenBuffer.SAME) and self._differ(stage, shapes):
                    taken.append(WrittenBuffer.SAME)
                self._take_mean(stage, stage.of(WrittenBuffer.MEAN, WrittenBuffer.READ_MEAN))
                self._take_first(stage, stage.of(*taken))

    @torch.no_grad()
    def evaluated(self, programs: Sequence[Program]) -> None:
        """Synchronise the buffers after an evaluation, if its forward writes; all replicas call it.

        Args:
            programs: of this replica's microbatches.
        """
        writes = any(
            set(segment.written) & stage.kinds.keys()
            for stage in self._stages
            for program in programs
            for own in program.stages.values()
            for segment in own.segments
        )
        for stage in self._stages:
            with self._waiting(stage):
                if any(largest([writes], stage.group)):
                    self._take_first(stage, list(stage.kinds))

    def _waiting(self, stage: StageBuffers) -> AbstractContextManager[None]:
        peers = others_of(stage.group)
        return self._progress.waiting("the buffers that the forward has written on", peers)

    def _differ(self, stage: StageBuffers, shapes: object) -> bool:
        """Whether replicas have run microbatches of other numbers or shapes."""
        number = zlib.crc32(repr(shapes).encode())
        most, least = largest([number, -number], stage.group)
        return most != -least

    def _take_mean(self, stage: StageBuffers, names: Sequence[str]) -> None:
        if not names:
            return
        own = [self._buffers[name] for name in names]
        exact = torch.promote_types(max((b.dtype for b in own), key=_itemsize), torch.float32)
        flat = torch.cat([buffer.reshape(-1).to(exact) for buffer in own])
        dist.all_reduce(flat, group=stage.group)
        flat /= dist.get_world_size(stage.group)
        pieces = flat.split([buffer.numel() for buffer in own])
        for buffer, piece in zip(own, pieces, strict=True):
            buffer.copy_(piece.view_as(buffer))

    def _take_first(self, stage: StageBuffers, names: Sequence[str]) -> None:
        for name in names:
            buffer = self._buffers[name]
            packed = buffer.contiguous()
            dist.broadcast(packed.view(-1).view(torch.uint8), stage.first, stage.group)
            buffer.copy_(packed)


def _itemsize(dtype: torch.dtype) -> int:
    return dtype.itemsize
