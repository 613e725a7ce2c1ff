"""`merak.init`: the ranks of a job as a mesh."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Never

import torch

from merak.core.doctor import limits
from merak.core.elastic import (
    AUTO_PLAN,
    Degrees,
    GivenDegrees,
    check_expert_degree,
    joined_plan,
    on_command_line,
    smaller_degrees,
)
from merak.core.errors import MeshError, PlanError, keyword_names, refuse_unknown
from merak.core.files.plan_file import plan_degrees
from merak.core.health import failure, preemption, store, watchdog
from merak.core.health.status import waiting_for_all
from merak.core.mesh import (
    Mesh,
    crosses_hosts,
    current_mesh,
    describe_hosts,
    has_mesh,
    set_mesh,
)
from merak.core.rank0 import warn_on_rank0
from merak.core.start.connect import connect, describe_place
from merak.core.start.device import check_backend, pick_device
from merak.core.start.unused_mesh import watch_for_no_use

logger = logging.getLogger(__name__)

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable with which torchrun makes a store anew for each attempt."""

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable with the number of a GPU's hardware queues."""

_TIMEOUT_S = 600.0

_LONGEST_S = 10 * 365 * 24 * 3600.0
"""Largest timeout in seconds: torch counts it in milliseconds of limited size."""


def init(
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    *,
    cp: int | None = None,
    ep: int | None = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout_s: float = _TIMEOUT_S,
    elastic: bool = False,
    plan: str | os.PathLike[str] | None = None,
    **unknown: Never,
) -> Mesh:
    """Lay the ranks out as dp × cp × tp × pp and connect them; call it before the trainer.

    Args:
        dp: data parallel degree; 1 where neither it nor a plan is given, here or by `merak run`.
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
        The mesh, which `current_mesh()` also gives, as does a second call for the same; with
        plan="auto" one of replicas until then.

    Raises:
        PlanError: the plan cannot be read, or has other degrees than those given.
        MeshError: degrees below 1 or whose product is not the world size, a job of several ranks
            that torchrun did not start, a device or backend that is none, or a second call for
            another mesh.
    """
    failure.install(limits.exhausted)
    _check_call(unknown, timeout_s)
    preemption.listen()
    given, plan = _with_outside(GivenDegrees(dp, tp, pp, cp, ep), plan)
    wanted = _wanted_degrees(given, plan, elastic)
    chosen = pick_device(device)
    check_backend(backend, chosen)
    call = _call_text(given, wanted, chosen, backend, timeout_s, elastic, plan)
    if has_mesh():
        return _same_mesh(call)
    degrees = _check_degrees(wanted, elastic)
    held = _expert_degree(given.ep, wanted, degrees, plan)
    mesh = replace(connect(degrees, held, chosen, backend, timeout_s), call=call)
    return _adopted(mesh, wanted, given if plan == AUTO_PLAN else None)


def _with_outside(
    given: GivenDegrees, plan: str | os.PathLike[str] | None
) -> tuple[GivenDegrees, str | os.PathLike[str] | None]:
    """Degrees and plan of a script, and from outside those that it leaves out.

    The script's own command line counts where it leaves out all of them. Where degrees come from
    outside without dp, dp is what is left of the ranks.
    """
    is_open = plan is None and not any(given)
    plan, outside = joined_plan(plan), GivenDegrees.from_outside(is_open)
    plan = on_command_line("plan") if is_open and plan is None else plan
    joined = given.joined(outside)
    if plan is not None or not any(outside):
        return joined, plan
    return joined.with_replicas(int(os.environ.get("WORLD_SIZE", "1"))), None


def _wanted_degrees(
    given: GivenDegrees, plan: str | os.PathLike[str] | None, elastic: bool
) -> Degrees:
    """Degrees that a job is written for: of its plan, or those given where there is no plan."""
    given.check()
    if plan is None:
        return given.filled()
    if plan == AUTO_PLAN:
        if elastic:
            raise MeshError(
                "elastic=True lowers degrees that are given, but plan='auto' chooses them for the "
                "ranks that are there; leave elastic out, and set global_batch."
            )
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        given.check_ranks(num_ranks)
        return Degrees(num_ranks, 1, 1)
    planned = plan_degrees(plan).filled()
    GivenDegrees(*planned).check()
    if any(own not in (None, other) for own, other in zip(given.axes, planned, strict=True)):
        raise PlanError(
            f"{given} contradicts the plan {plan}, which has {planned}; leave the degrees out, or "
            "plan again."
        )
    return planned


def _adopted(mesh: Mesh, wanted: Degrees, searched: GivenDegrees | None) -> Mesh:
    """Make a mesh that of this job, with the degrees that it is written for or leaves open."""
    mesh = replace(mesh, given=searched)
    mesh = _smaller(mesh, wanted) if mesh.world_size < math.prod(wanted) else mesh
    set_mesh(mesh)
    watch_for_no_use()
    _warn_of_hosts(mesh)
    return mesh


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
        watchdog.move(describe_place(laid))
    set_mesh(laid)
    _warn_of_tp(laid)
    _warn_of_one_queue(laid)
    return laid


def _check_call(unknown: Iterable[str], timeout_s: object) -> None:
    refuse_unknown("merak.init", unknown, keyword_names(init))
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _LONGEST_S:
        raise MeshError(f"{timeout_s=} is not a time to wait; use a number of seconds above 0.")


def _call_text(
    given: GivenDegrees,
    wanted: Degrees,
    device: torch.device,
    backend: str | None,
    timeout_s: float,
    elastic: bool,
    plan: str | os.PathLike[str] | None,
) -> str:
    """What `init` is called for, in words that are the same for the same mesh."""
    usual = "nccl" if device.type == "cuda" else "gloo"
    degrees = (given if plan == AUTO_PLAN else wanted)._asdict().items()
    parts = [f"{axis}={own}" for axis, own in degrees if own not in (None, 1)]
    parts += [f"ep={given.ep}"] * (plan != AUTO_PLAN and given.ep not in (None, 1))
    parts += [f"plan={os.fspath(plan)!r}"] if plan is not None else []
    parts += ["elastic=True"] * bool(elastic)
    parts.append(f"device={str(device)!r}")
    parts += [f"backend={backend!r}"] if backend not in (None, usual) else []
    parts += [f"timeout_s={timeout_s:g}"] if timeout_s != _TIMEOUT_S else []
    return f"merak.init({', '.join(parts)})"


def _same_mesh(call: str) -> Mesh:
    """The mesh that there is, for a further call for the same.

    Raises:
        MeshError: it is for another one.
    """
    mesh = current_mesh()
    if mesh.call != call:
        before = mesh.call or "another part of the program"
        raise MeshError(
            f"{call} is a second call, but {before} has laid the ranks out already; leave the "
            "second out (merak.current_mesh() gives the mesh), or give both the same arguments."
        )
    return mesh


def _check_degrees(wanted: Degrees, elastic: bool) -> Degrees:
    """Refuse degrees that are none, or whose product is not the number of ranks.

    Returns:
        The degrees to run in: smaller ones where fewer ranks are there and `elastic` allows it.
    """
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


def _expert_degree(
    ep: int | None, wanted: Degrees, degrees: Degrees, plan: str | os.PathLike[str] | None
) -> int:
    """The expert parallel degree of a job, whose degrees may be smaller than it is written for."""
    if plan == AUTO_PLAN:
        return 1  # until the plan is chosen
    if plan is not None:
        planned = plan_degrees(plan).ep
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


def _warn_of_hosts(mesh: Mesh) -> None:
    """Warn of a tensor parallelism that hosts slow down, and of hosts that could not come back."""
    _warn_of_tp(mesh)
    _warn_of_one_queue(mesh)
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


def _warn_of_one_queue(mesh: Mesh) -> None:
    if mesh.pp > 1 and mesh.device.type == "cuda" and os.environ.get(QUEUES) == "1":
        warn_on_rank0(
            logger,
            "%s=1 gives a GPU one hardware queue, in which a receive that is posted ahead holds up "
            "the computation behind it: stages of pp=%d may wait for one another for ever. Unset "
            "it; Merak needs no single queue to order communication.",
            QUEUES,
            mesh.pp,
        )


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
