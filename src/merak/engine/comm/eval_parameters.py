"""Remote parameters of an evaluation: read on one pp rank, and held by another.

A model may be cut otherwise in evaluation than in training, where writes into buffers keep parts of
it together; then a segment may read parameters that training has on several stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard, take
from merak.engine.health.status import Progress
from merak.graph.ir.ir import ModelGraph
from merak.graph.program.program import Program, RemoteParameter


def find_remote_parameters(
    owners: Mapping[str, frozenset[int]],
    stage_rank: Sequence[int],
    graph: ModelGraph,
    bounds: Sequence[int],
) -> tuple[RemoteParameter, ...]:
    """The parameters that pp ranks fetch from each other, in the same order on all of them.

    Args:
        owners: the stages that hold each parameter.
        stage_rank: the pp rank of each stage.
        graph: what is to run.
        bounds: stage s holds the segments bounds[s] … bounds[s + 1] − 1.
    """
    found: dict[tuple[str, int], RemoteParameter] = {}
    for stage, reader in enumerate(stage_rank):
        for segment in graph.segments[bounds[stage] : bounds[stage + 1]]:
            for name in segment.parameters:
                holders = {stage_rank[held] for held in owners[name]}
                if reader not in holders:
                    one = RemoteParameter(name, min(holders), reader, graph.parameters[name])
                    found.setdefault((name, reader), one)
    return tuple(found.values())


@torch.no_grad()
def fetch_remote(
    mesh: Mesh,
    parameters: Mapping[str, torch.nn.Parameter],
    programs: Sequence[Program],
    progress: Progress,
) -> dict[str, torch.Tensor]:
    """Send and receive remote parameters; all ranks of a pipeline call it together.

    Args:
        mesh: the grid of ranks.
        parameters: this rank's by name, all of them here.
        programs: of what is to be evaluated.
        progress: reports the wait.

    Returns:
        By name, this rank's shards of the parameters that it fetches.
    """
    every = dict.fromkeys(one for program in programs for one in program.remote_parameters)
    if not every:
        return {}
    group = mesh.group("pp")
    shards = {name: shard for program in programs for name, shard in program.shards.items()}
    remote: dict[str, torch.Tensor] = {}
    with progress.waiting("remote parameters of an evaluation from", mesh.peers("pp")):
        for one in every:
            if one.owner == mesh.pp_rank:
                held = parameters[one.name].detach().contiguous()
                dist.send(held, mesh.rank_at(one.reader), group)
            elif one.reader == mesh.pp_rank:
                shape = _shape(one, shards.get(one.name), mesh.shard_rank)
                remote[one.name] = torch.empty(shape, dtype=one.meta.dtype, device=mesh.device)
                dist.recv(remote[one.name], mesh.rank_at(one.owner), group)
    return remote


def _shape(one: RemoteParameter, shard: ParameterShard | None, index: int) -> tuple[int, ...]:
    """The shape of a rank's shard of a parameter."""
    if shard is None:
        return one.meta.shape
    return tuple(take(torch.empty(one.meta.shape, device="meta"), shard, index).shape)
