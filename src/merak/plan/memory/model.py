"""The memory model: peak bytes of every pp rank under a schedule and an activation policy.

Source: arXiv 2206.04959 (Merak), section 5.2, for the activations of microbatches in flight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from merak.core.mesh import Mesh, pretended
from merak.core.tensor_meta import TensorMeta
from merak.graph.program.program import Program, with_offloading
from merak.plan.activation_policy import ActivationPolicy
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.optimizer_memory import OptimizerFactory, OptimizerMemories, OptimizerMemory
from merak.plan.cost.segments.memory import SegmentMemory
from merak.plan.cost.selective_ops import SelectiveOps
from merak.plan.gradient_compression import feedback_bytes
from merak.plan.memory.communication_limits import MAX_OPEN_GATHERS, level_bytes
from merak.plan.memory.context import MemoryContext, TiedParameter, parameters_of
from merak.plan.memory.host import HostBytes, OffloadedTensor, host_bytes
from merak.plan.memory.ledger import Category, Ledger, Peak
from merak.plan.memory.measured import Measured
from merak.plan.memory.sub_pipelined import SplitSegments
from merak.plan.memory.timeline import MemoryTimeline
from merak.plan.memory.whole_tensors import (
    exchanged,
    on_all_ranks,
    stepped_shape,
    stepped_whole,
)
from merak.plan.memory.zero import ZeroSharding, total_bytes
from merak.plan.optimizer.home import is_away
from merak.plan.optimizer.needs import Findings, Needs, merged_findings
from merak.plan.optimizer.small_tensors import job_tensor
from merak.schedule.ir import Schedule
from merak.schedule.simulator.memory import num_weight_versions
from merak.schedule.steps import Step

_COPIES_OF_BUCKET = 3
"""Of a bucket of parameters that replicas average: what is sent, its parts, and their mean."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage on its rank.

    Args:
        stage: its number.
        parameters: of its parameters.
        gradients: of their gradients between microbatches.
        optimizer: of their optimizer state, masters included.
        activations: peak of its microbatches: saved activations, saved inputs of segments that
            recompute, open transfers, and temporaries of operators.
        host: of its optimizer in host memory or files: state, what is stepped, and its gradients; 0
            where they are on the device.
    """

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes of the stage on its device."""
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one pp rank.

    Args:
        rank: the pp rank.
        stages: its stages.
        peak: the moment at which it holds the most.
        host: what it has in host memory.
        host_blocks: number of blocks of pinned memory for offloaded activations, by their bytes.
        disk_bytes: of its optimizer in files.
    """

    rank: int
    stages: tuple[StageMemory, ...]
    peak: Peak
    host: HostBytes = field(default_factory=HostBytes)
    host_blocks: Mapping[int, int] = field(default_factory=dict)
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class UpdateExchange:
    """What the ranks that have pieces of parameters exchange in an optimizer's step.

    Args:
        findings: what the optimizer needs of the parameters.
        num_parameters: of which a rank steps a piece.
        num_bytes: of its pieces, in the type that is stepped.
    """

    findings: Findings
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Job:
    """A model laid out over pp ranks, with everything that its memory depends on.

    Args:
        programs: for each pp rank, its stages with their local segments, of any policy.
        mesh: the degrees, and the device.
        tied: by pp rank, its tied parameters by name and pipe.
        others: by pp rank, bytes of its buffers and of parameters that no segment reads.
        measured: memory of its segments and optimizer, which other layouts of the model share.
        optimizer: makes the optimizer; None for a job without one.
        every_microbatch: whether gradients of tied parameters are exchanged after every microbatch.
        bucket_bytes: size of the buckets in which gradients are reduced over replicas.
        zero: what replicas shard of parameters, gradients and optimizer state.
        averages: whether replicas average parameters (Local SGD), in buckets of `bucket_bytes`.
        outer_copies: copies of what the optimizer steps that an outer optimizer holds.
        kernels: type of the device whose kernels run, which need not be here; None for the mesh's.
        compression: of gradient reductions, as the option `gradient_compression`.
        has_levels: whether replicas reduce by hierarchy.
        home: of what the optimizer holds and steps, as of `plan.optimizer.home`.
        delays: whether its steps are delayed by one.
        split: splits segments into sub-microbatches, where they run as such; else None.
        recomputes_whole: whether a recomputation runs all of a segment again.
    """

    programs: tuple[Program, ...]
    mesh: Mesh
    tied: tuple[Mapping[tuple[str, int], TiedParameter], ...]
    others: tuple[int, ...]
    measured: Measured
    optimizer: OptimizerFactory | None = None
    every_microbatch: bool = True
    bucket_bytes: int = 25 * 2**20
    zero: ZeroSharding = field(default_factory=ZeroSharding)
    averages: bool = False
    outer_copies: int = 0
    kernels: str | None = None
    split: SplitSegments | None = None
    recomputes_whole: bool = False
    compression: str = "off"
    has_levels: bool = False
    home: str | None = None
    delays: bool = False

    @property
    def is_away(self) -> bool:
        """Whether what the optimizer holds and steps is not on the device."""
        return is_away(self.home)


class MemoryModel:
    """Estimates the memory of a job under any schedule and activation policy.

    Args:
        job: the model as it is laid out.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._measured = measured = job.measured
        with pretended(job.mesh.unconnected()):
            self.segments: dict[int, SegmentMemory] = {
                segment.segment.index: measured.segment(segment.segment, {n for n, _ in tied})
                for program, tied in zip(job.programs, job.tied, strict=True)
                for stage in program.stages.values()
                for segment in stage.segments
            }
            self._whole = dict(self.segments)
            self.segments |= self._in_turns()
            if job.recomputes_whole:
                self.segments = {i: own.recomputing_whole() for i, own in self.segments.items()}
            self._derived = [measured.prologue_bytes(program) for program in job.programs]
        # All ranks' kinds of parameters at first, of which each rank has some.
        kinds = [meta for p in job.programs for meta in dict.fromkeys(_stepped(job, p).values())]
        measured.optimizers(list(dict.fromkeys(kinds)), job.kernels)
        found = [_findings(job, p, measured.optimizers) for p in job.programs]
        self.findings = merged_findings(found)
        """What the optimizer needs of parameters of which ranks have shards."""
        needs = self.findings.needs
        self._optimizers = [_optimizer(job, p, measured.optimizers, needs) for p in job.programs]

    def _in_turns(
        self, keeps: Mapping[int, frozenset[str]] = MappingProxyType({})
    ) -> dict[int, SegmentMemory]:
        """Memory of segments that run as sub-microbatches, by what a recomputation keeps."""
        job, found = self.job, dict[int, SegmentMemory]()
        if job.split is not None:
            for program, tied in zip(job.programs, job.tied, strict=True):
                now = {name for name, _ in tied}
                for stage in program.stages.values():
                    found |= job.split.stage(stage, self._measured, self._whole, now, keeps)
        return found

    def exchange(self, rank: int) -> UpdateExchange:
        """What a pp rank's optimizer exchanges in its step.

        Args:
            rank: the pp rank.
        """
        job, program = self.job, self.job.programs[rank]
        stepped = _stepped(job, program)
        cut = exchanged(stepped, program.shards, job.zero)
        sizes = [meta.num_bytes for name, meta in stepped.items() if name in cut]
        return UpdateExchange(self.findings, len(sizes), sum(sizes))

    def find_selective_ops(self, profile: DeviceProfile) -> dict[int, SelectiveOps]:
        """By segment, the operators that are worth saving where it recomputes.

        Args:
            profile: the speeds of the devices.
        """
        segments = []
        for program in self.job.programs:
            for stage in program.stages.values():
                for own in stage.segments:
                    # Inputs and outputs are held where segments recompute, too.
                    saved_bytes = self.segments[own.segment.index].saved_bytes
                    segments += [(own.segment, saved_bytes)] if own.trains else []
        with pretended(self.job.mesh.unconnected()):
            found = self._measured.selective(segments, profile)
            in_turns = self._in_turns({index: ops.names for index, ops in found.items()})
        for index in found.keys() & in_turns.keys():
            memory = replace(in_turns[index], recomputed=found[index].memory.recomputed)
            found[index] = replace(found[index], memory=memory)
        return found

    def operator_seconds(self, profile: DeviceProfile) -> dict[int, Sequence[float]]:
        """By segment, the estimated seconds of each node of its graph in a forward.

        Args:
            profile: the speeds of the devices.
        """
        return {
            own.segment.index: self._measured.operator_seconds(own.segment, profile)
            for program in self.job.programs
            for stage in program.stages.values()
            for own in stage.segments
        }

    def rank(
        self,
        rank: int,
        schedule: Schedule,
        steps: Sequence[Sequence[Step]],
        policy: ActivationPolicy,
    ) -> RankMemory:
        """Memory of one pp rank.

        Args:
            rank: the pp rank.
            schedule: with the recompute flags of its stages.
            steps: its steps, lowered.
            policy: what is saved, recomputed and offloaded.
        """
        job = self.job
        program = _with_policy(job.programs[rank], policy)
        state, taken = self._optimizers[rank]
        away = _in_host(job, program, state)
        if job.is_away:
            state, taken = {}, 0
        fixed_bytes, varying_bytes = self._derived[rank]
        ledger = Ledger(schedule.label)
        parameters = parameters_of(program)
        ledger.hold("versions", _version_bytes(rank, schedule, program), Category.PARAMETERS)
        ledger.hold("others", job.others[rank] + fixed_bytes, Category.BUFFERS)
        ledger.hold("optimizer", sum(state.values()), Category.OPTIMIZER)
        feedback = _feedback_bytes(rank, schedule, job, parameters)
        ledger.hold("error feedback", feedback, Category.OPTIMIZER)
        columns = sum(column.num_bytes for column in _columns(program))
        ledger.hold("columns", columns * schedule.num_microbatches, Category.COLUMNS)
        ctx = MemoryContext(
            rank=rank,
            schedule=schedule,
            program=program,
            memory=self.segments,
            selective=policy.selective,
            derived_bytes=varying_bytes,
            tied=job.tied[rank],
            zero=job.zero,
            bucket_bytes=job.bucket_bytes if _is_replicated(rank, schedule, job) else None,
            has_levels=job.has_levels and _is_replicated(rank, schedule, job),
            every_microbatch=job.every_microbatch,
        )
        _hold_parameters(ctx, ledger, job.is_away)
        timeline = MemoryTimeline(ctx, ledger)
        timeline.run(steps[rank])
        _hold_update(ctx, ledger, job, taken)
        assert ledger.peak is not None
        stages = tuple(
            _stage(stage, program, state, away, job.zero, ledger.stage_peaks[stage])
            for stage in program.stages
        )
        is_pinned = (job.kernels or job.mesh.device.type) == "cuda"
        offloaded = timeline.host
        host, in_files = host_bytes(job.home, [*away.values()], offloaded, is_pinned)
        return RankMemory(rank, stages, ledger.peak, host, offloaded.blocks, in_files)


def _hold_update(ctx: MemoryContext, ledger: Ledger, job: Job, taken_bytes: int) -> None:
    """Record the step of the optimizer, and the gathers of what replicas have stepped."""
    parameters = parameters_of(ctx.program)
    # Buckets have become the gradients when the optimizer steps.
    ledger.set_category(Category.COMMUNICATION, 0)
    stepped_bytes = total_bytes(job.zero.optimizer_tensors(_trained(parameters)).values())
    held_bytes = 0 if job.is_away else ledger.by_category[Category.GRADIENTS]
    ledger.set_category(Category.GRADIENTS, min(stepped_bytes, held_bytes))
    ledger.record_peak("update", taken_bytes)
    sharded = ctx.sharded_parameters()
    whole = {name: meta for name, meta in parameters.items() if name not in sharded}
    ledger.record_peak("gather", _gathered_bytes(job, _trained(whole)))


def _in_host(job: Job, program: Program, state: Mapping[str, int]) -> dict[str, OffloadedTensor]:
    """What is in host memory of each parameter."""
    if not job.is_away:
        return {}
    metas = _trained(parameters_of(program))
    stepped = job.zero.optimizer_tensors(metas)
    found = {}
    for name, tensor in stepped.items():
        own = 0 if job.zero.master_bytes(metas[name], tensor) else tensor.num_bytes
        dtype = tensor.dtype if job.zero.parameters else metas[name].dtype
        sent = math.prod(tensor.shape) * dtype.itemsize
        found[name] = OffloadedTensor(state[name] + own, tensor.num_bytes, sent, job.delays)
    return found


def _hold_parameters(ctx: MemoryContext, ledger: Ledger, is_away: bool) -> None:
    """Hold the parameters, or this rank's shards of them.

    Shards that are masters count as state of the optimizer, unless that is in host memory.
    """
    sharded, every = ctx.sharded_parameters(), parameters_of(ctx.program)
    stepped = ctx.zero.optimizer_tensors(_trained(sharded))
    masters = {n for n in stepped if ctx.zero.master_bytes(sharded[n], stepped[n])}
    masters = set() if is_away else masters
    frozen = {n: meta for n, meta in sharded.items() if not meta.requires_grad}
    shards = {**stepped, **replace(ctx.zero, master_weights=False).optimizer_tensors(frozen)}
    held = {n: shards.get(n, meta) for n, meta in every.items() if n not in masters}
    ledger.hold("parameters", _sum(held), Category.PARAMETERS)


def _is_replicated(rank: int, schedule: Schedule, job: Job) -> bool:
    """Whether replicas, or ranks of another pipe, hold the same stages."""
    stages = schedule.stages_of(rank)
    return job.mesh.replicas > 1 or any(len(schedule.ranks_of(stage)) > 1 for stage in stages)


def _feedback_bytes(
    rank: int, schedule: Schedule, job: Job, parameters: Mapping[str, TensorMeta]
) -> int:
    """Bytes of the error feedback of compressed reductions."""
    copies = min(len(schedule.ranks_of(stage)) for stage in schedule.stages_of(rank))
    if not _is_replicated(rank, schedule, job):
        return 0
    gradients = job.zero.gradient_bytes(_trained(parameters))
    return feedback_bytes(job.compression, sum(gradients.values()), job.mesh.replicas * copies)


def _version_bytes(rank: int, schedule: Schedule, program: Program) -> int:
    """Bytes of older weight versions that microbatches in flight still use."""
    versions = num_weight_versions(schedule)
    every = parameters_of(program)
    return sum(
        (versions[rank, stage] - 1) * sum(every[name].num_bytes for name in _names(program, stage))
        for stage in program.stages
    )


def _with_policy(program: Program, policy: ActivationPolicy) -> Program:
    stages = {}
    for number, stage in program.stages.items():
        own = [replace(s, saved=s.segment.index in policy.saved) for s in stage.segments]
        stages[number] = replace(stage, segments=tuple(with_offloading(own, policy.offloaded)))
    return replace(program, stages=stages)


def _optimizer(
    job: Job, program: Program, measure: OptimizerMemories, needs: Needs
) -> tuple[dict[str, int], int]:
    """Optimizer state by parameter, with masters and outer state, and temporaries of its step."""
    metas, some = _trained(parameters_of(program)), _stepped(job, program)
    stepped = job.zero.optimizer_tensors(metas)
    if needs is not Needs.SHARDS:
        state, taken_bytes = _of_whole(job, program, measure, needs)
    else:
        found: OptimizerMemory = measure(list(some.values()), job.kernels)
        state, taken_bytes = dict(zip(some, found.state_bytes, strict=True)), found.taken_bytes
    masters = {name: job.zero.master_bytes(metas[name], stepped[name]) for name in metas}
    outer = {name: job.outer_copies * stepped[name].num_bytes for name in metas}
    held = {name: state.get(name, 0) + masters[name] + outer[name] for name in metas}
    if job.averages:
        sizes = [meta.num_bytes for meta in stepped.values()]
        bucket_bytes = min(sum(sizes), job.bucket_bytes + max(sizes, default=0))
        taken_bytes = max(taken_bytes, _COPIES_OF_BUCKET * bucket_bytes)
    return held, taken_bytes


def _of_whole(
    job: Job, program: Program, measure: OptimizerMemories, needs: Needs
) -> tuple[dict[str, int], int]:
    """Bytes by parameter on the rank with most, if each steps whole ones for others, and taken.

    Beside the states there are the whole parameters that it steps for others, and during the step
    their gradients. Pieces of all that is exchanged are sent; what it owns is received and joined.
    Where reductions of whole parameters are enough, so is stepped only what some ranks have nothing
    of.
    """
    metas = _in_stepped_type(job, _trained(parameters_of(program)))
    names, stepped = exchanged(metas, program.shards, job.zero), _stepped(job, program)
    reduced: dict[str, TensorMeta] = {}
    if needs is Needs.REDUCTIONS:
        some = names & on_all_ranks(metas, program.shards, job.zero, job.mesh)
        reduced = {name: meta for name, meta in stepped.items() if name in some}
    metas = {name: meta for name, meta in metas.items() if name not in reduced}
    ranks = stepped_whole(metas, program.shards, job.zero, job.mesh)
    sent = total_bytes(m for name, m in stepped.items() if name in names and name not in reduced)
    of_shards = measure(list(reduced.values()), job.kernels, True)
    shards = dict(zip(reduced, of_shards.state_bytes, strict=True))
    choices = []
    for own in ranks:
        found = measure(list(own.values()), job.kernels)
        copies = {name: meta.num_bytes if name in names else 0 for name, meta in own.items()}
        state = {n: b + copies[n] for n, b in zip(own, found.state_bytes, strict=True)}
        owned = sum(copies.values())
        taken = max(owned + found.taken_bytes + of_shards.taken_bytes, sent + 2 * owned)
        choices.append((state | shards, taken))
    return max(choices, key=lambda choice: sum(choice[0].values()))


def _in_stepped_type(job: Job, metas: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    """Parameters of a rank in the type that is stepped, before their rows are shared out."""
    return replace(job.zero, degree=1).optimizer_tensors(metas)


def _findings(job: Job, program: Program, measure: OptimizerMemories) -> Findings:
    """What the job's optimizer does to the pieces of parameters that ranks have."""
    metas = _trained(parameters_of(program))
    if job.optimizer is None or not exchanged(metas, program.shards, job.zero):
        return Findings()
    tensors = []
    for name, meta in _stepped(job, program).items():
        shape = stepped_shape(name, metas[name].shape, program.shards)
        one = job_tensor(shape, program.shards.get(name), job.zero.degree_of(name))
        tensors.append((meta, one))
    return measure.findings(tensors)


def _stepped(job: Job, program: Program) -> dict[str, TensorMeta]:
    """What the optimizer of a pp rank steps, by name."""
    stepped = job.zero.optimizer_tensors(_trained(parameters_of(program)))
    return {name: meta for name, meta in stepped.items() if meta.num_bytes}


def _gathered_bytes(job: Job, metas: Mapping[str, TensorMeta]) -> int:
    """Bytes of the all-gathers that give every replica the updated parameters."""
    metas = {name: meta for name, meta in metas.items() if job.zero.degree_of(name) > 1}
    if not metas:
        return 0
    sent = total_bytes(metas.values())
    if job.zero.gradients:
        largest = max(meta.num_bytes for meta in metas.values())
        sent = min(sent, MAX_OPEN_GATHERS * (job.bucket_bytes + largest))
    if job.has_levels:
        one = min(sent, job.bucket_bytes + max(meta.num_bytes for meta in metas.values()))
        sent += level_bytes(one, is_sharded=True)
    return sent + sent // job.zero.degree


def _trained(metas: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    return {name: meta for name, meta in metas.items() if meta.requires_grad}


def _columns(program: Program) -> list[TensorMeta]:
    """Shapes and element types of the columns that a pp rank reads."""
    found: dict[str, TensorMeta] = {}
    segments = [s.segment for stage in program.stages.values() for s in stage.segments]
    for segment in (*segments, program.batch_only.segment):
        for node in segment.graph.find_nodes(op="placeholder"):
            if node.meta["name"] in segment.columns:
                found[node.meta["name"]] = node.meta["tensor"]
    return list(found.values())


def _stage(
    stage: int,
    program: Program,
    state: Mapping[str, int],
    away: Mapping[str, OffloadedTensor],
    zero: ZeroSharding,
    activations: int,
) -> StageMemory:
    """Memory of a stage; a parameter of several stages of one rank counts in the first."""
    earlier = {n for s in program.stages if s < stage for n in _names(program, s)}
    own = _names(program, stage) - earlier
    metas = {name: meta for name, meta in parameters_of(program).items() if name in own}
    trained = _trained(metas)
    sizes = zero.gradient_shard_bytes if zero.gradients else zero.gradient_bytes
    return StageMemory(
        stage=stage,
        parameters=_sum(metas),
        gradients=sum(sizes(trained).values()),
        optimizer=sum(state.get(name, 0) for name in trained),
        activations=activations,
        host=sum(away[name].total for name in trained if name in away),
    )


def _names(program: Program, stage: int) -> set[str]:
    return {n for s in program.stages[stage].segments for n in s.segment.parameters}


def _sum(metas: Mapping[str, TensorMeta]) -> int:
    return total_bytes(metas.values())
