"""The plan of a loop of one's own: `parallelize` on ranks whose degrees are still open."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from merak.core.mesh import Mesh
from merak.core.start.init import lay_out
from merak.core.tensor_meta import Signature
from merak.engine.planning.choose import Job, choose_plan
from merak.engine.planning.devices import devices_here
from merak.engine.planning.replan import PlanWatch, Replanner
from merak.engine.planning.shapes import Samples
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from merak.plan.options import common_options
from merak.plan.price.workload import Workload
from merak.plan.search.pinned import pinned_options

_ADVICE = "a job with these degrees and options goes on in it from a checkpoint of this one"


def plan_loop(
    mesh: Mesh,
    source: GraphSource,
    batch: Samples,
    options: EngineOptions,
    cluster: str | None,
    cache: Path | None,
    named: Collection[str] = (),
) -> tuple[PlanWatch, EngineOptions, Signature]:
    """Search the fastest plan of a loop, and lay the ranks out; all ranks call it together.

    Args:
        mesh: of `merak.init`.
        source: the model.
        batch: of one replica, where each rank is one unless dp is given.
        options: as the user gives them.
        cluster: the devices, as of `parse_cluster`; None to find them out.
        cache: folder of profiles; None for none.
        named: options that the user gives, which are pinned also at their default.

    Returns:
        What compares the plan with the first steps, its options, and the columns of its
        microbatches.

    Raises:
        MerakError: the model cannot be traced, or no plan fits.
    """
    given = mesh.degrees if mesh.given is None else mesh.given
    replicas = given.dp or mesh.dp
    workload = Workload(
        copy.copy(source),  # whose model will be another one, for comparisons
        batch.of,
        batch.count * replicas,
        optimizer=options.optimizer,
        common=common_options(options),
        features=options.features,
    )
    devices = devices_here(mesh, cluster, cache, options.memory_budget)
    job = Job(workload, devices, lambda _: None)
    pinned = pinned_options(options, given, None, named)
    chosen = choose_plan(mesh, job, pinned)
    planned = replace(options, num_microbatches=chosen.num_microbatches, **chosen.options())
    planned = replace(planned, gradient_compression=workload.common.gradient_compression)
    lay_out(chosen.dp, chosen.tp, chosen.pp, chosen.cp, chosen.ep)
    watch = PlanWatch(Replanner(job, pinned, chosen, False, _ADVICE))
    return watch, planned, batch.of(chosen.microbatch)
