"""Buffers that one pp rank writes in training and another reads in evaluation, broadcast before it.

An evaluation runs all of the model's outputs, and is cut otherwise than a training step: what a
stage reads of running statistics, codes or averaged weights may have been written by another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from merak.core.mesh import Mesh
from merak.engine.health.status import Progress
from merak.graph.ir.ir import LITERAL, ModelGraph
from merak.graph.program.program import Program
from merak.graph.segment.buffer_kinds import written_buffers
from merak.plan.layout import Layout


def find_writers(layout: Layout) -> dict[str, int]:
    """The pp rank of the stage that writes each buffer in training, by the buffer's name."""
    writers: dict[str, int] = {}
    for stage, own in enumerate(layout.partition.stages):
        for segment in layout.graph.segments[own.start : own.stop]:
            for name in written_buffers(segment.graph):
                if not name.startswith(LITERAL):  # each run has its own copy of those
                    writers.setdefault(name, layout.stage_rank[stage])
    return writers


def find_synced_buffers(
    writers: Mapping[str, int], stage_rank: Sequence[int], graph: ModelGraph, bounds: Sequence[int]
) -> dict[str, int]:
    """The buffers that other ranks read in a graph than the one that writes them.

    Args:
        writers: the pp rank that writes each buffer.
        stage_rank: the pp rank of each stage.
        graph: what is to run.
        bounds: stage s holds the segments bounds[s] … bounds[s + 1] − 1.

    Returns:
        Their writers' pp ranks by their names, in the same order on every rank.
    """
    readers: dict[str, set[int]] = {}
    for stage, rank in enumerate(stage_rank):
        for segment in graph.segments[bounds[stage] : bounds[stage + 1]]:
            for name in segment.buffers:
                readers.setdefault(name, set()).add(rank)
    for name in graph.prologue.buffers:  # any rank may derive from the batch
        readers.setdefault(name, set()).update(stage_rank)
    return {n: rank for n, rank in writers.items() if readers.get(n, set()) - {rank}}


@torch.no_grad()
def sync_buffers(
    mesh: Mesh,
    buffers: Mapping[str, torch.Tensor],
    programs: Sequence[Program],
    progress: Progress,
) -> None:
    """Broadcast written buffers over the pipeline; all of its ranks call it together.

    Args:
        mesh: the grid of ranks.
        buffers: the model's, by name.
        programs: of what is to be evaluated.
        progress: reports the wait.
    """
    synced_buffers = {
        name: rank for program in programs for name, rank in program.synced_buffers.items()
    }
    group = mesh.group("pp")
    if group is None or not synced_buffers:
        return
    with progress.waiting("the buffers that training has written on", mesh.peers("pp")):
        for name, rank in synced_buffers.items():
            packed = buffers[name].contiguous()
            dist.broadcast(packed.view(-1).view(torch.uint8), mesh.rank_at(rank), group)
            if packed.data_ptr() != buffers[name].data_ptr():
                buffers[name].copy_(packed)
            elif mesh.pp_rank != rank:
                torch.autograd.graph.increment_version(buffers[name])
