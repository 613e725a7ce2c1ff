"""The order in which FSDP parameters are gathered, and their gradients reduced.

A step is a list of unshards, as the schedule orders them: for a segment's forward, recomputation,
or backward, which includes a recomputation just before it. The parameters of the next one are
prefetched while this one computes. A backward ends with the reduce-scatter of its gradients. So the
order of all collectives is known beforehand and is the same on all replicas, and a rank that aborts
a step takes part in the remaining ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from merak.engine.comm.gradient_buckets import others_of
from merak.engine.comm.replica_levels import ReplicaCollectives
from merak.engine.health.status import Progress
from merak.graph.program.program import SegmentProgram, StageProgram
from merak.schedule.ir import Kind


class Module(Protocol):
    """A module of parameters that one all-gather unshards, as `fsdp.FsdpGroup` is one."""

    trains: bool
    degree: int
    num_elements: int
    dtype: torch.dtype
    reduce_dtype: torch.dtype

    def unshard(self, async_op: bool = False) -> object:
        """Gather the parameters, or wait for a gather that has begun."""

    def reshard(self) -> None:
        """Free the gathered parameters."""


@dataclass(frozen=True, slots=True)
class Unshard:
    """An unshard: the time for which a segment's parameters are gathered.

    Args:
        modules: the parameters that it reads, as far as they are sharded.
        is_backward: whether its gradients are reduced at the end.
    """

    modules: tuple[Module, ...]
    is_backward: bool


@dataclass(frozen=True, slots=True)
class _Collective:
    module: Module
    is_reduction: bool


class UnshardOrder:
    """Gathers parameters in the order of a step's unshards, each during the one before.

    Args:
        group: the replicas.
        device: where the parameters are.
        progress: reports every wait.
        collectives: of the replicas; None for those of torch.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        progress: Progress,
        collectives: ReplicaCollectives | None = None,
    ) -> None:
        self.collectives = (collectives or ReplicaCollectives()).on_current_stream()
        self._group, self._device, self._progress = group, device, progress
        self._unshards: Sequence[Unshard] = ()
        self._collectives: list[_Collective] = []
        # Per unshard, how many collectives there are up to its computation, and up to its end.
        self._due: list[tuple[int, int]] = []
        self._next = self._mark = self._num_begun = 0

    def start(self, unshards: Iterable[Unshard]) -> None:
        """Set the unshards of a step or an evaluation that begins."""
        self._unshards = [unshard for unshard in unshards if unshard.modules]
        self._next = self._mark = self._num_begun = 0
        self._collectives, self._due = [], []
        for number, unshard in enumerate(self._unshards):
            last = self._unshards[number - 1].modules if number else unshard.modules
            gathered = [module for module in unshard.modules if module in last]
            self._plan([*gathered, *self._prefetched(number)], is_reduction=False)
            ready = len(self._collectives)
            # torch reduces in the order in which backward reaches the modules.
            self._plan(
                [m for m in reversed(unshard.modules) if unshard.is_backward and m.trains], True
            )
            self._due.append((ready, len(self._collectives)))

    def _plan(self, modules: Iterable[Module], is_reduction: bool) -> None:
        self._collectives += [_Collective(module, is_reduction) for module in modules]

    def _prefetched(self, number: int) -> list[Module]:
        """The modules to prefetch for the next unshard; this one's own are freed in between."""
        own = self._unshards[number].modules
        following = self._unshards[number + 1].modules if number + 1 < len(self._unshards) else ()
        return [module for module in following if module not in own]

    def count_collective(self) -> None:
        """Count a collective that has begun."""
        self._num_begun += 1

    def begin(self, modules: tuple[Module, ...], drained: bool = False) -> None:
        """Gather the modules of the next unshard, and prefetch the one after.

        Args:
            modules: its modules, as `start` was given.
            drained: take part in the collectives for the other replicas alone.
        """
        if not modules:
            return
        number = self._next
        assert self._unshards[number].modules == modules, "a segment runs out of order"
        self._next += 1
        if drained:
            self._join_due(self._due[number][0])
            return
        with self._progress.waiting("the parameters of a segment from", others_of(self._group)):
            for module in modules:
                module.unshard()
        for module in self._prefetched(number):
            module.unshard(async_op=True)

    def end(self, modules: tuple[Module, ...], drained: bool = False) -> None:
        """Free the modules of an unshard that has ended; arguments as of `begin`."""
        if not modules:
            return
        self._join_due(self._due[self._next - 1][1])  # where no gradient came, zeros are reduced
        if not drained:
            for module in modules:
                module.reshard()

    def mark(self) -> None:
        """Mark where an action begins."""
        self._mark = self._next

    def rewind(self) -> None:
        """Go back to the mark: the action's unshards come again, drained."""
        self._next = self._mark

    def _join_due(self, num_due: int) -> None:
        """Take part, with zeros, in collectives that are due and have not begun here."""
        while self._num_begun < num_due:
            found = self._collectives[self._num_begun]
            module, length = found.module, found.module.num_elements
            dtype = module.reduce_dtype if found.is_reduction else module.dtype
            one = torch.zeros(length, dtype=dtype, device=self._device)
            every = torch.zeros(module.degree * length, dtype=dtype, device=self._device)
            if found.is_reduction:
                self.collectives.reduce_scatter(one, every, group=self._group)
            else:
                self.collectives.all_gather(every, one, group=self._group)
            self.count_collective()


def unshards_of(
    kind: Kind, program: StageProgram, recomputes: bool
) -> list[tuple[tuple[str, ...], bool]]:
    """The unshards of an action: names of the parameters, and whether gradients are reduced.

    Args:
        kind: of the action.
        program: of its stage, for its microbatch.
        recomputes: whether the stage recomputes the activations that its program does not save.
    """
    is_backward = kind is Kind.BACKWARD
    segments = reversed(program.segments) if is_backward else program.segments
    return [
        (segment.segment.parameters, is_backward)
        for segment in segments
        if needs_parameters(segment, kind, recomputes)
    ]


def needs_parameters(segment: SegmentProgram, kind: Kind, recomputes: bool) -> bool:
    """Whether a segment reads its parameters in an action; arguments as of `unshards_of`."""
    if kind is Kind.RECOMPUTE:
        return segment.trains and recomputes and not segment.saved
    return segment.trains or kind is Kind.FORWARD
