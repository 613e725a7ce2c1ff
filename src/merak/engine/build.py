"""Puts a rank's engine together: graph → plan → schedule → stages with their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from merak.checkpoint.initial import materialize
from merak.core.errors import PlanError, TraceError
from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard
from merak.engine.deferred import WeightGradients, defer_weights
from merak.engine.engine import Engine
from merak.engine.gradients import GradientReducer
from merak.engine.parts import Parts, Plan, Signature
from merak.engine.program import Program, Rewrite, compile_program
from merak.engine.stage import Stage
from merak.engine.tied import Holder, Reader, TiedGradients, find_holders
from merak.engine.transfers import Transfers, channels_of
from merak.graph.build import GraphSource, build_graph
from merak.graph.features import Features
from merak.graph.ir import ModelGraph, Segment
from merak.graph.tensor_parallel import attributes_for, check_degree, shard_segment
from merak.plan.balance import balance
from merak.plan.cost import segment_costs
from merak.plan.partition import Partition, from_sizes
from merak.plan.profile import measure
from merak.schedule.ir import Kind
from merak.schedule.lower import lower
from merak.schedule.registry import build as build_schedule
from merak.schedule.registry import options as schedule_options


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is laid out and run.

    Args:
        schedule: name of the pipeline schedule.
        num_microbatches: microbatches per step of one replica, as planned for.
        seed: the job's seed, for initial weights and dropout.
        features: tensor parallel attributes; None takes Merak's own for known models.
        segments_per_stage: a partition of one's own; None balances by times.
        segment_times: a file of measured times of the segments; None estimates them.
        bucket_bytes: gradients are reduced over dp as soon as so many bytes are ready.
        exact_tied_gradients: exchange gradients of tied parameters after every microbatch, which
            sums them as one process does; else once per step.
    """

    schedule: str = "1f1b"
    num_microbatches: int = 1
    seed: int = 42
    features: Features | None = None
    segments_per_stage: tuple[int, ...] | None = None
    segment_times: Path | None = None
    bucket_bytes: int = 25 * 2**20
    exact_tied_gradients: bool = True


def build_engine(
    source: GraphSource, sample: Signature, mesh: Mesh, options: EngineOptions
) -> Engine:
    """Build the engine of this rank; called alike on every rank.

    Afterwards the user's model holds this rank's parameters, under their own names, and all its
    other parameters are on meta.

    Args:
        source: the model.
        sample: the columns of a typical microbatch.
        mesh: the grid of ranks.
        options: how to lay it out.

    Raises:
        TraceError, PlanError, ShardError, ScheduleError, WeightsError: what was asked for does not
            fit the model.
    """
    graph = build_graph(source, dict(sample), training=True)
    plan = _make_plan(options.schedule, mesh.pp, options.num_microbatches)
    schedule = plan.schedule
    partition = _partition(graph, schedule.num_stages, options, mesh, source.cache_dir)
    stage_rank = schedule.pipes[0]
    splits = any(a.kind is Kind.WEIGHT_GRADIENT for own in schedule.actions for a in own)
    programs = _Programs(source, mesh, partition, stage_rank, options.features, graph, splits)
    names = [n for n, held in programs.owners.items() if held & set(programs.own_stages)]
    materialize(
        source.model,
        names,
        device=mesh.device,
        seed=options.seed,
        shards=programs.base.shards,
        shard_index=mesh.tp_rank,
    )
    return _assemble(graph, partition, plan, programs, names, mesh, options)


class _Programs:
    """What this rank runs for a signature; traced when a shape is first met, then kept."""

    def __init__(
        self,
        source: GraphSource,
        mesh: Mesh,
        partition: Partition,
        stage_rank: Sequence[int],
        features: Features | None,
        graph: ModelGraph,
        splits_backwards: bool,
    ) -> None:
        self.source = source
        self.own_stages = [s for s, rank in enumerate(stage_rank) if rank == mesh.pp_rank]
        self.owners = _stage_of_parameters(graph, partition)
        self.buffers: dict[str, torch.Tensor] = {}
        self._mesh = mesh
        self._partition = partition
        self.waiting = {stage: WeightGradients() for stage in self.own_stages}
        self._rewrites = self._make_rewrites(graph, features, splits_backwards)
        self.base = self._compile(graph)
        self._known = {(tuple(graph.columns.items()), True): self.base}

    def _make_rewrites(
        self, graph: ModelGraph, features: Features | None, splits_backwards: bool
    ) -> dict[int, list[Rewrite]]:
        parallel = _rewriter(graph, features, self._mesh.tp)
        shared = frozenset(n for n, stages in _readers_of(graph).items() if stages > 1)
        rewrites: dict[int, list[Rewrite]] = {}
        for stage in self.own_stages:
            rewrites[stage] = [parallel] if parallel else []
            if splits_backwards:
                rewrites[stage].append(partial(_defer, shared, self.waiting[stage]))
        return rewrites

    def __call__(self, signature: Signature, training: bool) -> Program:
        key = (signature, training)
        if key not in self._known:
            graph = build_graph(self.source, dict(signature), training=training)
            self._known[key] = self._compile(graph)
        return self._known[key]

    def _compile(self, graph: ModelGraph) -> Program:
        for name, tensor in graph.constants.items():
            self.buffers[name] = tensor.to(self._mesh.device)
        bounds = _bounds(graph, self.owners, self._partition)
        return compile_program(graph, bounds, self._rewrites)


def _rewriter(graph: ModelGraph, features: Features | None, tp: int) -> Rewrite | None:
    """How this job makes segments tensor parallel; every rank checks the whole model."""
    if tp == 1:
        return None
    attributes = attributes_for(graph, features)
    check_degree(graph.segments, graph.parameters, attributes, tp)
    return partial(shard_segment, parameters=graph.parameters, attributes=attributes, degree=tp)


def _defer(
    kept: frozenset[str], waiting: WeightGradients, segment: Segment
) -> tuple[Segment, dict[str, ParameterShard]]:
    return defer_weights(segment, kept, waiting), {}


def _readers_of(graph: ModelGraph) -> Counter[str]:
    """How many segments read each parameter."""
    return Counter(name for segment in graph.segments for name in segment.parameters)


def _make_plan(name: str, num_ranks: int, num_microbatches: int) -> Plan:
    chosen = {"recompute": False} if "recompute" in schedule_options(name) else {}
    schedule = build_schedule(name, num_ranks, num_microbatches, **chosen)
    return Plan(schedule, lower(schedule))


def _partition(
    graph: ModelGraph, num_stages: int, options: EngineOptions, mesh: Mesh, cache: Path | None
) -> Partition:
    num_segments = len(graph.segments)
    if num_stages > num_segments:
        raise PlanError(
            f"{num_segments} segments cannot fill {num_stages} stages (pp={mesh.pp}); use "
            f"pp ≤ {num_segments}."
        )
    if options.segments_per_stage is not None:
        return from_sizes(options.segments_per_stage, num_segments)
    if num_stages == 1:
        return Partition(num_segments, ())
    # Measured speeds differ from rank to rank, and all ranks need one partition: rank 0 decides.
    decided: list[Partition | None] = [None]
    if mesh.rank == 0:
        costs = segment_costs(graph.segments, measure(mesh.device, cache))
        decided = [balance(costs, num_stages, options.num_microbatches)]
    if mesh.world_size > 1:
        dist.broadcast_object_list(decided, src=0)
    assert decided[0] is not None
    return decided[0]


def _stage_of_parameters(graph: ModelGraph, partition: Partition) -> dict[str, frozenset[int]]:
    """The stages that read each parameter; one that no segment reads lives on the first."""
    stages: dict[str, set[int]] = {}
    for stage, own in enumerate(partition.stages):
        for segment in graph.segments[own.start : own.stop]:
            for name in segment.parameters:
                stages.setdefault(name, set()).add(stage)
    return {name: frozenset(stages.get(name, {0})) for name in graph.parameters}


def _bounds(
    graph: ModelGraph, owners: Mapping[str, frozenset[int]], partition: Partition
) -> list[int]:
    """Where each stage begins; in a graph that was cut otherwise, by who holds the parameters."""
    if len(graph.segments) == partition.num_segments:
        return [0, *partition.cuts, partition.num_segments]
    num_stages = partition.num_stages
    bounds = [0]
    for segment in graph.segments:
        stage = len(bounds) - 1
        own = [owners[name] for name in segment.parameters]
        while stage + 1 < num_stages and any(stage not in held for held in own):
            stage += 1
            bounds.append(segment.index)
        if any(stage not in held for held in own):
            raise TraceError(
                f"segment {segment.index} ({segment.name}) reads parameters of several stages in "
                "this mode or shape of the model; use a smaller pp, or one batch shape."
            )
    bounds += [len(graph.segments)] * (num_stages + 1 - len(bounds))
    return bounds


def _assemble(
    graph: ModelGraph,
    partition: Partition,
    plan: Plan,
    programs: _Programs,
    names: Sequence[str],
    mesh: Mesh,
    options: EngineOptions,
) -> Engine:
    model = programs.source.model
    everything = dict(model.named_parameters(remove_duplicate=False))
    parameters = {name: everything[name] for name in names}
    programs.buffers |= dict(model.named_buffers(remove_duplicate=False))
    stage_rank = plan.schedule.pipes[0]
    holders = find_holders(_readers(graph, partition, stage_rank))
    shared = frozenset(holders)
    stages = {
        stage: Stage(stage, parameters, programs.buffers, shared, waiting, mesh.device)
        for stage, waiting in programs.waiting.items()
    }
    transfers = Transfers(mesh, max_open_sends=4 * mesh.pp)
    transfers.connect(channels_of(plan.steps))
    reducer = GradientReducer(mesh.group("dp"), options.bucket_bytes)
    plans = {options.num_microbatches: plan}

    def plan_for(count: int) -> Plan:
        if count not in plans:
            plans[count] = _make_plan(options.schedule, mesh.pp, count)
        return plans[count]

    return Engine(
        Parts(
            mesh=mesh,
            stages=stages,
            stage_rank=stage_rank,
            parameters=parameters,
            buffers=_buffers_here(graph, partition, programs),
            shared=shared,
            base=programs.base,
            program_for=programs,
            plan_for=plan_for,
            transfers=transfers,
            reducer=reducer,
            tied=_tied(holders, stages, parameters, reducer, mesh, options),
            seed=options.seed,
        )
    )


def _buffers_here(graph: ModelGraph, partition: Partition, programs: _Programs) -> frozenset[str]:
    """The buffers that this rank answers for: the first stage to read one, or stage 0."""
    first: dict[str, int] = {}
    for stage, own in enumerate(partition.stages):
        for segment in graph.segments[own.start : own.stop]:
            for name in segment.buffers:
                first.setdefault(name, stage)
    names = dict(programs.source.model.named_buffers(remove_duplicate=False))
    return frozenset(n for n in names if first.get(n, 0) in programs.own_stages)


def _readers(graph: ModelGraph, partition: Partition, stage_rank: Sequence[int]) -> list[Reader]:
    return [
        Reader(stage_rank[stage], stage, segment.index, segment.parameters)
        for stage, own in enumerate(partition.stages)
        for segment in graph.segments[own.start : own.stop]
    ]


def _tied(
    holders: Mapping[str, tuple[Holder, ...]],
    stages: Mapping[int, Stage],
    parameters: Mapping[str, nn.Parameter],
    reducer: GradientReducer,
    mesh: Mesh,
    options: EngineOptions,
) -> TiedGradients:
    leaves = {
        name: [stage.shared[name] for stage in stages.values() if name in stage.shared]
        for name in holders
    }
    return TiedGradients(
        mesh=mesh,
        holders=holders,
        leaves=leaves,
        parameters=parameters,
        every_microbatch=options.exact_tied_gradients,
        on_ready=lambda parameter: reducer.ready([parameter]),
    )
