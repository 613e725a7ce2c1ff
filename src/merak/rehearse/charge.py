"""Charges of the collectives and transfers of one rank, by the cost model of its cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from merak.core.mesh import AXES, Mesh
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.collectives import KINDS, collective_seconds, send_seconds
from merak.plan.cluster.groups import group_of_ranks, send_link
from merak.rehearse.fake_group import Call
from merak.rehearse.measure import Place

TRANSFERS = ("send", "receive")


@dataclass(frozen=True, slots=True)
class Charge:
    """Collectives of one kind in a step, and the seconds they would take one after another.

    Args:
        axis: of the mesh, along which the ranks lie; "pp" for transfers, "job" for groups over
            several axes.
        kind: of the calls.
        ranks: of the group; 2 for transfers.
        calls: number of them in a step.
        num_bytes: of all their tensors.
        seconds: of all of them.
    """

    axis: str
    kind: str
    ranks: int
    calls: int
    num_bytes: int
    seconds: float


def charges(calls: Iterable[Call], mesh: Mesh, cluster: Cluster) -> tuple[Charge, ...]:
    """Charge the calls of one step, summed by axis and kind.

    Args:
        calls: of one rank.
        mesh: the degrees and the rank.
        cluster: the links.
    """
    found: dict[tuple[str, str, int], list[tuple[int, float]]] = defaultdict(list)
    for call in calls:
        key = (axis_of(call, mesh), call.kind, len(call.ranks))
        found[key].append((call.num_bytes, call_seconds(call, cluster)))
    return tuple(
        Charge(*key, len(own), sum(size for size, _ in own), sum(seconds for _, seconds in own))
        for key, own in sorted(found.items())
    )


def seconds_inside(
    calls: Iterable[Call],
    mesh: Mesh,
    cluster: Cluster,
    actions: Mapping[Place, int],
    zero: int = 0,
) -> dict[Place, float]:
    """Mean seconds of collectives over tp and cp inside an action, by kind and stage.

    Args:
        calls: of one rank in one step.
        mesh: the degrees and the rank.
        cluster: the links.
        actions: number of actions of each kind and stage in the step.
        zero: ZeRO stage, whose exchanges are no part of the segments.
    """
    totals = dict.fromkeys(actions, 0.0)
    for call in calls:
        if call.action is not None and _is_inside(call, mesh, zero):
            totals[call.action.kind, call.action.stage] += call_seconds(call, cluster)
    return {place: total / actions[place] for place, total in totals.items()}


def _is_inside(call: Call, mesh: Mesh, zero: int) -> bool:
    """Whether a segment makes a call, and not the replicas that reduce gradients.

    Where dp is 1, replicas are those that share tokens: of their calls, all-to-alls are the
    segments' own, and what sums and gathers tokens as far as no bucket of gradients does.
    """
    axis = axis_of(call, mesh)
    if mesh.spreads_experts and call.kind == "all_to_all":
        return True
    if axis != "cp" or mesh.dp > 1 or call.kind == "all_to_all":
        return axis in ("tp", "cp")
    return not zero and call.kind != "all_reduce"


def call_seconds(call: Call, cluster: Cluster) -> float:
    """Seconds of one call on its own."""
    if call.kind in TRANSFERS:
        ends = call.ranks if call.kind == "send" else call.ranks[::-1]
        return send_seconds(call.num_bytes, send_link(cluster, *ends))
    if call.kind not in KINDS or len(call.ranks) < 2:
        return 0.0
    return collective_seconds(call.kind, call.num_bytes, group_of_ranks(cluster, [call.ranks]))


def axis_of(call: Call, mesh: Mesh) -> str:
    """The axis along which the ranks of a call lie; "job" where they lie along several."""
    if call.kind in TRANSFERS:
        return "pp"
    ends = call.ranks[0], call.ranks[-1]
    first, last = (_coordinates(rank, mesh) for rank in ends)
    axes = [axis for axis in first if first[axis] != last[axis]]
    return axes[0] if len(axes) == 1 else "job"


def _coordinates(rank: int, mesh: Mesh) -> dict[str, int]:
    own = Mesh(mesh.dp, mesh.tp, mesh.pp, rank, mesh.device, None, cp=mesh.cp, ep=mesh.ep)
    return {axis: getattr(own, f"{axis}_rank") for axis in AXES}
