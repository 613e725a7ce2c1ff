"""A job of many ranks with one process: its mesh, over process groups without peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from merak.core.errors import MeshError
from merak.core.mesh import Mesh, pretended
from merak.core.rank0 import REHEARSAL
from merak.rehearse.fake_group import Traffic, register_backend


@contextmanager
def fake_job(mesh: Mesh, traffic: Traffic) -> Iterator[Mesh]:
    """Connect one rank to peers that do not exist, for as long as the context lasts.

    Args:
        mesh: the degrees, the rank and its device, not connected.
        traffic: records the collectives and transfers of the rank.

    Yields:
        The mesh with fake process groups, which is also the current one.

    Raises:
        MeshError: the process is a rank of a real job.
    """
    if dist.is_initialized():
        raise MeshError(
            "merak rehearse plays one rank of a job in a process of its own, but this one is "
            "connected to others; run it without torchrun."
        )
    if mesh.world_size == 1:
        with pretended(mesh):
            yield mesh
        return
    register_backend(traffic)
    dist.init_process_group(
        REHEARSAL, store=HashStore(), rank=mesh.rank, world_size=mesh.world_size
    )
    try:
        connected = mesh.connected()
        with pretended(connected):
            yield connected
    finally:
        dist.destroy_process_group()
