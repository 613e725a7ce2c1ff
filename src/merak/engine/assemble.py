"""Assembly of a rank's engine: stages with their weights, and the communication between ranks."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn

from merak.core.errors import ScheduleError
from merak.core.gradients import is_low_precision
from merak.core.mesh import EXPERT_REPLICAS, REPLICAS, Mesh, mark_used
from merak.engine.comm.compression.stages import GradientCompression
from merak.engine.comm.gradient_buckets import GradientReducer, StageGradients, fill_buckets
from merak.engine.comm.gradient_reducers import GradientReducers
from merak.engine.comm.local_steps import LocalSteps, averaging_buckets
from merak.engine.comm.p2p import Route, Transfers
from merak.engine.comm.replica_buffers import ReplicaBuffers, stage_buffers
from merak.engine.comm.replica_levels import (
    ReplicaCollectives,
    connect_levels,
    connect_shards,
)
from merak.engine.comm.stage_io import StageIO
from merak.engine.comm.stage_replicas import gradients_to_reduce, replica_groups
from merak.engine.comm.tied_gradients import Leaf, TiedGradients, TiedParameters
from merak.engine.engine import Engine
from merak.engine.health.oom import OomGuard
from merak.engine.health.status import Progress
from merak.engine.health.step_records import clock_of
from merak.engine.health.watchdog import watch
from merak.engine.layer_dropping import layer_dropping
from merak.engine.local_programs import ProgramCache, num_readers
from merak.engine.microbatches import MicrobatchFactory
from merak.engine.segments.activation_offload import ActivationOffload
from merak.engine.segments.weight_gradients import WeightGradients
from merak.engine.stage import Stage
from merak.engine.state import EngineState, SaveFewer
from merak.engine.weight_versions import LiveWeights, StashedWeights, Weights
from merak.engine.zero.fsdp import FsdpParameters, replace_parameters
from merak.engine.zero.host_tensors import HostTensors
from merak.engine.zero.optimizer_params import OptimizerParams, Precision
from merak.engine.zero.param_all_gather import ParamAllGather, wait_on_access
from merak.engine.zero.replica_groups import ReplicaGroups
from merak.engine.zero.unshard_order import UnshardOrder
from merak.graph.program.program import StageProgram
from merak.plan.cluster.hierarchy import replica_lines
from merak.plan.constraints import low_sums_problem
from merak.plan.engine_options import EngineOptions
from merak.plan.layout import Layout
from merak.plan.memory.communication_limits import MAX_OPEN_GATHERS
from merak.plan.optimizer.home import folder_of, is_away
from merak.plan.options import zero_degree
from merak.plan.tied_parameters import find_holders
from merak.schedule.steps import links_of, links_of_pipe


@dataclass(frozen=True, slots=True)
class _Job:
    """The decisions that the parts of this rank's engine are made from.

    Args:
        layout: the model, laid out.
        programs: this rank's programs.
        mesh: the grid of ranks.
        options: how the job is laid out.
        parameters: this rank's parameters by name, unsharded over dp.
        tied: names of parameters whose gradients are collected from several segments.
        progress: reports every wait.
        oom_guard: what this rank does where memory runs out inside a step.
        collectives: of the replicas.
        sharing: the replicas that shard between them; None for all.
        of_stages: the replicas of each of this rank's stages, and their copies.
        route: of tensors between pp ranks.
    """

    layout: Layout
    programs: ProgramCache
    mesh: Mesh
    options: EngineOptions
    parameters: Mapping[str, nn.Parameter]
    tied: frozenset[str]
    progress: Progress
    oom_guard: OomGuard
    collectives: ReplicaCollectives
    sharing: dist.ProcessGroup | None
    of_stages: Mapping[int, dist.ProcessGroup | None]
    route: Route

    @property
    def stages(self) -> Iterable[StageProgram]:
        """The programs of this rank's stages."""
        return self.programs.base.stages.values()

    @property
    def experts(self) -> Collection[str]:
        """Names of parameters of which replicas hold different shards."""
        return self.programs.base.shards.keys() if self.mesh.spreads_experts else ()

    @property
    def groups(self) -> ReplicaGroups:
        """The replicas that hold the same parameters of this rank's."""
        group = self.mesh.group
        everyone = self.sharing or group(REPLICAS)
        of_copies: dict[str, dist.ProcessGroup] = {}
        for stage, program in self.programs.base.stages.items():
            copies = self.of_stages[stage]
            if self.layout.schedule.num_copies > 1 and copies is not None:
                of_copies |= {n: copies for s in program.segments for n in s.segment.parameters}
        return ReplicaGroups(everyone, group(EXPERT_REPLICAS), self.experts, of_copies)

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.programs.source.model


def assemble(  # one argument for each thing that the build has decided
    layout: Layout,
    programs: ProgramCache,
    names: Sequence[str],
    mesh: Mesh,
    options: EngineOptions,
    save_fewer: SaveFewer | None,
) -> Engine:
    """Assemble the engine of this rank, whose weights are loaded; a collective of all ranks.

    Args:
        layout: the model, laid out.
        programs: this rank's programs.
        names: of the parameters that this rank holds.
        mesh: the grid of ranks.
        options: how the job is laid out.
        save_fewer: changes the plan after a step that ran out of memory; None for errors instead.
    """
    job = _job(layout, programs, names, mesh, options, save_fewer is not None)
    engine = Engine(_state(job, save_fewer))
    mark_used()
    weakref.finalize(engine, watch(job.progress, mesh))
    return engine


def _state(job: _Job, save_fewer: SaveFewer | None) -> EngineState:
    fsdp = _fsdp_parameters(job)
    if fsdp is not None:
        job = replace(job, parameters={**job.parameters, **fsdp.meta_parameters})
    all_gather = _param_all_gather(job)
    optimizer_params = _optimizer_params(job, fsdp, all_gather)
    stages = _stages(job, fsdp, all_gather)
    transfers = _transfers(job)
    return EngineState(
        mesh=job.mesh,
        model=job.model,
        stages=stages,
        stage_rank=job.layout.stage_rank,
        parameters=job.parameters,
        owned=_owned(job),
        norm_order=_norm_order(job),
        densified=job.programs.densified,
        shared=job.tied,
        buffers=job.programs.buffers,
        replica_buffers=_replica_buffers(job),
        kept_buffers=_kept_buffers(job),
        base=job.programs.base,
        program_for=job.programs,
        plan_for=job.layout.plans,
        microbatches=MicrobatchFactory(job.mesh, job.programs.buffers, job.options.seed),
        transfers=transfers,
        stage_io=StageIO(transfers, job.mesh),
        reducer=_reducer(job, optimizer_params),
        tied=_tied_gradients(job, stages, optimizer_params, fsdp),
        optimizer_params=optimizer_params,
        fsdp=fsdp,
        zero=job.options.zero,
        local_steps=_local_steps(job, optimizer_params),
        ema_decay=job.options.ema_decay,
        layer_dropping=layer_dropping(job.programs.source, job.options),
        progress=job.progress,
        oom_guard=job.oom_guard,
        save_fewer=save_fewer,
    )


def _job(
    layout: Layout,
    programs: ProgramCache,
    names: Sequence[str],
    mesh: Mesh,
    options: EngineOptions,
    can_abort: bool,
) -> _Job:
    held = dict(programs.source.model.named_parameters(remove_duplicate=False))
    programs.buffers |= dict(programs.source.model.named_buffers(remove_duplicate=False))
    return _Job(
        layout,
        programs,
        mesh,
        options,
        {name: held[name] for name in names},
        _tied_names(layout),
        Progress(clock_of(mesh.device), options.recorded_steps),
        OomGuard(is_armed=can_abort),
        *_collectives(mesh, layout, options),
        replica_groups(mesh, layout.schedule),
        Route(mesh.device),
    )


def _collectives(
    mesh: Mesh, layout: Layout, options: EngineOptions
) -> tuple[ReplicaCollectives, dist.ProcessGroup | None]:
    """The collectives of replicas, and the group that shards; None for all replicas."""
    size = zero_degree(options, mesh.replicas)
    if options.zero and size < mesh.replicas and mesh.device_mesh is not None:
        own, shard_levels = connect_shards(mesh, size)
        return ReplicaCollectives(shard_levels), own
    if options.hierarchical_reductions == "off" or mesh.device_mesh is None or not options.trains:
        return ReplicaCollectives(), None
    axes = (REPLICAS, EXPERT_REPLICAS) if mesh.spreads_experts else (REPLICAS,)
    lines = [own for axis in axes for own in replica_lines(mesh, layout.schedule, axis)]
    return ReplicaCollectives(connect_levels(lines, mesh.hosts, mesh.rank)), None


def _optimizer_params(
    job: _Job, fsdp: FsdpParameters | None, all_gather: ParamAllGather | None
) -> OptimizerParams:
    groups = job.groups if job.options.zero else None
    home = job.options.offload_optimizer
    away = job.options.trains and is_away(home)
    delays = job.options.delay_optimizer_update
    host = HostTensors(job.mesh.device, folder_of(home), delays) if away else None
    return OptimizerParams(job.parameters, groups, _precision(job), all_gather, fsdp, host)


def _precision(job: _Job) -> Precision:
    return Precision(job.options.master_weights, job.options.float32_gradients)


def _stages(
    job: _Job, fsdp: FsdpParameters | None, all_gather: ParamAllGather | None
) -> dict[int, Stage]:
    offload = ActivationOffload(job.mesh.device) if job.layout.activations.offloaded else None
    return {
        stage: Stage(
            stage,
            _weights(job, stage, all_gather),
            job.programs.buffers,
            WeightGradients(),
            job.mesh.device,
            fsdp,
            offload,
        )
        for stage in job.programs.own_stages
    }


def _weights(job: _Job, stage: int, all_gather: ParamAllGather | None) -> Weights:
    if job.layout.schedule.is_synchronous:
        return LiveWeights(job.parameters, job.tied, all_gather)
    segments = job.programs.base.stages[stage].segments
    own = {name for segment in segments for name in segment.segment.parameters}
    return StashedWeights({name: p for name, p in job.parameters.items() if name in own})


def _transfers(job: _Job) -> Transfers:
    """Point-to-point traffic between the stages, of training and of evaluation."""
    transfers = Transfers(job.mesh, job.progress, job.oom_guard, job.route)
    evaluated = links_of_pipe(job.layout.stage_rank)
    transfers.connect(links_of(job.layout.plans.base.steps) | evaluated)
    return transfers


def _replica_buffers(job: _Job) -> ReplicaBuffers:
    written = stage_buffers(job.layout, job.mesh, job.of_stages) if job.options.trains else []
    replica_buffers = ReplicaBuffers(written, job.programs.buffers, job.progress)
    replica_buffers.start()
    return replica_buffers


def _gradient_groups(job: _Job) -> Mapping[int, dist.ProcessGroup | None]:
    """The ranks that reduce the gradients of each stage; under Local SGD those of one replica."""
    if not job.options.local_steps or job.mesh.dp == 1:
        return job.of_stages
    return replica_groups(job.mesh, job.layout.schedule, "cp")


def _local_steps(job: _Job, optimizer_params: OptimizerParams) -> LocalSteps | None:
    if not job.options.local_steps:
        return None
    tensors = optimizer_params.named
    names = [[n for s in stage.segments for n in s.segment.parameters] for stage in job.stages]
    buckets = averaging_buckets(names, tensors, job.tied, job.options.bucket_bytes)
    return LocalSteps(tensors, buckets, job.mesh, job.progress, job.options)


def _reducer(job: _Job, optimizer_params: OptimizerParams) -> GradientReducers:
    def over(
        groups: Mapping[int, dist.ProcessGroup | None], left_out: Collection[str]
    ) -> GradientReducer:
        reduced = gradients_to_reduce(
            job.programs.own_segments(),
            job.programs.owners,
            groups,
            job.parameters,
            job.tied,
            job.options.bucket_bytes,
            left_out,
        )
        compression = _compression(job, reduced)
        tensors = optimizer_params.by_id()
        others = (job.oom_guard, compression, job.collectives, job.sharing)
        return GradientReducer(reduced, job.progress, tensors, *others)

    experts = job.experts
    reducers = [over(_gradient_groups(job), experts)]
    if job.mesh.spreads_experts:
        own = replica_groups(job.mesh, job.layout.schedule, EXPERT_REPLICAS)
        reducers.append(over(own, job.parameters.keys() - experts))
    return GradientReducers(reducers)


def _compression(job: _Job, reduced: Mapping[int, StageGradients]) -> GradientCompression | None:
    """Compression of the reductions; None where the options want none."""
    kind = job.options.gradient_compression
    if kind == "off" or not job.options.trains:
        return None
    stages = {stage: (own.group, own.buckets) for stage, own in reduced.items()}
    names = {id(parameter): name for name, parameter in job.parameters.items()}
    dtype_of = _precision(job).reduce_dtype
    shard = f"{job.mesh.tp_rank} of {job.mesh.tp}"
    rank, fraction = job.options.powersgd_rank, job.options.topk_fraction
    return GradientCompression(kind, stages, dtype_of, names, shard, rank, fraction)


def _tied_names(layout: Layout) -> frozenset[str]:
    """Names of tied parameters, whose gradients are collected from several segments."""
    if not layout.schedule.is_synchronous:
        return frozenset()  # their readers are on one stage, whose leaves sum what they give
    return frozenset(name for name, count in num_readers(layout.graph).items() if count > 1)


def _owned(job: _Job) -> frozenset[str]:
    """The parameters whose first reader in the first pipe is here."""
    owners, stage_rank = job.programs.owners, job.layout.stage_rank
    first = {name: stage_rank[min(owners[name])] for name in job.parameters}
    return frozenset(name for name, rank in first.items() if rank == job.mesh.pp_rank)


def _norm_order(job: _Job) -> tuple[str, ...]:
    """The trained parameters that any segment reads, in the order of the model's parameters."""
    read = {name for segment in job.layout.graph.segments for name in segment.parameters}
    return tuple(n for n, p in job.model.named_parameters() if n in read and p.requires_grad)


def _kept_buffers(job: _Job) -> frozenset[str]:
    """The buffers that this rank answers for: the first stage to read one, or stage 0."""
    first: dict[str, int] = {}
    for stage, own in enumerate(job.layout.partition.stages):
        for segment in job.layout.graph.segments[own.start : own.stop]:
            for name in segment.buffers:
                first.setdefault(name, stage)
    names = dict(job.model.named_buffers(remove_duplicate=False))
    stage_rank = job.layout.stage_rank
    return frozenset(n for n in names if stage_rank[first.get(n, 0)] == job.mesh.pp_rank)


def _param_all_gather(job: _Job) -> ParamAllGather | None:
    """The all-gather of updated rows (ZeRO-1 and 2), in buckets in the order of the forward."""
    groups, parameters = job.groups, job.parameters
    if not job.options.zero or not groups.is_shared_out:
        return None
    read = [n for stage in job.stages for s in stage.segments for n in s.segment.parameters]
    in_order = [n for n in dict.fromkeys([*read, *parameters]) if not parameters[n].is_meta]
    names = {id(parameters[name]): name for name in in_order}
    places = {name: place for place, name in enumerate(in_order)}
    buckets = [
        ({names[id(parameter)]: parameter for parameter in bucket}, group)
        for group in dict.fromkeys(map(groups.of, in_order))
        if group is not None
        for bucket in fill_buckets(
            (parameters[n] for n in in_order if groups.of(n) is group), job.options.bucket_bytes
        )
    ]
    buckets.sort(key=lambda bucket: places[next(iter(bucket[0]))])
    most_open = MAX_OPEN_GATHERS if job.options.zero >= 2 else None
    all_gather = ParamAllGather(buckets, most_open, job.progress, job.collectives)
    wait_on_access(job.model, all_gather)
    return all_gather


def _fsdp_parameters(job: _Job) -> FsdpParameters | None:
    """The parameters that FSDP shards (ZeRO-3); the model has meta parameters in their places."""
    options, parameters = job.options, job.parameters
    if options.zero != 3 or job.groups.everyone is None:
        return None
    low = [name for name, p in parameters.items() if p.requires_grad and is_low_precision(p)]
    if low and not (options.master_weights and options.float32_gradients):
        raise ScheduleError(low_sums_problem(3, f"{low[0]!r} is of {parameters[low[0]].dtype}"))
    groups = job.groups

    def has_shards(name: str) -> bool:
        """A single number has no rows, another rank's expert nothing, one replica's no peers."""
        own = parameters[name]
        return own.dim() > 0 and own.numel() > 0 and groups.of(name) is not None

    segments = [
        [name for name in s.segment.parameters if has_shards(name)]
        for stage in job.stages
        for s in stage.segments
    ]

    def replicas(name: str) -> dist.ProcessGroup:
        found = groups.of(name)
        assert found is not None
        return found

    fsdp = FsdpParameters(
        segments,
        parameters,
        replicas,
        options.master_weights,
        job.tied,
        UnshardOrder(job.progress),
        job.collectives,
    )
    metas = {id(parameters[name]): meta for name, meta in fsdp.meta_parameters.items()}
    replace_parameters(job.model, metas)
    return fsdp


def _tied_gradients(
    job: _Job,
    stages: Mapping[int, Stage],
    optimizer_params: OptimizerParams,
    fsdp: FsdpParameters | None,
) -> TiedGradients:
    weights = [stage.weights for stage in stages.values()]
    live = [own for own in weights if isinstance(own, LiveWeights)]
    leaves: dict[str, Sequence[Leaf]] = {
        name: [own.shared[name] for own in live if name in own.shared] for name in job.tied
    }
    parameters = final = optimizer_params.parameters  # masters take their gradients from there
    if optimizer_params.is_sharded:
        final = {name: item.leaf for name, item in optimizer_params.items.items()}
    if fsdp is not None:  # shards are collected
        leaves |= {name: [fsdp.leaves[name]] for name in job.tied if name in fsdp.leaves}
        parameters = {**parameters, **fsdp.optimizer_tensors}
    every_microbatch = job.options.exact_tied_gradients
    shared = TiedParameters(
        parameters, leaves, final, every_microbatch, job.progress, job.oom_guard, job.route
    )
    schedule = job.layout.schedule
    num_pipes = len(schedule.pipes) if schedule.is_synchronous else 0
    pipes = [find_holders(job.layout.readers(pipe)) for pipe in range(num_pipes)]
    return TiedGradients(job.mesh, pipes, shared)
