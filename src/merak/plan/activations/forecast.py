"""Before anything is built: what recomputes, how much memory that takes, and whether it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from merak.core.mesh import Mesh
from merak.graph.program.program import Program, Rewrite, compile_program
from merak.graph.tensor_parallel.apply import TensorParallel
from merak.plan.activations.recompute import Parts, Position, fill_partly, recomputing_stages
from merak.plan.balance import Timed
from merak.plan.cost.selective_ops import Dear
from merak.plan.layout import EngineOptions, Layout, stage_bounds, stages_of_parameters
from merak.plan.memory.context import SharedHere
from merak.plan.memory.model import Job, Keeping, MemoryModel, RankMemory
from merak.plan.memory.zero import Sharing
from merak.plan.tied_parameters import Holder, find_holders
from merak.schedule.ir import FINAL_KINDS, Kind, Schedule
from merak.schedule.lower import lower
from merak.schedule.with_recompute import recomputing

Offloaded = Callable[[frozenset[int]], frozenset[int]]
"""Of segments that keep their activations, those that do so in host memory."""


def _none_of(kept: frozenset[int]) -> frozenset[int]:
    return frozenset()


@dataclass(frozen=True)
class Forecast:
    """The memory of a job, for any choice of what recomputes.

    Args:
        model: the user's model, for its buffers.
        layout: which segments form which stage, and the schedule.
        mesh: the degrees and the device.
        rewrite: what tensor parallelism does to segments; None for nothing.
        options: of which the optimizer and the ways of reducing gradients matter.
    """

    model: nn.Module
    layout: Layout
    mesh: Mesh
    rewrite: TensorParallel | None
    options: EngineOptions

    @property
    def kept(self) -> frozenset[int]:
        """All segments that keep their activations, as the layout and its schedule say."""
        stages, flags = self.layout.partition.stages, self.layout.schedule.recompute
        whole = {
            i for own, recomputes in zip(stages, flags, strict=True) if not recomputes for i in own
        }
        return self.layout.kept | self.untrained | whole

    @cached_property
    def memory(self) -> MemoryModel:
        """What estimates the memory; made when it is first asked for."""
        return MemoryModel(self._job())

    def ranks(
        self,
        schedule: Schedule,
        kept: frozenset[int],
        partly: Mapping[int, Dear] | None = None,
        offloaded: frozenset[int] | None = None,
    ) -> tuple[RankMemory, ...]:
        """The memory of every pipeline position.

        Args:
            schedule: any that has the layout's stages.
            kept: segments that keep their activations.
            partly: by segment that recomputes, the operators whose results it keeps; None for
                those of the layout.
            offloaded: of the kept segments, those that keep them in host memory; None for those
                of the layout.
        """
        chosen = self.recomputing(schedule, kept)
        partly = self.layout.partly if partly is None else partly
        offloaded = self.layout.offloaded if offloaded is None else offloaded
        keeping = Keeping(kept, partly, offloaded)
        return self.memory.ranks(chosen, lower(chosen), keeping)

    def recomputing(self, schedule: Schedule, kept: frozenset[int]) -> Schedule:
        """A schedule in which exactly the stages recompute that have a segment not kept."""
        free = kept | self.untrained
        return recomputing(schedule, recomputing_stages(self.layout.partition, free))

    @property
    def untrained(self) -> frozenset[int]:
        """Segments without a backward, which keep nothing and are never run twice."""
        graph = self.layout.graph
        return frozenset(
            segment.index
            for segment in graph.segments
            if not any(graph.values[name].requires_grad for name in segment.outputs)
        )

    def positions(self, schedule: Schedule, times: Sequence[Timed]) -> tuple[Position, ...]:
        """What there is to keep on every pipeline position, and what it costs and saves."""
        return tuple(
            self._position(schedule.stages_of(rank), schedule, times)
            for rank in range(self.mesh.pp)
        )

    def fill(
        self, schedule: Schedule, times: Sequence[Timed], budget_bytes: Sequence[int]
    ) -> frozenset[int]:
        """Let as much keep its activations as fits, what saves most time first."""
        kept = [
            self.fill_one(rank, schedule, times, budget, {})[0]
            for rank, budget in enumerate(budget_bytes)
        ]
        return frozenset().union(*kept)

    def fill_one(
        self,
        rank: int,
        schedule: Schedule,
        times: Sequence[Timed],
        budget_bytes: int,
        dear: Mapping[int, Dear],
        offloaded: Offloaded = _none_of,
    ) -> tuple[frozenset[int], frozenset[int]]:
        """What one pipeline position keeps, of whole segments and of operators.

        Args:
            rank: the pipeline position.
            schedule: any that has the layout's stages.
            times: of the segments.
            budget_bytes: what the position may hold.
            dear: by segment, the operators worth keeping where it recomputes.
            offloaded: of some that keep their activations, those that do so in host memory.

        Returns:
            The segments that keep their activations, and those of the others that keep the results
            of their dear operators.
        """

        def peak_of(kept: frozenset[int], partly: frozenset[int]) -> int:
            some = {index: dear[index] for index in partly}
            return self.peak(rank, schedule, Keeping(kept, some, offloaded(kept)))

        position, parts = self.choices(rank, schedule, times, dear)
        return fill_partly(position, parts, peak_of, budget_bytes)

    def peak(self, rank: int, schedule: Schedule, keeping: Keeping) -> int:
        """The most bytes of one position; what segments of others do is not looked at."""
        chosen = self.recomputing(schedule, keeping.kept)
        return self.memory.rank(rank, chosen, lower(chosen), keeping).peak.total_bytes

    def choices(
        self,
        rank: int,
        schedule: Schedule,
        times: Sequence[Timed],
        dear: Mapping[int, Dear],
        among: frozenset[int] | None = None,
    ) -> tuple[Position, Parts]:
        """What there is to keep on one pipeline position, whole segments and parts of them.

        Args:
            rank: the pipeline position.
            schedule: any that has the layout's stages.
            times: of the segments.
            dear: by segment, the operators worth keeping where it recomputes.
            among: the segments to choose from; None for all of the position.
        """
        stages = schedule.stages_of(rank)
        position = self._position(stages, schedule, times, among)
        flights = {stage: most_in_flight(schedule, stage) for stage in stages}
        stage_of = self.layout.partition.stage_of
        own = [index for index in position.segments if index in dear]
        parts = Parts(
            {index: dear[index].held_bytes * flights[stage_of(index)] for index in own},
            {index: dear[index].saved_share for index in own},
        )
        return position, parts

    def segments_of(self, rank: int) -> tuple[int, ...]:
        """The segments of a pipeline position."""
        stages = self.layout.schedule.stages_of(rank)
        return tuple(i for stage in stages for i in self.layout.partition.stages[stage])

    def held_bytes(self) -> dict[int, int]:
        """What each segment holds for a microbatch when it keeps its activations."""
        return {
            index: memory.saved_bytes + sum(output.num_bytes for output in memory.outputs.values())
            for index, memory in self.memory.segments.items()
        }

    def moved_bytes(self) -> dict[int, int]:
        """What each segment moves to host memory for a microbatch if its activations wait there.

        Of values that several segments of a stage save, the first one counts them.
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
                new = {roots.get(name, name) for name in memory.moved_values} - counted
                counted |= new
                found[index] = memory.moved_bytes + sum(sizes[root] for root in new)
        return found

    def _position(
        self,
        stages: Sequence[int],
        schedule: Schedule,
        times: Sequence[Timed],
        among: frozenset[int] | None = None,
    ) -> Position:
        every = [i for stage in stages for i in self.layout.partition.stages[stage]]
        segments = [i for i in every if among is None or i in among]
        flights = {stage: most_in_flight(schedule, stage) for stage in stages}
        held = self.held_bytes()
        return Position(
            segments=tuple(segments),
            saved_s=tuple(times[i].forward_s for i in segments),
            held_bytes=tuple(
                held[i] * flights[self.layout.partition.stage_of(i)] for i in segments
            ),
        )

    def _job(self) -> Job:
        layout, mesh = self.layout, self.mesh
        graph, partition = layout.graph, layout.partition
        owners = stages_of_parameters(graph, partition)
        bounds = stage_bounds(graph, owners, partition)
        rewrites: list[Rewrite] = []
        if self.rewrite is not None:
            graph, rewrite = self.rewrite.fit(graph)
            rewrites = [rewrite]
        programs = tuple(
            compile_program(
                graph,
                bounds,
                {stage: rewrites for stage in layout.schedule.stages_of(rank)},
            )
            for rank in range(mesh.pp)
        )
        return Job(
            programs=programs,
            mesh=mesh,
            shared=tuple(self._shared(rank) for rank in range(mesh.pp)),
            others=tuple(self._other_bytes(programs, rank, owners) for rank in range(mesh.pp)),
            optimizer=self.options.optimizer,
            every_microbatch=self.options.exact_tied_gradients,
            bucket_bytes=self.options.bucket_bytes,
            sharing=Sharing(
                degree=mesh.dp if self.options.zero else 1,
                every_microbatch=self.options.zero >= 2 and mesh.dp > 1,
                masters=self.options.master_weights,
                float32_gradients=self.options.float32_gradients,
                parameters=self.options.zero == 3 and mesh.dp > 1,
            ),
        )

    def _shared(self, rank: int) -> dict[tuple[str, int], SharedHere]:
        """The parameters that several segments read, one of them here."""
        schedule = self.layout.schedule
        if not schedule.is_synchronous:
            return {}
        plan = self.layout.plans.base

        def open_sends(pipe: int, place: int, found: Sequence[Holder]) -> int:
            if place + 1 == len(found):
                return 0
            return plan.open_sends(pipe, found[place].stage, found[place + 1].stage)

        return {
            (name, pipe): SharedHere(
                holder.first, holder is found[-1], len(found), open_sends(pipe, place, found)
            )
            for pipe in range(len(schedule.pipes))
            for name, found in find_holders(self.layout.readers(pipe)).items()
            for place, holder in enumerate(found)
            if holder.rank == rank
        }

    def _other_bytes(
        self, programs: Sequence[Program], rank: int, owners: Mapping[str, frozenset[int]]
    ) -> int:
        """Buffers, constants of the trace, and the parameters here that no segment reads."""
        graph = self.layout.graph
        buffers = [*self.model.buffers(), *graph.constants.values()]
        read = {name for segment in graph.segments for name in segment.parameters}
        own = set(programs[rank].stages)
        unread = [m for n, m in graph.parameters.items() if n not in read and owners[n] & own]
        return sum(b.nbytes for b in buffers) + sum(m.num_bytes for m in unread)


def most_in_flight(schedule: Schedule, stage: int) -> int:
    """Microbatches that a stage has in flight at a time on one rank, at most."""
    most = 0
    for rank in schedule.ranks_of(stage):
        level = 0
        for action in schedule.actions[rank]:
            if action.stage == stage:
                level += (action.kind is Kind.FORWARD) - (action.kind in FINAL_KINDS)
                most = max(most, level)
    return most
