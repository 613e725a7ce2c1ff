"""Which segments form which stage: decided once, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from merak.core.errors import PlanError
from merak.core.health.status import waiting_for_first
from merak.core.mesh import Mesh
from merak.graph.ir.ir import ModelGraph
from merak.graph.program.program import Rewrite
from merak.graph.tensor_parallel.features import Features
from merak.plan.balance import Timed, balance
from merak.plan.cost.benchmark import measure
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.measured_times import load_times
from merak.plan.cost.optimizer_memory import OptimizerFactory
from merak.plan.cost.segment_time import segment_costs
from merak.plan.cost.selective_ops import Dear
from merak.plan.partition import Partition, from_sizes
from merak.plan.recompute_spec import Recompute
from merak.plan.step_plans import StepPlans
from merak.plan.tied_parameters import Reader
from merak.schedule.ir import Schedule


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is laid out and run.

    Args:
        schedule: name of the pipeline schedule.
        num_microbatches: microbatches per step of one replica, as planned for.
        seed: the job's seed, for initial weights and dropout.
        features: tensor parallel attributes that override what is derived from the graph.
        segments_per_stage: a partition of one's own; None balances by times.
        segment_times: a file of measured times of the segments; None estimates them.
        device_profile: the speeds that estimates rest on; None measures those of the device.
        bucket_bytes: gradients are reduced over dp as soon as so many bytes are ready.
        exact_tied_gradients: exchange gradients of tied parameters after every microbatch, which
            sums them as one process does; else once per step.
        sub_pipelining: "on" runs every microbatch in halves, so that the all-reduces of tensor
            parallelism run beside the other half's work; "off" does not; "auto" where it pays.
        sequence_parallel: between the products that tensor parallelism splits, each of its ranks
            holds a share of the sequence; all-gathers and reduce-scatters replace all-reduces.
        hang_limit_s: seconds that a rank may wait, or be in one action; after them every rank says
            where it stands, and the job ends.
        recorded_steps: so many past steps are recorded, for `Engine.recorded_steps`.
        max_shapes: so many shapes of microbatches are kept ready beside the planned one.
        recompute: what is computed again for the backward instead of kept, as
            `merak.plan.recompute_spec.parse_recompute` reads it; None leaves it to the
            schedule.
        offload_activations: which of the kept activations wait in host memory, as
            `merak.plan.activations.offload.parse_offload` reads it; None for none.
        host_bytes_per_s: of a rank's way to host memory, each way while both are used; None
            measures it where it matters.
        memory_budget_bytes: what a rank may hold; None takes a GPU's memory, and on the CPU none.
        master_weights: keep float32 masters of parameters of a lower precision for the optimizer.
        float32_gradients: sum gradients of parameters of a lower precision in float32; else in
            their own type.
        zero: 1 shards the optimizer over dp, 2 also the gradients, 3 also the parameters, 0
            nothing.
        optimizer: makes the optimizer, whose state counts in the memory; None counts none.
        trains: whether it is laid out for training, whose batches give a loss; else for evaluation.
        observer: looks into segments as they run, such as `graph.segment.observe.Observer`; None
            does not.
    """

    schedule: str = "1f1b"
    num_microbatches: int = 1
    seed: int = 42
    features: Features | None = None
    segments_per_stage: tuple[int, ...] | None = None
    segment_times: Path | None = None
    device_profile: DeviceProfile | None = None
    bucket_bytes: int = 25 * 2**20
    exact_tied_gradients: bool = True
    sub_pipelining: str = "auto"
    sequence_parallel: bool = False
    hang_limit_s: float = 600.0
    recorded_steps: int = 4
    max_shapes: int = 64
    recompute: Recompute = None
    offload_activations: Recompute = None
    host_bytes_per_s: float | None = None
    memory_budget_bytes: int | None = None
    master_weights: bool = False
    float32_gradients: bool = True
    zero: int = 0
    optimizer: OptimizerFactory | None = None
    trains: bool = True
    observer: Rewrite | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Which segments form which stage, and when each stage computes.

    Args:
        graph: the model at the shape it is planned with.
        partition: its segments by stage.
        plans: the schedule.
        kept: segments that keep their activations in stages that recompute others.
        partly: by segment that recomputes, the operators whose results it keeps.
        offloaded: of the segments that keep their activations, those that do so in host memory.
    """

    graph: ModelGraph
    partition: Partition
    plans: StepPlans
    kept: frozenset[int] = frozenset()
    partly: Mapping[int, Dear] = field(default_factory=dict)
    offloaded: frozenset[int] = frozenset()

    @property
    def schedule(self) -> Schedule:
        """The schedule of an ordinary step."""
        return self.plans.base.schedule

    @property
    def stage_rank(self) -> tuple[int, ...]:
        """The pipeline position of each stage in the first pipe, whose copy of it counts."""
        return self.schedule.pipes[0]

    def readers(self, pipe: int) -> list[Reader]:
        """Every segment, where it is in a pipe, and the parameters it reads."""
        ranks = self.schedule.pipes[pipe]
        return [
            Reader(ranks[stage], stage, segment.index, segment.parameters)
            for stage, own in enumerate(self.partition.stages)
            for segment in self.graph.segments[own.start : own.stop]
        ]


def partition_segments(
    graph: ModelGraph, num_stages: int, options: EngineOptions, mesh: Mesh, cache: Path | None
) -> Partition:
    """Lay segments out over stages: as the user says, or balanced by time.

    Args:
        graph: the model.
        num_stages: stages of the schedule.
        options: the user's partition or times.
        mesh: the grid of ranks, which all call this together.
        cache: where measured speeds of this machine are kept.

    Raises:
        PlanError: more stages than segments, or a partition or times of another model.
    """
    num_segments = len(graph.segments)
    check_stages(num_segments, num_stages, mesh.pp)
    if options.segments_per_stage is not None:
        return from_sizes(options.segments_per_stage, num_segments)
    if num_stages == 1:
        return Partition(num_segments, ())
    # Measured speeds differ from rank to rank, and all ranks need one partition: rank 0 decides.
    decided: list[Partition | None] = [None]
    if mesh.rank == 0:
        costs = segment_times(graph, options, mesh, cache)
        decided = [balance(costs, num_stages, options.num_microbatches)]
    if mesh.device_mesh is not None:
        with waiting_for_first("the balance of stages"):
            dist.broadcast_object_list(decided, src=0)
    assert decided[0] is not None
    return decided[0]


def check_stages(num_segments: int, num_stages: int, pp: int) -> None:
    """Refuse more stages than there are segments to fill them.

    Raises:
        PlanError: there are.
    """
    if num_stages > num_segments:
        raise PlanError(
            f"{num_segments} segments cannot fill {num_stages} stages (pp={pp}); use "
            f"pp ≤ {num_segments}."
        )


def segment_times(
    graph: ModelGraph, options: EngineOptions, mesh: Mesh, cache: Path | None
) -> Sequence[Timed]:
    """The times of all segments for one microbatch: measured ones of the user's, or estimated."""
    if options.segment_times is not None:
        return load_times(options.segment_times, [segment.name for segment in graph.segments])
    return segment_costs(graph.segments, speeds(options, mesh, cache))


def speeds(options: EngineOptions, mesh: Mesh, cache: Path | None) -> DeviceProfile:
    """The speeds of this rank's device, as given or measured."""
    return options.device_profile or measure(mesh.device, cache)


def stages_of_parameters(graph: ModelGraph, partition: Partition) -> dict[str, frozenset[int]]:
    """The stages that read each parameter; one that no segment reads lives on the first."""
    stages: dict[str, set[int]] = {}
    for stage, own in enumerate(partition.stages):
        for segment in graph.segments[own.start : own.stop]:
            for name in segment.parameters:
                stages.setdefault(name, set()).add(stage)
    return {name: frozenset(stages.get(name, {0})) for name in graph.parameters}


def stage_bounds(
    graph: ModelGraph, owners: Mapping[str, frozenset[int]], partition: Partition
) -> list[int]:
    """Where each stage begins; in a graph that was cut otherwise, by who holds the parameters.

    A segment whose parameters no stage holds alone is where most of them are.
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
