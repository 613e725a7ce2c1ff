"""Mesh of ranks, dp × cp × tp × pp: coordinates, devices and process groups."""

from __future__ import annotations

import atexit
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Never

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from merak.core.doctor import failed_start
from merak.core.elastic import (
    AUTO_PLAN,
    Degrees,
    GivenDegrees,
    check_expert_degree,
    plan_expert_degree,
    smaller_degrees,
    wanted_degrees,
)
from merak.core.errors import MeshError, PlanError, keyword_names, refuse_unknown
from merak.core.health import failure, preemption, store, watchdog
from merak.core.health.hosts import choose_interface, exchange_hosts, host_names
from merak.core.health.quiet import quiet_libraries
from merak.core.health.status import waiting, waiting_for_all
from merak.core.rank0 import warn_on_rank0

logger = logging.getLogger(__name__)

BACKENDS = ("gloo", "nccl")
"""Backends of the process groups."""

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
        """Which shard of split parameters this rank holds."""
        return self.ep_rank if self.spreads_experts else self.tp_rank

    @property
    def degrees(self) -> GivenDegrees:
        """All degrees of the job."""
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

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return this rank's process group along one axis; None where the axis has degree 1."""
        mesh = self._mesh_of(axis)
        if mesh is None or getattr(self, axis) == 1:
            return None
        return mesh.get_group(self._named(axis))

    def submesh(self, axis: str) -> DeviceMesh | None:
        """Return torch's mesh along one axis; None where there is none."""
        mesh = self._mesh_of(axis)
        return None if mesh is None else mesh[self._named(axis)]

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
        return replace(self, device_mesh=made, expert_mesh=experts)

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


OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable with which torchrun makes a store anew for each attempt."""

_LONGEST_S = 10 * 365 * 24 * 3600.0
"""Largest timeout in seconds: torch counts it in milliseconds of limited size."""

_current: list[Mesh] = []


def init(
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    *,
    cp: int | None = None,
    ep: int | None = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout_s: float = 600.0,
    elastic: bool = False,
    plan: str | os.PathLike[str] | None = None,
    **unknown: Never,
) -> Mesh:
    """Lay the ranks out as dp × cp × tp × pp and connect them; call it once, before the trainer.

    Args:
        dp: data parallel degree; 1 where neither it nor a plan is given.
        tp: tensor parallel degree; as dp.
        pp: pipeline parallel degree; as dp.
        cp: context parallel degree, the number of ranks that share each sample's tokens; as dp.
        ep: expert parallel degree: tp, or where tp is 1 a divisor of dp × cp; as dp.
        backend: "nccl" or "gloo"; nccl where the device is a GPU.
        device: "cpu" or "cuda", in a single process also one of several GPUs ("cuda:1"); what the
            machine has by default.
        timeout_s: seconds that a rank waits for others until the engine is built, for which
            `hang_limit_s` counts; then every rank prints where it stands, and the job ends. torch's
            own timeouts are raised to come after it.
        elastic: whether the job may run in smaller degrees where torchrun has started fewer ranks
            (`--nnodes=MIN:MAX`): dp is lowered first, then pp, then tp. `MerakArguments` then
            raises `gradient_accumulation_steps`, so that a step has the same samples.
        plan: file that `merak plan` has written, whose degrees count instead of those above; or
            "auto": `MerakTrainer` and `parallelize` search the rest of the degrees.
        **unknown: refused by an `ArgumentsError`.

    Returns:
        The mesh, which `current_mesh()` also gives; with plan="auto" one of replicas until then.

    Raises:
        PlanError: the plan cannot be read, or has other degrees than those given.
        MeshError: degrees below 1 or whose product is not the world size, a job of several ranks
            that torchrun did not start, a device or backend that is none, or a second call.
    """
    failure.install()
    _check_call(unknown, timeout_s)
    preemption.listen()
    given = GivenDegrees(dp, tp, pp, cp, ep)
    wanted = wanted_degrees(given, plan, elastic)
    degrees = _check_degrees(wanted, elastic)
    held = _expert_degree(ep, wanted, degrees, plan)
    chosen = _pick_device(device)
    _check_backend(backend, chosen)
    mesh = _connect(degrees, held, chosen, backend, timeout_s)
    if plan == AUTO_PLAN:
        mesh = replace(mesh, given=given)
    if degrees != wanted:
        mesh = _smaller(mesh, wanted)
    _current.append(mesh)
    _warn_of_hosts(mesh)
    return mesh


def _check_call(unknown: Iterable[str], timeout_s: object) -> None:
    refuse_unknown("merak.init", unknown, keyword_names(init))
    if _current:
        raise MeshError("merak.init was called twice; call it once, before the trainer is built.")
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _LONGEST_S:
        raise MeshError(f"{timeout_s=} is not a time to wait; use a number of seconds above 0.")


def _expert_degree(
    ep: int | None, wanted: Degrees, degrees: Degrees, plan: str | os.PathLike[str] | None
) -> int:
    """The expert parallel degree of a job, whose degrees may be smaller than it is written for."""
    if plan == AUTO_PLAN:
        return 1  # until the plan is chosen
    if plan is not None:
        planned = plan_expert_degree(plan)
        if ep not in (None, planned):
            raise PlanError(
                f"ep={ep} contradicts the plan {plan}, which has ep={planned}; leave it out, or "
                "plan again."
            )
        ep = planned
    held = check_expert_degree(ep, wanted)
    if held == 1 or wanted.tp > 1:
        return min(held, degrees.tp)
    return math.gcd(held, degrees.replicas)


def _smaller(mesh: Mesh, wanted: Degrees) -> Mesh:
    """A mesh of fewer ranks than a job is written for."""
    warn_on_rank0(
        logger,
        "%d ranks are there for %s: running as %s.",
        mesh.world_size,
        wanted,
        Degrees(mesh.dp, mesh.tp, mesh.pp, mesh.cp),
    )
    return replace(mesh, wanted_dp=wanted.dp)


def lay_out(dp: int, tp: int, pp: int, cp: int = 1, ep: int = 1) -> Mesh:
    """Lay the ranks of `init(plan="auto")` out as the plan says; a collective of all ranks.

    Args:
        dp: data parallel degree.
        tp: tensor parallel degree.
        pp: pipeline parallel degree.
        cp: context parallel degree.
        ep: expert parallel degree.

    Returns:
        The mesh, which `current_mesh()` gives from now on.
    """
    mesh = current_mesh()
    laid = replace(mesh, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, given=None)
    if mesh.device_mesh is not None and laid.degrees != mesh.degrees:
        with waiting_for_all("the groups of ranks of"):
            laid = laid.connected()
        watchdog.move(_place(laid))
    _current[0] = laid
    _warn_of_tp(laid)
    return laid


def _warn_of_hosts(mesh: Mesh) -> None:
    """Warn of a tensor parallelism that hosts slow down, and of hosts that could not come back."""
    _warn_of_tp(mesh)
    if mesh.hosts and store.is_agents() and failure.restarts_left():
        warn_on_rank0(
            logger,
            "A host that is lost could not come back to this job: torchrun gives its new processes "
            "no address to meet at; set %s=1 for torchrun on every host.",
            OWN_STORE,
        )


def _warn_of_tp(mesh: Mesh) -> None:
    if crosses_hosts(mesh, "tp"):
        warn_on_rank0(
            logger,
            "tp=%d spans hosts (%s): every layer all-reduces over tp several times a microbatch, "
            "and between hosts that takes many times as long as inside one; %s.",
            mesh.tp,
            describe_hosts(mesh.hosts),
            _how_to_place(mesh.hosts, mesh.tp),
        )


def _check_degrees(wanted: Degrees, elastic: bool) -> Degrees:
    """Refuse degrees that are none, or whose product is not the number of ranks.

    Returns:
        The degrees to run in: smaller ones where fewer ranks are there and `elastic` allows it.
    """
    GivenDegrees(*wanted).check()
    num_ranks = math.prod(wanted)
    if "RANK" not in os.environ and num_ranks > 1:
        start = f"start it with `torchrun --nproc-per-node {num_ranks} script.py`."
        if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            start = (
                "srun has started several, which do not know of one another: let it start one "
                "torchrun on each node, as the job does that `merak launch slurm script.py` writes."
            )
        raise MeshError(f"{wanted} needs {num_ranks} ranks, but this is a single process; {start}")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks == world_size:
        return wanted
    smaller = smaller_degrees(wanted, world_size) if world_size < num_ranks else None
    if elastic and smaller is not None:
        return smaller
    fix = "make the product of the degrees equal the number of ranks"
    beside = num_ranks // wanted.dp
    fits = wanted._replace(dp=world_size // beside) if world_size % beside == 0 else smaller
    fix += f", or start {num_ranks}" if fits is None else f", such as {fits}"
    if smaller is not None:
        fix += ", or allow smaller degrees with merak.init(…, elastic=True)"
    raise MeshError(f"{wanted} = {num_ranks} ranks, but torchrun started {world_size}; {fix}.")


def crosses_hosts(mesh: Mesh, axis: str) -> bool:
    """Tell whether a group of ranks along an axis spans hosts.

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


def _how_to_place(hosts: Sequence[str], tp: int) -> str:
    """Advise how tensor parallel groups come inside hosts.

    Every rank is in one group, so groups fit if and only if tp divides each host's number of ranks;
    then groups of consecutive ranks do, where each host's ranks are consecutive.
    """
    if any(number % tp for number in Counter(hosts).values()):
        return f"start a multiple of {tp} ranks on every host, or use a tp that divides them all"
    return (
        "number each host's ranks consecutively, as torchrun does, and Slurm with "
        "--distribution=block"
    )


def _check_backend(backend: str | None, device: torch.device) -> None:
    """Refuse a backend that cannot carry a device's tensors, also in a single process."""
    if backend is None:
        return
    named = {part.rpartition(":")[2] for part in str(backend).split(",")}
    if not named.issubset(BACKENDS):
        raise MeshError(f"{backend=} is not supported; use 'gloo' or 'nccl', or leave it out.")
    if backend == "nccl" and device.type == "cpu":
        raise MeshError("backend='nccl' carries tensors of GPUs alone; use 'gloo' on the CPU.")


def _parsed(device: str | torch.device) -> torch.device:
    with suppress(RuntimeError, TypeError):
        found = torch.device(device)
        if found.type in ("cpu", "cuda"):
            return found
    raise MeshError(f"device={str(device)!r} is not supported; use 'cpu' or 'cuda'.")


def _pick_device(device: str | torch.device | None) -> torch.device:
    wanted = _parsed(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if wanted.type != "cuda":
        return torch.device(wanted.type)
    if not torch.cuda.is_available():
        raise MeshError("device='cuda' was asked for, but torch sees no GPU; use device='cpu'.")
    num_gpus = torch.cuda.device_count()
    if wanted.index is not None and "RANK" not in os.environ:
        if wanted.index >= num_gpus:
            raise MeshError(
                f"device={str(wanted)!r} is not here: torch sees {num_gpus} GPUs, counted from 0; "
                "use device='cuda', or the number of one of them."
            )
        torch.cuda.set_device(wanted)
        return wanted
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if wanted.index not in (None, local_rank):
        raise MeshError(
            f"device={str(wanted)!r} was asked for on local rank {local_rank}, but every rank "
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


@failure.starting(failed_start.advise)
def _connect(
    degrees: Degrees, ep: int, device: torch.device, backend: str | None, timeout_s: float
) -> Mesh:
    dp, tp, pp, cp = degrees
    quiet_libraries(int(os.environ.get("RANK", "0")))
    if "RANK" not in os.environ:
        return Mesh(dp, tp, pp, 0, device, None, cp=cp, ep=ep)
    rank, num_ranks = int(os.environ["RANK"]), math.prod(degrees)
    mesh = Mesh(dp, tp, pp, rank, device, None, cp=cp, ep=ep)
    _quiet_other_ranks(rank)
    limit = watchdog.Limit("timeout_s", timeout_s)
    timeout = timedelta(seconds=watchdog.timeouts_s(limit))
    known = None
    if dist.is_initialized():
        store.join(timeout_s)
    else:
        known = store.open_store(rank, timeout_s)
    if num_ranks > 1:
        watchdog.start(watchdog.Member(rank, num_ranks, _place(mesh)), limit)
    with waiting(watchdog.JOINING, tuple(r for r in range(num_ranks) if r != rank)):
        if known is not None:
            known.set_timeout(timeout)
        found = exchange_hosts(known, rank, num_ranks)
        names = host_names(found)
        if known is not None:
            choose_interface(found, rank)
            dist.init_process_group(
                backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"),
                store=known,
                rank=rank,
                world_size=num_ranks,
                timeout=timeout,
                device_id=device if device.type == "cuda" and backend != "gloo" else None,
            )
            atexit.register(_disconnect)
        mesh = mesh.connected()
    hosts = names if len(set(names)) > 1 else ()
    return replace(mesh, hosts=hosts)


def _place(mesh: Mesh) -> str:
    context = f", cp {mesh.cp_rank}" if mesh.cp > 1 else ""
    return f"pp {mesh.pp_rank}, dp {mesh.dp_rank}{context}, tp {mesh.tp_rank}"


_quiet: dict[str, int] = {}


def _quiet_other_ranks(rank: int) -> None:
    """Raise the log level to WARNING on ranks other than 0, unless the user has set a level."""
    own = logging.getLogger("merak")
    if rank and own.level == logging.NOTSET:
        _quiet["level"] = logging.WARNING
        own.setLevel(logging.WARNING)


def _disconnect() -> None:
    watchdog.stop()
    if dist.is_initialized():
        dist.destroy_process_group()


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


def reset() -> None:
    """Forget the mesh, so that `init` may be called again (tests, notebooks)."""
    if _quiet.pop("level", None) is not None:
        logging.getLogger("merak").setLevel(logging.NOTSET)
    watchdog.stop()
    store.forget()
    _current.clear()
