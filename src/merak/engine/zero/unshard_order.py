"""When the parameters of which replicas hold shares are gathered, and their gradients summed.

A step is a row of turns, as the schedule orders them: a segment's forward, its recomputation, or
its backward, which takes a recomputation just before it along. Parameters are gathered when a turn
begins; those of the next one then set out at once, and travel while this one computes. A backward
ends with the sums of its gradients. So the order of all collectives is known beforehand, is the
same on all replicas, and a rank that gives a step up takes part in the rest from where it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from merak.engine.comm.gradient_buckets import others_of
from merak.engine.health.status import Progress
from merak.graph.program.program import SegmentProgram, StageProgram
from merak.schedule.ir import Kind


class Module(Protocol):
    """Parameters that are gathered together; `sharded.FsdpGroup` says what these are."""

    trains: bool
    degree: int
    num_elements: int
    dtype: torch.dtype
    sums_dtype: torch.dtype

    def unshard(self, async_op: bool = False) -> object:
        """Gather them, or wait for those that are on their way."""

    def reshard(self) -> None:
        """Free what was gathered."""


@dataclass(frozen=True, slots=True)
class Unshard:
    """The time for which a segment's parameters are whole.

    Args:
        modules: the parameters that it reads, as far as they are in shares.
        goes_back: whether its gradients are summed at the end.
    """

    modules: tuple[Module, ...]
    goes_back: bool


@dataclass(frozen=True, slots=True)
class _Collective:
    module: Module
    is_sum: bool


class UnshardOrder:
    """Gathers parameters in the order of a row of turns, each turn's while the one before computes.

    Args:
        group: the replicas.
        device: where the parameters are.
        progress: told of every wait.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, progress: Progress) -> None:
        self._group, self._device, self._progress = group, device, progress
        self._unshards: Sequence[Unshard] = ()
        self._collectives: list[_Collective] = []
        # Per turn, how many collectives there are up to its computation, and up to its end.
        self._due: list[tuple[int, int]] = []
        self._next = self._marked = self._num_begun = 0

    def start(self, turns: Iterable[Unshard]) -> None:
        """A step or an evaluation begins, whose turns these are."""
        self._unshards = [turn for turn in turns if turn.modules]
        self._next = self._marked = self._num_begun = 0
        self._collectives, self._due = [], []
        for number, turn in enumerate(self._unshards):
            last = self._unshards[number - 1].modules if number else turn.modules
            gathered = [module for module in turn.modules if module in last]
            self._plan([*gathered, *self._ahead(number)], is_sum=False)
            ready = len(self._collectives)
            # torch sums in the order in which it meets the modules backward.
            self._plan([m for m in reversed(turn.modules) if turn.goes_back and m.trains], True)
            self._due.append((ready, len(self._collectives)))

    def _plan(self, modules: Iterable[Module], is_sum: bool) -> None:
        self._collectives += [_Collective(module, is_sum) for module in modules]

    def _ahead(self, number: int) -> list[Module]:
        """What sets out in a turn for the next one; what this one uses is freed in between."""
        own = self._unshards[number].modules
        following = self._unshards[number + 1].modules if number + 1 < len(self._unshards) else ()
        return [module for module in following if module not in own]

    def begun(self) -> None:
        """A collective has begun."""
        self._num_begun += 1

    def begin(self, modules: tuple[Module, ...], drained: bool = False) -> None:
        """A turn begins: have its parameters, and let the next one's set out.

        Args:
            modules: the turn's, as `start` was told.
            drained: take part in the collectives for the other replicas alone.
        """
        if not modules:
            return
        number = self._next
        assert self._unshards[number].modules == modules, "a segment runs out of its turn"
        self._next += 1
        if drained:
            self._join_due(self._due[number][0])
            return
        with self._progress.waiting("the parameters of a segment from", others_of(self._group)):
            for module in modules:
                module.unshard()
        for module in self._ahead(number):
            module.unshard(async_op=True)

    def end(self, modules: tuple[Module, ...], drained: bool = False) -> None:
        """The turn is over, its gradients are summed; arguments as of `begin`."""
        if not modules:
            return
        self._join_due(self._due[self._next - 1][1])  # where no gradient came, zeros are summed
        if not drained:
            for module in modules:
                module.reshard()

    def mark(self) -> None:
        """An action begins."""
        self._marked = self._next

    def go_back(self) -> None:
        """The marked action's turns come again, in name only."""
        self._next = self._marked

    def _join_due(self, num_due: int) -> None:
        """Take part in collectives that are due and have not begun here, with zeros."""
        while self._num_begun < num_due:
            found = self._collectives[self._num_begun]
            module, length = found.module, found.module.num_elements
            dtype = module.sums_dtype if found.is_sum else module.dtype
            one = torch.zeros(length, dtype=dtype, device=self._device)
            every = torch.zeros(module.degree * length, dtype=dtype, device=self._device)
            if found.is_sum:
                scatter(one, every, group=self._group)
            else:
                gather(every, one, group=self._group)
            self.begun()


def gather(output_tensor: torch.Tensor, input_tensor: torch.Tensor, **kwargs: Any) -> Any:
    """Gather what every replica has, one after the other."""
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return collective(output_tensor, input_tensor, **kwargs)


def scatter(output_tensor: torch.Tensor, input_tensor: torch.Tensor, **kwargs: Any) -> Any:
    """Sum what every replica has, and get a share of the sums."""
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return collective(output_tensor, input_tensor, **kwargs)


def unshards_of(
    kind: Kind, program: StageProgram, recomputes: bool
) -> list[tuple[tuple[str, ...], bool]]:
    """The turns of an action: the parameters' names, and whether gradients are summed.

    Args:
        kind: of the action.
        program: of its stage, for its microbatch.
        recomputes: whether the stage recomputes what its program does not keep.
    """
    goes_back = kind is Kind.BACKWARD
    segments = reversed(program.segments) if goes_back else program.segments
    return [
        (segment.segment.parameters, goes_back)
        for segment in segments
        if needs_parameters(segment, kind, recomputes)
    ]


def needs_parameters(segment: SegmentProgram, kind: Kind, recomputes: bool) -> bool:
    """Whether a segment needs its parameters in an action; arguments as of `unshards_of`."""
    if kind is Kind.RECOMPUTE:
        return segment.trains and recomputes and not segment.saved
    return segment.trains or kind is Kind.FORWARD
