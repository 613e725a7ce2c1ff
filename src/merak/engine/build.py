"""Builds a rank's engine: graph → plan → schedule → stages with their weights."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from merak.checkpoint.description import describe_model
from merak.core.announce import announce, announced, is_announcing
from merak.core.errors import MerakError, ScheduleError, TraceError
from merak.core.health.status import phase
from merak.core.mesh import Mesh
from merak.core.precision import refuse_autocast_around, refuse_inference_mode
from merak.core.rank0 import warn_on_rank0
from merak.core.tensor_meta import Signature
from merak.engine.assemble import assemble
from merak.engine.comm.sparse_gradients import find_sparse, warn_densified
from merak.engine.engine import Engine
from merak.engine.health.watchdog import check_limit, set_limit
from merak.engine.local_programs import ProgramCache, check_max_shapes, local_rewrite
from merak.engine.oom_replan import OomReplanner
from merak.engine.parameters.watched import sharded_tensors, watch_absent
from merak.engine.program_agreement import check_programs
from merak.engine.segments.activation_offload import reserve_host_memory
from merak.engine.step.parameter_writes import refuse_parameter_writes
from merak.graph.chunked_loss import ChunkedLoss
from merak.graph.ir.ir import ModelGraph
from merak.graph.joint.segment import joint_obstacle
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.tensor_parallel.apply import check_features
from merak.graph.tensor_parallel.features import given_plan
from merak.graph.weights.laid_out import mark_laid_out
from merak.graph.weights.materialize import materialize, names_of_parameters
from merak.graph.weights.rank_agreement import example_of_rank0
from merak.plan.activations.decide import may_replan, resolve_activations
from merak.plan.activations.forecast import Forecast
from merak.plan.constraints import (
    refuse_compressed_sparse,
    refuse_gradient_hooks,
    refuse_later_hooks,
    refuse_optional_layers,
    refuse_reductions,
    refuse_tied_copies,
    refuse_tied_stages,
    sub_pipelining_problem,
)
from merak.plan.cost.float8_products import refuse_float8_on
from merak.plan.engine_options import EngineOptions
from merak.plan.expected.speed import known_profile
from merak.plan.layout import (
    Layout,
    check_stages,
    partition_segments,
    segment_times,
    speeds,
)
from merak.plan.stage_costs import plans_from_costs
from merak.plan.step_plans import StepPlans
from merak.plan.sub_pipelining import choose_sub_pipelining, requested_sub_pipelining
from merak.plan.summary import summary

logger = logging.getLogger(__name__)


def build_engine(
    source: GraphSource, sample: Signature, mesh: Mesh, options: EngineOptions
) -> Engine:
    """Build the engine of this rank; all ranks call it together.

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
        ArgumentsError: a limit that is not positive.
    """
    return build_with_forecast(source, sample, mesh, options)[0]


def build_with_forecast(
    source: GraphSource, sample: Signature, mesh: Mesh, options: EngineOptions
) -> tuple[Engine, Forecast]:
    """Build the engine of this rank, and return it with the forecast of its memory.

    Args:
        source: as of `build_engine`.
        sample: as of `build_engine`.
        mesh: as of `build_engine`.
        options: as of `build_engine`.
    """
    check_limit(options.hang_limit_s)
    check_max_shapes(options.max_shapes)
    refuse_autocast_around(source.autocast, mesh.device)
    if options.trains:
        refuse_inference_mode()
    set_limit(options.hang_limit_s)
    with phase("building the engine"):
        description = describe_model(source.model)  # before its forward runs
        forecast = forecast_of(source, sample, mesh, options)
        if is_announcing():
            known = known_profile(options, mesh, source.cache_dir)
            announce("%s", summary(forecast, sample, known))
        with announced("building the stages"):
            engine = _build(source, forecast, mesh, options)
    engine.description = description
    engine.check_hooks = partial(refuse_later_hooks, source.model, forecast.layout, options)
    runs_whole = "" in source.opaque.modules
    mark_laid_out(source.model, engine.part, runs_whole=runs_whole)
    engine.watch.start(sharded_tensors(engine._state))
    watch_absent(source.model, engine.optimizer_params)
    return engine, forecast


def lay_out_evaluation(engine: Engine, signature: Signature, otherwise: str) -> tuple[str, ...]:
    """Make what an evaluation of some shape runs, so that what cannot run is refused at once.

    Args:
        engine: of this rank.
        signature: the columns of a batch.
        otherwise: what a user can do who needs no evaluation, as a clause.

    Returns:
        Names of the model's outputs in evaluation, in its order.

    Raises:
        TraceError: the model cannot be evaluated.
    """
    try:
        with announced("laying out the evaluation"):
            return engine.outputs(signature)
    except MerakError as error:
        raise TraceError(
            f"this job evaluates, and the model cannot run in evaluation: {str(error).rstrip('.')};"
            f" or {otherwise}."
        ) from error


def _build(source: GraphSource, forecast: Forecast, mesh: Mesh, options: EngineOptions) -> Engine:
    """The engine of this rank, whose stages have loaded their weights."""
    layout = forecast.layout
    times = partial(segment_times, layout.graph, options, mesh, source.cache_dir)
    is_sub_pipelined = choose_sub_pipelining(
        _requested_sub_pipelining(layout, options, mesh.cp), layout, mesh, times
    )
    programs = ProgramCache(source, mesh, layout, forecast.rewrite, is_sub_pipelined, options)
    check_programs(programs.base, layout, mesh)
    if not layout.schedule.is_synchronous:
        refuse_tied_stages(layout, programs.owners)
    refuse_tied_copies(layout, options.zero)
    refuse_optional_layers(layout, options.zero, mesh)
    refuse_compressed_sparse(options.gradient_compression, find_sparse(layout.graph))
    is_sharded = options.zero == 3 and mesh.replicas > 1
    delays = options.delay_optimizer_update
    refuse_parameter_writes(layout, is_sharded=is_sharded, delays=delays)
    refuse_gradient_hooks(source.model, layout, options, programs.base.shards, is_sub_pipelined)
    warn_densified(programs.densified if options.trains else ())
    _tell_what_stays(layout)
    names = [n for n, held in programs.owners.items() if held & set(programs.own_stages)]
    originals = names_of_parameters(source.model)
    with phase("loading weights"):
        materialize(
            source.model,
            names,
            device=mesh.device,
            seed=options.seed,
            shards=programs.base.shards,
            shard_index=mesh.shard_rank,
        )
    if layout.activations.offloaded and forecast.own_ranks is not None:
        reserve_host_memory(mesh.device, forecast.own_ranks[mesh.pp_rank].host_blocks)
    save_fewer = None
    can_abort = layout.schedule.is_synchronous and options.can_replan
    can_abort = can_abort and not mesh.spreads_experts  # others would wait for its rows
    if may_replan(options.recompute) and can_abort:
        profile = partial(speeds, options, mesh, source.cache_dir)
        save_fewer = OomReplanner(forecast, times, profile, programs).save_fewer
    engine = assemble(layout, programs, names, mesh, options, save_fewer)
    engine.optimizers.note_originals(originals)
    return engine


def _tell_what_stays(layout: Layout) -> None:
    """Warn of segments that are to be offloaded, and whose backwards autograd runs."""
    segments = [layout.graph.segments[index] for index in sorted(layout.activations.offloaded)]
    found = {s.name: why for s in segments if (why := joint_obstacle(s.graph))}
    if found:
        name, why = next(iter(found.items()))
        warn_on_rank0(
            logger,
            "%s of %s segments that offload_activations names keep their activations on the "
            "device, since autograd runs their backwards: %s (%s) is the first.",
            len(found),
            len(segments),
            name,
            why,
        )


def _refuse_sub_pipelining(options: EngineOptions, cp: int) -> None:
    """Refuse requested sub-pipelining that another option rules out, before a model is traced."""
    if requested_sub_pipelining(options) != "on":
        return
    if cp > 1:
        raise ScheduleError(
            f"sub_pipelining='on' hides collectives of tensor parallelism, but cp={cp}; leave it "
            "out, or use cp=1."
        )
    if problem := sub_pipelining_problem(options.zero):
        raise ScheduleError(problem)


def _requested_sub_pipelining(layout: Layout, options: EngineOptions, cp: int) -> str:
    """`requested_sub_pipelining`, or "off" where something else in the job rules it out."""
    requested = requested_sub_pipelining(options)
    if layout.activations.offloaded and requested == "on":
        raise ScheduleError(
            f"offload_activations={options.offload_activations!r} moves the activations of whole "
            "segments, but sub_pipelining='on' runs them as sub-microbatches; leave one out."
        )
    plain = options.zero == 3 or layout.activations.offloaded or cp > 1
    return "off" if plain else requested


def forecast_of(
    source: GraphSource, sample: Signature, mesh: Mesh, options: EngineOptions
) -> Forecast:
    """Lay a model out and forecast its memory, without building anything; all ranks call it.

    Args:
        source: the model.
        sample: the columns of a typical microbatch.
        mesh: the grid of ranks.
        options: how to lay it out.

    Raises:
        TraceError, PlanError, ShardError, ScheduleError: what was asked for does not fit the
            model, or the job does not fit its memory.
    """
    _refuse_sub_pipelining(options, mesh.cp)
    if options.fp8:
        refuse_float8_on(mesh.device)
    chosen = options.schedule_options or {}
    plans = StepPlans(options.schedule, mesh.pp, options.num_microbatches, chosen=chosen)
    if not plans.takes_costs:
        refuse_reductions(plans.base.schedule, options, mesh)
    source.example = example_of_rank0(source.example)
    with announced(f"tracing {type(source.model).__name__}") as details:
        graph = build_graph(source, dict(sample), training=options.trains)
        details.append(f"{len(graph.segments)} segments")
    if options.segment_times is not None:
        segment_times(graph, options, mesh, None)  # a wrong file is refused where nobody needs it
    check_stages(graph, mesh.pp, mesh.pp)
    with announced("planning"):
        return _forecast(source, graph, mesh, options, plans)


def _forecast(
    source: GraphSource, graph: ModelGraph, mesh: Mesh, options: EngineOptions, plans: StepPlans
) -> Forecast:
    num_stages = plans.base.schedule.num_stages
    partition = partition_segments(graph, num_stages, options, mesh, source.cache_dir)
    features = given_plan(source.model) if options.features is None else options.features
    if mesh.tp == 1 and options.features:
        check_features(graph, options.features)
    forecast = Forecast(
        source.model,
        Layout(graph, partition, plans),
        mesh,
        local_rewrite(
            graph,
            features,
            mesh,
            sequence=options.sequence_parallel,
            capacity=options.expert_capacity,
            fp8=options.fp8,
            loss_chunk_bytes=options.loss_chunk_bytes,
            one_pass=plans.base.schedule.holds_one_at_end,
        ),
        options,
    )
    times = partial(segment_times, graph, options, mesh, source.cache_dir)
    if plans.takes_costs:
        plans = plans_from_costs(forecast, times)
        refuse_reductions(plans.base.schedule, options, mesh)
        forecast = replace(forecast, layout=replace(forecast.layout, plans=plans))
        if isinstance(forecast.rewrite, ChunkedLoss):
            one_pass = plans.base.schedule.holds_one_at_end
            forecast = replace(forecast, rewrite=replace(forecast.rewrite, one_pass=one_pass))
    return resolve_activations(forecast, times, partial(speeds, options, mesh, source.cache_dir))
