"""The memory forecast of a job before it is built, for any activation policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from torch import nn

from merak.core.mesh import Mesh
from merak.core.start.device import device_or_cpu
from merak.core.storages import num_bytes
from merak.graph.chunked_loss import RankRewrite
from merak.graph.expert_parallel.apply import spread_weights
from merak.graph.program.program import Program
from merak.plan.activation_policy import ActivationPolicy
from merak.plan.activations.recompute import (
    Choice,
    PartialSaving,
    RankSegments,
    Recomputable,
    fill_memory,
    recomputing_stages,
)
from merak.plan.balance import Timed
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.measured_times import SegmentTimes
from merak.plan.cost.optimizer_memory import OptimizerMemories
from merak.plan.cost.selective_ops import SelectiveOps
from merak.plan.engine_options import EngineOptions
from merak.plan.layout import Layout, stage_bounds, stages_of_parameters
from merak.plan.memory.context import TiedParameter
from merak.plan.memory.local_model import LocalModel
from merak.plan.memory.model import Job, MemoryModel, RankMemory
from merak.plan.memory.on_autograd import OnAutograd, on_autograd
from merak.plan.memory.zero import ZeroSharding
from merak.plan.options import zero_degree
from merak.plan.tied_parameters import Holder, find_holders
from merak.schedule.changes import recomputing
from merak.schedule.ir import FINAL_KINDS, Kind, Schedule
from merak.schedule.lower import lower
from merak.schedule.steps import Step

Offloaded = Callable[[frozenset[int]], frozenset[int]]
"""Function from the saved segments to those of them whose activations are offloaded."""


def _offload_none(saved: frozenset[int]) -> frozenset[int]:
    return frozenset()


@dataclass(frozen=True)
class Forecast:
    """Forecast of a job's memory on every pp rank, for any activation policy.

    Args:
        model: the user's model, for its buffers.
        layout: the segments of every stage, and the schedule.
        mesh: the degrees and the device.
        rewrite: the tensor parallel rewrite of segments; None without tensor parallelism.
        options: the engine's, for the optimizer, ZeRO and the reduction of gradients.
        local: the model as a tensor parallel rank runs it, where other layouts share it.
    """

    model: nn.Module
    layout: Layout
    mesh: Mesh
    rewrite: RankRewrite | None
    options: EngineOptions
    local: LocalModel | None = None

    @property
    def saved(self) -> frozenset[int]:
        """All segments that save their activations under the layout and its schedule."""
        stages, flags = self.layout.partition.stages, self.layout.schedule.recompute
        whole = {
            i for own, recomputes in zip(stages, flags, strict=True) if not recomputes for i in own
        }
        return self.layout.activations.saved | self.untrained | whole

    @property
    def policy(self) -> ActivationPolicy:
        """The layout's activation policy, with the schedule's own saved segments."""
        return replace(self.layout.activations, saved=self.saved)

    @cached_property
    def memory(self) -> MemoryModel:
        """The memory model, made on first use."""
        return MemoryModel(self._job())

    @cached_property
    def _known_memory(self) -> MemoryModel | None:
        """The memory model; None where it is not known, as of `own_ranks`."""
        try:
            return self.memory
        except Exception:
            return None

    @cached_property
    def own_ranks(self) -> tuple[RankMemory, ...] | None:
        """Forecast memory of every pp rank under the layout's own schedule and policy.

        None where it is not known: code of the model's own may read values, which fake tensors do
        not have.
        """
        try:
            return self.ranks(self.layout.schedule)
        except Exception:
            return None

    def ranks(
        self, schedule: Schedule, policy: ActivationPolicy | None = None
    ) -> tuple[RankMemory, ...]:
        """Forecast memory of every pp rank.

        Args:
            schedule: any that has the layout's stages.
            policy: what is saved, recomputed and offloaded; None for the layout's own policy.
        """
        return tuple(self.each_rank(schedule, self.policy if policy is None else policy))

    def each_rank(self, schedule: Schedule, policy: ActivationPolicy) -> Iterator[RankMemory]:
        """Forecast memory of one pp rank after another; arguments as of `ranks`."""
        chosen = self.recomputing(schedule, policy.saved)
        steps = self._steps(chosen)
        return (self.memory.rank(rank, chosen, steps, policy) for rank in range(self.mesh.pp))

    def _steps(self, schedule: Schedule) -> Sequence[Sequence[Step]]:
        """Steps of a schedule: those of the layout's own are there already.

        They follow from the actions; a stage that recomputes inside its backwards has the same.
        """
        own = self.layout.plans.base
        return own.steps if schedule.actions == own.schedule.actions else lower(schedule)

    def recomputing(self, schedule: Schedule, saved: frozenset[int]) -> Schedule:
        """The schedule in which exactly the stages recompute that have an unsaved segment."""
        free = saved | self.untrained
        return recomputing(schedule, recomputing_stages(self.layout.partition, free))

    @cached_property
    def untrained(self) -> frozenset[int]:
        """Segments without a backward, which save nothing and are never recomputed."""
        graph = self.layout.graph
        return frozenset(
            segment.index
            for segment in graph.segments
            if not any(graph.values[name].requires_grad for name in segment.outputs)
        )

    @property
    def on_autograd(self) -> tuple[OnAutograd, ...]:
        """Segments whose backward autograd runs; none where memory is not known."""
        if self._known_memory is None:
            return ()
        trained = [s for s in self.layout.graph.segments if s.index not in self.untrained]
        return on_autograd(trained, self._known_memory.segments, self.saved)

    def fill_rank(
        self,
        rank: int,
        schedule: Schedule,
        times: Sequence[Recomputable],
        budget_bytes: int,
        selective: Mapping[int, SelectiveOps],
        offloaded: Offloaded = _offload_none,
    ) -> Choice:
        """Fill the memory of one pp rank with the saved activations that spare most recomputation.

        Args:
            rank: the pp rank.
            schedule: any that has the layout's stages.
            times: of the segments.
            budget_bytes: bytes that the rank may hold.
            selective: by segment, the operators worth saving where it recomputes.
            offloaded: the offloaded ones among some saved segments.

        Returns:
            The segments that save all activations, and those of the others that save the results
            of their selective operators.
        """

        @cache  # a rank of few segments has few choices, which bisection asks for again and again
        def peak_of(saved: frozenset[int], partly: frozenset[int]) -> int:
            some = {index: selective[index] for index in partly}
            return self.peak(rank, schedule, ActivationPolicy(saved, some, offloaded(saved)))

        segments, partial = self.choices(rank, schedule, times, selective)
        return fill_memory(segments, partial, peak_of, budget_bytes)

    def peak(self, rank: int, schedule: Schedule, policy: ActivationPolicy) -> int:
        """Peak bytes of one pp rank; the policy of other ranks' segments does not matter."""
        chosen = self.recomputing(schedule, policy.saved)
        return self.memory.rank(rank, chosen, self._steps(chosen), policy).peak.total_bytes

    def choices(
        self,
        rank: int,
        schedule: Schedule,
        times: Sequence[Recomputable],
        selective: Mapping[int, SelectiveOps],
        among: frozenset[int] | None = None,
    ) -> tuple[RankSegments, PartialSaving]:
        """Segments of one pp rank that may save activations, and their selective operators.

        Args:
            rank: the pp rank.
            schedule: any that has the layout's stages.
            times: of the segments.
            selective: by segment, the operators worth saving where it recomputes.
            among: the segments to choose from; None for all of the rank.
        """
        partition, saved_bytes = self.layout.partition, self.saved_bytes()
        stages = schedule.stages_of(rank)
        every = [i for stage in stages for i in partition.stages[stage]]
        segments = [i for i in every if among is None or i in among]
        flights = {stage: max_in_flight(schedule, stage) for stage in stages}
        in_flight = {i: flights[partition.stage_of(i)] for i in segments}
        own = [index for index in segments if index in selective]
        whole_s = {i: self.recompute_s(times, i) for i in segments}
        return (
            RankSegments(
                segments=tuple(segments),
                recompute_s=tuple(whole_s[i] for i in segments),
                saved_bytes=tuple(saved_bytes[i] * in_flight[i] for i in segments),
            ),
            PartialSaving(
                {index: selective[index].saved_bytes * in_flight[index] for index in own},
                {i: whole_s[i] - self.recompute_s(times, i, selective[i]) for i in own},
            ),
        )

    def timed(
        self, times: Sequence[Timed], profile: DeviceProfile | None
    ) -> tuple[SegmentTimes, ...]:
        """Times of segments, with those of the operators that a recomputation may leave out.

        Args:
            times: of the segments.
            profile: known speeds of a rank's device; None for none.
        """
        seconds: Mapping[int, Sequence[float]] = {}
        if profile is not None and self._known_memory is not None:
            seconds = self._known_memory.operator_seconds(profile)
        return tuple(
            SegmentTimes(s.name, own.forward_s, own.backward_s, seconds.get(s.index, ()))
            for s, own in zip(self.layout.graph.segments, times, strict=True)
        )

    def recompute_s(
        self, times: Sequence[Recomputable], index: int, ops: SelectiveOps | None = None
    ) -> float:
        """Seconds of computing a segment's activations of a microbatch again.

        Those of a whole forward where it is not known what would be computed.

        Args:
            times: of the segments.
            index: number of the segment.
            ops: operators whose results it has saved.
        """
        memory = self._known_memory
        most = None if memory is None else memory.segments[index].recomputed
        return times[index].recompute_seconds(most if ops is None else ops.memory.recomputed, most)

    def segments_of(self, rank: int) -> tuple[int, ...]:
        """The segments of a pp rank."""
        stages = self.layout.schedule.stages_of(rank)
        return tuple(i for stage in stages for i in self.layout.partition.stages[stage])

    def saved_bytes(self) -> dict[int, int]:
        """Bytes of each segment's saved activations for one microbatch."""
        return {
            index: memory.saved_bytes + sum(output.num_bytes for output in memory.outputs.values())
            for index, memory in self.memory.segments.items()
        }

    def offload_bytes(self) -> dict[int, int]:
        """Bytes that each segment copies to host memory for a microbatch if it is offloaded.

        A value that several segments of a stage save counts for the first of them.
        """
        found: dict[int, int] = {}
        roots: dict[str, str] = {}
        sizes: Counter[str] = Counter()
        for stage in self.layout.partition.stages:
            counted: set[str] = set()
            for index in stage:
                memory = self.memory.segments[index]
                for name, output in memory.outputs.items():
                    root = roots[name] = roots.get(output.root, output.root)
                    sizes[root] = max(sizes[root], output.num_bytes)
                new = {roots.get(name, name) for name in memory.offload_values} - counted
                counted |= new
                found[index] = memory.offload_bytes + sum(sizes[root] for root in new)
        return found

    def _job(self) -> Job:
        layout, mesh, profile = self.layout, self.mesh, self.options.device_profile
        graph, partition = layout.graph, layout.partition
        kernels = None if profile is None else profile.device_type
        owners = stages_of_parameters(graph, partition)
        bounds = stage_bounds(graph, owners, partition)
        local = self.local_model
        programs = tuple(
            local.program(bounds, layout.schedule.stages_of(rank)) for rank in range(mesh.pp)
        )
        return Job(
            programs=programs,
            mesh=mesh,
            tied=self._tied(),
            others=self._other_bytes(programs, owners),
            optimizer=self.options.optimizer,
            every_microbatch=self.options.exact_tied_gradients,
            bucket_bytes=self.options.bucket_bytes,
            compression=self.options.gradient_compression,
            has_levels=self.options.hierarchical_reductions != "off",
            averages=self.options.local_steps > 0,
            outer_copies=self.options.outer_copies,
            zero=ZeroSharding(
                degree=zero_degree(self.options, mesh.replicas, self.layout.schedule.num_copies),
                gradients=self.options.zero >= 2 and mesh.replicas > 1,
                master_weights=self.options.master_weights,
                float32_gradients=self.options.float32_gradients,
                parameters=self.options.zero == 3 and mesh.replicas > 1,
                experts=spread_weights(graph) if mesh.spreads_experts else frozenset(),
                expert_replicas=mesh.expert_replicas,
            ),
            home=self.options.offload_optimizer,
            delays=self.options.delay_optimizer_update,
            kernels=kernels,
            measured=local.measured(self.options.float32_gradients, kernels),
            recomputes_whole=self.options.recomputes_whole,
            split=local.split if mesh.tp > 1 and self.options.sub_pipelining == "on" else None,
        )

    @cached_property
    def local_model(self) -> LocalModel:
        """The model as a tensor parallel rank runs it: the shared one where it is of this job."""
        graph, shared, options = self.layout.graph, self.local, self.options
        device = device_or_cpu(self.mesh.device)
        if (
            shared is not None
            and shared.whole is graph
            and shared.rewrite is self.rewrite
            and shared.optimizers.factory is options.optimizer
            and shared.optimizers.ema_decay == options.ema_decay
            and shared.device == device
        ):
            return shared
        optimizers = OptimizerMemories(options.optimizer, device, options.ema_decay)
        return LocalModel(graph, self.rewrite, device, optimizers)

    def _tied(self) -> tuple[Mapping[tuple[str, int], TiedParameter], ...]:
        """Tied parameters of every pp rank, by name and pipe."""
        schedule = self.layout.schedule
        own: tuple[dict[tuple[str, int], TiedParameter], ...]
        own = tuple({} for _ in range(self.mesh.pp))
        if not schedule.is_synchronous:
            return own
        plan = self.layout.plans.base

        def open_sends(pipe: int, place: int, found: Sequence[Holder]) -> int:
            if place + 1 == len(found):
                return 0
            return plan.open_sends(pipe, found[place].stage, found[place + 1].stage)

        for pipe in range(len(schedule.pipes)):
            for name, found in find_holders(self.layout.readers(pipe)).items():
                for place, holder in enumerate(found):
                    own[holder.rank][name, pipe] = TiedParameter(
                        holder.first,
                        holder is found[-1],
                        len(found),
                        open_sends(pipe, place, found),
                    )
        return own

    def _other_bytes(
        self, programs: Sequence[Program], owners: Mapping[str, frozenset[int]]
    ) -> tuple[int, ...]:
        """Bytes of buffers, constants, and parameters that no segment reads, of every pp rank."""
        graph = self.layout.graph
        buffers = [*self.model.buffers(), *graph.constants.values()]
        buffer_bytes = sum(num_bytes(buffer) for buffer in buffers)
        read = {name for segment in graph.segments for name in segment.parameters}
        unread = {name: meta for name, meta in graph.parameters.items() if name not in read}
        return tuple(
            buffer_bytes
            + sum(m.num_bytes for n, m in unread.items() if owners[n] & program.stages.keys())
            for program in programs
        )


def max_in_flight(schedule: Schedule, stage: int) -> int:
    """The most microbatches that a stage has in flight at a time on one rank."""
    most = 0
    for rank in schedule.ranks_of(stage):
        level = 0
        for action in schedule.actions[rank]:
            if action.stage == stage:
                level += (action.kind is Kind.FORWARD) - (action.kind in FINAL_KINDS)
                most = max(most, level)
    return most
