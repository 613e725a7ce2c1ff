"""Collectives of replicas by hierarchy: inside nodes, then between them, then inside.

On GPUs the collectives of a hierarchy are started one after another on a stream of their own, on
the CPU by a thread of their own: both run beside the computation, in the order in which they are
asked for, which is the same on all ranks.

Source: Goyal et al., "Accurate, large minibatch SGD" (arXiv 1706.02677), section 4.2.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from merak.core.mesh import Mesh, group_of_lines
from merak.ops.collectives import all_gather, reduce_scatter
from merak.plan.cluster.hierarchy import Hierarchy, hierarchy_of, shard_lines


class Waitable(Protocol):
    """Handle of a collective in flight, as `torch.distributed.Work` is one."""

    def wait(self) -> Any:
        """Wait until the collective is done."""


@dataclass(frozen=True, slots=True)
class _Done:
    """A job of a thread, whose error is raised where it is waited for."""

    future: Future[None] = field(default_factory=Future)

    def wait(self) -> None:
        self.future.result()


class _Lane:
    """A thread that runs collectives one after another."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], _Done]] = queue.SimpleQueue()
        # A daemon: a job that fails must not wait for peers that are gone.
        threading.Thread(target=self._run, daemon=True, name="merak-replicas").start()

    def start(self, job: Callable[[], None]) -> Waitable:
        """Run a job after those before it."""
        done = _Done()
        self._jobs.put((job, done))
        return done

    def _run(self) -> None:
        while True:
            job, done = self._jobs.get()
            try:
                job()
            except Exception as error:
                done.future.set_exception(error)
            else:
                done.future.set_result(None)
            del job, done  # and with them the tensors


@dataclass(frozen=True, slots=True)
class _OnStream:
    """Collectives on a stream, for which the stream that waits has to wait."""

    done: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.done)


@dataclass(slots=True)
class Levels:
    """The two levels of a group of replicas, with this rank's group in each.

    Args:
        inside: ranks of its node.
        between: ranks of the same place in their nodes.
        order: places in the whole group, by place inside a node and then by node.
    """

    inside: dist.ProcessGroup
    between: dist.ProcessGroup
    order: tuple[int, ...]
    _lane: _Lane | None = field(init=False, default=None)
    _stream: torch.cuda.Stream | None = field(init=False, default=None)
    _order_there: torch.Tensor | None = field(init=False, default=None)

    def all_reduce(self, flat: torch.Tensor) -> None:
        """Sum a flat tensor over the whole group, whose length `inside` divides."""
        piece = flat.new_empty(flat.numel() // self.inside.size())
        reduce_scatter(piece, flat, group=self.inside)
        dist.all_reduce(piece, group=self.between)
        all_gather(flat, piece, group=self.inside)

    def reduce_scatter(self, own: torch.Tensor, everything: torch.Tensor) -> None:
        """Sum the tensors of all ranks, one shard for each of them in the group's order."""
        shards = everything.view(len(self.order), -1).index_select(0, self._places(own.device))
        piece = own.new_empty(shards.numel() // self.inside.size())
        reduce_scatter(piece, shards.view(-1), group=self.inside)
        reduce_scatter(own, piece, group=self.between)

    def all_gather(self, everything: torch.Tensor, own: torch.Tensor) -> None:
        """Gather the tensors of all ranks, in the group's order."""
        piece = own.new_empty(self.between.size() * own.numel())
        all_gather(piece, own.contiguous(), group=self.between)
        shards = own.new_empty(len(self.order), own.numel())
        all_gather(shards.view(-1), piece, group=self.inside)
        everything.view(len(self.order), -1).index_copy_(0, self._places(own.device), shards)

    def _places(self, device: torch.device) -> torch.Tensor:
        """`order` on the device, once: with a list of the host, each collective waits for it."""
        if self._order_there is None or self._order_there.device != device:
            self._order_there = torch.tensor(self.order, device=device)
        return self._order_there

    def start(self, job: Callable[[], None], device: torch.device) -> Waitable:
        """Run collectives beside what this thread does next.

        Args:
            job: calls them.
            device: of their tensors.
        """
        if device.type != "cuda":
            self._lane = self._lane or _Lane()
            return self._lane.start(job)
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            job()
            return _OnStream(self._stream.record_event(), device)


class ShardLevels(Levels):
    """A group that shards, and the groups beside it that have the same shards.

    `inside` is the ranks of the group, `between` those of the same place in all groups.
    """

    __slots__ = ()

    def reduce_scatter(self, own: torch.Tensor, everything: torch.Tensor) -> None:
        """Sum the tensors of all groups' ranks, one shard for each rank of a group."""
        reduce_scatter(own, everything, group=self.inside)
        dist.all_reduce(own, group=self.between)

    def all_gather(self, everything: torch.Tensor, own: torch.Tensor) -> None:
        """Gather the shards of this group's ranks."""
        all_gather(everything, own.contiguous(), group=self.inside)


class ReplicaCollectives:
    """Collectives of groups of replicas: by hierarchy where a group has one, else at once.

    They take the arguments of torch's.

    Args:
        levels: of the groups that have two, by the group's ranks.
    """

    def __init__(self, levels: Mapping[tuple[int, ...], Levels] | None = None) -> None:
        self._levels = levels or {}

    def _of(self, group: dist.ProcessGroup | None) -> Levels | None:
        if not self._levels or group is None:
            return None
        return self._levels.get(tuple(dist.get_process_group_ranks(group)))

    def rest(self, length: int, group: dist.ProcessGroup | None) -> int:
        """Elements that a flat tensor of some length lacks for `all_reduce`."""
        levels = self._of(group)
        return 0 if levels is None else -length % levels.inside.size()

    def all_reduce(self, flat: torch.Tensor, group: dist.ProcessGroup | None) -> Waitable:
        """Begin to sum a flat tensor over a group."""
        levels = self._of(group)
        if levels is not None:
            return levels.start(lambda: levels.all_reduce(flat), flat.device)
        work: Waitable | None = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        return work

    def reduce_scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        *,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """Sum the tensors of a group's ranks, and receive this one's shard."""
        levels = self._of(group)
        if levels is None:
            return reduce_scatter(output_tensor, input_tensor, group=group, async_op=async_op)
        return self._run(
            levels, partial(levels.reduce_scatter, output_tensor, input_tensor), async_op
        )

    def all_gather(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        *,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """Gather the tensors of a group's ranks."""
        levels = self._of(group)
        if levels is None:
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return self._run(levels, partial(levels.all_gather, output_tensor, input_tensor), async_op)

    def _run(self, levels: Levels, job: partial[None], async_op: bool) -> Waitable | None:
        work = levels.start(job, job.args[0].device)
        if async_op:
            return work
        work.wait()
        return None


def connect_shards(
    mesh: Mesh, size: int
) -> tuple[dist.ProcessGroup, dict[tuple[int, ...], Levels]]:
    """Groups of replicas that shard between them; all ranks call it together.

    Args:
        mesh: the grid of ranks.
        size: replicas of a group.

    Returns:
        This rank's group, and by its ranks how it reduces with the others: over groups of their
        own, since that runs beside what this rank calls by itself.
    """
    lines = shard_lines(mesh, size)
    own, inside, between = (
        group_of_lines(level, "the groups of replicas that shard with")
        for level in (lines.inside, lines.inside, lines.between)
    )
    assert own is not None and inside is not None and between is not None
    levels = ShardLevels(inside, between, tuple(range(size)))
    return own, {tuple(dist.get_process_group_ranks(own)): levels}


def connect_levels(
    lines: Iterable[Sequence[Sequence[int]]], hosts: Sequence[str], rank: int
) -> dict[tuple[int, ...], Levels]:
    """Process groups of both levels of this rank's groups of replicas; all ranks call it together.

    Args:
        lines: lists of groups without a common rank, the same on all ranks.
        hosts: of every rank.
        rank: this one.

    Returns:
        By the ranks of a group, its levels; groups of one level are left out.
    """
    found: dict[tuple[int, ...], Levels] = {}
    for groups in lines:
        known = {tuple(own): hierarchy_of(own, hosts) for own in groups}
        levels = [own for own in known.values() if own is not None]
        if not levels:
            continue
        inside, between = (
            group_of_lines(level, "the groups of a hierarchy with")
            for level in (
                [group for own in levels for group in own.inside],
                [group for own in levels for group in own.between],
            )
        )
        for ranks, own in known.items():
            if own is not None and rank in ranks:
                assert inside is not None and between is not None
                found[ranks] = Levels(inside, between, _order(ranks, own))
    return found


def _order(ranks: Sequence[int], own: Hierarchy) -> tuple[int, ...]:
    return tuple(ranks.index(rank) for group in own.between for rank in group)
