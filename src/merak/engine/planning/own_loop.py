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
from merak.plan.price.candidate import Candidate
from merak.plan.price.workload import Workload
from merak.plan.search.pinned import pinned_options

_ADVICE = "with replan=True, `replanned` goes on in it from a checkpoint"


def plan_loop(
    mesh: Mesh,
    source: GraphSource,
    batch: Samples,
    options: EngineOptions,
    cluster: str | None,
    cache: Path | None,
    named: Collection[str] = (),
    moves: bool = False,
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
        moves: whether the loop goes on in a layout that turns out to be faster.

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
        dp=replicas,
    )
    devices = devices_here(mesh, cluster, cache, options.memory_budget)
    job = Job(workload, devices, lambda _: None)
    pinned = pinned_options(options, given, None, named)
    chosen = choose_plan(mesh, job, pinned)
    watch = PlanWatch(Replanner(job, pinned, chosen, moves, _ADVICE))
    return watch, *take_layout(chosen, watch, options, batch)


def take_layout(
    layout: Candidate, watch: PlanWatch, options: EngineOptions, batch: Samples
) -> tuple[EngineOptions, Signature]:
    """Lay the ranks out for a loop; all ranks call it together.

    Args:
        layout: of a plan.
        watch: what compares it with the first steps.
        options: as the user gives them.
        batch: as of `plan_loop`.

    Returns:
        The plan's options, and the columns of its microbatches.
    """
    planned = replace(options, num_microbatches=layout.num_microbatches, **layout.options())
    planned = replace(planned, gradient_compression=watch.compression)
    lay_out(layout.dp, layout.tp, layout.pp, layout.cp, layout.ep)
    return planned, batch.of(layout.microbatch)
