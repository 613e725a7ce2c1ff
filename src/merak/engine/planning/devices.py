"""The devices of a job as a cluster: from a saved profile, data sheets or a short measurement."""

from __future__ import annotations

import itertools
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from merak.core.announce import announce
from merak.core.doctor.finding import System
from merak.core.doctor.memory import read_memory
from merak.core.errors import PlanError
from merak.core.health.status import waiting_for_all
from merak.core.mesh import Mesh
from merak.core.rank0 import decide_on_rank0
from merak.core.units import counted
from merak.engine.profile.measure import measure_profile
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.from_profile import cluster_of, sheet_of
from merak.plan.cluster.parse import parse_cluster
from merak.plan.cost.benchmark import device_name
from merak.plan.profile.saved import find_saved, save_for_jobs

_SIZES = (2**12, 2**18, 2**22)
"""Bytes of the messages and collectives of a short measurement."""

_ROUND_S = 0.004
"""Seconds of its rounds."""


@dataclass(frozen=True, slots=True)
class _Device:
    """The device of a rank.

    Args:
        host: of the rank.
        name: as its driver or the operating system calls it.
        memory_bytes: of a GPU; None of the CPU.
        host_memory_bytes: that its host, or the container there, has for all ranks; 0 if unknown.
    """

    host: str
    name: str
    memory_bytes: int | None
    host_memory_bytes: int = 0


def devices_here(
    mesh: Mesh, named: str | None, cache: Path | None, memory_budget: int | None
) -> Cluster | None:
    """The devices of a job as a cluster; all ranks call it together.

    Args:
        mesh: of all ranks.
        named: the cluster as the user names it, as of `parse_cluster`; None to find it out.
        cache: folder of the cache, where profiles are; None for none.
        memory_budget: bytes that a rank may hold; None for the memory of the devices.

    Returns:
        The cluster on rank 0; None on other ranks.

    Raises:
        PlanError: the named cluster is none, or has another number of devices.
    """
    ranks = _gathered(mesh)
    known: list[Cluster] = []

    def look() -> bool:
        found = _named(named, ranks) if named is not None else _known(ranks, cache)
        known.extend([] if found is None else [found])
        return found is None

    if decide_on_rank0(mesh, "the devices", look):
        announce("devices: measured now, since they have no data sheet and no saved profile")
        profile = measure_profile(mesh, sizes=_SIZES, round_s=_ROUND_S)
        if mesh.rank == 0:
            known.append(cluster_of(profile))
            if cache is not None:
                save_for_jobs(cache, profile)
    if mesh.rank:
        return None
    found = _with_hosts(known[0], ranks)
    return found if memory_budget is None else _limited(found, memory_budget)


def _gathered(mesh: Mesh) -> list[_Device]:
    """The device of every rank."""
    memory = None
    if mesh.device.type == "cuda":
        memory = torch.cuda.get_device_properties(mesh.device).total_memory
    host = mesh.hosts[mesh.rank] if mesh.hosts else socket.gethostname()
    whole = read_memory(System()).whole_bytes
    found = [_Device(host, device_name(mesh.device), memory, whole)] * mesh.world_size
    if mesh.device_mesh is not None:
        own = found[0]
        with waiting_for_all("the devices of"):
            dist.all_gather_object(found, own)
    return found


def _named(named: str, ranks: Sequence[_Device]) -> Cluster:
    cluster = parse_cluster(named, device=ranks[0].name)
    if cluster.num_devices != len(ranks):
        raise PlanError(
            f"cluster={named!r} has {counted(cluster.num_devices, 'device')}, but the job has "
            f"{counted(len(ranks), 'rank')}; name a cluster of as many, or leave it out."
        )
    announce("devices: %s", named)
    return cluster


def _known(ranks: Sequence[_Device], cache: Path | None) -> Cluster | None:
    """The cluster of a saved profile or of data sheets; None where there are neither."""
    names = {own.name for own in ranks}
    if cache is not None and len(names) == 1:
        profile = find_saved(cache, ranks[0].name, Counter(own.host for own in ranks))
        if profile is not None:
            announce("devices: %s, by the profile saved in %s", ranks[0].name, cache)
            return cluster_of(profile)
    sheets = {name: sheet_of(name) for name in sorted(names)}
    if ranks[0].memory_bytes is None or None in sheets.values():
        return None
    nodes = []
    for own, group in itertools.groupby(ranks, lambda rank: (rank.host, rank.name)):
        devices = list(group)
        (kind,) = parse_cluster(f"{sheets[own[1]]}:{len(devices)}").nodes
        memory = min(device.memory_bytes or 0 for device in devices)
        nodes.append(replace(kind, device=replace(kind.device, memory_bytes=memory)))
    merged = [replace(kind, count=len(list(same))) for kind, same in itertools.groupby(nodes)]
    announce(
        "devices: %s, by the data sheet of %s",
        ", ".join(sheets),
        ", ".join(dict.fromkeys(map(str, sheets.values()))),
    )
    return Cluster(tuple(merged))


def _with_hosts(cluster: Cluster, ranks: Sequence[_Device]) -> Cluster:
    """A cluster whose hosts have the memory of the smallest that is here, unless it says theirs."""
    least = min(own.host_memory_bytes for own in ranks) or None
    nodes = [
        replace(own, host_memory_bytes=own.host_memory_bytes or least) for own in cluster.nodes
    ]
    return replace(cluster, nodes=tuple(nodes))


def _limited(cluster: Cluster, memory_budget: int) -> Cluster:
    """A cluster of whose devices a rank may fill no more than so many bytes."""
    limited = [replace(own.device, tensor_bytes=memory_budget) for own in cluster.nodes]
    nodes = [replace(own, device=device) for own, device in zip(cluster.nodes, limited)]
    return replace(cluster, nodes=tuple(nodes))
