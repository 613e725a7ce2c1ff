"""The layout of a job: segments of every stage, schedule and activation policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from merak.core.errors import PlanError
from merak.core.mesh import Mesh
from merak.core.rank0 import decide_on_rank0
from merak.graph.ir.ir import ModelGraph
from merak.graph.trace.opaque.report import opaque_cause
from merak.plan.activation_policy import ActivationPolicy
from merak.plan.balance import Timed, balance
from merak.plan.cost.benchmark import measure
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.kernels.by_rules import segment_costs
from merak.plan.cost.measured_times import load_times
from merak.plan.engine_options import EngineOptions
from merak.plan.partition import Partition, from_sizes
from merak.plan.recompute_spec import recomputing_times
from merak.plan.step_plans import StepPlans
from merak.plan.tied_parameters import Reader
from merak.schedule.ir import Schedule


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a model over a pipeline: its stages, their schedule and activations.

    Args:
        graph: the model at the planned shape.
        partition: its segments by stage.
        plans: the schedule.
        activations: the policy within stages that recompute; the others save all activations.
    """

    graph: ModelGraph
    partition: Partition
    plans: StepPlans
    activations: ActivationPolicy = field(default_factory=ActivationPolicy)

    @property
    def schedule(self) -> Schedule:
        """The schedule of an ordinary step."""
        return self.plans.base.schedule

    @property
    def stage_rank(self) -> tuple[int, ...]:
        """The pp rank of each stage in the first pipe, whose copy of the weights is saved."""
        return self.schedule.pipes[0]

    def readers(self, pipe: int) -> list[Reader]:
        """Every segment with its pp rank and stage in a pipe, and the parameters it reads."""
        ranks = self.schedule.pipes[pipe]
        return [
            Reader(ranks[stage], stage, segment.index, segment.parameters)
            for stage, own in enumerate(self.partition.stages)
            for segment in self.graph.segments[own.start : own.stop]
        ]


def partition_segments(
    graph: ModelGraph, num_stages: int, options: EngineOptions, mesh: Mesh, cache: Path | None
) -> Partition:
    """Partition of the segments into stages: the user's own, or balanced by time.

    Args:
        graph: the model.
        num_stages: stages of the schedule.
        options: the user's partition or times.
        mesh: the grid of ranks, which all call this together.
        cache: folder of this machine's measured speeds.

    Raises:
        PlanError: more stages than segments, or a partition or times of another model.
    """
    num_segments = len(graph.segments)
    check_stages(graph, num_stages, mesh.pp)
    if options.partition is not None:
        return from_sizes(options.partition, num_segments)
    if num_stages == 1:
        return Partition(num_segments, ())

    def balanced() -> Partition:
        names = [segment.name for segment in graph.segments]
        times = segment_times(graph, options, mesh, cache)
        costs = recomputing_times(times, names, options.recompute)
        return balance(costs, num_stages, options.num_microbatches)

    # Measured speeds differ from rank to rank, and all ranks need one partition.
    return decide_on_rank0(mesh, "the balance of stages", balanced)


def few_segments(graph: ModelGraph) -> str:
    """Clause that says why a model is cut into so few segments; "" where its size says it.

    Args:
        graph: the model. An embedding may have most of its parameters, so that an opaque module
            with a tenth of them takes the place of all blocks.
    """
    return opaque_cause(graph, 0.1)


def check_stages(graph: ModelGraph, num_stages: int, pp: int) -> None:
    """Refuse more stages than there are segments to fill them.

    Args:
        graph: the model.
        num_stages: of all ranks.
        pp: the pipeline degree.

    Raises:
        PlanError: there are.
    """
    num_segments = len(graph.segments)
    if num_stages > num_segments:
        cause = few_segments(graph)
        most = num_segments * pp // num_stages  # of a schedule with several stages a rank
        fix = f"pp ≤ {most}" if most else "a schedule with fewer stages a rank"
        why = f": {cause}" if cause else ""
        raise PlanError(
            f"{num_segments} segments cannot fill {num_stages} stages (pp={pp}){why}; use {fix}."
        )


def segment_times(
    graph: ModelGraph, options: EngineOptions, mesh: Mesh, cache: Path | None
) -> Sequence[Timed]:
    """Times of all segments for one microbatch: from the user's file, or estimated."""
    if options.segment_times is not None:
        return load_times(Path(options.segment_times), [segment.name for segment in graph.segments])
    return segment_costs(graph.segments, speeds(options, mesh, cache))


def speeds(options: EngineOptions, mesh: Mesh, cache: Path | None) -> DeviceProfile:
    """Speeds of this rank's device, given or measured."""
    return options.device_profile or measure(mesh.device, cache)


def stages_of_parameters(graph: ModelGraph, partition: Partition) -> dict[str, frozenset[int]]:
    """Stages that read each parameter; one that no segment reads belongs to the first stage."""
    stages: dict[str, set[int]] = {}
    for stage, own in enumerate(partition.stages):
        for segment in graph.segments[own.start : own.stop]:
            for name in segment.parameters:
                stages.setdefault(name, set()).add(stage)
    return {name: frozenset(stages.get(name, {0})) for name in graph.parameters}


def stage_bounds(
    graph: ModelGraph, owners: Mapping[str, frozenset[int]], partition: Partition
) -> list[int]:
    """First segment of each stage, and the number of segments at the end.

    In a graph with other segments than the planned one, a segment belongs to the stage that holds
    most of its parameters.
    """
    if len(graph.segments) == partition.num_segments:
        return [0, *partition.cuts, partition.num_segments]
    num_stages = partition.num_stages
    bounds = [0]
    for segment in graph.segments:
        own = [owners[name] for name in segment.parameters]
        missing = [
            sum(stage not in held for held in own) for stage in range(len(bounds) - 1, num_stages)
        ]
        bounds += [segment.index] * missing.index(min(missing))
    bounds += [len(graph.segments)] * (num_stages + 1 - len(bounds))
    return bounds
