"""Puts a rank's engine together: graph → plan → schedule → stages with their weights."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from merak.core.announce import announce, announced, is_announcing
from merak.core.errors import ScheduleError
from merak.core.gradients import is_low_precision
from merak.core.health.status import phase
from merak.core.mesh import Mesh
from merak.core.tensor_meta import Signature
from merak.engine.comm.gradient_buckets import GradientReducer, fill_buckets
from merak.engine.comm.p2p import Transfers, channels_of, channels_of_pipe
from merak.engine.comm.replica_buffers import ReplicaBuffers, stage_buffers
from merak.engine.comm.sparse_gradients import warn_densified
from merak.engine.comm.stage_replicas import reduced_of, replica_groups
from merak.engine.comm.tied_gradients import Leaf, Shared, TiedGradients
from merak.engine.engine import Engine
from merak.engine.health.oom import OomGuard
from merak.engine.health.status import Progress
from merak.engine.health.step_records import clock_of
from merak.engine.health.watchdog import check_limit, set_limit, watch
from merak.engine.local_programs import ProgramCache, check_max_shapes, num_readers, rewriter
from merak.engine.oom_replan import OomReplanner
from merak.engine.parameter_writes import refuse_parameter_writes
from merak.engine.segments.activation_offload import ActivationOffload
from merak.engine.stage import Stage
from merak.engine.state import EngineState, SaveFewer
from merak.engine.weight_versions import LiveWeights, StashedWeights, Weights
from merak.engine.zero.fsdp import FsdpParameters, can_abort_step, replace_parameters
from merak.engine.zero.optimizer_params import OptimizerParams, Precision
from merak.engine.zero.param_all_gather import ParamAllGather, wait_on_access
from merak.engine.zero.unshard_order import UnshardOrder
from merak.graph.ir.ir import ModelGraph
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.tensor_parallel.apply import check_features
from merak.graph.tensor_parallel.hf_tp_plan import given_plan
from merak.graph.weights.materialize import materialize
from merak.plan.activations.decide import may_replan, resolve_activations
from merak.plan.activations.forecast import Forecast
from merak.plan.constraints import (
    refuse_gradient_hooks,
    refuse_optional_layers,
    refuse_tied_stages,
    refuse_zero,
)
from merak.plan.engine_options import EngineOptions
from merak.plan.layout import (
    Layout,
    check_stages,
    partition_segments,
    segment_times,
    speeds,
)
from merak.plan.memory.communication_limits import MAX_OPEN_GATHERS
from merak.plan.stage_costs import plans_from_costs
from merak.plan.step_plans import StepPlans
from merak.plan.sub_pipelining import choose_sub_pipelining, requested_sub_pipelining
from merak.plan.summary import summary
from merak.plan.tied_parameters import find_holders


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
        ArgumentsError: a limit that is none.
    """
    check_limit(options.hang_limit_s)
    check_max_shapes(options.max_shapes)
    set_limit(options.hang_limit_s)
    with phase("building the engine"):
        forecast = forecast_of(source, sample, mesh, options)
        if is_announcing():
            announce("%s", summary(forecast, sample))
        with announced("building the stages"):
            return _build(source, forecast, mesh, options)


def _build(source: GraphSource, forecast: Forecast, mesh: Mesh, options: EngineOptions) -> Engine:
    """This rank's stages with their weights, and the engine around them."""
    layout = forecast.layout
    times = partial(segment_times, layout.graph, options, mesh, source.cache_dir)
    in_halves = choose_sub_pipelining(_wish_for_halves(layout, options), layout, mesh, times)
    programs = ProgramCache(source, mesh, layout, forecast.rewrite, in_halves, options)
    if not layout.schedule.is_synchronous:
        refuse_tied_stages(layout, programs.owners)
    refuse_optional_layers(layout, options.zero)
    refuse_parameter_writes(layout, in_shares=options.zero == 3 and mesh.dp > 1)
    refuse_gradient_hooks(source.model, layout, options, programs.base.shards, in_halves)
    warn_densified(programs.densified if options.trains else ())
    names = [n for n, held in programs.owners.items() if held & set(programs.own_stages)]
    with phase("loading weights"):
        materialize(
            source.model,
            names,
            device=mesh.device,
            seed=options.seed,
            shards=programs.base.shards,
            shard_index=mesh.tp_rank,
        )
    save_fewer = None
    can_abort = layout.schedule.is_synchronous and (options.zero != 3 or can_abort_step())
    if may_replan(options.recompute) and can_abort:
        profile = partial(speeds, options, mesh, source.cache_dir)
        save_fewer = OomReplanner(forecast, times, profile, programs).save_fewer
    return _assemble(layout, programs, names, mesh, options, save_fewer)


def _wish_for_halves(layout: Layout, options: EngineOptions) -> str:
    """`requested_sub_pipelining`, or "off" where parameters or activations rule it out."""
    wish = requested_sub_pipelining(options)
    if options.zero == 3 and wish == "on":
        raise ScheduleError(
            "zero=3 gathers the parameters of one segment at a time, but sub_pipelining='on' runs "
            "the halves of several in turns; use zero=2, or sub_pipelining='off'."
        )
    if layout.activations.offloaded and wish == "on":
        raise ScheduleError(
            f"offload_activations={options.offload_activations!r} moves the activations of whole "
            "segments, but sub_pipelining='on' runs them in halves; leave one of the two."
        )
    return "off" if options.zero == 3 or layout.activations.offloaded else wish


def forecast_of(
    source: GraphSource, sample: Signature, mesh: Mesh, options: EngineOptions
) -> Forecast:
    """Lay a model out and foresee its memory, without building anything; alike on every rank.

    Args:
        source: the model.
        sample: the columns of a typical microbatch.
        mesh: the grid of ranks.
        options: how to lay it out.

    Raises:
        TraceError, PlanError, ShardError, ScheduleError: what was asked for does not fit the
            model, or the job does not fit its memory.
    """
    with announced(f"tracing {type(source.model).__name__}") as details:
        graph = build_graph(source, dict(sample), training=options.trains)
        details.append(f"{len(graph.segments)} segments")
    if options.segment_times is not None:
        segment_times(graph, options, mesh, None)  # a wrong file is refused where nobody needs it
    check_stages(len(graph.segments), mesh.pp, mesh.pp)  # before a schedule of any length is made
    with announced("planning"):
        return _forecast(source, graph, mesh, options)


def _forecast(
    source: GraphSource, graph: ModelGraph, mesh: Mesh, options: EngineOptions
) -> Forecast:
    plans = StepPlans(options.schedule, mesh.pp, options.num_microbatches)
    if not plans.takes_costs:
        refuse_zero(plans.base.schedule, options.zero)
    num_stages = plans.base.schedule.num_stages
    partition = partition_segments(graph, num_stages, options, mesh, source.cache_dir)
    features = given_plan(source.model) if options.features is None else options.features
    if mesh.tp == 1 and options.features:
        check_features(graph, options.features)
    forecast = Forecast(
        source.model,
        Layout(graph, partition, plans),
        mesh,
        rewriter(graph, features, mesh.tp, sequence=options.sequence_parallel),
        options,
    )
    times = partial(segment_times, graph, options, mesh, source.cache_dir)
    if plans.takes_costs:
        plans = plans_from_costs(forecast, times)
        refuse_zero(plans.base.schedule, options.zero)
        forecast = replace(forecast, layout=replace(forecast.layout, plans=plans))
    return resolve_activations(forecast, times, partial(speeds, options, mesh, source.cache_dir))


def _assemble(
    layout: Layout,
    programs: ProgramCache,
    names: Sequence[str],
    mesh: Mesh,
    options: EngineOptions,
    save_fewer: SaveFewer | None,
) -> Engine:
    model = programs.source.model
    everything = dict(model.named_parameters(remove_duplicate=False))
    parameters = {name: everything[name] for name in names}
    programs.buffers |= dict(model.named_buffers(remove_duplicate=False))
    shared = _shared(layout)
    progress = Progress(clock_of(mesh.device), options.recorded_steps)
    fsdp = _fsdp(programs, (parameters, shared), mesh, options, progress)
    if fsdp is not None:
        parameters |= fsdp.drained
    optimizer_params, param_all_gather = _trained(
        programs, (parameters, fsdp), mesh, options, progress
    )
    weights = partial(_weights, layout, programs, (parameters, shared), param_all_gather)
    offload = ActivationOffload(mesh.device) if layout.activations.offloaded else None
    stages = {
        stage: Stage(
            stage, weights(stage), programs.buffers, weight_gradients, mesh.device, fsdp, offload
        )
        for stage, weight_gradients in programs.weight_gradients.items()
    }
    oom_guard = OomGuard(is_armed=save_fewer is not None)
    transfers = _connected(layout, mesh, progress, oom_guard)
    groups = replica_groups(mesh, layout.schedule)
    reduced = reduced_of(
        programs.own_segments(), programs.owners, groups, parameters, shared, options.bucket_bytes
    )
    written = stage_buffers(layout, mesh, groups) if options.trains else []
    replica_buffers = ReplicaBuffers(written, programs.buffers, mesh, progress)
    replica_buffers.start()
    engine = Engine(
        EngineState(
            mesh=mesh,
            model=model,
            stages=stages,
            stage_rank=layout.stage_rank,
            parameters=parameters,
            owned=_owned(layout, programs, names, mesh),
            norm_order=_norm_order(model, layout),
            densified=programs.densified,
            shared=shared,
            buffers=programs.buffers,
            replica_buffers=replica_buffers,
            kept_buffers=_kept_buffers(layout, programs, mesh),
            base=programs.base,
            program_for=programs,
            plan_for=layout.plans,
            transfers=transfers,
            reducer=GradientReducer(reduced, progress, optimizer_params.by_id(), oom_guard),
            tied=_tied(
                layout, stages, (optimizer_params, fsdp), mesh, options, (progress, oom_guard)
            ),
            optimizer_params=optimizer_params,
            fsdp=fsdp,
            zero=options.zero,
            seed=options.seed,
            progress=progress,
            oom_guard=oom_guard,
            save_fewer=save_fewer,
        )
    )
    weakref.finalize(engine, watch(progress, mesh))
    return engine


def _connected(layout: Layout, mesh: Mesh, progress: Progress, oom_guard: OomGuard) -> Transfers:
    """The ways between the stages, those of training and of evaluation."""
    transfers = Transfers(mesh, progress, oom_guard, max_open_sends=4 * mesh.pp)
    evaluated = channels_of_pipe(layout.stage_rank)
    transfers.connect(channels_of(layout.plans.base.steps) | evaluated)
    return transfers


def _shared(layout: Layout) -> frozenset[str]:
    """Parameters whose gradient is collected apart, since several segments read them."""
    if not layout.schedule.is_synchronous:
        return frozenset()  # their readers are on one stage, whose leaves sum what they give
    return frozenset(name for name, count in num_readers(layout.graph).items() if count > 1)


def _weights(
    layout: Layout,
    programs: ProgramCache,
    held: tuple[Mapping[str, nn.Parameter], frozenset[str]],
    param_all_gather: ParamAllGather | None,
    stage: int,
) -> Weights:
    parameters, shared = held
    if layout.schedule.is_synchronous:
        return LiveWeights(parameters, shared, param_all_gather)
    own = {n for s in programs.base.stages[stage].segments for n in s.segment.parameters}
    return StashedWeights({name: p for name, p in parameters.items() if name in own})


def _owned(
    layout: Layout, programs: ProgramCache, names: Sequence[str], mesh: Mesh
) -> frozenset[str]:
    """The parameters whose first reader in the first pipe is here."""
    first = {name: layout.stage_rank[min(programs.owners[name])] for name in names}
    return frozenset(name for name, rank in first.items() if rank == mesh.pp_rank)


def _norm_order(model: nn.Module, layout: Layout) -> tuple[str, ...]:
    """What is trained of what any segment reads, in the order of the model's parameters."""
    read = {name for segment in layout.graph.segments for name in segment.parameters}
    return tuple(n for n, p in model.named_parameters() if n in read and p.requires_grad)


def _kept_buffers(layout: Layout, programs: ProgramCache, mesh: Mesh) -> frozenset[str]:
    """The buffers that this rank answers for: the first stage to read one, or stage 0."""
    first: dict[str, int] = {}
    for stage, own in enumerate(layout.partition.stages):
        for segment in layout.graph.segments[own.start : own.stop]:
            for name in segment.buffers:
                first.setdefault(name, stage)
    names = dict(programs.source.model.named_buffers(remove_duplicate=False))
    return frozenset(n for n in names if layout.stage_rank[first.get(n, 0)] == mesh.pp_rank)


def _trained(
    programs: ProgramCache,
    held: tuple[Mapping[str, nn.Parameter], FsdpParameters | None],
    mesh: Mesh,
    options: EngineOptions,
    progress: Progress,
) -> tuple[OptimizerParams, ParamAllGather | None]:
    """What this rank steps, and what brings it the others' steps."""
    parameters, fsdp = held
    precision = Precision(options.master_weights, options.float32_gradients)
    group = mesh.group("dp") if options.zero else None
    if group is None:
        return OptimizerParams(parameters, None, precision), None
    stages = programs.base.stages.values()
    read = [n for stage in stages for s in stage.segments for n in s.segment.parameters]
    in_order = [n for n in dict.fromkeys([*read, *parameters]) if not parameters[n].is_meta]
    names = {id(parameters[name]): name for name in in_order}
    buckets = [
        {names[id(parameter)]: parameter for parameter in bucket}
        for bucket in fill_buckets((parameters[n] for n in in_order), options.bucket_bytes)
    ]
    most_open = MAX_OPEN_GATHERS if options.zero >= 2 else None
    param_all_gather = ParamAllGather(buckets, group, most_open, progress)
    wait_on_access(programs.source.model, param_all_gather)
    return OptimizerParams(parameters, group, precision, param_all_gather, fsdp), param_all_gather


def _fsdp(
    programs: ProgramCache,
    held: tuple[Mapping[str, nn.Parameter], frozenset[str]],
    mesh: Mesh,
    options: EngineOptions,
    progress: Progress,
) -> FsdpParameters | None:
    """The parameters that replicas hold in shares; the model has empty ones in their places."""
    parameters, shared = held
    group = mesh.group("dp")
    if options.zero != 3 or group is None:
        return None
    low = [name for name, p in parameters.items() if p.requires_grad and is_low_precision(p)]
    if low and not (options.master_weights and options.float32_gradients):
        raise ScheduleError(
            f"zero=3 sums gradients in the type that is stepped, and {low[0]!r} is of "
            f"{parameters[low[0]].dtype}; set master_weights=True and leave gradient_sums="
            "'float32', or use zero=2."
        )
    segments = [
        [n for n in s.segment.parameters if parameters[n].dim()]  # a single number has no rows
        for stage in programs.base.stages.values()
        for s in stage.segments
    ]
    assert mesh.device_mesh is not None
    turns = UnshardOrder(group, mesh.device, progress)
    replicas = mesh.device_mesh["dp"]
    fsdp = FsdpParameters(segments, parameters, replicas, options.master_weights, shared, turns)
    places = {id(parameters[name]): drained for name, drained in fsdp.drained.items()}
    replace_parameters(programs.source.model, places)
    return fsdp


def _tied(
    layout: Layout,
    stages: Mapping[int, Stage],
    held: tuple[OptimizerParams, FsdpParameters | None],
    mesh: Mesh,
    options: EngineOptions,
    told: tuple[Progress, OomGuard],
) -> TiedGradients:
    optimizer_params, fsdp = held
    weights = [stage.weights for stage in stages.values()]
    live = [own for own in weights if isinstance(own, LiveWeights)]
    names = _shared(layout)
    leaves: dict[str, Sequence[Leaf]] = {
        name: [own.shared[name] for own in live if name in own.shared] for name in names
    }
    parameters = final = optimizer_params.parameters  # masters take their gradients from there
    if optimizer_params.is_sharded:
        final = {name: item.tensor for name, item in optimizer_params.items.items()}
    if fsdp is not None:  # shares are collected
        leaves |= {name: [fsdp.leaves[name]] for name in names if name in fsdp.leaves}
        parameters = {**parameters, **fsdp.optimizer_tensors}
    shared = Shared(parameters, leaves, final, options.exact_tied_gradients, *told)
    num_pipes = len(layout.schedule.pipes) if layout.schedule.is_synchronous else 0
    pipes = [find_holders(layout.readers(pipe)) for pipe in range(num_pipes)]
    return TiedGradients(mesh, pipes, shared)
