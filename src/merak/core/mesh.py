"""The mesh of ranks: dp × tp × pp, who stands where, and the process groups between them."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from merak.core import failure
from merak.core.errors import MeshError

logger = logging.getLogger(__name__)

AXES = ("pp", "dp", "tp")
"""Slowest axis first: tp ranks are neighbours on one node, pp stages lie farthest apart."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The grid of ranks, and where this rank stands in it.

    Args:
        dp: data parallel degree.
        tp: tensor parallel degree.
        pp: pipeline parallel degree, the number of pipeline positions.
        rank: this rank, 0 … dp · tp · pp − 1, laid out as (pp, dp, tp) with tp fastest.
        device: the device this rank computes on.
        device_mesh: torch's mesh over the same ranks; None in a single process, and for a grid
            that is only planned with.
    """

    dp: int
    tp: int
    pp: int
    rank: int
    device: torch.device
    device_mesh: DeviceMesh | None

    @property
    def world_size(self) -> int:
        """The number of ranks in the job."""
        return self.dp * self.tp * self.pp

    @property
    def pp_rank(self) -> int:
        """This rank's pipeline position."""
        return self.rank // (self.dp * self.tp)

    @property
    def dp_rank(self) -> int:
        """This rank's data parallel replica."""
        return self.rank // self.tp % self.dp

    @property
    def tp_rank(self) -> int:
        """This rank's tensor parallel shard."""
        return self.rank % self.tp

    def rank_at(self, pp_rank: int) -> int:
        """The global rank at another pipeline position of this rank's own dp and tp coordinates."""
        return (pp_rank * self.dp + self.dp_rank) * self.tp + self.tp_rank

    def peers(self, axis: str) -> tuple[int, ...]:
        """The other global ranks along one axis."""
        stride = {"pp": self.dp * self.tp, "dp": self.tp, "tp": 1}[axis]
        own = {"pp": self.pp_rank, "dp": self.dp_rank, "tp": self.tp_rank}[axis]
        others = range(getattr(self, axis))
        return tuple(self.rank + (place - own) * stride for place in others if place != own)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group of this rank along one axis; None where the axis has degree 1."""
        if self.device_mesh is None or getattr(self, axis) == 1:
            return None
        return self.device_mesh.get_group(axis)


_current: list[Mesh] = []


def init(
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout_s: float = 600.0,
) -> Mesh:
    """Lay the ranks out as dp × tp × pp and connect them. Call once, before building the trainer.

    Args:
        dp: data parallel degree.
        tp: tensor parallel degree.
        pp: pipeline parallel degree.
        backend: "nccl" or "gloo"; nccl where the device is a GPU.
        device: "cpu" or "cuda", in a single process also one of several GPUs ("cuda:1"); what the
            machine has by default.
        timeout_s: seconds after which a collective that does not complete ends the job, while the
            engine is built; then `hang_limit_s` of the engine counts, and torch's own timeouts are
            raised to come after it.

    Returns:
        The mesh, which `current_mesh()` also gives.

    Raises:
        MeshError: degrees below 1, degrees whose product is not the world size, a job of several
            ranks that torchrun did not start, or a second call.
    """
    failure.install()
    if _current:
        raise MeshError("merak.init was called twice; call it once, before the trainer is built.")
    for axis, degree in (("dp", dp), ("tp", tp), ("pp", pp)):
        if not isinstance(degree, int) or degree < 1:
            raise MeshError(f"{axis}={degree!r} is not a degree; use a whole number of 1 or more.")
    num_ranks = dp * tp * pp
    if "RANK" not in os.environ and num_ranks > 1:
        raise MeshError(
            f"dp={dp} × tp={tp} × pp={pp} needs {num_ranks} ranks, but this is a single process; "
            f"start it with `torchrun --nproc-per-node {num_ranks} script.py`."
        )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks != world_size:
        raise MeshError(
            f"dp={dp} × tp={tp} × pp={pp} = {num_ranks} ranks, but torchrun started {world_size}; "
            f"make the product of the degrees equal the number of ranks."
        )
    mesh = _connect(dp, tp, pp, _pick_device(device), backend, timeout_s)
    _current.append(mesh)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size))
    if mesh.rank == 0 and crosses_nodes(mesh, per_node):
        logger.warning(
            "tp=%d spans nodes of %d ranks: every layer sums over tp several times a microbatch, "
            "and between nodes that takes many times as long as inside one; use a tp that divides "
            "%d, and pp or dp for the rest.",
            tp,
            per_node,
            per_node,
        )
    return mesh


def crosses_nodes(mesh: Mesh, ranks_per_node: int) -> bool:
    """Whether some tensor parallel group has ranks on two nodes, which hold consecutive ranks."""
    return mesh.world_size > ranks_per_node and ranks_per_node % mesh.tp != 0


def _pick_device(device: str | torch.device | None) -> torch.device:
    asked = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if asked.type != "cuda":
        return torch.device(asked.type)
    if not torch.cuda.is_available():
        raise MeshError("device='cuda' was asked for, but torch sees no GPU; use device='cpu'.")
    num_gpus = torch.cuda.device_count()
    if asked.index is not None and "RANK" not in os.environ:
        if asked.index >= num_gpus:
            raise MeshError(
                f"device={str(asked)!r} is not here: torch sees {num_gpus} GPUs, counted from 0; "
                "use device='cuda', or the number of one of them."
            )
        torch.cuda.set_device(asked)
        return asked
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if asked.index not in (None, local_rank):
        raise MeshError(
            f"device={str(asked)!r} was asked for on local rank {local_rank}, but every rank "
            "computes on the GPU of its own number; use device='cuda', and CUDA_VISIBLE_DEVICES to "
            "choose among GPUs."
        )
    if local_rank >= num_gpus:
        raise MeshError(
            f"local rank {local_rank} has no GPU of its own: {num_gpus} here; "
            "start at most one rank per GPU."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _connect(
    dp: int, tp: int, pp: int, device: torch.device, backend: str | None, timeout_s: float
) -> Mesh:
    if "RANK" not in os.environ:
        return Mesh(dp, tp, pp, 0, device, None)
    if not dist.is_initialized():
        dist.init_process_group(
            backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"),
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" and backend != "gloo" else None,
        )
        atexit.register(_disconnect)
    device_mesh = init_device_mesh(device.type, (pp, dp, tp), mesh_dim_names=AXES)
    return Mesh(dp, tp, pp, dist.get_rank(), device, device_mesh)


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def current_mesh() -> Mesh:
    """The mesh that `merak.init` laid out.

    Raises:
        MeshError: `merak.init` has not been called.
    """
    if not _current:
        failure.install()  # as `init` would have done
        raise MeshError(
            "merak.init has not been called; call merak.init(dp=…, tp=…, pp=…) at the top of the "
            "script, before the trainer is built."
        )
    return _current[0]


@contextmanager
def pretended(mesh: Mesh) -> Iterator[None]:
    """Let a mesh without ranks stand in for the job's, to run graphs without numbers on it.

    Args:
        mesh: with the degrees in question and no `device_mesh`, so that nothing is exchanged.
    """
    saved = list(_current)
    _current[:] = [mesh]
    try:
        yield
    finally:
        _current[:] = saved


def reset() -> None:
    """Forget the mesh, so that `init` may be called again (tests, notebooks)."""
    _current.clear()
