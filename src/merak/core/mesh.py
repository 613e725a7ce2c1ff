"""Mesh of ranks, dp × cp × tp × pp: coordinates and process groups, and the one of this job."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from merak.core.elastic import GivenDegrees
from merak.core.errors import MeshError
from merak.core.health import failure, store, watchdog
from merak.core.health.quiet import unquiet_other_ranks
from merak.core.health.status import waiting_for_all
from merak.core.rank0 import REHEARSAL

AXES = ("pp", "dp", "cp", "tp")
"""Slowest axis first: tp ranks are neighbours on one node, pp ranks are farthest apart."""

REPLICAS = "replicas"
"""The axes dp and cp together: ranks with the same parameters, whose gradients they sum."""

EXPERT_REPLICAS = "expert_replicas"
"""The replicas that hold the same experts: one in `ep` of them where experts are over replicas."""

EXPERT_AXES = ("pp", EXPERT_REPLICAS, "ep")
"""Axes of the ranks where experts are over replicas, slowest first: those of `AXES` without tp,
whose dp and cp are split anew."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Mesh of ranks, and this rank's coordinates in it.

    Args:
        dp: data parallel degree.
        tp: tensor parallel degree.
        pp: pipeline parallel degree, the number of pp ranks.
        rank: this rank, 0 … world size − 1, laid out as (pp, dp, cp, tp) with tp fastest.
        device: the device this rank computes on.
        device_mesh: torch's mesh over the same ranks; None in a single process, and for a mesh
            that a job is only planned for.
        hosts: name of each rank's host; empty where all ranks are on one.
        wanted_dp: the dp of `init`, where there are too few ranks for it; 0 where there are enough.
        given: the degrees that `init(plan="auto")` got, until the plan is chosen: then all ranks
            count as replicas; None where the degrees are those of the job.
        cp: context parallel degree: so many ranks share the tokens of the same samples.
        ep: expert parallel degree: the number of ranks that have the experts of a layer between
            them, whole ones each; tensor parallel ranks where tp is above 1, else replicas.
        expert_mesh: torch's mesh over the same ranks with `EXPERT_AXES`; None where experts are
            not over replicas.
        call: what `init` was called for, in words; empty where another has made the mesh.
    """

    dp: int
    tp: int
    pp: int
    rank: int
    device: torch.device
    device_mesh: DeviceMesh | None
    hosts: tuple[str, ...] = ()
    wanted_dp: int = 0
    given: GivenDegrees | None = None
    cp: int = 1
    ep: int = 1
    expert_mesh: DeviceMesh | None = None
    call: str = field(default="", compare=False)

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return self.replicas * self.tp * self.pp

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same parameters of a stage: dp × cp."""
        return self.dp * self.cp

    @property
    def pp_rank(self) -> int:
        """Pipeline parallel coordinate of this rank."""
        return self.rank // (self.replicas * self.tp)

    @property
    def dp_rank(self) -> int:
        """Data parallel coordinate of this rank: which samples it reads."""
        return self.replicas_rank // self.cp

    @property
    def cp_rank(self) -> int:
        """Context parallel coordinate of this rank: which tokens of its samples it computes."""
        return self.replicas_rank % self.cp

    @property
    def replicas_rank(self) -> int:
        """Coordinate of this rank among those that hold the same parameters."""
        return self.rank // self.tp % self.replicas

    @property
    def tp_rank(self) -> int:
        """Tensor parallel coordinate of this rank, its shard."""
        return self.rank % self.tp

    @property
    def ep_rank(self) -> int:
        """Expert parallel coordinate of this rank: which experts it has."""
        return self.rank % self.ep

    @property
    def spreads_experts(self) -> bool:
        """Whether replicas have the experts of a layer between them, rather than tp ranks."""
        return self.ep > 1 and self.tp == 1

    @property
    def spread_experts(self) -> int:
        """Number of replicas that have the experts of a layer between them."""
        return self.ep if self.spreads_experts else 1

    @property
    def expert_replicas(self) -> int:
        """Number of ranks that hold the same experts of a stage."""
        return self.replicas // self.ep if self.spreads_experts else self.replicas

    @property
    def expert_replicas_rank(self) -> int:
        """Coordinate of this rank among those that hold the same experts."""
        return self.replicas_rank // self.ep if self.spreads_experts else self.replicas_rank

    @property
    def shard_axis(self) -> str:
        """The axis over which parameters are split: ep where replicas have experts, else tp."""
        return "ep" if self.spreads_experts else "tp"

    @property
    def shard_degree(self) -> int:
        """Number of ranks over which parameters are split."""
        return self.ep if self.spreads_experts else self.tp

    @property
    def shard_rank(self) -> int:
        """Index of the shard of split parameters that this rank holds."""
        return self.ep_rank if self.spreads_experts else self.tp_rank

    @property
    def degrees(self) -> GivenDegrees:
        """Degrees of the job: dp, tp, pp, cp and ep."""
        return GivenDegrees(self.dp, self.tp, self.pp, self.cp, self.ep)

    def rank_at(self, pp_rank: int) -> int:
        """Return the global rank of another pp rank with this rank's other coordinates."""
        return (pp_rank * self.replicas + self.replicas_rank) * self.tp + self.tp_rank

    def stride(self, axis: str) -> int:
        """Return the distance of neighbours along one axis, in global ranks."""
        strides = {
            "pp": self.replicas * self.tp,
            "dp": self.cp * self.tp,
            EXPERT_REPLICAS: self.replicas // self.expert_replicas * self.tp,
            "tp": 1,
            "ep": 1,
        }
        return strides.get(axis, self.tp)

    def peers(self, axis: str) -> tuple[int, ...]:
        """Return the other global ranks along one axis."""
        stride = self.stride(axis)
        own = getattr(self, f"{axis}_rank")
        others = range(getattr(self, axis))
        return tuple(self.rank + (place - own) * stride for place in others if place != own)

    @property
    def group_axes(self) -> tuple[str, ...]:
        """The axes along which each rank has a process group of its own."""
        both = (REPLICAS,) if self.dp > 1 and self.cp > 1 else ()
        experts = (EXPERT_REPLICAS, "ep") if self.spreads_experts else ()
        return (*(axis for axis in (*AXES, *experts) if getattr(self, axis) > 1), *both)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return this rank's process group along one axis; None where the axis has degree 1."""
        mesh = self._mesh_of(axis)
        if mesh is None or getattr(self, axis) == 1:
            return None
        return mesh.get_group(self._named(axis))

    def connected(self) -> Mesh:
        """This mesh with the groups of ranks along every axis; all ranks call it together."""
        shape = (self.pp, self.dp, self.cp, self.tp)
        kind = self.device.type
        made = init_device_mesh(kind, shape, mesh_dim_names=AXES)
        if self.dp > 1 and self.cp > 1:
            made["dp", "cp"]._flatten(REPLICAS)
        experts = None
        if self.spreads_experts:
            own_shape = (self.pp, self.expert_replicas, self.ep)
            experts = init_device_mesh(kind, own_shape, mesh_dim_names=EXPERT_AXES)
        laid = replace(self, device_mesh=made, expert_mesh=experts)
        for axis in laid.group_axes:
            connect_group(laid.group(axis))
        return laid

    def unconnected(self) -> Mesh:
        """The mesh of the first rank of such a job, which exchanges nothing."""
        return replace(self, rank=0, device_mesh=None, expert_mesh=None)

    def _mesh_of(self, axis: str) -> DeviceMesh | None:
        return self.expert_mesh if axis in ("ep", EXPERT_REPLICAS) else self.device_mesh

    def _named(self, axis: str) -> str:
        """The axis of torch's mesh: of replicas that lie along one axis, that one."""
        if axis == REPLICAS and 1 in (self.dp, self.cp):
            return "dp" if self.cp == 1 else "cp"
        return axis


def group_of_lines(
    lines: Sequence[Sequence[int]], what: str, most_channels: int | None = None
) -> dist.ProcessGroup | None:
    """Make a process group of each of some lists of ranks; all ranks of the job call it together.

    NCCL makes those of all lists at once, out of the communicator of the whole job. Others make
    them one by one.

    Args:
        lines: of global ranks, without a common one.
        what: name of the groups, ending in "with", for the watchdog's report.
        most_channels: NCCL's, of groups for transfers alone, whose pairs the caller connects, so
            that they have small buffers; None for groups for collectives.

    Returns:
        The group of this rank's list; None where it is in none. One for collectives is connected
        as by `connect_group`.
    """
    ranks = [list(line) for line in lines]
    device = carried_device()
    with waiting_for_all(what):
        group: dist.ProcessGroup | None
        if device.type != "cpu" and _whole()._get_backend(device).supports_splitting:
            options: Any = None
            if most_channels is not None:
                options = copy.deepcopy(_whole()._get_backend(device).options)
                options.config.max_ctas = most_channels
            group = dist.split_group(split_ranks=ranks, pg_options=options)
        else:
            group, _ = dist.new_subgroups_by_enumeration(ranks)
        if most_channels is None:
            connect_group(group)
    return group


def connect_group(group: dist.ProcessGroup | None) -> None:
    """Sum a number over a new group, where NCCL connects ranks when they first meet, on the host.

    So no step waits for that, and a network that carries nothing is found at the start. Gloo has
    connected its ranks already.

    Args:
        group: whose ranks call it together; None for that of a rank alone.
    """
    if group is not None and dist.get_backend(group) not in ("gloo", REHEARSAL):
        dist.all_reduce(torch.zeros(1, device=carried_device()), group=group)


def largest(numbers: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """The largest of the numbers of some ranks, each in its place, for the host to decide by.

    They travel between the hosts' memories, so that no GPU is waited for.

    Args:
        numbers: of this rank, as many as the others have.
        group: whose ranks call it together; None for all ranks.
    """
    found = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.tolist()


def _whole() -> dist.ProcessGroup:
    """The group of all ranks."""
    return dist.distributed_c10d._get_default_group()


def carried_device() -> torch.device:
    """The device whose tensors the job's groups carry: the GPU that NCCL was given, or the CPU."""
    bound = _whole().bound_device_id if dist.is_initialized() else None
    return bound or torch.device("cpu")


def crosses_hosts(mesh: Mesh, axis: str) -> bool:
    """Whether a group of ranks along an axis spans hosts.

    Args:
        mesh: of the job.
        axis: one of `AXES`.
    """
    stride = mesh.stride(axis)
    degree = getattr(mesh, axis)
    firsts = (rank - rank // stride % degree * stride for rank in range(mesh.world_size))
    return any(host != mesh.hosts[first] for host, first in zip(mesh.hosts, firsts))


def describe_hosts(hosts: Sequence[str]) -> str:
    """List hosts with their numbers of ranks, as "3 ranks on a, 5 on b".

    Args:
        hosts: of each rank.
    """
    counts = Counter(hosts)
    listed = [f"{number} on {host}" for host, number in counts.items()]
    return ", ".join(listed).replace(" on", " ranks on" if counts[hosts[0]] > 1 else " rank on", 1)


_current: list[Mesh] = []
_used: list[bool] = []


def current_mesh() -> Mesh:
    """Return the mesh that `merak.init` has laid out.

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


def mark_used() -> None:
    """Mark the mesh as used by a trainer, an engine or a measurement."""
    _used[:] = [True]


def is_used() -> bool:
    """Whether something has run on the mesh that `merak.init` has laid out."""
    return bool(_used)


def has_mesh() -> bool:
    """Whether this process has a mesh already."""
    return bool(_current)


def set_mesh(mesh: Mesh) -> None:
    """Make a mesh the one that `current_mesh` returns.

    Args:
        mesh: of this job, from now on.
    """
    _current[:] = [mesh]


@contextmanager
def pretended(mesh: Mesh) -> Iterator[None]:
    """Replace the job's mesh by one without process groups, to run fake tensors on it.

    Args:
        mesh: with the degrees in question and no `device_mesh`, so that nothing is exchanged.
    """
    saved = list(_current)
    _current[:] = [mesh]
    try:
        yield
    finally:
        _current[:] = saved


def among_replicas(dp: int) -> AbstractContextManager[None]:
    """Context in which a model finds so many replicas, whatever the layout of the job.

    Args:
        dp: how many; nothing where no mesh has been laid out.
    """
    if not _current:
        return nullcontext()
    mesh = _current[0]
    others = max(1, mesh.world_size // dp)
    return pretended(Mesh(dp, 1, others, mesh.rank, mesh.device, None))


def reset() -> None:
    """Forget the mesh, so that `init` may be called again (tests, notebooks)."""
    unquiet_other_ranks()
    watchdog.stop()
    store.forget()
    _current.clear()
    _used.clear()
