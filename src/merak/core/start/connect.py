"""Ranks that torchrun has started meet: process groups, hosts, the watchdog."""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from merak.core.doctor import failed_start
from merak.core.elastic import Degrees
from merak.core.errors import MeshError
from merak.core.health import failure, store, watchdog
from merak.core.health.hosts import choose_interface, exchange_hosts, host_names
from merak.core.health.quiet import quiet_libraries, quiet_other_ranks
from merak.core.health.status import named, waiting
from merak.core.mesh import Mesh
from merak.core.start.allocator import keep_freed_memory


@failure.starting(failed_start.advise)
def connect(
    degrees: Degrees, ep: int, device: torch.device, backend: str | None, timeout_s: float
) -> Mesh:
    """Connect the ranks of a job; a collective of all of them.

    Args:
        degrees: whose product is the number of ranks.
        ep: expert parallel degree.
        device: of this rank.
        backend: of the process groups; None for that of the device.
        timeout_s: seconds that a rank waits for others.

    Returns:
        The mesh, with groups of ranks along every axis, and the host of every rank.
    """
    dp, tp, pp, cp = degrees
    if device.type == "cpu":
        keep_freed_memory()
    quiet_libraries(int(os.environ.get("RANK", "0")))
    if "RANK" not in os.environ:
        return Mesh(dp, tp, pp, 0, device, None, cp=cp, ep=ep)
    rank, num_ranks = int(os.environ["RANK"]), math.prod(degrees)
    mesh = Mesh(dp, tp, pp, rank, device, None, cp=cp, ep=ep)
    quiet_other_ranks(rank)
    limit = watchdog.Limit("timeout_s", timeout_s)
    timeout = timedelta(seconds=watchdog.timeouts_s(limit))
    known = None
    if dist.is_initialized():
        _check_carries_both(device)
        store.join(timeout_s)
    else:
        known = store.open_store(rank, timeout_s)
    if num_ranks > 1:
        watchdog.start(watchdog.Member(rank, num_ranks, describe_place(mesh)), limit)
    with waiting(watchdog.JOINING, tuple(r for r in range(num_ranks) if r != rank)):
        if known is not None:
            known.set_timeout(timeout)
        found = exchange_hosts(known, rank, num_ranks, f"{degrees} × ep={ep}")
        _refuse_other_degrees([host.job for host in found])
        names = host_names(found)
        if known is not None:
            choose_interface(found, rank)
            carries_gpus = device.type == "cuda" and backend != "gloo"
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if carries_gpus else "gloo",
                store=known,
                rank=rank,
                world_size=num_ranks,
                timeout=timeout,
                device_id=device if carries_gpus else None,
            )
            atexit.register(_disconnect)
        mesh = mesh.connected()
    hosts = names if len(set(names)) > 1 else ()
    return replace(mesh, hosts=hosts)


def _check_carries_both(device: torch.device) -> None:
    """Refuse process groups of somebody else's that carry no tensors of the CPU beside a GPU's.

    Raises:
        MeshError: they do not.
    """
    own = dist.distributed_c10d._get_default_group()
    if device.type == "cuda" and torch.device("cpu") not in own._device_types:
        raise MeshError(
            f"torch.distributed was initialized with {dist.get_backend()!r} alone, and Merak also "
            "sends tensors of the CPU; leave that call to merak.init, or make it "
            "init_process_group('cpu:gloo,cuda:nccl', device_id=…)."
        )


def _refuse_other_degrees(jobs: Sequence[str]) -> None:
    """Refuse ranks that were given other degrees; they would wait for each other for ever.

    Raises:
        MeshError: two ranks differ; on all ranks.
    """
    ranks = {job: tuple(r for r, one in enumerate(jobs) if one == job) for job in jobs}
    if len(ranks) > 1:
        given = ", ".join(f"{job} on {named(own)}" for job, own in ranks.items())
        raise MeshError(
            f"merak.init was given other degrees on other ranks: {given}; call it alike on all."
        )


def describe_place(mesh: Mesh) -> str:
    """Name this rank's coordinates, as "pp 0, dp 1, tp 0"."""
    context = f", cp {mesh.cp_rank}" if mesh.cp > 1 else ""
    return f"pp {mesh.pp_rank}, dp {mesh.dp_rank}{context}, tp {mesh.tp_rank}"


def _disconnect() -> None:
    watchdog.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
