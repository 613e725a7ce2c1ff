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
from merak.graph.tensor_parallel.feature_file import parse_features
from merak.graph.tensor_parallel.features import Features
from merak.plan.balance import Timed, balance
from merak.plan.cost.benchmark import measure
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.measured_times import load_times
from merak.plan.cost.optimizer_memory import OptimizerFactory
from merak.plan.cost.segment_time import segment_costs
from merak.plan.cost.selective_ops import Dear
from merak.plan.options import ParallelOptions
from merak.plan.partition import Partition, from_sizes
from merak.plan.step_plans import StepPlans
from merak.plan.tied_parameters import Reader
from merak.schedule.ir import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(ParallelOptions):
    """Options of an engine: those that users choose, and what the loop around it knows.

    Args:
        num_microbatches: microbatches per step of one replica, as planned for.
        seed: the job's seed, for initial weights and dropout.
        device_profile: speeds that estimated times rest on; None measures those of the device.
        recorded_steps: number of past steps that are recorded, for `Engine.recorded_steps`.
        optimizer: makes the optimizer, whose state counts in the memory; None counts none.
        trains: whether it is laid out for training, whose batches give a loss; else for evaluation.
        observer: rewrites segments to observe tensors as they run, such as
            `graph.segment.observe.Observer`; None does not.
    """

    num_microbatches: int = 1
    seed: int = 42
    device_profile: DeviceProfile | None = None
    recorded_steps: int = 4
    optimizer: OptimizerFactory | None = None
    trains: bool = True
    observer: Rewrite | None = None

    @property
    def features(self) -> Features | None:
        """Tensor parallel attributes that override what is derived from the graph.

        Raises:
            ShardError: an attribute of `feature_dict` is none.
        """
        return None if self.feature_dict is None else parse_features(self.feature_dict)

    @property
    def exact_tied_gradients(self) -> bool:
        """Whether gradients of tied parameters are all-reduced after every microbatch."""
        return self.tied_gradients == "microbatch"

    @property
    def float32_gradients(self) -> bool:
        """Whether gradients of a lower precision are accumulated and reduced in float32."""
        return self.gradient_sums == "float32"


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
    if options.partition is not None:
        return from_sizes(options.partition, num_segments)
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
        return load_times(Path(options.segment_times), [segment.name for segment in graph.segments])
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
