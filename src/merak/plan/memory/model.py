"""The memory of every rank, before anything runs: what it holds, when most, and whether it fits.

Source: arXiv 2206.04959 (Merak), section 5.2, for what grows with the microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from merak.core.mesh import Mesh, pretended
from merak.core.tensor_meta import TensorMeta
from merak.graph.program.program import Program, with_offloading
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.optimizer_memory import OptimizerFactory, OptimizerMemory, optimizer_memory
from merak.plan.cost.segment_memory import SegmentMemories, SegmentMemory, storage_bytes
from merak.plan.cost.selective_ops import Dear, find_dear
from merak.plan.memory.communication_limits import MAX_OPEN_GATHERS
from merak.plan.memory.context import SharedHere, Surroundings, parameters_of
from merak.plan.memory.ledger import Ledger, Moment, Part
from merak.plan.memory.timeline import Walk
from merak.plan.memory.zero import Sharing, total_bytes
from merak.schedule.ir import Schedule
from merak.schedule.simulate.memory import num_weight_versions
from merak.schedule.steps import Step

SENDS_PER_RANK = 4
"""A rank holds the buffers of so many sends for each pipeline position."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage on its rank.

    Args:
        stage: its number.
        parameters: of its parameters.
        gradients: of their gradients, as they are between microbatches.
        optimizer: of the optimizer's state for them, masters included.
        activations: the most that its microbatches take at a time: what autograd saves, inputs
            kept by what recomputes, what arrives and leaves, and what an operator takes meanwhile.
    """

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What the ranks of one pipeline position hold.

    Args:
        rank: the pipeline position.
        stages: its stages.
        peak: the moment at which it holds most.
        host_bytes: the most that it keeps in host memory at a time.
    """

    rank: int
    stages: tuple[StageMemory, ...]
    peak: Moment
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is done with activations.

    Args:
        kept: segments that keep them, in stages that recompute others.
        partly: by segment that recomputes, the operators whose results it keeps.
        offloaded: of the kept segments, those that keep them in host memory.
    """

    kept: frozenset[int]
    partly: Mapping[int, Dear] = field(default_factory=dict)
    offloaded: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Job:
    """A model laid out over pipeline positions, as its memory depends on it.

    Args:
        programs: for each position, its stages with their local segments; what recomputes is said
            apart.
        mesh: the degrees, and the device.
        shared: by position, the parameters that several segments read, by name and pipe.
        others: by position, bytes of its buffers and of parameters that no segment reads.
        optimizer: makes the optimizer; None counts none.
        every_microbatch: whether gradients of shared parameters travel after every microbatch.
        bucket_bytes: gradients are summed over replicas as soon as so many bytes are final.
        sharing: what of gradients and optimizer each replica holds.
    """

    programs: tuple[Program, ...]
    mesh: Mesh
    shared: tuple[Mapping[tuple[str, int], SharedHere], ...]
    others: tuple[int, ...]
    optimizer: OptimizerFactory | None = None
    every_microbatch: bool = True
    bucket_bytes: int = 25 * 2**20
    sharing: Sharing = field(default_factory=Sharing)


class MemoryModel:
    """Estimates the memory of a job under any schedule and choice of what recomputes.

    Args:
        job: the model as it is laid out.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._device = device = _fake_device(job.mesh.device)
        with pretended(replace(job.mesh, rank=0, device_mesh=None)):
            measure = SegmentMemories(device, job.sharing.float32_gradients)
            self.segments: dict[int, SegmentMemory] = {
                segment.segment.index: measure(segment.segment)
                for program in job.programs
                for stage in program.stages.values()
                for segment in stage.segments
            }
            self._derived = [_prologue_bytes(p, device) for p in job.programs]
        self._optimizers = [_optimizer(job, program, device) for program in job.programs]

    def find_dear(self, profile: DeviceProfile) -> dict[int, Dear]:
        """By segment, the operators that are worth keeping where it recomputes.

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
        with pretended(replace(self.job.mesh, rank=0, device_mesh=None)):
            return find_dear(segments, profile, self._device)

    def ranks(
        self,
        schedule: Schedule,
        steps: Sequence[Sequence[Step]],
        keeping: Keeping,
    ) -> tuple[RankMemory, ...]:
        """The memory of every pipeline position.

        Args:
            schedule: with the stages that recompute anything.
            steps: its steps, lowered.
            keeping: what is done with activations.
        """
        return tuple(
            self.rank(rank, schedule, steps, keeping) for rank in range(len(self.job.programs))
        )

    def rank(
        self,
        rank: int,
        schedule: Schedule,
        steps: Sequence[Sequence[Step]],
        keeping: Keeping,
    ) -> RankMemory:
        """The memory of one pipeline position; arguments as of `ranks`."""
        job = self.job
        program = _keeping(job.programs[rank], keeping)
        state, taken = self._optimizers[rank]
        fixed_bytes, varying_bytes = self._derived[rank]
        ledger = Ledger()
        parameters = parameters_of(program)
        ledger.hold("versions", _version_bytes(rank, schedule, program), Part.PARAMETERS)
        ledger.hold("others", job.others[rank] + fixed_bytes, Part.BUFFERS)
        ledger.hold("optimizer", sum(state.values()), Part.OPTIMIZER)
        columns = sum(column.num_bytes for column in _columns(program))
        ledger.hold("columns", columns * schedule.num_microbatches, Part.COLUMNS)
        around = Surroundings(
            rank=rank,
            schedule=schedule,
            program=program,
            memory=self.segments,
            partly=keeping.partly,
            derived_bytes=varying_bytes,
            shared=job.shared[rank],
            sharing=job.sharing,
            bucket_bytes=job.bucket_bytes if _is_replicated(rank, schedule, job) else None,
            every_microbatch=job.every_microbatch,
            open_sends=SENDS_PER_RANK * job.mesh.pp,
        )
        _hold_parameters(around, ledger)
        walk = Walk(around, ledger)
        walk.run(steps[rank])
        # Buckets have become the gradients when the optimizer steps.
        ledger.settle(Part.COMMUNICATION, 0)
        stepped_bytes = total_bytes(job.sharing.stepped(_trained(parameters)).values())
        ledger.settle(Part.GRADIENTS, min(stepped_bytes, ledger.parts[Part.GRADIENTS]))
        ledger.look("update", taken)
        whole = {n: m for n, m in parameters.items() if n not in around.in_shares()}
        ledger.look("gather", _gathered_bytes(job, _trained(whole)))
        assert ledger.peak is not None
        stages = tuple(
            _stage(stage, program, state, job.sharing, ledger.stage_peaks[stage])
            for stage in program.stages
        )
        return RankMemory(rank, stages, ledger.peak, walk.host.peak_bytes)


def _hold_parameters(around: Surroundings, ledger: Ledger) -> None:
    """Parameters as they are held throughout, and what the largest segment gathers of them."""
    in_shares, every = around.in_shares(), parameters_of(around.program)
    stepped = around.sharing.stepped(_trained(in_shares))
    masters = {n for n in stepped if around.sharing.master_bytes(in_shares[n], stepped[n])}
    frozen = {n: meta for n, meta in in_shares.items() if not meta.requires_grad}
    shares = {**stepped, **replace(around.sharing, masters=False).stepped(frozen)}
    held = {n: shares.get(n, meta) for n, meta in every.items() if n not in masters}
    ledger.hold("parameters", _sum(held), Part.PARAMETERS)
    gathered = [
        {n: in_shares[n] for n in segment.segment.parameters if n in in_shares}
        for stage in around.program.stages.values()
        for segment in stage.segments
    ]
    # As they arrive, and in their places.
    most = max((2 * _sum(own) for own in gathered), default=0)
    ledger.hold("gathered", most, Part.COMMUNICATION)


def _is_replicated(rank: int, schedule: Schedule, job: Job) -> bool:
    """Whether others hold the same stages, replicas or ranks of another pipe."""
    stages = schedule.stages_of(rank)
    return job.mesh.dp > 1 or any(len(schedule.ranks_of(stage)) > 1 for stage in stages)


def _version_bytes(rank: int, schedule: Schedule, program: Program) -> int:
    """Bytes of the weights that microbatches under way still need, besides the present ones."""
    versions = num_weight_versions(schedule)
    every = parameters_of(program)
    return sum(
        (versions[rank, stage] - 1) * sum(every[name].num_bytes for name in _names(program, stage))
        for stage in program.stages
    )


def _fake_device(device: torch.device) -> torch.device:
    """Where fake tensors claim to be: on the job's kind of device, if this machine has one."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return torch.device("cpu")
    return device


def _keeping(program: Program, keeping: Keeping) -> Program:
    stages = {}
    for number, stage in program.stages.items():
        own = [replace(s, saved=s.segment.index in keeping.kept) for s in stage.segments]
        stages[number] = replace(stage, segments=tuple(with_offloading(own, keeping.offloaded)))
    return replace(program, stages=stages)


def _optimizer(job: Job, program: Program, device: torch.device) -> tuple[dict[str, int], int]:
    """State of the optimizer by parameter with its master, and what it takes while it steps."""
    metas = _trained(parameters_of(program))
    stepped = job.sharing.stepped(metas)
    some = {name: meta for name, meta in stepped.items() if meta.num_bytes}
    found: OptimizerMemory = optimizer_memory(job.optimizer, list(some.values()), device)
    state = dict(zip(some, found.state_bytes, strict=True))
    masters = {name: job.sharing.master_bytes(metas[name], stepped[name]) for name in metas}
    return {name: state.get(name, 0) + masters[name] for name in metas}, found.taken_bytes


def _gathered_bytes(job: Job, metas: Mapping[str, TensorMeta]) -> int:
    """What replicas take to give each other the parameters that they have stepped."""
    if not job.sharing.is_sharded or not metas:
        return 0
    sent = total_bytes(metas.values())
    if job.sharing.every_microbatch:
        largest = max(meta.num_bytes for meta in metas.values())
        sent = min(sent, MAX_OPEN_GATHERS * (job.bucket_bytes + largest))
    return sent + sent // job.sharing.degree


def _trained(metas: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    return {name: meta for name, meta in metas.items() if meta.requires_grad}


def _prologue_bytes(program: Program, device: torch.device) -> tuple[int, int]:
    """Batch-only values that stay throughout, and those of one microbatch."""
    fixed, varying = (
        sum(storage_bytes(prologue.segment, device).values()) if prologue.segment.outputs else 0
        for prologue in (program.fixed, program.batch_only)
    )
    return fixed, varying


def _columns(program: Program) -> list[TensorMeta]:
    """What each column is that a position reads."""
    found: dict[str, TensorMeta] = {}
    segments = [s.segment for stage in program.stages.values() for s in stage.segments]
    for segment in (*segments, program.batch_only.segment):
        for node in segment.graph.find_nodes(op="placeholder"):
            if node.meta["name"] in segment.columns:
                found[node.meta["name"]] = node.meta["tensor"]
    return list(found.values())


def _stage(
    stage: int, program: Program, state: Mapping[str, int], sharing: Sharing, activations: int
) -> StageMemory:
    """A stage's row; a parameter of several stages of one position counts in the first."""
    earlier = {n for s in program.stages if s < stage for n in _names(program, s)}
    own = {n: m for n, m in parameters_of(program).items() if n in _names(program, stage)}
    metas = {name: meta for name, meta in own.items() if name not in earlier}
    trained = _trained(metas)
    of = sharing.share_bytes if sharing.every_microbatch else sharing.gradient_bytes
    return StageMemory(
        stage=stage,
        parameters=_sum(metas),
        gradients=sum(of(trained).values()),
        optimizer=sum(state.get(name, 0) for name in trained),
        activations=activations,
    )


def _names(program: Program, stage: int) -> set[str]:
    return {n for s in program.stages[stage].segments for n in s.segment.parameters}


def _sum(metas: Mapping[str, TensorMeta]) -> int:
    return total_bytes(metas.values())
