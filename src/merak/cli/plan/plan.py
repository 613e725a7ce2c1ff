"""`merak plan`: the fastest plans of a job, priced before a device is there."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from merak.cli.options import takes
from merak.cli.output import show, stdout_to_stderr
from merak.cli.plan.planned import Planned
from merak.cli.plan.report import PlanReport, WhatIf, rejected_rows, row_of, text_of
from merak.cli.plan.request import PlanRequest, pinned_of
from merak.core.errors import PlanError

if TYPE_CHECKING:
    from merak.plan.cluster.cluster import Cluster
    from merak.plan.price.workload import Workload

SCRIPT = "train.py"
"""Name of the user's script in the command that is shown."""


@takes(PlanRequest)
def plan(request: PlanRequest) -> None:
    """Find the fastest way to lay a job out on devices that need not be here."""
    with stdout_to_stderr():
        report = plan_report(request)
    show(report, text_of, request.as_json)


def plan_report(request: PlanRequest) -> PlanReport:
    """Plan a job.

    Args:
        request: the model, the devices, the batch, and what is pinned.

    Raises:
        CommandError: an option makes no sense.
        MerakError: the model cannot be traced, or fits nowhere.
    """
    from merak.plan.search.plan_file import plan_of, write_plan

    began = time.perf_counter()
    planned = find_plans(request)
    best = planned.ranking.plans[0]
    if request.output is not None:
        write_plan(request.output, plan_of(planned.workload, best, request.cluster))
    if request.page is not None:
        from merak.cli.plan.page import write_page

        write_page(request.page, planned, request)
    workload, cluster = planned.workload, planned.cluster
    dtype, dollars = workload.autocast or workload.dtype, _dollars_per_hour(request, cluster)
    return PlanReport(
        model=type(workload.model).__name__,
        cluster=request.cluster,
        devices=cluster.num_devices,
        global_batch=request.global_batch,
        sequence=request.sequence,
        plans=[row_of(own, cluster, dtype, dollars) for own in planned.ranking.plans],
        rejected=rejected_rows(planned.ranking),
        notes=list(planned.ranking.notes),
        candidates=planned.ranking.num_candidates,
        priced=planned.ranking.num_priced,
        proved=planned.ranking.is_proved,
        what_if=list(_what_ifs(request, planned)) if request.what_if else [],
        commands=commands(cluster, best.candidate.world_size, request.output),
        output=None if request.output is None else str(request.output),
        page=None if request.page is None else str(request.page),
        seconds=time.perf_counter() - began,
    )


def find_plans(request: PlanRequest) -> Planned:
    """Search for the plans of a request.

    Raises:
        CommandError: an option makes no sense.
        PlanError: nothing fits; the smallest cluster that would do is named.
    """
    pinned = pinned_of(request)
    # Heavy imports wait until a command is known to be well formed.
    from merak.plan.cluster.parse import parse_cluster
    from merak.plan.search.degrees import check_degrees
    from merak.plan.search.search import search

    cluster = parse_cluster(request.cluster)
    check_degrees(cluster.num_devices, request.global_batch, pinned)
    workload = _workload(request, cluster)
    ranking = search(workload, cluster, pinned, top=request.top)
    planned = Planned(workload, cluster, pinned, ranking)
    if not ranking.plans:
        raise PlanError(ranking.refusal or _fits_nowhere(request, planned))
    return planned


def _workload(request: PlanRequest, cluster: Cluster) -> Workload:
    from merak.arguments import default_trace_cache
    from merak.cli.memory import optimizer_factory, types_of
    from merak.zoo.model_source import check_inner_fields, parse_overrides, resolve_model
    from merak.zoo.workload import example_workload

    dtype, autocast = types_of(request.dtype, request.autocast)
    changes = parse_overrides(request.config)
    source = resolve_model(request.model, changes, trust_remote_code=request.trust_remote_code)
    check_inner_fields(source.config, changes)
    folder = Path(default_trace_cache()) if default_trace_cache() else None
    return example_workload(
        source,
        global_batch=request.global_batch,
        sequence=request.sequence,
        dtype=dtype,
        autocast=autocast,
        cache_dir=folder,
        optimizer=optimizer_factory(request.optimizer),
        master_weights=request.master_weights,
    )


def _fits_nowhere(request: PlanRequest, planned: Planned) -> str:
    """The sentence on a job that fits nowhere."""
    from merak.plan.search.explain import describe
    from merak.plan.search.smallest import smallest_cluster

    what = f"{request.model} with {request.global_batch} samples of {request.sequence} tokens"
    pinned = f" with {planned.pinned}" if str(planned.pinned) else ""
    reasons = [own for own in planned.ranking.rejected if own.count] or planned.ranking.rejected
    nearest = f" ({reasons[0].what}: {reasons[0].why})" if reasons else ""
    found = smallest_cluster(planned.workload, planned.cluster, planned.pinned)
    if found is None:
        fix = "no number of such devices would do; use a smaller batch or pin less"
    else:
        fix = (
            f"the smallest of 2, 4, 8, … times as many that would do has "
            f"{found.candidate.world_size} devices, with {describe(found.candidate)}"
        )
    return f"{what} fits nowhere on {request.cluster}{pinned}{nearest}; {fix}."


def _dollars_per_hour(request: PlanRequest, cluster: Cluster) -> float | None:
    if request.price_per_device_hour is not None:
        return request.price_per_device_hour * cluster.num_devices
    return cluster.dollars_per_hour


def _what_ifs(request: PlanRequest, planned: Planned) -> Iterator[WhatIf]:
    """The best plans with more devices, a slower network, and a larger batch."""
    from merak.core.errors import MerakError
    from merak.plan.search.search import search

    workload, cluster = planned.workload, planned.cluster
    larger = copy.copy(workload)
    larger.global_batch = 2 * workload.global_batch
    for what, job, devices in (
        ("twice the devices", workload, _doubled(cluster)),
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


def commands(cluster: Cluster, world_size: int, output: Path | None) -> list[str]:
    """The commands that start a plan, one for each kind of node.

    Args:
        cluster: the devices.
        world_size: ranks of the plan.
        output: file of the plan; None for a plan that was not written.
    """
    script = f"{SCRIPT} --plan {output or 'plan.json'}"
    num_nodes = sum(own.count for own in cluster.nodes)
    if world_size < cluster.num_devices or num_nodes == 1:
        first = cluster.nodes[0].devices_per_node
        if world_size <= first:
            return [f"torchrun --nproc-per-node {world_size} {script}"]
        num_nodes = -(-world_size // first)
    meet = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    kinds = dict.fromkeys(own.devices_per_node for own in cluster.nodes)
    return [
        f"torchrun --nnodes {num_nodes} --nproc-per-node {size} {meet} {script}" for size in kinds
    ]
