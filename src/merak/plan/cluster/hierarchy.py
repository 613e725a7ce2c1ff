"""Two levels of replicas: those inside a node, and those of equal places between nodes.

A hierarchical reduction reduces inside nodes, then between them, then gathers inside, so that each
node sends a tensor once, however many replicas it has.

Source: Goyal et al., "Accurate, large minibatch SGD" (arXiv 1706.02677), section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from merak.core.mesh import REPLICAS, Mesh
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.collectives import collective_seconds
from merak.plan.cluster.groups import Group, group_of, group_of_ranks
from merak.schedule.ir import Schedule

HIERARCHIES = ("off", "on", "auto")
"""Values of the option `hierarchical_reductions`."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The two levels of a group of ranks.

    Args:
        inside: groups of equal size, each on one node.
        between: one group for each place in those, with the ranks that have it.
    """

    inside: tuple[tuple[int, ...], ...]
    between: tuple[tuple[int, ...], ...]


def hierarchy_of(ranks: Sequence[int], hosts: Sequence[str]) -> Hierarchy | None:
    """The two levels of a group of ranks; None where one level would have single ranks.

    Where nodes have different numbers of its ranks, groups inside them have as many as divide all.

    Args:
        ranks: of the group, global.
        hosts: of every rank of the job; empty where all are on one.
    """
    nodes: dict[str, list[int]] = {}
    for rank in ranks if hosts else ():
        nodes.setdefault(hosts[rank], []).append(rank)
    size = math.gcd(*map(len, nodes.values()))
    if len(nodes) < 2 or size == 1:
        return None
    inside = tuple(
        tuple(own[start : start + size])
        for own in nodes.values()
        for start in range(0, len(own), size)
    )
    # In the order of ranks, as process groups have them.
    between = (tuple(sorted(own)) for own in zip(*inside, strict=True))
    return Hierarchy(inside, tuple(between))


def on_nodes(mesh: Mesh, cluster: Cluster) -> Mesh:
    """A mesh that is only planned for, with the nodes of a cluster as its hosts.

    Args:
        mesh: the degrees.
        cluster: the devices, in the order of ranks.
    """
    nodes = [cluster.place(rank)[1] for rank in range(mesh.world_size)]
    names = tuple(f"node {number}" for number in nodes)
    return replace(mesh, hosts=names if len(set(names)) > 1 else ())


def replica_lines(mesh: Mesh, schedule: Schedule, axis: str = REPLICAS) -> list[list[list[int]]]:
    """The global ranks of all groups of a job's replicas, in lists without a common rank.

    Args:
        mesh: the grid of ranks.
        schedule: that of a step.
        axis: `REPLICAS`, `EXPERT_REPLICAS` for those of a stage's experts, or "cp".
    """
    holders = sorted({schedule.ranks_of(stage) for stage in range(schedule.num_stages)})
    alone = [line for ranks in holders if len(ranks) == 1 for line in lines_of(mesh, ranks, axis)]
    several = [lines_of(mesh, ranks, axis) for ranks in holders if len(ranks) > 1]
    return [alone, *several] if alone else several


def lines_of(mesh: Mesh, pp_ranks: Sequence[int], axis: str) -> list[list[int]]:
    """The global ranks of every group of a stage's replicas along an axis.

    Args:
        mesh: the grid of ranks.
        pp_ranks: those that hold the stage.
        axis: as of `replica_lines`.
    """
    stride, degree, size = mesh.stride(axis), getattr(mesh, axis), mesh.stride("pp")
    firsts = [n for n in range(size) if n // stride % degree == 0]
    return [
        [p * size + first + r * stride for p in pp_ranks for r in range(degree)] for first in firsts
    ]


def shard_lines(mesh: Mesh, size: int) -> Hierarchy:
    """Groups of neighbouring replicas that shard between them, and those with the same shards.

    Args:
        mesh: the grid of ranks.
        size: replicas of a group, which divides them all.
    """
    lines = [line for rank in range(mesh.pp) for line in lines_of(mesh, (rank,), REPLICAS)]
    inside, between = [], []
    for line in lines:
        groups = [tuple(line[start : start + size]) for start in range(0, len(line), size)]
        inside += groups
        between += list(zip(*groups, strict=True))
    return Hierarchy(tuple(inside), tuple(between))


def replicas_of_stage(
    cluster: Cluster, mesh: Mesh, pp_ranks: tuple[int, ...], axis: str = REPLICAS
) -> Group:
    """The slowest group of a stage's replicas, which are on all pp ranks that hold the stage.

    Args:
        cluster: the devices, in the order of ranks.
        mesh: the degrees.
        pp_ranks: those that hold the stage.
        axis: as of `replica_lines`.
    """
    if len(pp_ranks) == 1:  # as those of every other stage
        return group_of(cluster, getattr(mesh, axis), mesh.stride(axis))
    return group_of_ranks(cluster, lines_of(mesh, pp_ranks, axis))


def reduction_seconds(kind: str, num_bytes: float, group: Group, hierarchy: str) -> float:
    """Seconds of a collective of replicas, at once or by hierarchy.

    Args:
        kind: "all_reduce", "reduce_scatter" or "all_gather".
        num_bytes: of the whole tensor.
        group: the replicas.
        hierarchy: one of `HIERARCHIES`; "auto" takes the faster of the two.
    """
    at_once_s = collective_seconds(kind, num_bytes, group)
    levels_s = math.inf if hierarchy == "off" else hierarchical_seconds(kind, num_bytes, group)
    if math.isinf(levels_s):  # there is one level
        return at_once_s
    return levels_s if hierarchy == "on" else min(at_once_s, levels_s)


def hierarchical_seconds(kind: str, num_bytes: float, group: Group) -> float:
    """Seconds of a collective inside nodes and between them; infinite where there is one level.

    Args:
        kind: as of `reduction_seconds`.
        num_bytes: of the whole tensor.
        group: the replicas.
    """
    size = math.gcd(group.most_on_node, group.fewest_on_node)
    if group.num_nodes == 1 or size == 1:
        return math.inf
    inner = Group(size, 1, size, size, group.link, None)
    most, fewest = group.most_on_node // size, group.fewest_on_node // size
    outer = replace(
        group,
        size=group.size // size,
        most_on_node=most,
        fewest_on_node=fewest,
        link=group.link if most > 1 else None,
    )
    steps = {
        "all_reduce": ("reduce_scatter", "all_gather"),
        "reduce_scatter": ("reduce_scatter",),
        "all_gather": ("all_gather",),
    }
    inside_s = sum(collective_seconds(own, num_bytes, inner) for own in steps[kind])
    return inside_s + collective_seconds(kind, num_bytes / size, outer)
