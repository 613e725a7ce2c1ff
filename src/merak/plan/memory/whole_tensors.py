"""Whole parameters that one rank steps for all that have shards of them: which rank steps which.

The engine and the memory model share them out by the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard, row_shard
from merak.core.tensor_meta import TensorMeta
from merak.plan.memory.zero import ZeroSharding


def owners(
    sizes: Mapping[str, int], able: Mapping[str, Sequence[int]], num_ranks: int
) -> dict[str, int]:
    """The rank that steps each parameter, so that all step about as many elements.

    Args:
        sizes: elements of each parameter.
        able: ranks that may step it, the lowest of which are preferred.
        num_ranks: those that have pieces.
    """
    found: dict[str, int] = {}
    load = [0] * num_ranks
    for name in sorted(sizes, key=lambda one: (-sizes[one], one)):
        found[name] = min(able[name], key=lambda rank: (load[rank], rank), default=0)
        load[found[name]] += sizes[name]
    return found


def stepped_whole(
    metas: Mapping[str, TensorMeta],
    shards: Mapping[str, ParameterShard],
    zero: ZeroSharding,
    mesh: Mesh,
) -> list[dict[str, TensorMeta]]:
    """Parameters that each rank of a stage steps, where all are stepped whole, by name.

    Args:
        metas: parameters as a rank has them, in the type that is stepped.
        shards: how they are sharded.
        zero: over which replicas their rows are shared out.
        mesh: the degrees.
    """
    first = mesh.unconnected()
    ranks, pieces, steps = _pieces(metas, shards, zero, mesh)
    here = [set(metas) for _ in ranks]

    def share_out(names: set[str], group_of: Callable[[Mesh], Hashable], *, joins: bool) -> None:
        """Leave each name on the one of a group's ranks that owns it."""
        for key in dict.fromkeys(group_of(rank) for rank in ranks):
            group = [rank.rank for rank in ranks if group_of(rank) == key]
            own = names & here[group[0]]
            for dtype in {metas[name].dtype for name in own}:
                kind = [name for name in own if metas[name].dtype == dtype]
                joined = group if joins else group[:1]
                sizes = {n: sum(math.prod(pieces[rank][n]) for rank in joined) for n in kind}
                able = {n: [i for i, rank in enumerate(group) if n in steps[rank]] for n in kind}
                for name, place in owners(sizes, able, len(group)).items():
                    for rank in (*group[:place], *group[place + 1 :]):
                        here[rank].discard(name)

    experts = zero.experts & metas.keys()
    if zero.is_sharded:
        degree = zero.degree

        def sharers(rank: Mesh) -> tuple[int, int]:
            return rank.tp_rank, rank.replicas_rank // degree

        share_out(metas.keys() - experts, sharers, joins=False)
    if experts and min(zero.degree, zero.expert_replicas) > 1:
        share_out(set(experts), lambda rank: rank.shard_rank, joins=False)
    cut = exchanged(metas, shards, None)
    if first.spreads_experts:
        share_out(cut, lambda rank: rank.expert_replicas_rank, joins=True)
    else:
        share_out(cut, lambda rank: rank.replicas_rank, joins=True)
    return [
        {
            n: replace(metas[n], shape=stepped_shape(n, pieces[r][n], shards))
            for n in metas
            if n in own
        }
        for r, own in enumerate(here)
    ]


def on_all_ranks(
    metas: Mapping[str, TensorMeta],
    shards: Mapping[str, ParameterShard],
    zero: ZeroSharding,
    mesh: Mesh,
) -> set[str]:
    """Names of the parameters of which every rank of a stage steps a piece.

    Args:
        metas: parameters as a rank has them.
        shards: how they are sharded.
        zero: over which replicas their rows are shared out.
        mesh: the degrees.
    """
    return set(metas).intersection(*_pieces(metas, shards, zero, mesh)[2])


def _pieces(
    metas: Mapping[str, TensorMeta],
    shards: Mapping[str, ParameterShard],
    zero: ZeroSharding,
    mesh: Mesh,
) -> tuple[list[Mesh], list[dict[str, tuple[int, ...]]], list[set[str]]]:
    """The ranks of a stage, shapes of the shards of each, and what it steps some elements of."""
    first = mesh.unconnected()
    ranks = [replace(first, rank=rank) for rank in range(first.replicas * first.tp)]
    pieces = [{n: _shape(n, metas[n], shards, rank) for n in metas} for rank in ranks]
    steps = [
        {n for n, shape in own.items() if math.prod(_rows(n, shape, zero, rank))}
        for own, rank in zip(pieces, ranks, strict=True)
    ]
    return ranks, pieces, steps


def exchanged(
    names: Iterable[str], shards: Mapping[str, ParameterShard], zero: ZeroSharding | None
) -> set[str]:
    """Names of the parameters of which ranks have pieces.

    Args:
        names: of parameters.
        shards: how they are sharded.
        zero: over which replicas their rows are shared out; None leaves rows out.
    """
    cut = {name for name in names if name in shards and shards[name].owner is None}
    return cut | {name for name in names if zero is not None and zero.degree_of(name) > 1}


def _shape(
    name: str, meta: TensorMeta, shards: Mapping[str, ParameterShard], rank: Mesh
) -> tuple[int, ...]:
    """The shape of a rank's shard of a parameter."""
    shard = shards.get(name)
    if shard is None:
        return meta.shape
    size = sum(shard.sizes(rank.shard_rank))
    return (*meta.shape[: shard.dim], size, *meta.shape[shard.dim + 1 :])


def _rows(name: str, shape: tuple[int, ...], zero: ZeroSharding, rank: Mesh) -> tuple[int, ...]:
    """The shape of the rows of a shard that a rank steps."""
    degree = zero.degree_of(name)
    if degree == 1:
        return shape
    is_expert = name in zero.experts
    index = rank.expert_replicas_rank if is_expert else rank.replicas_rank % degree
    rows = row_shard(shape, degree, index)
    return (rows.stop - rows.start, *shape[1:])


def stepped_shape(
    name: str, shape: tuple[int, ...], shards: Mapping[str, ParameterShard]
) -> tuple[int, ...]:
    """The whole shape of a parameter; of an expert that one rank has, the rank's.

    Args:
        name: of the parameter.
        shape: of a rank's shard.
        shards: how parameters are sharded.
    """
    shard = shards.get(name)
    if shard is None or shard.owner is not None:
        return shape
    return (*shape[: shard.dim], sum(shard.parts), *shape[shard.dim + 1 :])
