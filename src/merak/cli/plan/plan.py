"""`merak plan`: the fastest plans of a job, priced before a device is there."""

from __future__ import annotations

import copy
import json
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from merak.cli.model import (
    filled,
    model_source,
    model_workload,
    precision_of,
    recipe_job,
    request_optimizer,
    types_of,
)
from merak.cli.options import takes
from merak.cli.output import show, stdout_to_stderr
from merak.cli.plan.planned import Planned
from merak.cli.plan.report import PlanReport, WhatIf, rejected_rows, row_of, samples, text_of
from merak.cli.plan.request import PlanRequest, pinned_of
from merak.core.errors import CommandError, PlanError
from merak.core.garbage import paused_collector
from merak.plan.options import ParallelOptions

if TYPE_CHECKING:
    import torch

    from merak.cli.recipe.planned_job import JobDraft, PlannedJob
    from merak.plan.cluster.cluster import Cluster, Nodes
    from merak.plan.price.workload import Workload
    from merak.plan.search.plan_file import PlanFile

SCRIPT = "train.py"
"""Name of the user's script in the command that is shown."""


@dataclass(frozen=True, slots=True)
class Started:
    """Words that start a job.

    Args:
        by_torchrun: behind torchrun's own options.
        on_one_host: a whole command for one host, without torchrun; None where there is none.
    """

    by_torchrun: str
    on_one_host: str | None = None


@takes(PlanRequest)
def plan(request: PlanRequest) -> None:
    """Find the fastest way to lay a job out on devices that need not be here."""
    with stdout_to_stderr(), paused_collector(process_ends=True):
        report = plan_report(request)
    show(report, lambda own: text_of(own, request.explain), request.as_json)


def plan_report(request: PlanRequest) -> PlanReport:
    """Search for the fastest layout of a job, and report it.

    Args:
        request: the model, the devices, the batch, and what is pinned.

    Raises:
        CommandError: an option makes no sense.
        MerakError: the model cannot be traced, or fits nowhere.
    """
    from merak.plan.price.arrange import forecast_as_priced
    from merak.plan.search.plan_file import plan_of, write_plan

    began = time.perf_counter()
    job = recipe_job(request)
    request, draft = _with_recipe(request, job)
    planned = find_plans(request, job, draft)
    best = planned.ranking.plans[0]
    found = plan_of(planned.workload, best, planned.cluster_name)
    if request.output is not None:
        write_plan(request.output, found)
    if request.page is not None:
        from merak.cli.plan.page import write_page

        write_page(request.page, planned, request)
    workload, cluster = planned.workload, planned.cluster
    dtype, dollars = workload.autocast or workload.dtype, _dollars_per_hour(request, cluster)
    return PlanReport(
        model=type(workload.model).__name__,
        cluster=planned.cluster_name,
        devices=cluster.num_devices,
        global_batch=workload.global_batch,
        sequence=workload.sequence,
        precision=precision_of(workload, request, job),
        counted="samples" if workload.tokens_per_sample == 1 else "tokens",
        plans=[row_of(own, cluster, dtype, dollars) for own in planned.ranking.plans],
        rejected=rejected_rows(planned.ranking),
        notes=[
            *planned.ranking.notes,
            *_slow_types(cluster, dtype),
            *map(str, forecast_as_priced(workload, cluster, best.candidate).on_autograd),
        ],
        candidates=planned.ranking.num_candidates,
        priced=planned.ranking.num_priced,
        proved=planned.ranking.is_proved,
        kinds=[
            WhatIf(kind, row_of(own, cluster, dtype, dollars))
            for kind, own in planned.ranking.kinds.items()
            if own is not best
        ],
        what_if=list(_what_ifs(request, planned)) if request.what_if else [],
        commands=commands(cluster, best.candidate.world_size, started_by(request, job, found)),
        starts=_starts(job),
        output=None if request.output is None else str(request.output),
        page=None if request.page is None else str(request.page),
        seconds=time.perf_counter() - began,
    )


def _with_recipe(
    request: PlanRequest, job: PlannedJob | None
) -> tuple[PlanRequest, JobDraft | None]:
    """The request with what the recipe's arguments say of it, and the recipe's job."""
    if job is None:
        return request, None
    import torch

    from merak.plan.cluster.parse import parse_cluster

    nodes = parse_cluster(request.cluster).nodes
    draft = job.draft(torch.device("cpu"), [own.device for own in nodes])
    draft.refuse_unpriced("merak plan")
    return filled(request, draft.pinned()), draft


def find_plans(
    request: PlanRequest, job: PlannedJob | None = None, draft: JobDraft | None = None
) -> Planned:
    """Search for the plans of a request.

    Args:
        request: with what a recipe says of it.
        job: of the recipe; None without one.
        draft: its arguments; None without a recipe.

    Raises:
        CommandError: an option makes no sense.
        PlanError: nothing fits; the smallest cluster that would do is named.
    """
    pinned = pinned_of(request)
    # Heavy imports wait until a command is known to be well formed.
    from merak.plan.cluster.parse import parse_cluster
    from merak.plan.search.bounds import JobPricing
    from merak.plan.search.degrees import check_degrees
    from merak.plan.search.fewer_devices import (
        search_some,
        with_fewer_devices,
        without_slow_nodes,
    )
    from merak.plan.search.node_order import order_of, search_orders
    from merak.plan.search.smallest import fits_nowhere

    cluster = parse_cluster(request.cluster)
    if request.global_batch is None:
        raise CommandError("Missing option '--global-batch': the samples of a step of the job.")
    check_degrees(cluster.num_devices, request.global_batch, pinned)
    workload = _workload(request, job, draft)
    found = search_orders(workload, cluster, pinned, top=request.top)
    if not found.ranking.num_candidates:
        found = search_some(workload, cluster, pinned, request.top) or found
    if not found.ranking.plans:
        what = f"{request.model} with {samples(request.global_batch, workload.sequence)}"
        why = fits_nowhere(what, request.cluster, workload, cluster, pinned, found.ranking)
        raise PlanError(why)
    found = without_slow_nodes(workload, found, pinned, request.top)
    is_other = found.is_changed or found.cluster.num_devices < cluster.num_devices
    name = order_of(found.cluster) if is_other else request.cluster
    pricing = JobPricing(workload, found.cluster, pinned.microbatch or 1)
    ranking = with_fewer_devices(found.ranking, pricing, pinned, request.top)
    return Planned(workload, found.cluster, name, pinned, ranking)


def _workload(request: PlanRequest, job: PlannedJob | None, draft: JobDraft | None) -> Workload:
    from merak.zoo.batches.batch import DEFAULT_SEQUENCE
    from merak.zoo.configs.fields import most_positions
    from merak.zoo.workload import reads_sequence

    types_of(request.dtype, request.autocast)  # refuses words before the model is built
    request, source = model_source(request, job)
    if request.sequence is None and reads_sequence(source):
        limit = most_positions(source.config)
        usual = DEFAULT_SEQUENCE if limit is None else min(DEFAULT_SEQUENCE, limit[1])
        raise CommandError(
            f"the time of {source.name} depends on the tokens of a sequence; add --seq, such as "
            f"--seq {usual}."
        )
    assert request.global_batch is not None
    workload = model_workload(
        request,
        source,
        global_batch=request.global_batch,
        optimizer=request_optimizer(request, draft),
        common=ParallelOptions(**request.common),
        draft=draft,
    )
    return workload


def _slow_types(cluster: Cluster, dtype: torch.dtype) -> Iterator[str]:
    """Sentences on devices without units for the element type of the products."""
    name = str(dtype).removeprefix("torch.")
    for device in dict.fromkeys(own.device.name for own in cluster.nodes):
        known = next(own.device for own in cluster.nodes if own.device.name == device).flops_per_s
        if name not in known and known.keys() & {"bfloat16", "float16"}:
            other = "bfloat16" if "bfloat16" in known else "float16"
            yield f"{device} multiplies {name} as slowly as float32; {other} is faster there"


def _dollars_per_hour(request: PlanRequest, cluster: Cluster) -> float | None:
    if request.price_per_device_hour is not None:
        return request.price_per_device_hour * cluster.num_devices
    return cluster.dollars_per_hour


def _what_ifs(request: PlanRequest, planned: Planned) -> Iterator[WhatIf]:
    """The best plans with more devices, fewer, a slower network, and a larger batch."""
    from merak.core.errors import MerakError
    from merak.plan.search.fewer_devices import half_cluster
    from merak.plan.search.search import search

    workload, cluster = planned.workload, planned.cluster
    larger = copy.copy(workload)
    larger.global_batch = 2 * workload.global_batch
    for what, job, devices in (
        ("twice the devices", workload, _doubled(cluster)),
        ("half the devices", workload, half_cluster(cluster)),
        ("half the network", workload, _slower(cluster)),
        ("twice the batch", larger, cluster),
    ):
        try:
            plans = search(job, devices, planned.pinned, top=1).plans
        except MerakError:
            plans = ()
        dtype, dollars = workload.autocast or workload.dtype, _dollars_per_hour(request, devices)
        yield WhatIf(what, row_of(plans[0], devices, dtype, dollars) if plans else None)


def _doubled(cluster: Cluster) -> Cluster:
    return replace(cluster, nodes=tuple(replace(n, count=2 * n.count) for n in cluster.nodes))


def _slower(cluster: Cluster) -> Cluster:
    networks = [replace(n.network, bytes_per_s=n.network.bytes_per_s / 2) for n in cluster.nodes]
    pairs = zip(cluster.nodes, networks, strict=True)
    return replace(cluster, nodes=tuple(replace(n, network=network) for n, network in pairs))


def _starts(job: PlannedJob | None) -> str | None:
    """A sentence on the script that the command starts; None where it starts a recipe."""
    if job is not None:
        return None
    return (
        f"{SCRIPT} is a script of this model that gives the file to merak.init(plan=…) and "
        "MerakArguments(plan=…), as that of merak init does"
    )


def started_by(request: PlanRequest, job: PlannedJob | None, plan: PlanFile) -> Started:
    """Return what starts a rank of the planned job: a script that follows the plan, or a recipe.

    Args:
        request: with the recipe and its changes, and the file of the plan.
        job: of the recipe; None without one.
        plan: whose choices the recipe may contradict.
    """
    file = request.output or "plan.json"
    if job is None:
        return Started(f"{SCRIPT} --plan {file}")
    # The plan's degrees count, and a recipe that repeats others would contradict it.
    given = any(getattr(job.recipe.parallel, axis) is not None for axis in ("dp", "tp", "pp", "cp"))
    changes = [*(request.settings or ()), f"plan={file}", *(["parallel=null"] if given else [])]
    changes += _changes(job.recipe.arguments, plan)
    words = shlex.join(["train", request.model, *changes])
    return Started(f"-m merak.cli.main {words}", f"merak {words}")


def _changes(arguments: Mapping[str, Any], plan: PlanFile) -> Iterator[str]:
    """Changes of the fields of a recipe that a plan has otherwise."""
    from merak.arguments.planned import planned_arguments

    for name, value in planned_arguments(plan).items():
        given = arguments.get(name)
        if given is not None and given != value:
            yield f"arguments.{name}={json.dumps(value)}"


def commands(cluster: Cluster, world_size: int, started: Started) -> list[str]:
    """The commands that start a plan, one for nodes with the same number of ranks and device.

    Args:
        cluster: the devices.
        world_size: ranks of the plan.
        started: what starts a rank.
    """
    script = started.by_torchrun
    runs = list(_runs(cluster, world_size))
    num_nodes = sum(own.count for own in runs)
    size = runs[0].devices_per_node
    if num_nodes == 1:
        return [started.on_one_host or f"torchrun --nproc-per-node {size} {script}"]
    if len(runs) == 1:
        meet = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
        return [f"torchrun --nnodes {num_nodes} --nproc-per-node {size} {meet} {script}"]
    return list(_numbered(runs, num_nodes, script))


def _runs(cluster: Cluster, world_size: int) -> Iterator[Nodes]:
    """The nodes that the ranks of a plan fill, the last one perhaps in part."""
    left = world_size
    for own in cluster.nodes:
        count = min(own.count, left // own.devices_per_node)
        left -= count * own.devices_per_node
        if count:
            yield replace(own, count=count)
        if count < own.count:
            if left:
                yield replace(own, count=1, devices_per_node=left)
            return


def _numbered(runs: list[Nodes], num_nodes: int, script: str) -> Iterator[str]:
    """Commands with numbers of nodes: a rendezvous would order unequal nodes as they come."""
    first = 0
    for own in runs:
        last = first + own.count - 1
        which = str(first) if last == first else f"{{{first}..{last}}}"
        yield (
            f"torchrun --nnodes {num_nodes} --node-rank {which} "
            f"--nproc-per-node {own.devices_per_node} --master-addr HOST --master-port 29500 "
            f"{script}  # {own.device.name}"
        )
        first = last + 1
