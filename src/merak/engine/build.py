"""Puts a rank's engine together: graph → plan → schedule → stages with their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from merak.checkpoint.initial import materialize
from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard
from merak.engine.deferred import WeightGradients, defer_weights
from merak.engine.engine import Engine
from merak.engine.gradients import GradientReducer
from merak.engine.layout import (
    EngineOptions,
    Layout,
    partition_segments,
    stage_bounds,
    stages_of_parameters,
)
from merak.engine.parts import Parts, Signature
from merak.engine.plans import Plans
from merak.engine.program import Program, Rewrite, compile_program
from merak.engine.stage import Stage
from merak.engine.tied import Holder, TiedGradients, find_holders
from merak.engine.transfers import Transfers, channels_of
from merak.graph.build import GraphSource, build_graph
from merak.graph.features import Features
from merak.graph.ir import ModelGraph, Segment
from merak.graph.tensor_parallel import attributes_for, check_degree, shard_segment


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
    plans = Plans(options.schedule, mesh.pp, options.num_microbatches)
    schedule = plans.base.schedule
    partition = partition_segments(graph, schedule.num_stages, options, mesh, source.cache_dir)
    layout = Layout(graph, partition, plans)
    programs = _Programs(source, mesh, layout, options.features)
    names = [n for n, held in programs.owners.items() if held & set(programs.own_stages)]
    materialize(
        source.model,
        names,
        device=mesh.device,
        seed=options.seed,
        shards=programs.base.shards,
        shard_index=mesh.tp_rank,
    )
    return _assemble(layout, programs, names, mesh, options)


class _Programs:
    """What this rank runs for a signature; traced when a shape is first met, then kept."""

    def __init__(
        self,
        source: GraphSource,
        mesh: Mesh,
        layout: Layout,
        features: Features | None,
    ) -> None:
        self.source = source
        graph = layout.graph
        self.own_stages = [s for s, rank in enumerate(layout.stage_rank) if rank == mesh.pp_rank]
        self.owners = stages_of_parameters(graph, layout.partition)
        self.buffers: dict[str, torch.Tensor] = {}
        self._mesh = mesh
        self._partition = layout.partition
        self.waiting = {stage: WeightGradients() for stage in self.own_stages}
        self._rewrites = self._make_rewrites(graph, features, layout.plans.splits_backwards)
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
        bounds = stage_bounds(graph, self.owners, self._partition)
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


def _assemble(
    layout: Layout,
    programs: _Programs,
    names: Sequence[str],
    mesh: Mesh,
    options: EngineOptions,
) -> Engine:
    model = programs.source.model
    everything = dict(model.named_parameters(remove_duplicate=False))
    parameters = {name: everything[name] for name in names}
    programs.buffers |= dict(model.named_buffers(remove_duplicate=False))
    holders = find_holders(layout.readers())
    shared = frozenset(holders)
    stages = {
        stage: Stage(stage, parameters, programs.buffers, shared, waiting, mesh.device)
        for stage, waiting in programs.waiting.items()
    }
    transfers = Transfers(mesh, max_open_sends=4 * mesh.pp)
    transfers.connect(channels_of(layout.plans.base.steps))
    reducer = GradientReducer(mesh.group("dp"), options.bucket_bytes)
    return Engine(
        Parts(
            mesh=mesh,
            stages=stages,
            stage_rank=layout.stage_rank,
            parameters=parameters,
            buffers=_buffers_here(layout, programs),
            shared=shared,
            base=programs.base,
            program_for=programs,
            plan_for=layout.plans,
            transfers=transfers,
            reducer=reducer,
            tied=_tied(holders, stages, parameters, reducer, mesh, options),
            seed=options.seed,
        )
    )


def _buffers_here(layout: Layout, programs: _Programs) -> frozenset[str]:
    """The buffers that this rank answers for: the first stage to read one, or stage 0."""
    first: dict[str, int] = {}
    for stage, own in enumerate(layout.partition.stages):
        for segment in layout.graph.segments[own.start : own.stop]:
            for name in segment.buffers:
                first.setdefault(name, stage)
    names = dict(programs.source.model.named_buffers(remove_duplicate=False))
    return frozenset(n for n in names if first.get(n, 0) in programs.own_stages)


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
