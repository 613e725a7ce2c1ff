"""The order in which FSDP parameters are gathered, and their gradients reduced.

A step is a list of unshards, as the schedule orders them: for a segment's forward, recomputation,
or backward, which includes a recomputation just before it. The parameters of the next one are
prefetched while this one computes. A backward ends with the start of the reduce-scatter of its
gradients; where it leaves some for later, the reduce-scatter starts when these are there, too. So
the order of all collectives is known beforehand and is the same on all replicas, and a rank that
aborts a step takes part in the remaining ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

import torch.distributed as dist

from merak.engine.comm.gradient_buckets import others_of
from merak.engine.health.status import Progress


class Group(Protocol):
    """Parameters that one all-gather unshards, as `fsdp.FsdpGroup` is one."""

    group: dist.ProcessGroup

    def begin_gather(self) -> None:
        """Begin to gather the parameters."""

    def unshard(self) -> None:
        """Wait for a gather that has begun, if any."""

    def reshard(self) -> None:
        """Free the gathered parameters."""

    def begin_reduction(self) -> None:
        """Begin to reduce the gradients."""

    def take_reduction(self) -> None:
        """Wait for a reduction that has begun, if any."""

    def join(self, is_reduction: bool) -> None:
        """Take part in a collective for the other replicas alone."""


@dataclass(frozen=True, slots=True)
class Unshard:
    """An unshard: the time for which a segment's parameters are gathered.

    Args:
        groups: the parameters that it reads, as far as they are sharded; none where it makes
            gradients that a backward has left for later.
        reduced: those whose gradients are reduced at its end.
    """

    groups: tuple[Group, ...]
    reduced: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True)
class _Collective:
    group: Group
    is_reduction: bool


class UnshardOrder:
    """Gathers parameters in the order of a step's unshards, each during the one before.

    What the next unshard reads as well stays gathered. The reductions of a backward are open while
    the next one computes.

    Args:
        progress: reports every wait.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._unshards: Sequence[Unshard] = ()
        self._collectives: list[_Collective] = []
        # Per unshard, how many collectives there are up to its computation, and up to its end.
        self._due: list[tuple[int, int]] = []
        self._next = self._mark = self._num_begun = 0
        self._open: list[Group] = []

    def start(self, unshards: Iterable[Unshard]) -> None:
        """Set the unshards of a step or an evaluation that begins."""
        self._unshards = [own for own in unshards if own.groups or own.reduced]
        self._next = self._mark = self._num_begun = 0
        self._collectives, self._due = [], []
        for number, unshard in enumerate(self._unshards):
            first = () if number else unshard.groups
            self._plan([*first, *self._prefetched(number)], is_reduction=False)
            ready = len(self._collectives)
            self._plan(unshard.reduced, is_reduction=True)
            self._due.append((ready, len(self._collectives)))

    def _plan(self, groups: Iterable[Group], is_reduction: bool) -> None:
        self._collectives += [_Collective(group, is_reduction) for group in groups]

    def _prefetched(self, number: int) -> list[Group]:
        """The groups to prefetch for the next unshard that reads any, beside this one's own."""
        own = self._unshards[number].groups
        return [group for group in self._following(number) if own and group not in own]

    def _following(self, number: int) -> tuple[Group, ...]:
        behind = islice(self._unshards, number + 1, None)
        return next((unshard.groups for unshard in behind if unshard.groups), ())

    def begin(self, groups: tuple[Group, ...], drained: bool = False) -> None:
        """Gather the groups of the next unshard, and prefetch the one after.

        Args:
            groups: its groups, as `start` was given.
            drained: take part in the collectives for the other replicas alone.
        """
        if not groups:
            return
        number = self._next
        assert self._unshards[number].groups == groups, "a segment runs out of order"
        self._next += 1
        if drained:
            self._join_due(self._due[number][0])
            return
        for group in () if number else groups:
            self._begin(group.begin_gather)
        for group in groups:
            with self._waiting("the parameters of a segment from", group):
                group.unshard()
        for group in self._prefetched(number):
            self._begin(group.begin_gather)

    def end(self, groups: tuple[Group, ...], drained: bool = False) -> None:
        """Free the groups of an unshard that has ended; arguments as of `begin`."""
        if not groups:
            return
        number = self._next - 1
        self._reduce(number, drained)
        following = self._following(number)
        for group in () if drained else groups:
            if group not in following:
                group.reshard()

    def reduce(self, groups: tuple[Group, ...], drained: bool = False) -> None:
        """Reduce gradients that a backward has left for later, and that are there now.

        Arguments are those of `begin`.
        """
        if not groups:
            return
        number = self._next
        assert self._unshards[number] == Unshard((), groups), "a segment runs out of order"
        self._next += 1
        self._reduce(number, drained)

    def _reduce(self, number: int, drained: bool) -> None:
        """Begin the reductions at the end of an unshard."""
        if drained:
            self._join_due(self._due[number][1])
            return
        reduced = self._unshards[number].reduced
        if reduced:
            self.take_reductions()
        for group in reduced:
            self._begin(group.begin_reduction)
            self._open.append(group)

    def take_reductions(self) -> None:
        """Wait for the reductions that have begun."""
        while self._open:
            group = self._open.pop()
            with self._waiting("the sum of the gradients of a segment with", group):
                group.take_reduction()

    def _begin(self, collective: Callable[[], None]) -> None:
        collective()
        self._num_begun += 1

    def _waiting(self, what: str, group: Group) -> AbstractContextManager[None]:
        return self._progress.waiting(what, others_of(group.group))

    def mark(self) -> None:
        """Mark where an action begins."""
        self._mark = self._next

    def rewind(self) -> None:
        """Go back to the mark: the action's unshards come again, drained."""
        self._next = self._mark
        self._open.clear()

    def _join_due(self, num_due: int) -> None:
        """Take part, with zeros, in collectives that are due and have not begun here."""
        while self._num_begun < num_due:
            found = self._collectives[self._num_begun]
            self._begin(partial(found.group.join, found.is_reduction))
